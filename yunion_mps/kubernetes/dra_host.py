"""What the host offers now: follows the daemon's devices, pools and leases."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from yunion_mps.errors import UnreachableError, YunionError
from yunion_mps.http.client import AsyncDaemonClient, timeout_error
from yunion_mps.http.operations import (
    GET_DEVICES,
    GET_GPUS,
    GET_HEALTH,
    GET_LEASES,
    GET_POOLS,
    GET_STATUS,
    Operation,
)
from yunion_mps.http.parameters import Value
from yunion_mps.kubernetes.dra_claims import is_claim_lease
from yunion_mps.kubernetes.dra_devices import DRIVER, HostDevice, HostFacts, OfferedDevice, offered_devices
from yunion_mps.kubernetes.kubelet_api import HEALTHY, UNHEALTHY
from yunion_mps.kubernetes.metrics import DAEMON, Counts
from yunion_mps.kubernetes.resources import ResourceHealth
from yunion_mps.paths import Paths
from yunion_mps.reasons import DAEMON_UNREACHABLE
from yunion_mps.tasks import first_of

if TYPE_CHECKING:
    from yunion_mps.answers import Device

log = logging.getLogger(__name__)

#: How long each request for a change waits, in s.
CHANGE_WAIT_S = 60
#: The pause between two requests, in s: many changes at once cause few of them, and failures are retried.
_PAUSE_S = 0.2
#: How long the daemon may be unreachable, as during an upgrade, before its devices get taints, in s.
OUTAGE_S = 5.0
#: How often the daemon is asked whether it is alive, in s: one that hangs answers none of the requests above,
#: whose timeouts are long, because reading thousands of devices on a busy host takes its time.
_PROBE_S = 2.0
#: How long a claim waits for the daemon's first answer, in s.
_KNOWN_S = 10.0
#: How many devices are read at once: all of a large host would take 10 MiB for a moment.
_PAGE = 256
_MEMBERS = tuple(HostDevice.__annotations__)
#: The root of the PCI hierarchy in a device's sysfs path.
_PCIE_ROOT = re.compile(r"/(pci[0-9a-f]{4}:[0-9a-f]{2})/")


class DraHost:
    """`offered` are the devices, None until the daemon has answered; `failure` is why it no longer answers.

    `changed` is set when either changes.
    """

    def __init__(
        self, paths: Paths, counts: Counts, outage_s: float = OUTAGE_S, change_wait_s: int = CHANGE_WAIT_S
    ) -> None:
        self._paths = paths
        self._daemon = AsyncDaemonClient(paths)
        self._counts = counts
        self._outage_s = outage_s
        self._change_wait_s = change_wait_s
        self._stale = asyncio.Event()
        self._failing_since_s: float | None = None
        self.offered: Sequence[OfferedDevice] | None = None
        self.failure: YunionError | None = None
        self.changed = asyncio.Event()
        self.status = "waiting for the daemon"
        #: A device with a taint is unhealthy: no pod should get it.
        self.health = ResourceHealth(DRIVER)

    async def run(self) -> None:
        """Follow the daemon, without end."""
        watches = self._watch(GET_DEVICES, limit=0), self._watch(GET_POOLS)
        await first_of(*watches, self._read(), self._probe())

    async def _read(self) -> None:
        while True:
            await self._stale.wait()
            self._stale.clear()
            began_s = _now_s()
            try:
                self._publish(offered_devices(await self._facts()))
                self._failing_since_s, self.failure = None, None
            except YunionError as error:
                self._note_failure(error, began_s)
                self._stale.set()
            await asyncio.sleep(_PAUSE_S)

    async def _probe(self) -> None:
        """Notice within `outage_s` plus one interval that the daemon hangs."""
        while True:
            await asyncio.sleep(_PROBE_S)
            began_s = _now_s()
            try:
                await self._daemon.call(GET_HEALTH, self._outage_s)
            except YunionError as error:
                self._note_failure(error, began_s)
                self._stale.set()  # everything is read once it answers again

    async def known(self) -> dict[str, OfferedDevice]:
        """The devices by name, once the daemon has answered; raises YunionError if it does not."""
        if self.offered is None and self.failure is None:
            await first_of(self.changed.wait(), asyncio.sleep(_KNOWN_S))
        if self.offered is None or self.failure:
            raise self.failure or timeout_error(self._paths.socket, _KNOWN_S)
        return {one.name: one for one in self.offered}

    async def _watch(self, operation: Operation[Any], **arguments: Value) -> None:
        condition: dict[str, Value] = {}
        while True:
            try:
                etag = await self._note_change(operation, **arguments, **condition)
                condition = {"if_none_match": etag, "wait_s": self._change_wait_s}
            except YunionError:
                condition = {}
                self._stale.set()  # the attempt to read everything reports it
            await asyncio.sleep(_PAUSE_S)

    async def _note_change(self, operation: Operation[Any], **arguments: Value) -> str:
        """Wait for a change, and return its ETag."""
        etag = await self._daemon.wait_for_change(operation, **arguments)
        self._stale.set()  # also after a wait without a change: the control daemons' limits may have changed
        return etag

    async def _facts(self) -> HostFacts:
        call = self._daemon.call
        gpus = {gpu["uuid"]: gpu for gpu in (await call(GET_GPUS))["gpus"] if gpu["uuid"]}
        roots = {uuid: root for uuid, gpu in gpus.items() if (root := self._pcie_root(gpu["pci_address"]))}
        status = await call(GET_STATUS)
        domains = {uuid: domain for domain in status["domains"] for uuid in domain["gpus"]}
        driver_version = status["driver"]["version"] or ""
        pools = (await call(GET_POOLS))["pools"]
        devices = await self._devices()
        leases = (await call(GET_LEASES))["leases"]  # after the devices, as unhealthy_cause needs them
        others = {lease["id"]: lease for lease in leases if not is_claim_lease(lease)}
        return HostFacts(devices, pools, gpus, domains, roots, driver_version, others)

    async def _devices(self) -> list[HostDevice]:
        """All devices; if their number has changed between two pages, they are read again."""
        while True:
            devices: list[HostDevice] = []
            totals: set[int] = set()
            while len(devices) < max(totals, default=1):
                page = await self._daemon.call(GET_DEVICES, limit=_PAGE, offset=len(devices))
                devices += map(_host_device, page["isolated_devices"])
                totals.add(page["total"])
                if not page["isolated_devices"]:
                    break
            if totals == {len(devices)}:
                return devices

    def _pcie_root(self, address: str) -> str:
        """As in /sys/devices/pci0000:00/…; empty if sysfs does not show it here."""
        path = os.path.realpath(os.path.join(self._paths.pci_devices, address.lower()))
        found = _PCIE_ROOT.search(path)
        return found[1] if found else ""

    def _note_failure(self, error: YunionError, began_s: float) -> None:
        """Note that a request that began at this time failed."""
        self._counts.errors[DAEMON] += 1
        if self._failing_since_s is None:
            self._failing_since_s = began_s
        if _now_s() - self._failing_since_s >= self._outage_s and isinstance(error, UnreachableError):
            is_new, self.failure = self.failure is None, error
            if self.offered is not None:
                taint, reason = DAEMON_UNREACHABLE, error.message
                self._publish(
                    [one._replace(taint=taint, reason=reason, is_healthy=False) for one in self.offered]
                )
            elif is_new:
                self._wake()
            self.status = error.message

    def _publish(self, offered: Sequence[OfferedDevice]) -> None:
        is_first = self.offered is None
        tainted = [one for one in offered if one.taint]
        status = f"{len(offered) - len(tainted)} of {len(offered)} devices can be allocated"
        if tainted:
            status += f"; {tainted[0].address}: {tainted[0].reason}"
        if status != self.status:
            log.info("%s", status)
        self.status = status
        if is_first or offered != self.offered:
            self.health.update(_health(self.offered or ()), _health(offered))
            self.offered = offered
            self._wake()

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _host_device(device: Device) -> HostDevice:
    every: Mapping[str, object] = device
    return cast("HostDevice", {name: every[name] for name in _MEMBERS})


def _health(offered: Sequence[OfferedDevice]) -> dict[str, str]:
    return {one.name: UNHEALTHY if one.taint else HEALTHY for one in offered}
