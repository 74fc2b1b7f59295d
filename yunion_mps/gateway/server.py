"""Read-only listeners over TCP: the metrics for Prometheus, and the web page.

Both accept only names of this host. Browsers keep a page of another origin from reading them, unless the
owner of a name makes it point to this host (DNS rebinding). So only names that others cannot own are
accepted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from yunion_mps.core.errors import UnreachableError
from yunion_mps.core.paths import Paths
from yunion_mps.gateway import read_addresses
from yunion_mps.gateway.client import Overview, OverviewCache, get_from_daemon
from yunion_mps.host.files import read_text
from yunion_mps.host.log import Failures
from yunion_mps.http.listener import listen_on
from yunion_mps.http.messages import EventualResponse, Request, Response, problem_response, response_of
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import GET_EVENTS, GET_METRICS, GET_USAGE, MAX_NUMBER
from yunion_mps.http.parameters import BadRequestError, Parameter, query_arguments
from yunion_mps.http.pool import Application, Limits
from yunion_mps.http.server import Server

log = logging.getLogger(__name__)

#: Less than Prometheus's default timeout of 10 s, to distinguish a hung daemon from a hung gateway.
_METRICS_S = 7.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METRICS_DOWN = b"""\
# HELP yunion_mps_up Whether the daemon answers (1) or not (0).
# TYPE yunion_mps_up gauge
yunion_mps_up 0
"""

#: A proxy may have a shorter timeout than the daemon's 60 s.
_MAX_WAIT_S = 25
_ANSWER_S = 10.0
#: The parameters of requests for events that are relayed, with the maximums of numbers.
_EVENT_MAXIMUMS = {
    "after": MAX_NUMBER,
    "before": MAX_NUMBER,
    "limit": 200,
    "severe_first": 0,
    "wait_s": _MAX_WAIT_S,
}
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


class _RelayedRequest(NamedTuple):
    operation: Operation[Any]
    #: Those that a browser may send; the daemon has the defaults.
    parameters: tuple[Parameter, ...]


def _relayed_requests() -> dict[str, _RelayedRequest]:
    """Return the requests that are relayed to the daemon, by path."""
    for_events: list[Parameter] = []
    for parameter in GET_EVENTS.query_parameters:
        if parameter.name in _EVENT_MAXIMUMS:
            for_events.append(parameter._replace(maximum=_EVENT_MAXIMUMS[parameter.name], default=None))
    for_usage: list[Parameter] = []
    for parameter in GET_USAGE.parameters:
        for_usage.append(parameter._replace(default=None, pattern="^[0-9a-zA-Z:.-]{0,64}$"))
    return {
        GET_EVENTS.path: _RelayedRequest(GET_EVENTS, tuple(for_events)),
        GET_USAGE.path: _RelayedRequest(GET_USAGE, tuple(for_usage)),
    }


_RELAYED = _relayed_requests()
_ADDRESS = re.compile(r"\[[0-9a-f:.]+\]|[0-9]{1,3}(\.[0-9]{1,3}){3}")
_OVERVIEW = (
    Parameter("mark", "The mark of the overview that the page already has."),
    Parameter(
        "event",
        "Return an overview that is newer than this event.",
        type="integer",
        default=0,
        maximum=MAX_NUMBER,
    ),
)


class HostNames:
    """Accepts `localhost`, the host's name, other names on its lines of /etc/hosts, and all IP addresses."""

    def __init__(self, paths: Paths) -> None:
        self._hosts_file = paths.hosts
        node = os.uname().nodename.lower()
        self._names = {"localhost", node, node.partition(".")[0]}

    def refusal(self, host: str, resource: str) -> Response | None:
        """Return the error for a request for `resource` with this Host header; None if the name is ours."""
        name = re.sub(r":[0-9]{1,5}$", "", host).lower()
        if _ADDRESS.fullmatch(name) or name in self._names or name in self._aliases():
            return None
        names = ", ".join(sorted(self._names))
        hint = f"use an IP address or one of {names}; add other names to their line of /etc/hosts"
        return problem_response(421, f"{resource} not served under that name", hint)

    def _aliases(self) -> set[str]:
        """Return all names on the lines of /etc/hosts that contain ours; read again for each unknown name."""
        aliases: set[str] = set()
        for line in read_text(self._hosts_file).splitlines():
            names = line.partition("#")[0].lower().split()[1:]
            if not self._names.isdisjoint(names):
                aliases.update(names)
        return aliases


class ReadOnlyHandler:
    """Handles GET requests to a name of this host; a subclass routes them."""

    subject: str

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._names = HostNames(paths)

    def handle(self, request: Request) -> EventualResponse:
        """Return the response or an awaitable of it; never raises."""
        refusal = self._names.refusal(request.headers.get("host", ""), self.subject)
        if refusal:
            return refusal
        if request.method not in ("GET", "HEAD"):
            return problem_response(
                405, f"{request.method} is not supported here", "use GET", (("Allow", "GET, HEAD"),)
            )
        try:
            return self._route(urlsplit(request.target), request)
        except BadRequestError as error:
            return problem_response(400, error.message, error.hint)
        except ValueError:
            return problem_response(400, "the request's target is not a valid URL", "write a path such as /")

    def _route(self, url: SplitResult, request: Request) -> EventualResponse:
        raise NotImplementedError


