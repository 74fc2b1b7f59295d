"""The CDI files of devices and leases: kept where container engines look for as long as the daemon serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from yunion_mps import reasons
from yunion_mps.containers import nvidia
from yunion_mps.containers.spec import HostFiles, Node, Nvidia, devices_spec, lease_spec
from yunion_mps.errors import HostError
from yunion_mps.host.files import UNFINISHED, write_atomically
from yunion_mps.host.processes import find_program
from yunion_mps.host.threads import on_thread
from yunion_mps.models import Device, DomainPlan, Event, Gpu, Lease, Snapshot
from yunion_mps.paths import ROOT_VARIABLE, Paths
from yunion_mps.reasons import NO_REASON, Reason
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: The file of all devices; a lease's own file has its id in between.
DEVICES_FILE = "yunion-mps.json"
_LEASE, _END = "yunion-mps-lease-", ".json"
#: How often the files are compared with what was written: a handful of system calls.
_COMPARE_S = 10.0
_PROGRAM = "/usr/bin/yunion-mps"


def lease_file(lease_id: str) -> str:
    """The name of the lease's file."""
    return f"{_LEASE}{lease_id}{_END}"


class SpecDirectory:
    """The directory that engines read: our files in it, and whether each is still as it was written."""

    def __init__(self, path: str) -> None:
        self.path = path
        #: By name: inode, size, and time of the last change in ns.
        self._written: dict[str, tuple[int, int, int]] = {}

    def write(self, name: str, spec: Mapping[str, Any]) -> None:
        """Write the specification, and make a missing directory; raises OSError."""
        text = json.dumps(spec, separators=(",", ":"))
        if not os.path.isdir(self.path):
            os.makedirs(self.path, exist_ok=True)
            os.chmod(self.path, 0o755)  # noqa: S103 - for engines of every user, whatever our umask is
        self._written[name] = _mark(write_atomically(os.path.join(self.path, name), text))

    def is_as_written(self, name: str) -> bool:
        """Whether the file is there, and nothing else has changed it."""
        try:
            found = _mark(os.lstat(os.path.join(self.path, name)))
        except OSError:
            return False
        return self._written.get(name) == found

    def remove(self, name: str) -> None:
        """Remove a file; that this fails does not matter, because the hook refuses its device."""
        self._written.pop(name, None)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.path, name))

    def names(self) -> list[str]:
        """The names of our files, the unfinished ones among them."""
        try:
            found = os.listdir(self.path)
        except OSError:
            return []
        return [
            name for name in found if name.removesuffix(UNFINISHED) == DEVICES_FILE or name.startswith(_LEASE)
        ]


def _mark(about: os.stat_result) -> tuple[int, int, int]:
    return (about.st_ino, about.st_size, about.st_mtime_ns)


class _Inputs(NamedTuple):
    """All that the devices' file is made of."""

    devices: tuple[Device, ...]
    domains: tuple[DomainPlan, ...]
    parked: tuple[DomainPlan, ...]
    gpus: tuple[Gpu, ...]
    nodes: tuple[Node, ...]
    gpu_nodes: dict[str, tuple[Node, ...]]
    nvidia: nvidia.Mark | None


