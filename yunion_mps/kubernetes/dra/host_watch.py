"""What the host offers now: follows the daemon's devices, pools and leases."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.errors import UnreachableError, YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import DAEMON_UNREACHABLE
from yunion_mps.core.tasks import first_of
from yunion_mps.http.client import AsyncDaemonClient, timeout_error
from yunion_mps.http.operations import GET_GPUS, GET_LEASES, GET_STATUS
from yunion_mps.kubernetes.daemon_watch import HANG_S, PROBE_S, DaemonWatch
from yunion_mps.kubernetes.dra.claims import is_claim_lease
from yunion_mps.kubernetes.dra.slice_devices import (
    DRIVER,
    HostDevice,
    HostFacts,
    OfferedDevice,
    offered_devices,
)
from yunion_mps.kubernetes.kubelet.device_plugin_api import HEALTHY, UNHEALTHY
from yunion_mps.kubernetes.metrics import Counts, ResourceHealth

if TYPE_CHECKING:
    from yunion_mps.answers import DomainJson, GpuJson

log = logging.getLogger(__name__)

#: The root of the PCI hierarchy in a device's sysfs path.
_PCIE_ROOT = re.compile(r"/(pci[0-9a-f]{4,8}:[0-9a-f]{2})/")


class HostTimes(NamedTuple):
    """Timeouts and intervals of the driver's requests to the daemon, in s."""

    #: How long the daemon may be unreachable, as during an upgrade, before its devices get taints.
    outage_s: float = 5.0
    #: How often everything is read without a change of the devices: the control daemons' limits may change.
    reread_s: float = 60.0
    #: How long a claim waits for the daemon's first answer.
    first_answer_s: float = 10.0
    #: How often the daemon is asked whether it is alive.
    probe_s: float = PROBE_S
    #: How long it has to answer that.
    hang_s: float = HANG_S


HOST_TIMES = HostTimes()


class DraHost:
    """What the host offers; the driver reads it, and runs it.

    `offered` are the devices, None until the daemon has answered; `failure` is why it no longer answers.
    `changed` is set when either changes, and then replaced.
    """

    def __init__(self, paths: Paths, counts: Counts, times: HostTimes = HOST_TIMES) -> None:
        self._paths = paths
        self._daemon = AsyncDaemonClient(paths)
        self._first_answer_s = times.first_answer_s
        self._watch = DaemonWatch(
            self._daemon,
            counts,
            self._read,
            self._lose,
            outage_s=times.outage_s,
            reread_s=times.reread_s,
            probe_s=times.probe_s,
            hang_s=times.hang_s,
        )
        self.offered: Sequence[OfferedDevice] | None = None
        self.failure: YunionError | None = None
        self.changed = asyncio.Event()
        self.status = "waiting for the daemon"
        #: A device with a taint is unhealthy: no pod should get it.
        self.health = ResourceHealth(DRIVER)

    async def run(self) -> None:
        """Follow the daemon, without end."""
        await self._watch.run()

    async def _read(self) -> None:
        self._publish(offered_devices(await self._facts()))
        self.failure = None

    async def known(self) -> dict[str, OfferedDevice]:
        """Return the devices by name, once the daemon has answered; raises YunionError if it does not."""
        if self.offered is None and self.failure is None:
            await first_of(self.changed.wait(), asyncio.sleep(self._first_answer_s))
        if self.offered is None or self.failure:
            raise self.failure or timeout_error(self._paths.socket, self._first_answer_s)
        return {device.name: device for device in self.offered}

    async def _facts(self) -> HostFacts:
        call = self._daemon.call
        gpus: dict[str, GpuJson] = {}
        pcie_roots: dict[str, str] = {}
        for gpu in (await call(GET_GPUS))["gpus"]:
            if gpu["uuid"]:
                gpus[gpu["uuid"]] = gpu
                pcie_roots[gpu["uuid"]] = pcie_root(self._paths, gpu["pci_address"])
        status = await call(GET_STATUS)
        domains: dict[str, DomainJson] = {}
        for domain in status["domains"]:
            domains.update(dict.fromkeys(domain["gpus"], domain))
        pools = await self._watch.pools()
        devices = await self._watch.devices(HostDevice)
        leases = (await call(GET_LEASES))["leases"]  # after the devices, as unhealthy_cause needs them
        return HostFacts(
            devices=devices,
            pools=pools,
            gpus=gpus,
            domains=domains,
            pcie_roots=pcie_roots,
            driver_version=status["driver"]["version"] or "",
            other_leases={lease["id"]: lease for lease in leases if not is_claim_lease(lease)},
        )

    def _lose(self, error: YunionError) -> None:
        if not isinstance(error, UnreachableError):
            return
        is_new = self.failure is None
        self.failure = error
        if self.offered is not None:
            self._publish([_lost(device, error) for device in self.offered])
        elif is_new:
            self._wake()
        self.status = error.message

    def _publish(self, offered: Sequence[OfferedDevice]) -> None:
        is_first = self.offered is None
        tainted = [device for device in offered if device.taint]
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
        self.changed.set()
        self.changed = asyncio.Event()


def _lost(device: OfferedDevice, error: YunionError) -> OfferedDevice:
    """Return the device while the daemon does not answer."""
    return device._replace(taint=DAEMON_UNREACHABLE, reason=error.message, is_healthy=False)


def _health(offered: Sequence[OfferedDevice]) -> dict[str, str]:
    return {device.name: UNHEALTHY if device.taint else HEALTHY for device in offered}


def pcie_root(paths: Paths, address: str) -> str:
    """Return the root of a GPU's PCI hierarchy, as in /sys/devices/pci0000:00/…; empty if sysfs has none."""
    path = os.path.realpath(os.path.join(paths.pci_devices, physical_gpu(address)))
    match = _PCIE_ROOT.search(path)
    return match[1] if match else ""
