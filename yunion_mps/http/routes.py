"""What each path answers. Errors are problem details (RFC 9457)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Union
from urllib.parse import unquote, urlsplit

from yunion_mps.errors import NotFoundError
from yunion_mps.http.deferred import Deferred, Later
from yunion_mps.http.query import (
    LARGEST_NUMBER,
    BadRequestError,
    Request,
    Response,
    boolean,
    encode,
    number,
    parse_query,
    problem,
    refuse_unknown,
)
from yunion_mps.service.queries import DEFAULT_LIMIT, Filters, Service

#: No host has more devices; an answer is never larger than this many of them.
LARGEST_LIMIT = 100_000
_READ = ("GET", "HEAD")
_CACHED_BYTES = 8 << 20
_NO_URL = "the request's target is no URL that can be taken apart"


Answer = Union[Response, Awaitable[Response]]


class Router:
    """Answers requests out of the service; equal questions between two changes get the very same bytes."""

    def __init__(self, service: Service, deferred: Deferred) -> None:
        self._service = service
        self._deferred = deferred
        self._answers: dict[str, Response] = {}
        self._answers_for = -1
        self._cached_bytes = 0
        self._fixed: dict[str, Callable[[Mapping[str, str]], Any]] = {
            "/v1/devices": self._devices,
            "/v1/gpus": self._plain(service.gpus),
            "/v1/status": self._plain(service.status),
            "/v1/openapi.json": self._plain(_openapi),
        }

    def answer(self, request: Request) -> Answer:
        """The response to a request, or what becomes it later; never raises."""
        version = self._service.version
        if version != self._answers_for or self._cached_bytes > _CACHED_BYTES:
            self._answers.clear()
            self._answers_for, self._cached_bytes = version, 0
        reads = request.method in _READ
        response = self._answers.get(request.target) if reads else None
        if response:
            return response
        try:
            path = urlsplit(request.target).path
        except ValueError:
            return problem(400, _NO_URL)
        later = self._deferred.find(path, request.method)
        if later:
            return self._later(later, request)
        if not reads:
            return self._refuse_method(path, request)
        response = self._answers[request.target] = self._make(request.target)
        self._cached_bytes += len(request.target) + len(response.body)
        return response

    def hurry(self) -> None:
        """Let no answer wait for what may come."""
        self._deferred.hurry()

    def _later(self, later: Later, request: Request) -> Answer:
        if request.method not in later.methods:
            return _method_not_allowed(request, ", ".join(later.methods))
        return self._deferred.answer(later, request)

    def _refuse_method(self, path: str, request: Request) -> Response:
        if self._find(path) is None:
            return self._not_found(request.target)
        return _method_not_allowed(request, "GET, HEAD")

    def _make(self, target: str) -> Response:
        try:
            parts = urlsplit(target)
            handler = self._find(parts.path)
            if handler is None:
                return self._not_found(target)
            return Response(200, "application/json", encode(handler(parse_query(parts.query))))
        except NotFoundError as error:
            return problem(404, error.message, error.hint)
        except BadRequestError as error:
            return problem(400, error.message, error.hint)

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
        refuse_unknown(query, known)
        words: dict[str, Any] = {name: query[name] for name in Filters._fields if name in query}
        if "numa_node" in query:
            words["numa_node"] = number(query, "numa_node", 0, -1, LARGEST_NUMBER)
        if "unused" in query:
            words["unused"] = boolean(query, "unused")
        limit = number(query, "limit", DEFAULT_LIMIT, 0, LARGEST_LIMIT)
        return self._service.devices(Filters(**words), limit, number(query, "offset", 0, 0, LARGEST_NUMBER))

    @staticmethod
    def _plain(ask: Callable[[], Any]) -> Callable[[Mapping[str, str]], Any]:
        def handler(query: Mapping[str, str]) -> Any:
            refuse_unknown(query, set())
            return ask()

        return handler

    def _not_found(self, target: str) -> Response:
        hint = "the paths are in /v1/openapi.json"
        return problem(404, f"there is nothing at {urlsplit(target).path[:200]!r}", hint)


def _method_not_allowed(request: Request, allowed: str) -> Response:
    return problem(405, f"{request.method} is not possible here", headers=(("Allow", allowed),))


def _openapi() -> Any:
    from yunion_mps.http.openapi import document

    return document()