class MetricsHandler(ReadOnlyHandler):
    """Serves the daemon's metrics, or `yunion_mps_up 0` if it does not answer."""

    subject = "the metrics are"

    def __init__(self, paths: Paths) -> None:
        super().__init__(paths)
        self._failures = Failures(log)

    def _route(self, url: SplitResult, request: Request) -> EventualResponse:
        if url.path != GET_METRICS.path:
            return problem_response(404, "not found", f"the metrics are at {GET_METRICS.path}")
        return self._metrics(request.headers.get("accept", ""))

    async def _metrics(self, accept: str) -> Response:
        try:
            answer = await get_from_daemon(self._paths, GET_METRICS.path, accept, _METRICS_S)
        except UnreachableError as error:
            self._failures.report(f"yunion_mps_up is 0: {error.message}", consequence=error.hint)
            return Response(200, _METRICS_TYPE, _METRICS_DOWN)
        if self._failures.clear():
            log.warning("yunion_mps_up is 1 again: the daemon answers")
        return answer


class WebPage(ReadOnlyHandler):
    """Serves the page's files and its overview, and relays requests to the daemon."""

    subject = "this page is"

    def __init__(self, paths: Paths) -> None:
        super().__init__(paths)
        self._overview = OverviewCache(paths)
        self._files = _files()
        #: Changes with an upgrade; an open page then reloads itself.
        self._page = sha256(b"".join(self._files[path].body for path in sorted(self._files))).hexdigest()[:16]

    def handle(self, request: Request) -> EventualResponse:
        response = super().handle(request)
        if isinstance(response, Response):
            return _with_security_headers(response)
        return self._run_async(response)

    def _route(self, url: SplitResult, request: Request) -> EventualResponse:
        if url.path in self._files:
            return self._files[url.path]
        if url.path == "/overview.json":
            return self._respond_with_overview(**query_arguments(url.query, _OVERVIEW))
        if url.path in _RELAYED:
            return self._relay(url, request)
        return problem_response(404, "not found", "the page is at /")

    async def _run_async(self, pending: Awaitable[Response]) -> Response:
        try:
            return _with_security_headers(await pending)
        except UnreachableError as error:
            return _with_security_headers(problem_response(503, error.message, error.hint))
        except Exception:
            log.exception("a request of the web page failed")
            hint = "see: journalctl -u yunion-mps-gateway"
            return _with_security_headers(problem_response(500, "internal error in the gateway", hint))

    def _respond_with_overview(self, mark: Any, event: Any) -> EventualResponse:
        """Answer immediately if the cached overview is current, which frees the connection soon."""
        overview = self._overview.current(event)
        if overview is None:
            return self._next_overview(mark, event)
        return self._overview_response(mark, overview)

    async def _next_overview(self, mark: str | None, event: int) -> Response:
        return self._overview_response(mark, await self._overview.overview(event))

    def _overview_response(self, mark: str | None, overview: Overview) -> Response:
        """Return the overview, or only its time if the page already has the one with this mark."""
        shown: dict[str, object] = {"mark": overview.mark, "taken": overview.taken, "page": self._page}
        if mark != overview.mark:
            shown.update(overview.contents, host=os.uname().nodename)
        return response_of(shown)

    def _relay(self, url: SplitResult, request: Request) -> Awaitable[Response]:
        relayed = _RELAYED[url.path]
        arguments = query_arguments(url.query, relayed.parameters)
        wait_s = int(str(arguments.get("wait_s") or 0))
        if wait_s:
            request.await_event()
        target = relayed.operation.encode(arguments).target
        return get_from_daemon(self._paths, target, timeout_s=wait_s + _ANSWER_S)


def _files() -> dict[str, Response]:
    """Read the page's files at the start, so that an upgrade cannot mix two versions."""
    pages = {}
    for file in (files("yunion_mps.gateway") / "page").iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind:
            path = "/" if file.name == _INDEX else f"/{file.name}"
            pages[path] = Response(200, kind, file.read_bytes())
    return pages


def _with_security_headers(response: Response) -> Response:
    return response._replace(headers=(*response.headers, *_HEADERS))


#: Every local user can connect to a port of 127.0.0.1, and all of them count as one client.
LIMITS = Limits(first_request_timeout_s=2.0, waiting=512)
_POLL_S = 2.0


async def serve_gateway(paths: Paths) -> None:
    """Serve at the addresses that the daemon publishes, until there are none."""
    listeners = Listeners({"metrics_listen": MetricsHandler(paths), "web_listen": WebPage(paths)})
    while True:
        published = read_addresses(paths)
        await listeners.update(published)
        if not published:
            return
        await asyncio.sleep(_POLL_S)


class Listeners:
    """The gateway's servers, one for each key of host.conf that has an address."""

    def __init__(self, handlers: Mapping[str, Application]) -> None:
        self._handlers = handlers
        self._open: dict[str, tuple[str, Server]] = {}
        self._failures = {key: Failures(log, level=logging.ERROR) for key in handlers}

    async def update(self, published: Mapping[str, str]) -> None:
        for key, (address, server) in list(self._open.items()):
            if published.get(key) != address:
                await server.close()
                del self._open[key]
                log.info("%s: stopped serving at http://%s/", key, address)
        for key, address in published.items():
            if key not in self._open and key in self._handlers:
                await self._open_listener(key, address)

    async def _open_listener(self, key: str, address: str) -> None:
        try:
            listener = listen_on(address)
        except OSError as error:
            again = f"trying again every {_POLL_S:g} s. Choose another port in host.conf"
            text = f"{key}: cannot listen on {address}: {error.strerror}"
            self._failures[key].report(text, consequence=again)
            return
        server = Server(self._handlers[key], LIMITS)
        await server.open(listener)
        self._open[key] = address, server
        self._failures[key].clear()
        log.info("%s: serving at http://%s/", key, address)
