"""What an operation of the API is: its parameters, how a request is encoded and decoded, who has access.

GET has its parameters in the query, POST in a JSON body. The table of all operations is in `operations`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from yunion_mps.http.parameters import Parameter, Value, body_arguments, query_arguments

T = TypeVar("T")

MAX_CHANGE_WAIT_S = 600

#: How long a client waits for an answer, in s; longer if it needs the driver, because waking many GPUs takes
#: tens of seconds, and a hanging call is abandoned after 60.
TIMEOUT_S = 30.0
SLOW_S = 150.0

#: Every user that can connect has access.
ANYONE = "anyone"
#: The owner and root have access (`service.permissions`).
OWNER = "owner"
#: Only root has access.
ROOT = "root"

#: The parameter of a watchable operation in the query.
WATCH_WAIT = Parameter(
    "wait_s",
    "If the response still matches `If-None-Match`, wait this many seconds for a change.",
    type="integer",
    default=0,
    minimum=0,
    maximum=MAX_CHANGE_WAIT_S,
)
#: The header of a watchable operation.
WATCH_ETAG = Parameter(
    "If-None-Match",
    "The `ETag` of the response that the caller has; 304 if nothing has changed.",
    example='"3f8a6c0d51b7e294"',
)
WATCH_PARAMETERS = (WATCH_WAIT, WATCH_ETAG)


class EncodedRequest(NamedTuple):
    """A request without its method: the path with its query, the headers, and the body."""

    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


class Operation(Generic[T]):
    """One operation, whose answer is a T: the server decodes its requests, and the client encodes them."""

    def __init__(
        self,
        name: str,
        method: str,
        path: str,
        summary: str,
        answer: str,
        *,
        parameters: tuple[Parameter, ...] = (),
        headers: tuple[Parameter, ...] = (),
        access: str = ANYONE,
        refusals: tuple[int, ...] = (),
        cached: bool = False,
        uninterruptible: bool = False,
        media_types: tuple[str, ...] = (),
        watchable: bool = False,
        creates: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Declare an operation.

        answer: the name of T, empty if it is not a type of answers/, such as text.
        parameters: those in the path, and those in the query, or in the body of POST.
        headers: the parameters that are headers.
        access: ANYONE, OWNER or ROOT.
        refusals: the statuses that are specific to this operation.
        cached: the answer is made from the snapshot without waiting, and reused until the snapshot changes;
            others may wait, up to the parameter `wait_s` if there is one.
        uninterruptible: the operation is finished even if the caller disconnects.
        media_types: set only for an answer that is not JSON.
        watchable: the answer has an `ETag`, with which a caller can wait for a change.
        creates: it answers 201 with the `Location`, or 200 if what it creates exists already.
        timeout_s: how long a client waits for the answer.
        """
        self.name = name
        self.method = method
        self.path = path
        self.summary = summary
        self.answer = answer
        in_path: list[Parameter] = []
        elsewhere: list[Parameter] = []
        for parameter in parameters:
            if f"{{{parameter.name}}}" in path:
                in_path.append(parameter)
            else:
                elsewhere.append(parameter)
        self.has_body = method == "POST"
        self.path_parameters = tuple(in_path)
        self.query_parameters = () if self.has_body else tuple(elsewhere)
        self.members = tuple(elsewhere) if self.has_body else ()
        self.headers = headers
        self.access = access
        self.refusals = refusals if access == ANYONE else (403, *refusals)
        self.cached = cached
        self.uninterruptible = uninterruptible
        self.media_types = media_types
        self.watchable = watchable
        if watchable:
            self.query_parameters += (WATCH_WAIT,)
            self.headers += (WATCH_ETAG,)
        self.creates = creates
        self.timeout_s = timeout_s

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.path_parameters + self.query_parameters + self.headers + self.members

    def arguments(self, query: str, headers: Mapping[str, str], body: bytes) -> dict[str, Value]:
        """Return the value of every parameter except the path's.

        headers: their names are in lower case.
        Raises BadRequestError if a value is invalid, or not one of a parameter.
        """
        arguments = query_arguments(query, self.query_parameters)
        for parameter in self.headers:
            text = headers.get(parameter.name.lower())
            arguments[parameter.argument] = parameter.default if text is None else parameter.value(text)
        if self.has_body:
            arguments.update(body_arguments(body, headers.get("content-type", ""), self.members))
        return arguments

    def encode(self, arguments: Mapping[str, Value]) -> EncodedRequest:
        """Encode the request; arguments that are None are left out.

        Raises TypeError for an argument that is not a parameter.
        """
        values = {name: value for name, value in arguments.items() if value is not None}
        unknown = set(values) - {parameter.argument for parameter in self.parameters}
        if unknown:
            raise TypeError(f"{self.name} has no parameter {', '.join(sorted(unknown))}")
        headers: list[tuple[str, str]] = []
        for header in self.headers:
            if header.argument in values:
                headers.append((header.name, str(values[header.argument])))
        members: dict[str, Value] = {}
        for member in self.members:
            if member.name in values:
                members[member.name] = _without_none(values[member.name])
        if not members:
            return EncodedRequest(self._target(values), tuple(headers))
        headers.append(("Content-Type", "application/json"))
        return EncodedRequest(self._target(values), tuple(headers), json.dumps(members).encode())

    def _target(self, given: Mapping[str, Value]) -> str:
        target = self.path
        for parameter in self.path_parameters:
            target = target.replace(f"{{{parameter.name}}}", _text(given[parameter.name]))
        pairs: list[str] = []
        for parameter in self.query_parameters:
            if parameter.name in given:
                pairs.append(f"{parameter.name}={_text(given[parameter.name])}")
        return f"{target}?{'&'.join(pairs)}" if pairs else target


def _without_none(value: Value) -> Value:
    if not isinstance(value, Mapping):
        return value
    return {name: member for name, member in value.items() if member is not None}


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quote(str(value))


def _quote(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._~-]*", text):
        return text
    from urllib.parse import quote  # 2 ms, which a plain `run` need not pay

    return quote(text, safe="", errors="surrogateescape")  # an argument need not be UTF-8
