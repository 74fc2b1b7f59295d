"""What Prometheus reads: the daemon's own metrics, or that it is not there."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from yunion_mps.errors import UnreachableError
from yunion_mps.gateway.names import HostNames
from yunion_mps.gateway.upstream import ask
from yunion_mps.http.query import Request, Response, problem
from yunion_mps.http.routes import Answer
from yunion_mps.paths import Paths

log = logging.getLogger(__name__)

PATH = "/metrics"
#: Less than Prometheus waits unless told otherwise, 10 s: who hangs is the daemon, and not the gateway.
_PATIENCE_S = 7.0
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DOWN = b"""\
# HELP yunion_mps_up Whether the daemon answers.
# TYPE yunion_mps_up gauge
yunion_mps_up 0
"""


class Metrics:
    """Answers one path, and only to readers."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._names = HostNames(paths)
        self._said = ""

    def answer(self, request: Request) -> Answer:
        """The metrics; never raises."""
        refusal = self._names.refusal(request.host, "the metrics are")
        if refusal:
            return refusal
        if request.method not in ("GET", "HEAD"):
            return problem(405, f"{request.method} is not possible here", headers=(("Allow", "GET, HEAD"),))
        if _path(request.target) != PATH:
            return problem(404, "there is nothing here", f"the metrics are at {PATH}")
        return self._metrics(request.accept)

    def hurry(self) -> None:
        """Nothing here waits for what may come."""

    async def _metrics(self, accept: str) -> Response:
        try:
            answer = await ask(self._paths, PATH, accept, _PATIENCE_S)
        except UnreachableError as error:
            self._say(f"yunion_mps_up is 0: {error.message}; {error.hint}")
            return Response(200, _TYPE, _DOWN)
        self._say("")
        return answer

    def _say(self, trouble: str) -> None:
        """Once for each trouble, and once when it is over."""
        if trouble != self._said:
            log.warning("%s", trouble or "yunion_mps_up is 1 again: the daemon answers")
        self._said = trouble


def _path(target: str) -> str:
    try:
        return urlsplit(target).path
    except ValueError:  # `http://[`
        return ""
