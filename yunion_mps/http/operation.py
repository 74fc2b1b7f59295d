"""One operation of the API: what it takes, what it answers, and how a request for it is written and read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from yunion_mps.errors import (
    BusyError,
    ConfigError,
    InfeasibleError,
    NotAllowedError,
    NotFoundError,
    NothingFreeError,
    YunionError,
)
from yunion_mps.http.parameters import (
    BadRequestError,
    MediaTypeError,
    Parameter,
    Value,
    body_arguments,
    query_arguments,
)

T = TypeVar("T")

MAX_CHANGE_WAIT_S = 600

#: How long a client waits for an answer, in s; longer if it needs the driver, because waking many GPUs takes
#: tens of seconds, and a hanging call is abandoned after 60.
TIMEOUT_S = 30.0
SLOW_S = 150.0

#: Who has access: every user that can connect; the owner and root (`service.permissions`); only root.
ANYONE, OWNER, ROOT = "anyone", "owner", "root"


#: The status of each class of errors, subclasses first; 409 for all others.
STATUSES: dict[type[YunionError], int] = {
    MediaTypeError: 415,
    BadRequestError: 400,
    NotAllowedError: 403,
    NotFoundError: 404,
    ConfigError: 422,
    InfeasibleError: 410,
    NothingFreeError: 423,
    BusyError: 503,
}


class EncodedRequest(NamedTuple):
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


class Operation(Generic[T]):
    def __init__(
        self,
        name: str,
        method: str,
        path: str,
        summary: str,
        answer: str,
        *parameters: Parameter,
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
        """`answer` is the name of T, empty if it is not a type of answers/, such as text.

        `refusals` are the statuses that are specific to this operation. A `cached` answer is made from the
        snapshot without waiting, and reused until the snapshot changes; others may wait, up to the parameter
        `wait_s` if there is one. An `uninterruptible` operation is finished even if the caller disconnects.
        If it `creates` something, it answers 201 with the `Location`, or 200 if that exists already. A
        `watchable` answer has an `ETag`, with which a caller can wait for a change. `media_types` are set
        only for an answer that is not JSON.
        """
        self.name = name
        self.method = method
        self.path = path
        self.summary = summary
        self.answer = answer
        self.path_parameters = tuple(parameter for parameter in parameters if f"{{{parameter.name}}}" in path)
        rest = tuple(parameter for parameter in parameters if parameter not in self.path_parameters)
        self.has_body = method == "POST"
        self.query_parameters = () if self.has_body else rest
        self.members = rest if self.has_body else ()
        self.headers = headers
        self.access = access
        self.refusals = refusals if access == ANYONE else (403, *refusals)
        self.cached = cached
        self.uninterruptible = uninterruptible
        self.media_types = media_types
        self.watchable = watchable
        if watchable:
            self.query_parameters += WATCH_PARAMETERS[:1]
            self.headers += WATCH_PARAMETERS[1:]
        self.creates = creates
        self.timeout_s = timeout_s

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.path_parameters + self.query_parameters + self.headers + self.members

    def arguments(self, query: str, headers: Mapping[str, str], body: bytes) -> dict[str, Value]:
        """The value of every parameter except the path's, from lower-case headers; raises BadRequestError."""
        arguments = query_arguments(query, self.query_parameters)
        for parameter in self.headers:
            text = headers.get(parameter.name.lower())
            arguments[parameter.argument] = parameter.default if text is None else parameter.value(text)
        if self.has_body:
            arguments.update(body_arguments(body, headers.get("content-type", ""), self.members))
        return arguments

    def encode(self, arguments: Mapping[str, Value]) -> EncodedRequest:
        """Encode the request; arguments that are None are left out."""
        given = {name: value for name, value in arguments.items() if value is not None}
        unknown = set(given) - {one.argument for one in self.parameters}
        if unknown:
            raise TypeError(f"{self.name} has no parameter {', '.join(sorted(unknown))}")
        path = self.path
        for one in self.path_parameters:
            path = path.replace(f"{{{one.name}}}", _text(given[one.name]))
        query = [f"{one.name}={_text(given[one.name])}" for one in self.query_parameters if one.name in given]
        headers = [(one.name, str(given[one.argument])) for one in self.headers if one.argument in given]
        body = {one.name: _without_none(given[one.name]) for one in self.members if one.name in given}
        if body:
            headers.append(("Content-Type", "application/json"))
        return EncodedRequest(
            f"{path}?{'&'.join(query)}" if query else path,
            tuple(headers),
            json.dumps(body).encode() if body else b"",
        )


#: The parameters of a watchable operation: one of the query, and a header.
WATCH_PARAMETERS = (
    Parameter("wait_s", "If the response still matches `If-None-Match`, wait this many seconds for a change.",
              "integer", 0, 0, MAX_CHANGE_WAIT_S),
    Parameter("If-None-Match", "The `ETag` of the response that the caller has; 304 if nothing has changed.",
              example='"3f8a6c0d51b7e294"'),
)  # fmt: skip


def _without_none(value: Value) -> Value:
    if not isinstance(value, Mapping):
        return value
    return {name: member for name, member in value.items() if member is not None}


def _text(value: Value) -> str:
    return _quoted(str(value).lower() if isinstance(value, bool) else str(value))


def _quoted(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._~-]*", text):
        return text
    from urllib.parse import quote  # 2 ms, which a plain `run` need not pay

    return quote(text, safe="", errors="surrogateescape")  # an argument need not be UTF-8
