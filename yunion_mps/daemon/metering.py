"""The metrics while the daemon runs: the facts are taken on the loop, all that takes time on a thread.

A scrape waits for nobody: where the driver does not tell in time who uses the GPUs, what it told last holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from yunion_mps.daemon.leasing import Leasing
from yunion_mps.errors import YunionError
from yunion_mps.host.proc import started_ticks, uid_of
from yunion_mps.host.threads import on_thread
from yunion_mps.http.counting import Counts
from yunion_mps.http.query import Response
from yunion_mps.inventory import Nvml
from yunion_mps.metrics.facts import Facts, Moment, Observation, Queue, ServedDomain, Use, use_of
from yunion_mps.metrics.text import OPENMETRICS_TYPE, PLAIN_TYPE, text_of, wants_openmetrics
from yunion_mps.mps.servers import is_server
from yunion_mps.revision import revision
from yunion_mps.service.process_devices import ProcessDevices
from yunion_mps.service.queries import Filters, Service
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: How long the driver has to tell who uses the GPUs before what it told last is given.
_DRIVER_S = 2.0
#: Several who scrape within so long get the very same.
_KEPT_S = 1.0


class _Question(NamedTuple):
    """One domain, its GPUs, and the PIDs of its control daemon (None while there is none) and servers."""

    name: str
    gpu_uuids: tuple[str, ...]
    control_pid: int | None
    servers: frozenset[int]


class Metering:
    """Gives the metrics to whoever asks."""

    def __init__(
        self,
        supervisor: Supervisor,
        service: Service,
        leasing: Leasing,
        devices: ProcessDevices,
        counts: Counts,
    ) -> None:
        self._supervisor = supervisor
        self._service = service
        self._leasing = leasing
        self._devices = devices
        self._counts = counts
        self._revision = revision()  # now, for after an upgrade it would be another program's
        self._looking: asyncio.Task[Use] | None = None
        self._began_s = 0.0
        self._use: Use | None = None
        self._asking = asyncio.Lock()
        self._kept: dict[bool, bytes] = {}

    async def metrics(self, accept: str) -> Response:
        """All metrics, in the format that an Accept header asks for."""
        openmetrics = wants_openmetrics(accept)
        return Response(
            200, OPENMETRICS_TYPE if openmetrics else PLAIN_TYPE, await self.text(openmetrics=openmetrics)
        )

    async def text(self, *, openmetrics: bool = False) -> bytes:
        """All metrics, at most a second old."""
        async with self._asking:
            if openmetrics not in self._kept:
                await self._look()
                facts = self._facts()
                text = await on_thread(lambda: text_of(facts, openmetrics=openmetrics))
                self._kept[openmetrics] = text
                asyncio.get_running_loop().call_later(_KEPT_S, self._kept.pop, openmetrics)
            return self._kept[openmetrics]

    def _facts(self) -> Facts:
        """What is known now: nothing here waits or asks."""
        supervisor, service = self._supervisor, self._service
        waiting = [waiter.since_s for waiter in self._leasing.queue.waiters]
        now = Moment(time.time(), asyncio.get_running_loop().time())
        probes = {domain.plan.name: domain.probe_s for domain in supervisor.domains}
        return Facts(
            now,
            self._revision,
            service.status(),
            service.gpus()["gpus"],
            service.devices(Filters(), 0, 0)["isolated_devices"],
            supervisor.snapshot().domains,
            {name: probe_s for name, probe_s in probes.items() if probe_s is not None},
            Queue(
                Counter(lease.holder.binding for lease in self._leasing.ledger.leases.values()),
                len(waiting),
                max((now.wall_s - since_s for since_s in waiting), default=0.0),
            ),
            dict(supervisor.event_log.counts),
            self._counts.counted(),
            self._use,
            service.ill_gpus(),
            self._given(),
        )

    def _given(self) -> dict[str, tuple[int, float]]:
        """The budgets (MiB and percent) of the devices that somebody has, as they were given, by address."""
        return {
            device.addr: (device.memory_limit_mib, device.thread_percentage)
            for lease in self._leasing.ledger.leases.values()
            for device in lease.devices
        }

    async def _look(self) -> None:
        """See who uses the GPUs; one look at a time, and what takes longer is known to a later scrape."""
        nvml = self._supervisor.nvml
        if nvml is None:
            self._use = None
            return
        loop = asyncio.get_running_loop()
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._seen(nvml))
            self._began_s = loop.time()
        await asyncio.wait({self._looking}, timeout=max(0.0, self._began_s + _DRIVER_S - loop.time()))
        if self._looking.done():
            looking, self._looking = self._looking, None
            try:
                self._use = looking.result()
            except YunionError as error:
                log.debug("who uses the GPUs is not known: %s", error.message)

    async def _seen(self, nvml: Nvml) -> Use:
        questions = [
            _Question(
                domain.plan.name, domain.plan.gpu_uuids, domain.status().pid, frozenset(domain.server_pids())
            )
            for domain in self._supervisor.domains
        ]
        known = self._devices.known()
        return await on_thread(
            lambda: use_of(_look(nvml, questions, lambda jobs: self._devices.of(jobs, known)), known.budgets)
        )


def _look(
    nvml: Nvml,
    questions: Iterable[_Question],
    devices_of: Callable[[Mapping[int, int]], Mapping[int, tuple[str, ...]]],
) -> Observation:
    """What NVML and the kernel tell; raises DriverError."""
    # In this order: whoever begins between the two questions is known to use MPS.
    memory, through_mps = nvml.processes(), nvml.mps_clients()
    served = tuple(
        ServedDomain(one.name, one.gpu_uuids, one.servers, _started_s(one.control_pid)) for one in questions
    )
    servers = {pid for one in served for pid in one.servers}
    pids = {pid for of_gpu in (*memory.values(), *through_mps.values()) for pid in of_gpu} - servers
    others = frozenset(pid for pid in pids if uid_of(pid) is None or is_server(pid))
    jobs = {pid: ticks for pid in pids - others if (ticks := started_ticks(pid)) is not None}
    return Observation(time.time(), served, memory, through_mps, devices_of(jobs), others)


def _started_s(pid: int | None) -> float | None:
    import psutil

    try:
        return psutil.Process(pid).create_time() if pid else None
    except psutil.Error:
        return None