class CdiPublisher:
    """Writes the files of the plan's devices and of leases, each only when its content changes."""

    def __init__(self, paths: Paths, supervisor: Supervisor) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._files = SpecDirectory(paths.cdi_directory)
        self._hook = _hook_program()
        self._snapshot: Snapshot | None = None
        self._compare_s = 0.0
        self._inputs: _Inputs | None = None
        self._host: HostFiles | None = None
        self._leases: dict[str, Lease] = {}
        self._trouble = NO_REASON
        self._work: asyncio.Task[None] | None = None
        self._is_closed = False
        #: Held while the devices' file is written, so that none is written after `remove`.
        self._writing = threading.Lock()

    def restore(self, leases: Iterable[Lease]) -> None:
        """Write the files of these leases, and remove those of all others."""
        wanted = {lease_file(lease.id): lease for lease in leases if lease.cdi}
        for name in self._files.names():
            if name != DEVICES_FILE and name not in wanted:
                self._files.remove(name)
        for lease in wanted.values():
            self.add(lease, or_warn=True)

    def add(self, lease: Lease, *, or_warn: bool) -> None:
        """Write a lease's file at once; if that fails, warn if `or_warn`, else raise HostError."""
        if self._host is None:
            self._host, _ = self._host_of(self._inputs_of(self._supervisor.snapshot()))
        try:
            self._write_leases([lease], self._host)
        except OSError as error:
            path = f"{self._files.path}/{lease_file(lease.id)}"
            what = f"containers cannot find the lease: {path}: {error.strerror}"
            if not or_warn:
                hint = f"make {self._files.path} a directory that root can write to"
                raise HostError(what, hint) from None
            log.warning("%s", what)
        self._leases[lease.id] = lease

    def _write_leases(self, leases: Iterable[Lease], host: HostFiles) -> None:
        planned = {device.id for device in self._supervisor.snapshot().plan.devices}
        for lease in leases:
            self._files.write(lease_file(lease.id), lease_spec(lease, planned, host))

    def forget(self, lease: Lease) -> None:
        """The lease has ended."""
        self._leases.pop(lease.id, None)
        if lease.cdi:
            self._files.remove(lease_file(lease.id))

    def refresh(self) -> None:
        """Have the files written soon if they are not as they should be; costs nothing if nothing changed."""
        snapshot, now_s = self._supervisor.snapshot(), asyncio.get_running_loop().time()
        if self._is_closed or (snapshot is self._snapshot and now_s < self._compare_s):
            return
        if self._work and not self._work.done():
            return
        self._snapshot, self._compare_s = snapshot, now_s + _COMPARE_S
        inputs = self._inputs_of(snapshot)
        is_there = not inputs.devices or self._files.is_as_written(DEVICES_FILE)
        if inputs != self._inputs or not is_there or self._spoilt():
            self._work = asyncio.ensure_future(self._write(inputs))

    def close(self) -> None:
        """Change nothing any more: the next program goes on with the files."""
        self._is_closed = True

    def remove(self) -> None:
        """The daemon has stopped: no container finds a device of ours."""
        self.close()
        with self._writing:
            for name in self._files.names():
                self._files.remove(name)

    def _inputs_of(self, snapshot: Snapshot) -> _Inputs:
        gpus = snapshot.inventory.gpus
        return _Inputs(
            snapshot.plan.devices,
            tuple(status.plan for status in snapshot.domains),
            snapshot.plan.parked,
            tuple(Gpu(gpu.pci_address, gpu.uuid, minor=gpu.minor) for gpu in gpus),
            nvidia.driver_nodes(self._paths),
            nvidia.gpu_nodes(self._paths, gpus),
            nvidia.find(self._paths),
        )

    def _spoilt(self) -> list[Lease]:
        """The leases whose files are gone, or were changed by another program."""
        return [
            lease for lease in self._leases.values() if not self._files.is_as_written(lease_file(lease.id))
        ]

    async def _write(self, inputs: _Inputs) -> None:
        """Off the loop: thousands of devices, and NVIDIA's file, take longer than a turn of it may."""

        def work() -> tuple[HostFiles, Reason]:
            host, trouble = self._host_of(inputs)
            spec = devices_spec(inputs.devices, inputs.domains, host, inputs.parked)
            with self._writing:
                if spec is None:
                    self._files.remove(DEVICES_FILE)
                elif not self._is_closed:
                    self._files.write(DEVICES_FILE, spec)
            return host, trouble

        before, path = self._host, f"{self._files.path}/{DEVICES_FILE}"
        try:
            host, trouble = await on_thread(work)
            if not self._is_closed:  # a lease's containers are started for months, maybe after a new driver
                self._write_leases(self._leases.values() if host != before else self._spoilt(), host)
            self._host, self._inputs = host, inputs
        except (OSError, HostError) as error:
            why = error.strerror if isinstance(error, OSError) else error.message
            trouble = Reason(f"containers find no devices: {path}: {why}", reasons.CDI_DIRECTORY_FAILED)
        except Exception as error:  # noqa: BLE001 - it is tried again, and reported where operators look
            what = f"containers find no devices: {path} cannot be created: {error!r}"
            trouble = Reason(what, reasons.CDI_DIRECTORY_FAILED)
        if self._is_closed:
            return
        if trouble != self._trouble:
            self._report(trouble)
        self._trouble = trouble

    def _host_of(self, inputs: _Inputs) -> tuple[HostFiles, Reason]:
        """What containers need of the host, and what is wrong with NVIDIA's specification of it."""
        theirs: Nvidia | None = None
        trouble = NO_REASON
        if inputs.nvidia:
            path = inputs.nvidia[0]
            try:
                theirs = nvidia.read(path, inputs.gpus)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                what = f"containers do not get the driver from yunion-mps: {path} is ignored: {why}"
                trouble = Reason(what, reasons.CDI_DRIVER_FAILED)
        root = self._paths.root
        environment = {} if root == "/" else {ROOT_VARIABLE: root}
        return HostFiles(inputs.nodes, inputs.gpu_nodes, self._hook, environment, theirs), trouble

    def _report(self, trouble: Reason) -> None:
        """Once for each trouble: in the log, as an event, and among the warnings of `status`."""
        self._supervisor.set_warning("containers", trouble)
        event = Event("info", "daemon", "containers", "containers find the devices again")
        if trouble:
            means = "everything else continues, and the write is retried"
            event = Event("warning", "daemon", "containers", trouble, "", means, trouble.code)
            log.warning("%s; %s", trouble, means)
        else:
            log.info("%s", event.what)
        self._supervisor.event_log.record(event)


def _hook_program() -> str:
    """The command line's program beside the daemon's own, where engines can call it."""
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "yunion-mps")
    if os.access(beside, os.X_OK):
        return beside
    try:
        return find_program("yunion-mps", "")
    except HostError:
        return _PROGRAM
