"""What stands behind the `?` of a request, and what a request is answered with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from yunion_mps.errors import YunionError

LARGEST_NUMBER = (1 << 31) - 1

#: The format of metrics that Prometheus asks for; others get text.
OPENMETRICS = "application/openmetrics-text"


class Request(NamedTuple):
    """What was asked, and by whom: uid and PID are the kernel's word on the other end of the connection.

    `keep` has a function called when the connection ends, which then may be idle for good. Bodies are not
    kept: `body_bytes` is how long it was. `host` is what the asker calls us (the Host header), and `accept`
    which formats it takes. `await_event` is called once the answer waits for something to happen.
    """

    method: str
    target: str
    uid: int
    pid: int = 0
    keep: Callable[[Callable[[], None]], None] = lambda _: None
    body_bytes: int = 0
    host: str = ""
    accept: str = ""
    await_event: Callable[[], None] = lambda: None


class Response(NamedTuple):
    """What is answered."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class BadRequestError(YunionError):
    """The request cannot be understood; `field` names the parameter."""

    exit_code = 2


class ContradictionError(YunionError):
    """Each parameter can be understood, and all of them together cannot."""

    exit_code = 2


def problem(
    status: int, detail: str, hint: str = "", headers: tuple[tuple[str, str], ...] = (), code: str = ""
) -> Response:
    """An error as problem details; `hint` is what to do, as our commands print it, `code` the reason code."""
    body: dict[str, Any] = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status}
    body["detail"] = detail
    if hint:
        body["hint"] = hint
    if code:
        body["code"] = code
    return Response(status, "application/problem+json", encode(body), headers)


def encode(value: Any) -> bytes:
    """The value as JSON in UTF-8; an unpaired surrogate, which UTF-8 cannot encode, is a JSON escape."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def parse_query(text: str) -> dict[str, str]:
    """The parameters by name; raises BadRequestError."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=32)
    except ValueError:
        hint = "write it as name=value&name=value"
        raise BadRequestError("the query cannot be taken apart", hint) from None
    query = dict(pairs)
    if len(query) != len(pairs):
        raise BadRequestError("a parameter is given twice")
    return query


def refuse_unknown(query: Mapping[str, str], known: set[str]) -> None:
    """Raise BadRequestError for a parameter that is not among the known."""
    for name in query:
        if name not in known:
            there = f"the parameters are {', '.join(sorted(known))}" if known else "there are none here"
            raise BadRequestError(f"{name[:100]!r} is no parameter", there)


def number(query: Mapping[str, str], name: str, default: int, lowest: int, highest: int) -> int:
    """The parameter as a whole number within the bounds; raises BadRequestError."""
    text = query.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-") if lowest < 0 else text
    if not (text.isascii() and digits.isdigit() and len(text) < 12 and lowest <= int(text) <= highest):
        raise BadRequestError(f"{name} is {text[:100]!r}", f"write a whole number from {lowest} to {highest}")
    return int(text)


def boolean(query: Mapping[str, str], name: str) -> bool:
    """The parameter as true or false, false where it is not given; raises BadRequestError."""
    if name not in query:
        return False
    if query[name] not in ("true", "false"):
        raise BadRequestError(f"{name} is {query[name][:100]!r}", f"write {name}=true or {name}=false")
    return query[name] == "true"
