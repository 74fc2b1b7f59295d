"""Serves the metrics as text, and writes the file for node_exporter's textfile collector.

The formats are OpenMetrics and Prometheus' older text format, made by prometheus_client. Only its modules
that make families and text are imported, at the first call: 1 MiB and 5 ms instead of 6 MiB and 35 ms for the
whole package, which includes HTTP servers, clients and OpenSSL.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

from yunion_mps.errors import HostError
from yunion_mps.host.files import write_atomically
from yunion_mps.host.threads import on_thread
from yunion_mps.http.operations import OPENMETRICS
from yunion_mps.metrics.catalogue import (
    CATALOGUE,
    COUNTER,
    GAUGE,
    HISTOGRAM,
    INFO,
    Metric,
    Sample,
)
from yunion_mps.mps.directories import directory_of
from yunion_mps.paths import Paths
from yunion_mps.reasons import METRICS_FILE_FAILED, NO_REASON, Reason
from yunion_mps.service.facts import Facts
from yunion_mps.supervisor import Supervisor
from yunion_mps.text import printable

log = logging.getLogger(__name__)

_NAME = "prometheus_client"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Suffixes that OpenMetrics does not count as part of a family's name, by kind.
_SUFFIXES = {COUNTER: "_total", INFO: "_info"}
_END = b"# EOF\n"

#: Scrapes within this time share a text.
_CACHE_S = 1.0
#: The interval between writes of the file.
_WRITE_S = 15.0


class Exporter:
    def __init__(self, facts: Callable[[], Awaitable[Facts]]) -> None:
        self._facts = facts
        self._writing = asyncio.Lock()
        self._cache: dict[bool, bytes] = {}

    async def answer(self, accept: str) -> tuple[str, bytes]:
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
        self._trouble = ""

    def wake(self) -> None:
        """Apply the configuration now instead of with the next write."""
        self._wake.set()

    async def run(self) -> None:
        """Write the file at intervals, forever."""
        while True:
            file = self._configured
            if self._written != file:
                self.remove()
                self._supervisor.set_warning("metrics_textfile", NO_REASON)
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
        trouble = ""
        self._written = file
        try:
            text = await self._exporter.text()
            await on_thread(lambda: write(file, text))
        except (OSError, HostError) as error:
            cause = error.strerror if isinstance(error, OSError) else error.message
            trouble = f"cannot write metrics_textfile {file}: {cause}"
        except Exception as error:  # noqa: BLE001 - metrics must not stop the daemon
            trouble = f"the metrics for {file} cannot be generated: {error!r}"
        if trouble and self._trouble != trouble:
            log.warning("%s; retrying every %g s", trouble, _WRITE_S)
        self._trouble = trouble
        reason = Reason(trouble, METRICS_FILE_FAILED) if trouble else NO_REASON
        self._supervisor.set_warning("metrics_textfile", reason)


def write(file: str, text: bytes) -> None:
    """Write the text atomically and readable for all; raises OSError and HostError.

    The directory may belong to another user, so its symlinks are not followed.
    """
    with directory_of(file) as (directory, name):
        write_atomically(name, text, dir_fd=directory)


class _Library(NamedTuple):
    families: Mapping[str, type[Any]]
    write: Any
    process: Any


_library: _Library | None = None


def wants_openmetrics(accept: str) -> bool:
    """Whether an Accept header asks for OpenMetrics, as Prometheus' does and curl's does not."""
    return OPENMETRICS in accept


def text_of(facts: Facts, *, openmetrics: bool) -> bytes:
    library = _load()
    families = (_family(library, metric, metric.samples(facts)) for metric in CATALOGUE)
    parts = [
        _format(library, family, openmetrics=openmetrics)
        for family in chain(families, library.process.collect())
        if family.samples
    ]
    return b"".join([*parts, _END] if openmetrics else parts)


def _family(library: _Library, metric: Metric, samples: Iterable[Sample]) -> Any:
    suffix = _SUFFIXES.get(metric.kind, "")
    name = metric.name[: -len(suffix)] if suffix else metric.name
    family = library.families[metric.kind](name, metric.help, labels=metric.labels)
    known = set()
    for labels, *value in samples:
        # Two domains may have the same name for a while, during a replacement.
        if value[0] is not None and labels not in known:
            known.add(labels)
            if metric.kind == INFO:  # the only text from elsewhere: driver versions, GPU names
                value = [{key: printable(text) for key, text in value[0].items()}]
            family.add_metric(labels, *value)
    return family


class _SingleMetricCollector:
    def __init__(self, family: Any) -> None:
        self._family = family

    def collect(self) -> Iterable[Any]:
        return (self._family,)


def _format(library: _Library, family: Any, *, openmetrics: bool) -> bytes:
    if not openmetrics:
        family.name += _SUFFIXES.get(family.type, "")
        family.type = GAUGE if family.type == INFO else family.type
    # This escaping checks a name as a whole, the default one checks every letter.
    return bytes(library.write(_SingleMetricCollector(family), escaping="allow-utf-8"))[: -len(_END)]


def _load() -> _Library:
    """Import the parts of prometheus_client; raises ImportError."""
    global _library
    if _library is None:
        is_whole = _NAME in sys.modules
        if not is_whole:
            spec = importlib.util.find_spec(_NAME)
            if spec is None:
                raise ImportError(f"there is no {_NAME}")
            shell = ModuleType(_NAME)  # without the imports of its __init__
            shell.__path__ = list(spec.submodule_search_locations or ())
            sys.modules[_NAME] = shell
        try:
            from prometheus_client import metrics_core, process_collector
            from prometheus_client.openmetrics import exposition

            families = {
                GAUGE: metrics_core.GaugeMetricFamily,
                COUNTER: metrics_core.CounterMetricFamily,
                INFO: metrics_core.InfoMetricFamily,
                HISTOGRAM: metrics_core.HistogramMetricFamily,
            }
            # The usual metrics of a process, as `yunion_mps_process_...`.
            process = process_collector.ProcessCollector(namespace="yunion_mps", registry=None)
            _library = _Library(families, exposition.generate_latest, process)
        finally:
            if not is_whole:
                del sys.modules[_NAME]
    return _library
