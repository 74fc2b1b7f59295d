"""The exporter: the metrics as text for a scrape, and in a file for node_exporter's textfile collector."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator

from yunion_mps.errors import HostError
from yunion_mps.host.files import write_atomically
from yunion_mps.host.threads import on_thread
from yunion_mps.metrics.text import OPENMETRICS_TYPE, PLAIN_TYPE, text_of, wants_openmetrics
from yunion_mps.mps.directories import open_directory
from yunion_mps.paths import Paths
from yunion_mps.reasons import METRICS_FILE_FAILED, NO_REASON, Reason
from yunion_mps.service.metrics import MetricsCollector
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: Scrapes within this time get the same text.
_KEPT_S = 1.0


class Exporter:
    """Writes the metrics for HTTP and for the textfile."""

    def __init__(self, metrics: MetricsCollector) -> None:
        self._metrics = metrics
        self._writing = asyncio.Lock()
        self._kept: dict[bool, bytes] = {}

    async def answer(self, accept: str) -> tuple[str, bytes]:
        """All metrics in the format that an Accept header asks for, after their content type."""
        openmetrics = wants_openmetrics(accept)
        text = await self.text(openmetrics=openmetrics)
        return OPENMETRICS_TYPE if openmetrics else PLAIN_TYPE, text

    async def text(self, *, openmetrics: bool = False) -> bytes:
        """All metrics, at most a second old."""
        async with self._writing:
            if openmetrics not in self._kept:
                facts = await self._metrics.facts()
                self._kept[openmetrics] = await on_thread(lambda: text_of(facts, openmetrics=openmetrics))
                asyncio.get_running_loop().call_later(_KEPT_S, self._kept.pop, openmetrics)
            return self._kept[openmetrics]


#: How often it is written.
_WRITE_S = 15.0


class Textfile:
    """Writes the file that the configuration names, if any: whole at every moment, gone at a stop."""

    def __init__(self, paths: Paths, supervisor: Supervisor, exporter: Exporter) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._exporter = exporter
        self._wake = asyncio.Event()
        self._written = ""
        self._trouble = ""

    def soon(self) -> None:
        """Look at once at what the configuration says."""
        self._wake.set()

    async def run(self) -> None:
        """Write for good."""
        while True:
            file = self._wanted
            if self._written != file:
                self.remove()
                self._supervisor.set_warning("metrics_textfile", NO_REASON)
            if file:
                await self._write(file)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _WRITE_S if file else None)
            self._wake.clear()

    def remove(self) -> None:
        """Leave no file, because what it says would look true for good."""
        if self._written:
            with contextlib.suppress(OSError, HostError), _directory_of(self._written) as (directory, name):
                os.unlink(name, dir_fd=directory)
        self._written = ""

    @property
    def _wanted(self) -> str:
        file = self._supervisor.config.metrics_textfile
        return self._paths.under(file) if file else ""

    async def _write(self, file: str) -> None:
        trouble = ""
        self._written = file
        try:
            text = await self._exporter.text()
            await on_thread(lambda: write(file, text))
        except (OSError, HostError) as error:
            why = error.strerror if isinstance(error, OSError) else error.message
            trouble = f"metrics_textfile is {file}, which cannot be written: {why}"
        except Exception as error:  # noqa: BLE001 - a daemon without metrics does all that matters to jobs
            trouble = f"the metrics for {file} cannot be generated: {error!r}"
        if trouble and self._trouble != trouble:
            log.warning("%s; retrying every %g s", trouble, _WRITE_S)
        self._trouble = trouble
        reason = Reason(trouble, METRICS_FILE_FAILED) if trouble else NO_REASON
        self._supervisor.set_warning("metrics_textfile", reason)


def write(file: str, text: bytes) -> None:
    """Put the text there in one step, for all to read; raises OSError and HostError.

    The directory may be another user's: nothing is followed there that it has laid out.
    """
    with _directory_of(file) as (directory, name):
        write_atomically(name, text, dir_fd=directory)


@contextlib.contextmanager
def _directory_of(file: str) -> Iterator[tuple[int, str]]:
    """A descriptor of the file's directory, and its name there."""
    place, name = os.path.split(file)
    directory = open_directory(place)
    try:
        yield directory, name
    finally:
        os.close(directory)
