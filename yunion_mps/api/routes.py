"""What each path answers. Errors are problem details (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from yunion_mps.errors import NotFoundError, YunionError
from yunion_mps.service import DEFAULT_LIMIT, Filters, Service

#: No host has more devices; an answer is never larger than this many of them.
LARGEST_LIMIT = 100_000
LARGEST_NUMBER = (1 << 31) - 1
_READ = ("GET", "HEAD")
_CACHED_BYTES = 8 << 20
_NO_URL = "the request's target is no URL that can be taken apart"


class Request(NamedTuple):
    """What was asked, and by whom: the uid is the kernel's word on the other end of the connection."""

    method: str
    target: str
    uid: int


class Response(NamedTuple):
    """What is answered."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class BadRequestError(YunionError):
    """The request cannot be understood; `field` names the parameter."""

    exit_code = 2


def problem(status: int, detail: str, hint: str = "", headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """An error as problem details; `hint` is what to do, as our commands print it."""
    body: dict[str, Any] = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status}
    body["detail"] = detail
    if hint:
        body["hint"] = hint
    return Response(status, "application/problem+json", _encode(body), headers)


class Router:
    """Answers requests out of the service; equal questions between two changes get the very same bytes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._answers: dict[str, Response] = {}
        self._answers_for = -1
        self._cached_bytes = 0
        self._fixed: dict[str, Callable[[Mapping[str, str]], Any]] = {
            "/v1/devices": self._devices,
            "/v1/gpus": self._plain(service.gpus),
            "/v1/status": self._plain(service.status),
            "/v1/openapi.json": self._plain(_openapi),
        }

    def answer(self, request: Request) -> Response:
        """The response to a request; never raises."""
        if request.method not in _READ:
            return self._refuse_method(request)
        version = self._service.version
        if version != self._answers_for or self._cached_bytes > _CACHED_BYTES:
            self._answers.clear()
            self._answers_for, self._cached_bytes = version, 0
        response = self._answers.get(request.target)
        if response is None:
            response = self._answers[request.target] = self._make(request.target)
            self._cached_bytes += len(request.target) + len(response.body)
        return response

    def _refuse_method(self, request: Request) -> Response:
        try:
            if self._find(urlsplit(request.target).path) is None:
                return self._not_found(request.target)
        except ValueError:
            return problem(400, _NO_URL)
        return problem(405, f"{request.method} is not possible here", headers=(("Allow", "GET, HEAD"),))

    def _make(self, target: str) -> Response:
        try:
            parts = urlsplit(target)
            handler = self._find(parts.path)
            if handler is None:
                return self._not_found(target)
            return Response(200, "application/json", _encode(handler(_query(parts.query))))
        except NotFoundError as error:
            return problem(404, error.message, error.hint)
        except BadRequestError as error:
            return problem(400, error.message, error.hint)
        except ValueError:
            return problem(400, _NO_URL)

    def _find(self, path: str) -> Callable[[Mapping[str, str]], Any] | None:
        if path in self._fixed:
            return self._fixed[path]
        prefix = "/v1/devices/"
        name = path[len(prefix) :]
        if path.startswith(prefix) and name and "/" not in name:
            return self._plain(lambda: self._service.device(unquote(name)))
        return None

    def _devices(self, query: Mapping[str, str]) -> Any:
        known = {*Filters._fields, "limit", "offset"}
        _refuse_unknown(query, known)
        words: dict[str, Any] = {name: query[name] for name in Filters._fields if name in query}
        if "numa_node" in query:
            words["numa_node"] = _number(query, "numa_node", 0, 0, LARGEST_NUMBER)
        if "unused" in query:
            words["unused"] = _boolean(query, "unused")
        limit = _number(query, "limit", DEFAULT_LIMIT, 0, LARGEST_LIMIT)
        return self._service.devices(Filters(**words), limit, _number(query, "offset", 0, 0, LARGEST_NUMBER))

    @staticmethod
    def _plain(ask: Callable[[], Any]) -> Callable[[Mapping[str, str]], Any]:
        def handler(query: Mapping[str, str]) -> Any:
            _refuse_unknown(query, set())
            return ask()

        return handler

    def _not_found(self, target: str) -> Response:
        hint = "the paths are in /v1/openapi.json"
        return problem(404, f"there is nothing at {urlsplit(target).path[:200]!r}", hint)


def _openapi() -> Any:
    from yunion_mps.api.openapi import document

    return document()


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _query(text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=32)
    except ValueError:
        hint = "write it as name=value&name=value"
        raise BadRequestError("the query cannot be taken apart", hint) from None
    query = dict(pairs)
    if len(query) != len(pairs):
        raise BadRequestError("a parameter is given twice")
    return query


def _refuse_unknown(query: Mapping[str, str], known: set[str]) -> None:
    for name in query:
        if name not in known:
            there = f"the parameters are {', '.join(sorted(known))}" if known else "there are none here"
            raise BadRequestError(f"{name[:100]!r} is no parameter", there)


def _number(query: Mapping[str, str], name: str, default: int, lowest: int, highest: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and lowest <= int(text) <= highest):
        raise BadRequestError(f"{name} is {text[:100]!r}", f"write a whole number from {lowest} to {highest}")
    return int(text)


def _boolean(query: Mapping[str, str], name: str) -> bool:
    if query[name] not in ("true", "false"):
        raise BadRequestError(f"{name} is {query[name][:100]!r}", f"write {name}=true or {name}=false")
    return query[name] == "true"
