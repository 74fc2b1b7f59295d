"""Every path of ours, from one root.

`YUNION_MPS_ROOT` names another root than `/` for tests and for looking into an unpacked host; what is
configured (`/tmp/nvidia-mps/pipe`) then lies under it as well.
"""

from __future__ import annotations

import os

ROOT_VARIABLE = "YUNION_MPS_ROOT"

#: The longest path that fits a Unix socket's address, in bytes (unix(7): sun_path less its final NUL).
MAX_SOCKET_PATH = 107


class _PathBelowRoot:
    """A path below the root of its `Paths`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, paths: Paths, owner: type[Paths]) -> str:
        return paths.under(self._path)


class Paths:
    """The files and directories that the programs use, below `root`."""

    #: Cloudpods' configuration of the host, which holds our keys too.
    host_conf = _PathBelowRoot("/etc/yunion/host.conf")
    #: machine-id(5).
    machine_id = _PathBelowRoot("/etc/machine-id")
    #: Names of hosts and their addresses.
    hosts = _PathBelowRoot("/etc/hosts")
    #: Where the socket and the lock lie; emptied by a reboot.
    run_directory = _PathBelowRoot("/run/yunion-mps")
    #: The API's socket.
    socket = _PathBelowRoot("/run/yunion-mps/yunion-mps.sock")
    #: Held by the one daemon of a host, and names its PID.
    lock = _PathBelowRoot("/run/yunion-mps/daemon.lock")
    #: A copy of what the store knows of compute modes; both end with the boot.
    former_modes = _PathBelowRoot("/run/yunion-mps/former-compute-modes.json")
    #: Which control daemon was adopted that we did not start.
    adopted = _PathBelowRoot("/run/yunion-mps/adopted.json")
    #: The directory with the PID and start of each control daemon that we have started since the boot.
    control_daemons = _PathBelowRoot("/run/yunion-mps/control-daemons")
    #: A copy of the newest events since the boot.
    events_copy = _PathBelowRoot("/run/yunion-mps/events.jsonl")
    #: The directory with a copy of each lease.
    lease_copies = _PathBelowRoot("/run/yunion-mps/leases")
    #: The GPUs that had a fatal XID since the boot.
    gpu_faults = _PathBelowRoot("/run/yunion-mps/gpu-faults.json")
    #: What the gateway is to serve over TCP; it exists only if anything is.
    gateway = _PathBelowRoot("/run/yunion-mps/gateway.json")
    #: Where container engines look for devices that come and go; /var/run is the same directory.
    cdi_directory = _PathBelowRoot("/run/cdi")
    #: What must survive the daemon.
    state_directory = _PathBelowRoot("/var/lib/yunion-mps")
    #: The SQLite file in the state directory.
    store = _PathBelowRoot("/var/lib/yunion-mps/state.db")
    #: The GPUs that have served devices.
    served_gpus = _PathBelowRoot("/var/lib/yunion-mps/served-gpus.json")
    #: The kernel's log (dmesg(1)).
    kernel_log = _PathBelowRoot("/dev/kmsg")
    #: Sysfs' list of PCI devices.
    pci_devices = _PathBelowRoot("/sys/bus/pci/devices")
    #: Udev's names of the render nodes by PCI address.
    render_nodes = _PathBelowRoot("/dev/dri/by-path")
    #: The kernel's id of this boot; never below another root, because there is one kernel.
    boot_id = "/proc/sys/kernel/random/boot_id"

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.normpath(root)

    @classmethod
    def from_environment(cls) -> Paths:
        """The paths below the root that the environment names, which is `/` on a real host."""
        return cls(os.environ.get(ROOT_VARIABLE) or "/")

    def under(self, path: str) -> str:
        """Where the absolute `path` lies below the root."""
        return path if self.root == "/" else self.root + path
