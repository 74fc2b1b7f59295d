"""The metrics in a file, for node_exporter's textfile collector: whole at every moment, gone at a stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator

from yunion_mps.errors import HostError
from yunion_mps.host.files import write_atomically
from yunion_mps.host.threads import on_thread
from yunion_mps.mps.directories import open_directory
from yunion_mps.paths import Paths
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: How often it is written.
_WRITE_S = 15.0


class Textfile:
    """Writes the file that the configuration names, if any."""

    def __init__(self, paths: Paths, supervisor: Supervisor, text: Callable[[], Awaitable[bytes]]) -> None:
        """`text` gives the metrics."""
        self._paths = paths
        self._supervisor = supervisor
        self._text = text
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
                self._supervisor.remark("metrics_textfile", "")
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
            text = await self._text()
            await on_thread(lambda: write(file, text))
        except (OSError, HostError) as error:
            why = error.strerror if isinstance(error, OSError) else error.message
            trouble = f"metrics_textfile is {file}, which cannot be written: {why}"
        except Exception as error:  # noqa: BLE001 - a daemon without metrics does all that matters to jobs
            trouble = f"the metrics for {file} cannot be made: {error!r}"
        if trouble and self._trouble != trouble:
            log.warning("%s; it is tried again every %g s", trouble, _WRITE_S)
        self._trouble = trouble
        self._supervisor.remark("metrics_textfile", trouble)


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
