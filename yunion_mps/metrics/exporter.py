"""Serves the metrics as text, and writes the file for node_exporter's textfile collector.

The formats are OpenMetrics and Prometheus' older text format (yunion_mps/core/exposition.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable

from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_METRICS_FILE, IMPAIRED
from yunion_mps.core.errors import HostError
from yunion_mps.core.exposition import OPENMETRICS_TYPE, PLAIN_TYPE, exposition_of, wants_openmetrics
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import METRICS_FILE_FAILED, Reason
from yunion_mps.host.files import write_atomically
from yunion_mps.host.log import Failures
from yunion_mps.host.threads import on_thread
from yunion_mps.metrics.catalogue import CATALOGUE
from yunion_mps.mps.directories import directory_of
from yunion_mps.service.facts import Facts
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: Scrapes within this time share a text.
_CACHE_S = 1.0
#: The interval between writes of the file.
_WRITE_S = 15.0


class Exporter:
    """Makes the text of all metrics, for scrapes and for the file."""

    def __init__(self, facts: Callable[[], Awaitable[Facts]]) -> None:
        self._facts = facts
        self._writing = asyncio.Lock()
        self._cache: dict[bool, bytes] = {}

    async def render(self, accept: str) -> tuple[str, bytes]:
        """Return the content type and all metrics, in the format that an Accept header asks for."""
        openmetrics = wants_openmetrics(accept)
        text = await self.text(openmetrics=openmetrics)
        return OPENMETRICS_TYPE if openmetrics else PLAIN_TYPE, text

    async def text(self, *, openmetrics: bool = False) -> bytes:
        """Return all metrics, at most a second old."""
        async with self._writing:
            if openmetrics not in self._cache:
                facts = await self._facts()
                self._cache[openmetrics] = await on_thread(lambda: text_of(facts, openmetrics=openmetrics))
                asyncio.get_running_loop().call_later(_CACHE_S, self._cache.pop, openmetrics)
            return self._cache[openmetrics]


class Textfile:
    """Writes the file named in the configuration, if any: atomically, and removes it at a stop."""

    def __init__(self, paths: Paths, supervisor: Supervisor, exporter: Exporter) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._exporter = exporter
        self._wake = asyncio.Event()
        self._written = ""
        self._failures = Failures(log)

    def wake(self) -> None:
        """Apply the configuration now instead of with the next write."""
        self._wake.set()

    async def run(self) -> None:
        """Write the file at intervals, forever."""
        while True:
            file = self._configured
            if self._written != file:
                self.remove()
                self._supervisor.end_condition(ABOUT_METRICS_FILE)
            if file:
                await self._write(file)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _WRITE_S if file else None)
            self._wake.clear()

    def remove(self) -> None:
        """Remove the file, because outdated metrics would look current."""
        if self._written:
            with contextlib.suppress(OSError, HostError), directory_of(self._written) as (directory, name):
                os.unlink(name, dir_fd=directory)
        self._written = ""

    @property
    def _configured(self) -> str:
        file = self._supervisor.config.metrics_textfile
        return self._paths.under(file) if file else ""

    async def _write(self, file: str) -> None:
        self._written = file
        message = ""
        try:
            text = await self._exporter.text()
            await on_thread(lambda: write(file, text))
        except (OSError, HostError) as error:
            cause = error.strerror if isinstance(error, OSError) else error.message
            message = f"cannot write metrics_textfile {file}: {cause}"
        except Exception as error:  # noqa: BLE001 - metrics must not stop the daemon
            message = f"the metrics for {file} cannot be generated: {error!r}"
        if message:
            self._failures.report(message, consequence=f"retrying every {_WRITE_S:g} s")
            reason = Reason(message, METRICS_FILE_FAILED)
            self._supervisor.set_condition(Condition(ABOUT_METRICS_FILE, "", IMPAIRED, reason))
        else:
            self._failures.clear()
            self._supervisor.end_condition(ABOUT_METRICS_FILE)


def write(file: str, text: bytes) -> None:
    """Write the text atomically and readable for all; raises OSError and HostError.

    The directory may belong to another user, so its symlinks are not followed.
    """
    with directory_of(file) as (directory, name):
        write_atomically(name, text, dir_fd=directory)


def text_of(facts: Facts, *, openmetrics: bool) -> bytes:
    """Format all metrics; raises ImportError without prometheus_client."""
    families = (metric.family(facts) for metric in CATALOGUE)
    return exposition_of(families, "yunion_mps", openmetrics=openmetrics)
