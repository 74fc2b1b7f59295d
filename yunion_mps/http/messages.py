"""Requests and responses of the API; errors are problem details (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Union

from yunion_mps.core.errors import (
    BusyError,
    ConfigError,
    InfeasibleError,
    NotAllowedError,
    NotFoundError,
    NothingFreeError,
    YunionError,
)
from yunion_mps.core.reasons import BUSY, FAILED, INVALID_REQUEST, NOT_ALLOWED, NOT_FOUND
from yunion_mps.http.parameters import BadRequestError, MediaTypeError

#: The status of each class of errors, subclasses first, and of all others.
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
OTHER_STATUS = 409
#: The reason codes of statuses that no class of errors has.
_CODES = {404: NOT_FOUND, 403: NOT_ALLOWED, 500: FAILED, 503: BUSY}

if TYPE_CHECKING:
    from yunion_mps.answers import ProblemDetailsJson


class Request(NamedTuple):
    """A request, and the user, process and systemd unit that sent it, according to the kernel."""

    method: str
    #: The path with its query.
    target: str
    uid: int
    pid: int = 0
    unit: str | None = ""
    #: Registers a function to call when the connection ends, and exempts it from the idle timeout.
    keep_open: Callable[[Callable[[], None]], None] = lambda _: None
    #: Their names are in lower case.
    headers: Mapping[str, str] = {}
    body: bytes = b""
    #: Called if the answer waits for an event.
    await_event: Callable[[], None] = lambda: None


class Response(NamedTuple):
    """A response; its `Content-Type` and `Content-Length` are not among the headers."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class CreatedResource(NamedTuple):
    """A handler's result that is answered with 201."""

    value: object
    #: The resource's path.
    location: str


#: A response, or an awaitable one.
EventualResponse = Union[Response, Awaitable[Response]]


def problem_response(
    status: int, detail: str, hint: str, headers: tuple[tuple[str, str], ...] = (), code: str = ""
) -> Response:
    """Return an error as problem details (RFC 9457).

    detail: what is wrong
    hint: what the caller can do
    code: the reason code; if it is empty, that of the status
    """
    from http import HTTPStatus  # 3 ms, which a client need not pay

    title = HTTPStatus(status).phrase
    body: ProblemDetailsJson = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": detail,
        "code": code or _CODES.get(status, INVALID_REQUEST),
    }
    if hint:
        body["hint"] = hint
    return Response(status, "application/problem+json", encode(body), headers)


def problem_of(error: YunionError) -> Response:
    """Return the error as problem details, with the status of its class."""
    return problem_response(_status_of(error), error.message, error.hint, code=error.code)


def _status_of(error: YunionError) -> int:
    for kind, status in STATUSES.items():
        if isinstance(error, kind):
            return status
    return OTHER_STATUS


def response_of(value: object) -> Response:
    """Return the response for what a handler returned: as it is, 201 if created, otherwise 200 with JSON."""
    if isinstance(value, Response):
        return value
    if isinstance(value, CreatedResource):
        return Response(201, "application/json", encode(value.value), (("Location", value.location),))
    return Response(200, "application/json", encode(value))


def encode(value: object) -> bytes:
    """Return the value as JSON in UTF-8.

    An unpaired surrogate, which UTF-8 cannot encode, becomes a JSON escape.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")
