"""The web page: its files, and the little that it asks; nothing here changes anything."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple
from urllib.parse import urlsplit

from yunion_mps.errors import UnreachableError
from yunion_mps.gateway.asking import Asking
from yunion_mps.gateway.names import HostNames
from yunion_mps.gateway.upstream import ask
from yunion_mps.http.query import (
    LARGEST_NUMBER,
    BadRequestError,
    Request,
    Response,
    encode,
    number,
    parse_query,
    problem,
    refuse_unknown,
)
from yunion_mps.http.routes import Answer
from yunion_mps.paths import Paths

log = logging.getLogger(__name__)

#: A proxy on the way may give up sooner than the daemon's own 60 s.
_LONGEST_WAIT_S = 25
_PATIENCE_S = 10.0
_MOST_EVENTS = 200

_INDEX = "index.html"
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)


class _Relayed(NamedTuple):
    """Which parameters of a path of the daemon's are handed on: numbers up to a bound, and plain words."""

    numbers: dict[str, int]
    texts: tuple[str, ...] = ()


_RELAYED = {
    "/v1/events": _Relayed({"after": LARGEST_NUMBER, "limit": _MOST_EVENTS, "wait": _LONGEST_WAIT_S}),
    "/v1/usage": _Relayed({}, ("gpu", "devices")),
}


class Web:
    """Answers a few paths, and only to readers who call this host by a name of its own."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._asking = Asking(paths)
        self._names = HostNames(paths)
        self._files = _files()
        #: Another one after an upgrade: a page that is open then loads itself anew.
        self._page = sha256(b"".join(self._files[path].body for path in sorted(self._files))).hexdigest()[:16]

    def answer(self, request: Request) -> Answer:
        """The response to a request, or what becomes it later; never raises."""
        answer = self._answer(request)
        return _guarded(answer) if isinstance(answer, Response) else self._later(answer)

    def hurry(self) -> None:
        """Nothing waits here that could not be cut off."""

    def _answer(self, request: Request) -> Answer:
        refusal = self._names.refusal(request.host, "this page is")
        if refusal:
            return refusal
        if request.method not in ("GET", "HEAD"):
            return problem(405, f"{request.method} is not possible here", headers=(("Allow", "GET, HEAD"),))
        try:
            path, query = urlsplit(request.target).path, urlsplit(request.target).query
            if path in self._files:
                return self._files[path]
            if path == "/overview.json":
                return self._overview(parse_query(query))
            if path in _RELAYED:
                return self._relay(path, parse_query(query), request)
        except BadRequestError as error:
            return problem(400, error.message, error.hint)
        except ValueError:
            return problem(400, "the request's target is no URL that can be taken apart")
        return problem(404, "there is nothing here", "the page is at /")

    async def _later(self, answer: Awaitable[Response]) -> Response:
        try:
            return _guarded(await answer)
        except UnreachableError as error:
            return _guarded(problem(503, error.message, error.hint))
        except Exception:
            log.exception("the web page's question has failed")
            return _guarded(problem(500, "a fault of the gateway", "see: journalctl -u yunion-mps-gateway"))

    def _overview(self, query: dict[str, str]) -> Awaitable[Response]:
        refuse_unknown(query, {"mark", "event"})
        return self._picture(query.get("mark"), number(query, "event", 0, 0, LARGEST_NUMBER))

    async def _picture(self, mark: str | None, event: int) -> Response:
        """The whole picture after this event, or where the asker has it already, only when that was taken."""
        shown = await self._asking.picture(event)
        if mark == shown["mark"]:
            shown = {"mark": mark, "taken": shown["taken"], "page": self._page}
        else:
            shown = {**shown, "host": os.uname().nodename, "page": self._page}
        return Response(200, "application/json", encode(shown))

    def _relay(self, path: str, query: dict[str, str], request: Request) -> Awaitable[Response]:
        relayed = _RELAYED[path]
        refuse_unknown(query, {*relayed.numbers, *relayed.texts})
        for name, highest in relayed.numbers.items():
            number(query, name, 0, 0, highest)
        for name in relayed.texts:
            if not re.fullmatch(r"[0-9a-zA-Z:.-]{0,64}", query.get(name, "")):
                raise BadRequestError(f"{name} is not as it should be")
        target = path + "".join(
            f"{'&' if place else '?'}{name}={value}" for place, (name, value) in enumerate(query.items())
        )
        wait_s = number(query, "wait", 0, 0, _LONGEST_WAIT_S)
        if wait_s:
            request.await_event()
        return ask(self._paths, target, timeout_s=wait_s + _PATIENCE_S)


def _files() -> dict[str, Response]:
    """By path; all of them are read at the start, so that an upgrade cannot mix two versions."""
    found = {}
    for file in (files("yunion_mps.gateway") / "page").iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind:
            found["/" if file.name == _INDEX else f"/{file.name}"] = Response(200, kind, file.read_bytes())
    return found


def _guarded(response: Response) -> Response:
    return response._replace(headers=(*response.headers, *_HEADERS))
