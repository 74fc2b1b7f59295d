"""Keeping the devices where container engines look for them, for as long as the daemon serves."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Iterable
from typing import NamedTuple

from yunion_mps.cdi import files, nvidia
from yunion_mps.cdi.nodes import driver_nodes, gpu_nodes
from yunion_mps.cdi.spec import Host, Node, Nvidia, devices_spec, lease_spec
from yunion_mps.errors import HostError
from yunion_mps.host.processes import find_program
from yunion_mps.host.threads import on_thread
from yunion_mps.models import Device, DomainPlan, Event, Gpu, Lease, Snapshot
from yunion_mps.paths import ROOT_VARIABLE, Paths
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: How often it is looked whether all is as it was left: a handful of system calls.
_LOOK_S = 10.0
_PROGRAM = "/usr/bin/yunion-mps"


class _Known(NamedTuple):
    """All that the devices' file is made of."""

    devices: tuple[Device, ...]
    domains: tuple[DomainPlan, ...]
    parked: tuple[DomainPlan, ...]
    gpus: tuple[Gpu, ...]
    nodes: tuple[Node, ...]
    gpu_nodes: dict[str, tuple[Node, ...]]
    nvidia: nvidia.Mark | None


class ContainerDevices:
    """The files of the plan's devices and of leases; each is written only when it becomes another."""

    def __init__(self, paths: Paths, supervisor: Supervisor) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._directory = paths.cdi_directory
        self._hook = _hook_program()
        self._seen: Snapshot | None = None
        self._look_again_s = 0.0
        self._written: _Known | None = None
        #: What was left of each file, by its name.
        self._marks: dict[str, files.Mark] = {}
        self._host: Host | None = None
        self._leases: dict[str, Lease] = {}
        self._trouble = ""
        self._work: asyncio.Task[None] | None = None
        self._is_closed = False
        #: Held while the devices' file is written, so that none comes after the last word.
        self._writing = threading.Lock()

    def restore(self, leases: Iterable[Lease]) -> None:
        """Have the files of these leases, and of no others."""
        wanted = {files.lease_file(lease.id): lease for lease in leases if lease.cdi}
        for name in list(files.ours(self._directory)):
            if name != files.DEVICES and name not in wanted:
                files.remove(self._directory, name)
        for lease in wanted.values():
            self.add(lease, or_warn=True)

    def add(self, lease: Lease, *, or_warn: bool) -> None:
        """Have a lease as a device, at once; where it cannot be, warn if `or_warn`, else raise HostError."""
        if self._host is None:
            self._host, _ = self._host_of(self._known(self._supervisor.snapshot()))
        try:
            self._write_leases([lease], self._host)
        except OSError as error:
            name = files.lease_file(lease.id)
            what = f"containers cannot find the lease: {self._directory}/{name}: {error.strerror}"
            if not or_warn:
                raise HostError(what, f"make {self._directory} a directory that root can write") from None
            log.warning("%s", what)
        self._leases[lease.id] = lease

    def _write_leases(self, leases: Iterable[Lease], host: Host) -> None:
        planned = {device.id for device in self._supervisor.snapshot().plan.devices}
        for lease in leases:
            name = files.lease_file(lease.id)
            self._marks[name] = files.write(self._directory, name, lease_spec(lease, planned, host))

    def forget(self, lease: Lease) -> None:
        """The lease has ended."""
        self._leases.pop(lease.id, None)
        if lease.cdi:
            name = files.lease_file(lease.id)
            self._marks.pop(name, None)
            files.remove(self._directory, name)

    def look(self) -> None:
        """See to it that the file is what it should be, soon; costs nothing where nothing has changed."""
        snapshot, now_s = self._supervisor.snapshot(), asyncio.get_running_loop().time()
        if self._is_closed or (snapshot is self._seen and now_s < self._look_again_s):
            return
        if self._work and not self._work.done():
            return
        self._seen, self._look_again_s = snapshot, now_s + _LOOK_S
        known = self._known(snapshot)
        if known != self._written or not self._is_there(known):
            self._work = asyncio.ensure_future(self._write(known))

    def close(self) -> None:
        """Change nothing any more: the next program goes on with what is there."""
        self._is_closed = True

    def remove(self) -> None:
        """The daemon has stopped: no container finds a device of ours."""
        self.close()
        with self._writing:
            for name in list(files.ours(self._directory)):
                files.remove(self._directory, name)

    def _known(self, snapshot: Snapshot) -> _Known:
        gpus = snapshot.inventory.gpus
        return _Known(
            snapshot.plan.devices,
            tuple(status.plan for status in snapshot.domains),
            snapshot.plan.parked,
            tuple(Gpu(gpu.pci_address, gpu.uuid, minor=gpu.minor) for gpu in gpus),
            driver_nodes(self._paths),
            gpu_nodes(self._paths, gpus),
            nvidia.find(self._paths),
        )

    def _is_there(self, known: _Known) -> bool:
        return (not known.devices or self._is_as_left(files.DEVICES)) and not self._spoilt()

    def _spoilt(self) -> list[Lease]:
        """The leases whose files are gone, or were changed by somebody else."""
        return [lease for lease in self._leases.values() if not self._is_as_left(files.lease_file(lease.id))]

    def _is_as_left(self, name: str) -> bool:
        left = self._marks.get(name)
        return left is not None and files.mark(self._directory, name) == left

    async def _write(self, known: _Known) -> None:
        """Off the loop: thousands of devices, and NVIDIA's file, take longer than a turn of it may."""

        def work() -> tuple[Host, str]:
            host, trouble = self._host_of(known)
            spec = devices_spec(known.devices, known.domains, host, known.parked)
            with self._writing:
                if spec is None:
                    files.remove(self._directory, files.DEVICES)
                elif not self._is_closed:
                    self._marks[files.DEVICES] = files.write(self._directory, files.DEVICES, spec)
            return host, trouble

        before = self._host
        try:
            host, trouble = await on_thread(work)
            if not self._is_closed:  # what has a lease is begun anew for months, maybe after a new driver
                is_another = host != before
                self._write_leases(self._leases.values() if is_another else self._spoilt(), host)
            self._host, self._written = host, known
        except OSError as error:
            trouble = f"containers find no devices: {self._directory}/{files.DEVICES}: {error.strerror}"
        except Exception as error:  # noqa: BLE001 - it is tried again, and said where people look
            trouble = (
                f"containers find no devices: {self._directory}/{files.DEVICES} cannot be made: {error!r}"
            )
        if self._is_closed:
            return
        if trouble != self._trouble:
            self._tell(trouble)
        self._trouble = trouble

    def _host_of(self, known: _Known) -> tuple[Host, str]:
        """What containers need of the host, and what is wrong with NVIDIA's word on it."""
        theirs: Nvidia | None = None
        trouble = ""
        if known.nvidia:
            path = known.nvidia[0]
            try:
                theirs = nvidia.read(path, known.gpus)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                trouble = f"containers get no driver from us: {path} is passed over: {why}"
        root = self._paths.root
        environment = {} if root == "/" else {ROOT_VARIABLE: root}
        return Host(known.nodes, known.gpu_nodes, self._hook, environment, theirs), trouble

    def _tell(self, trouble: str) -> None:
        """Once for each trouble: in the log, as an event, and among the warnings of `status`."""
        self._supervisor.remark("containers", trouble)
        if trouble:
            means = "all else goes on, and it is tried again"
            log.warning("%s; %s", trouble, means)
        else:
            trouble, means = "containers find the devices again", ""
            log.info("%s", trouble)
        severity = "warning" if means else "info"
        self._supervisor.event_log.record(Event(severity, "daemon", "containers", trouble, "", means))


def _hook_program() -> str:
    """The command line's program beside the daemon's own, where engines can call it."""
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "yunion-mps")
    if os.access(beside, os.X_OK):
        return beside
    try:
        return find_program("yunion-mps", "")
    except HostError:
        return _PROGRAM
