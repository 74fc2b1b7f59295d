"""Publish the CDI files of devices and leases to container engines while the daemon serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from yunion_mps.containers.nodes import DeviceNode, MissingNodes, driver_nodes, gpu_nodes, missing_nodes
from yunion_mps.containers.spec import (
    HostFiles,
    Nvidia,
    devices_spec,
    find_nvidia_spec,
    lease_spec,
    read_nvidia_spec,
)
from yunion_mps.core import reasons
from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_CDI_FILES, IMPAIRED
from yunion_mps.core.errors import HostError
from yunion_mps.core.models import Device, DomainPlan, Gpu, Lease, Snapshot
from yunion_mps.core.paths import ROOT_VARIABLE, Paths
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.host.files import UNFINISHED, FileVersion, version_of, write_atomically
from yunion_mps.host.processes import find_program
from yunion_mps.host.threads import on_thread
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: The file of all devices; a lease's own file has its id in between.
DEVICES_FILE = "yunion-mps.json"
_LEASE = "yunion-mps-lease-"
_END = ".json"
#: How often the files are compared with what was written: a handful of system calls.
_CHECK_INTERVAL_S = 10.0
_PROGRAM = "/usr/bin/yunion-mps"


def lease_file(lease_id: str) -> str:
    """Return the name of the lease's file."""
    return f"{_LEASE}{lease_id}{_END}"


class SpecDirectory:
    """Our files in the directory that engines read, and whether each is unchanged since it was written."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._written: dict[str, FileVersion] = {}

    def write(self, name: str, spec: Mapping[str, object]) -> None:
        """Write a file; raises OSError."""
        text = json.dumps(spec, separators=(",", ":"))
        if not os.path.isdir(self.path):
            os.makedirs(self.path, exist_ok=True)
            os.chmod(self.path, 0o755)  # noqa: S103 - for engines of every user, whatever our umask is
        self._written[name] = write_atomically(os.path.join(self.path, name), text)

    def is_unchanged(self, name: str) -> bool:
        """Return whether the file exists, and no other program has changed it."""
        version = version_of(os.path.join(self.path, name), follow_symlinks=False)
        return version is not None and self._written.get(name) == version

    def remove(self, name: str) -> None:
        """Remove a file; a failure is ignored, because the hook refuses its device."""
        self._written.pop(name, None)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.path, name))

    def names(self) -> list[str]:
        """Return the names of our files, including unfinished ones."""
        try:
            files = os.listdir(self.path)
        except OSError:
            return []
        return [name for name in files if _is_ours(name)]


def _is_ours(name: str) -> bool:
    return name.removesuffix(UNFINISHED) == DEVICES_FILE or name.startswith(_LEASE)


class _Inputs(NamedTuple):
    """Everything that the devices' file depends on."""

    devices: tuple[Device, ...]
    domains: tuple[DomainPlan, ...]
    parked: tuple[DomainPlan, ...]
    gpus: tuple[Gpu, ...]
    nodes: tuple[DeviceNode, ...]
    gpu_nodes: dict[str, tuple[DeviceNode, ...]]
    missing: dict[str, MissingNodes]
    nvidia: tuple[str, FileVersion] | None


