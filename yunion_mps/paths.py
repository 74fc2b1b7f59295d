"""Every path of ours, from one root.

`YUNION_MPS_ROOT` names another root than `/` for tests and for looking into an unpacked host; what is
configured (`/tmp/nvidia-mps/pipe`) then lies under it as well.
"""

from __future__ import annotations

import os

ROOT_VARIABLE = "YUNION_MPS_ROOT"

#: The longest path that fits a Unix socket's address, in bytes (unix(7): sun_path less its final NUL).
LONGEST_SOCKET_PATH = 107


class Paths:
    """The files and directories that the programs use, below `root`."""

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.normpath(root)

    @classmethod
    def from_environment(cls) -> Paths:
        """The paths below the root that the environment names, which is `/` on a real host."""
        return cls(os.environ.get(ROOT_VARIABLE) or "/")

    def under(self, path: str) -> str:
        """Where the absolute `path` lies below the root."""
        return path if self.root == "/" else self.root + path

    @property
    def host_conf(self) -> str:
        """Cloudpods' configuration of the host, which holds our keys too."""
        return self.under("/etc/yunion/host.conf")

    @property
    def machine_id(self) -> str:
        """machine-id(5)."""
        return self.under("/etc/machine-id")

    @property
    def hosts(self) -> str:
        """Names of hosts and their addresses (/etc/hosts)."""
        return self.under("/etc/hosts")

    @property
    def run_directory(self) -> str:
        """Where the socket and the lock lie; emptied by a reboot."""
        return self.under("/run/yunion-mps")

    @property
    def socket(self) -> str:
        """The API's socket."""
        return self.under("/run/yunion-mps/yunion-mps.sock")

    @property
    def lock(self) -> str:
        """Held by the one daemon of a host, and names its PID."""
        return self.under("/run/yunion-mps/daemon.lock")

    @property
    def former_modes(self) -> str:
        """A copy of what the store knows of compute modes; both end with the boot."""
        return self.under("/run/yunion-mps/former-compute-modes.json")

    @property
    def taken_over(self) -> str:
        """Which control daemon of somebody else is ours; ends with the boot, as that does."""
        return self.under("/run/yunion-mps/taken-over.json")

    @property
    def control_daemons(self) -> str:
        """The directory with the PID and start of each control daemon that we have started since the boot."""
        return self.under("/run/yunion-mps/control-daemons")

    @property
    def events_copy(self) -> str:
        """A copy of the newest events since the boot."""
        return self.under("/run/yunion-mps/events.jsonl")

    @property
    def lease_copies(self) -> str:
        """The directory with a copy of each lease."""
        return self.under("/run/yunion-mps/leases")

    @property
    def waiting_places(self) -> str:
        """The directory with since when each of those waits who wait for devices."""
        return self.under("/run/yunion-mps/waiting")

    @property
    def ill_gpus(self) -> str:
        """Which GPUs had a fatal XID since the boot."""
        return self.under("/run/yunion-mps/ill-gpus.json")

    @property
    def gateway(self) -> str:
        """What is to be served over TCP, for the gateway; there where anything is."""
        return self.under("/run/yunion-mps/gateway.json")

    @property
    def cdi_directory(self) -> str:
        """Where container engines look for devices that come and go; /var/run is the same directory."""
        return self.under("/run/cdi")

    @property
    def state_directory(self) -> str:
        """What must survive the daemon."""
        return self.under("/var/lib/yunion-mps")

    @property
    def store(self) -> str:
        """The SQLite file in the state directory."""
        return self.under("/var/lib/yunion-mps/state.db")

    @property
    def served_gpus(self) -> str:
        """Who the GPUs are that have served devices."""
        return self.under("/var/lib/yunion-mps/served-gpus.json")

    @property
    def boot_id(self) -> str:
        """The kernel's identity of this boot; never below another root, for there is one kernel."""
        return "/proc/sys/kernel/random/boot_id"

    @property
    def kernel_log(self) -> str:
        """The kernel's log (dmesg(1))."""
        return self.under("/dev/kmsg")

    @property
    def pci_devices(self) -> str:
        """Sysfs' list of PCI devices."""
        return self.under("/sys/bus/pci/devices")

    @property
    def render_nodes(self) -> str:
        """Udev's names of the render nodes by PCI address."""
        return self.under("/dev/dri/by-path")
