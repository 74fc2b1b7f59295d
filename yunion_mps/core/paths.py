"""All of our paths, from one root.

`YUNION_MPS_ROOT` sets another root than `/`, for tests and to inspect an unpacked host; configured paths
(`/tmp/nvidia-mps/pipe`) are below it, too.
"""

from __future__ import annotations

import os

ROOT_VARIABLE = "YUNION_MPS_ROOT"

#: The longest path in a Unix socket's address, in bytes (unix(7): sun_path without the final NUL).
MAX_SOCKET_PATH = 107


class _PathBelowRoot:
    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, paths: Paths, owner: type[Paths]) -> str:
        return paths.under(self._path)


class Paths:
    """The files and directories that the programs use, below `root`."""

    #: Cloudpods' configuration of the host, with our keys.
    host_conf = _PathBelowRoot("/etc/yunion/host.conf")
    machine_id = _PathBelowRoot("/etc/machine-id")
    hosts = _PathBelowRoot("/etc/hosts")
    #: Directory of the socket and the lock; emptied by a reboot.
    run_directory = _PathBelowRoot("/run/yunion-mps")
    socket = _PathBelowRoot("/run/yunion-mps/yunion-mps.sock")
    #: Held by the host's only daemon, and contains its PID.
    lock = _PathBelowRoot("/run/yunion-mps/daemon.lock")
    #: A copy of the store's original compute modes and time slices; all are only valid until the next boot.
    former_modes = _PathBelowRoot("/run/yunion-mps/former-compute-modes.json")
    #: A copy of what the store says is ours and was there before us, except leases.
    settings_copy = _PathBelowRoot("/run/yunion-mps/records.json")
    #: An adopted control daemon that we did not start.
    adopted = _PathBelowRoot("/run/yunion-mps/adopted.json")
    #: Directory with the PID and start time of each control daemon that we have started since boot.
    control_daemons = _PathBelowRoot("/run/yunion-mps/control-daemons")
    #: A copy of the newest events since boot.
    events_copy = _PathBelowRoot("/run/yunion-mps/events.jsonl")
    #: Directory with a copy of each lease, and the file that says of what the copies were made.
    lease_copies = _PathBelowRoot("/run/yunion-mps/leases")
    lease_revision = _PathBelowRoot("/run/yunion-mps/leases.json")
    #: GPUs with a fatal Xid since boot.
    gpu_faults = _PathBelowRoot("/run/yunion-mps/gpu-faults.json")
    #: The gateway's TCP addresses; exists only if there are any.
    gateway = _PathBelowRoot("/run/yunion-mps/gateway.json")
    #: Container engines' directory for devices that come and go; the same as /var/run/cdi.
    cdi_directory = _PathBelowRoot("/run/cdi")
    #: State that survives the daemon.
    state_directory = _PathBelowRoot("/var/lib/yunion-mps")
    #: The SQLite file in the state directory.
    store = _PathBelowRoot("/var/lib/yunion-mps/state.db")
    #: Lists the directories that the daemon uses, so that a purge of the package can remove them.
    directory_record = _PathBelowRoot("/var/lib/yunion-mps/directories")
    #: The GPUs that have served devices.
    served_gpus = _PathBelowRoot("/var/lib/yunion-mps/served-gpus.json")
    #: The kernel's log (dmesg(1)).
    kernel_log = _PathBelowRoot("/dev/kmsg")
    #: The configuration of the kubelet plugin.
    kubelet_plugin = _PathBelowRoot("/etc/yunion/kubelet-plugin.yml")
    #: The kubelet's directory of the sockets of device plugins, wherever its root directory is.
    device_plugins = _PathBelowRoot("/var/lib/kubelet/device-plugins")
    #: The kubelet's list of the devices of pods.
    pod_resources = _PathBelowRoot("/var/lib/kubelet/pod-resources/kubelet.sock")
    #: The kubelet's directory of the sockets by which plugins register, and ours for the driver's socket.
    plugins_registry = _PathBelowRoot("/var/lib/kubelet/plugins_registry")
    dra_directory = _PathBelowRoot("/var/lib/kubelet/plugins/mps.yunion.io")
    #: A pod's token and the certificate authority of its API server.
    service_account = _PathBelowRoot("/var/run/secrets/kubernetes.io/serviceaccount")
    #: The environment of each Slurm job's tasks, and what has become of its MIG instances.
    slurm_jobs = _PathBelowRoot("/run/yunion-mps/slurm")
    #: The devices by Slurm's index, and the entry that creates their nodes at boot.
    slurm_devices = _PathBelowRoot("/etc/yunion/slurm-devices.json")
    slurm_tmpfiles = _PathBelowRoot("/etc/tmpfiles.d/yunion-mps-slurm.conf")
    #: The driver's files that name the device nodes of MIG instances.
    capabilities = _PathBelowRoot("/proc/driver/nvidia/capabilities")
    pci_devices = _PathBelowRoot("/sys/bus/pci/devices")
    #: Udev's links to render nodes, by PCI address.
    render_nodes = _PathBelowRoot("/dev/dri/by-path")
    #: The kernel's id of this boot; ignores the root, because there is one kernel.
    boot_id = "/proc/sys/kernel/random/boot_id"

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.normpath(root)

    @classmethod
    def from_environment(cls) -> Paths:
        """Return the paths below the environment's root, `/` on a real host."""
        return cls(os.environ.get(ROOT_VARIABLE) or "/")

    def under(self, path: str) -> str:
        """Return the absolute `path` below the root."""
        return path if self.root == "/" else self.root + path