class CdiPublisher:
    """Writes the files of the plan's devices and of leases, each only when its content changes."""

    def __init__(self, paths: Paths, supervisor: Supervisor) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._files = SpecDirectory(paths.cdi_directory)
        self._hook = _hook_program()
        self._snapshot: Snapshot | None = None
        self._next_check_s = 0.0
        self._inputs: _Inputs | None = None
        self._host: HostFiles | None = None
        self._leases: dict[str, Lease] = {}
        self._work: asyncio.Task[None] | None = None
        self._is_closed = False
        #: Held while the devices' file is written, so that none is written after `remove`.
        self._writing = threading.Lock()

    def restore(self, leases: Iterable[Lease], kept_leases: Iterable[str] = ()) -> None:
        """Write the files of these leases, and remove all others, except those of `kept_leases` (ids)."""
        published = [lease for lease in leases if lease.cdi]
        spared = {DEVICES_FILE}
        spared.update(lease_file(lease.id) for lease in published)
        spared.update(lease_file(lease_id) for lease_id in kept_leases)
        for name in self._files.names():
            if name not in spared:
                self._files.remove(name)
        for lease in published:
            self.add(lease, warn_only=True)

    def add(self, lease: Lease, *, warn_only: bool) -> None:
        """Write a lease's file at once.

        Raises HostError if that fails; with `warn_only`, only a warning is logged.
        """
        if self._host is None:
            self._host, _ = self._read_host(self._inputs_of(self._supervisor.snapshot()))
        try:
            self._write_leases([lease], self._host)
        except OSError as error:
            path = f"{self._files.path}/{lease_file(lease.id)}"
            message = f"containers cannot find the lease: {path}: {error.strerror}"
            if not warn_only:
                hint = f"make {self._files.path} a directory that root can write to"
                raise HostError(message, hint) from None
            log.warning("%s", message)
        self._leases[lease.id] = lease

    def _write_leases(self, leases: Iterable[Lease], host: HostFiles) -> None:
        planned = {device.id for device in self._supervisor.snapshot().plan.devices}
        for lease in leases:
            self._files.write(lease_file(lease.id), lease_spec(lease, planned, host))

    def forget(self, lease: Lease) -> None:
        """Remove the file of a lease that has ended."""
        self._leases.pop(lease.id, None)
        if lease.cdi:
            self._files.remove(lease_file(lease.id))

    def refresh(self) -> None:
        """Schedule a write of the files if they are outdated; cheap if nothing has changed."""
        snapshot = self._supervisor.snapshot()
        now_s = asyncio.get_running_loop().time()
        if self._is_closed or (snapshot is self._snapshot and now_s < self._next_check_s):
            return
        if self._work and not self._work.done():
            return
        self._snapshot = snapshot
        self._next_check_s = now_s + _CHECK_INTERVAL_S
        inputs = self._inputs_of(snapshot)
        is_written = not inputs.devices or self._files.is_unchanged(DEVICES_FILE)
        if inputs != self._inputs or not is_written or self._leases_to_rewrite():
            self._work = asyncio.ensure_future(self._write(inputs))

    def close(self) -> None:
        """Write nothing any longer."""
        self._is_closed = True

    def remove(self) -> None:
        """Remove all files, because the daemon has stopped."""
        self.close()
        with self._writing:
            for name in self._files.names():
                self._files.remove(name)

    def _inputs_of(self, snapshot: Snapshot) -> _Inputs:
        gpus = snapshot.inventory.gpus
        return _Inputs(
            devices=snapshot.plan.devices,
            domains=tuple(status.plan for status in snapshot.domains),
            parked=snapshot.plan.parked,
            gpus=tuple(Gpu(gpu.pci_address, gpu.uuid, minor=gpu.minor) for gpu in gpus),
            nodes=driver_nodes(self._paths),
            gpu_nodes=gpu_nodes(self._paths, gpus),
            missing=missing_nodes(self._paths, gpus),
            nvidia=find_nvidia_spec(self._paths),
        )

    def _leases_to_rewrite(self) -> list[Lease]:
        is_unchanged = self._files.is_unchanged
        return [lease for lease in self._leases.values() if not is_unchanged(lease_file(lease.id))]

    async def _write(self, inputs: _Inputs) -> None:
        """Write the files on a thread: thousands of devices would block the event loop."""

        def work() -> tuple[HostFiles, Reason]:
            host, failure = self._read_host(inputs)
            spec = devices_spec(inputs.devices, inputs.domains, host, inputs.parked)
            with self._writing:
                if spec is None:
                    self._files.remove(DEVICES_FILE)
                elif not self._is_closed:
                    self._files.write(DEVICES_FILE, spec)
            return host, failure

        before = self._host
        path = f"{self._files.path}/{DEVICES_FILE}"
        try:
            host, failure = await on_thread(work)
            if not self._is_closed:
                # After an update of the driver, containers may be started with leases of before.
                outdated = self._leases_to_rewrite() if host == before else list(self._leases.values())
                self._write_leases(outdated, host)
            self._host = host
            self._inputs = inputs
        except (OSError, HostError) as error:
            why = error.strerror if isinstance(error, OSError) else error.message
            text = f"containers cannot find the devices: {path}: {why}"
            failure = Reason(text, reasons.CDI_DIRECTORY_FAILED)
        except Exception as error:  # noqa: BLE001 - it is retried, and reported to operators
            text = f"containers cannot find the devices: {path} cannot be created: {error!r}"
            failure = Reason(text, reasons.CDI_DIRECTORY_FAILED)
        if self._is_closed:
            return
        if failure:
            self._supervisor.set_condition(Condition(ABOUT_CDI_FILES, "", IMPAIRED, failure))
        else:
            self._supervisor.end_condition(ABOUT_CDI_FILES)

    def _read_host(self, inputs: _Inputs) -> tuple[HostFiles, Reason]:
        """Return what containers need from the host, and the error in NVIDIA's specification, if any."""
        theirs: Nvidia | None = None
        failure = NO_REASON
        if inputs.nvidia:
            path = inputs.nvidia[0]
            try:
                theirs = read_nvidia_spec(path, inputs.gpus)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                text = f"containers do not get the driver from yunion-mps: {path} is ignored: {why}"
                failure = Reason(text, reasons.CDI_DRIVER_FAILED)
        root = self._paths.root
        host = HostFiles(
            nodes=inputs.nodes,
            gpu_nodes=inputs.gpu_nodes,
            missing=inputs.missing,
            hook=self._hook,
            hook_environment={} if root == "/" else {ROOT_VARIABLE: root},
            nvidia=theirs,
        )
        return host, failure


def _hook_program() -> str:
    """Return the path of the command line's program, for engines to call; preferably beside the daemon's."""
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "yunion-mps")
    if os.access(beside, os.X_OK):
        return beside
    try:
        return find_program("yunion-mps", "")
    except HostError:
        return _PROGRAM
