"""Reason codes: stable names for what can be wrong, each with its meaning and what the operator should do.

Every reason, warning, finding and error carries one, as does every event above severity info, so that no
program has to parse messages. Codes are never renamed or reused. docs/reason-codes.md is generated from this
table.
"""

from __future__ import annotations

from typing import NamedTuple

from yunion_mps.core.addresses import full_address


class ReasonCode(NamedTuple):
    meaning: str
    hint: str


class Reason(str):
    """The text of a reason, and its `code` for programs; empty if nothing is wrong."""

    __slots__ = ("code",)
    code: str

    def __new__(cls, text: str, code: str) -> Reason:  # noqa: PYI034 - there is no Self before 3.11
        reason = super().__new__(cls, text)
        reason.code = code
        return reason


NO_REASON = Reason("", "")

_EVENTS = "see what happened: yunion-mps events --since 1h"
_DOCTOR = "run the diagnostics: yunion-mps doctor"
_CLIENTS = "list the jobs: yunion-mps who --clients"
_REPAIRED = f"repair or reset the GPU, then: yunion-mps reload; {_DOCTOR}"
_RETRIED = f"wait for the automatic restart, or retry at once: yunion-mps reload; {_EVENTS}"
_END_JOB = "ask its owner, or terminate it: yunion-mps terminate {pid}"

CODES: dict[str, ReasonCode] = {}


def _code(name: str, meaning: str, hint: str) -> str:
    CODES[name] = ReasonCode(meaning, hint)
    return name


def hint_of(
    code: str, *, gpu: str = "GPU", pid: int | None = None, lease: str = "", log_directory: str = ""
) -> str:
    """Return what the operator should do; a general hint for an unknown code, as from a newer daemon.

    gpu: an address or UUID. For a MIG instance, the hint names its GPU, because nvidia-smi needs that.
    pid: the process that the reason is about; None for a placeholder
    lease: without one, advice to release it is left out if there is other advice
    log_directory: that of the domain
    """
    if code not in CODES:
        return _DOCTOR
    hint = CODES[code].hint
    if not lease:
        others = "; ".join(part for part in hint.split("; ") if "{lease}" not in part)
        if others:
            hint = others
    gpu = gpu.partition("-g")[0]
    server_log = f"{log_directory}/server.log" if log_directory else "server.log in cuda_mps_log_directory"
    hint = hint.replace("{server_log}", server_log)
    hint = hint.replace("{gpu}", full_address(gpu)).replace("{lease}", lease or "LEASE")
    return hint.replace("{pid}", str(pid or "PID"))


def hint_within_doctor(hint: str) -> str:
    """Return a hint as the diagnostics show it: without the advice to run them."""
    return "; ".join(part for part in hint.split("; ") if part != _DOCTOR) or _EVENTS


# fmt: off
# -- GPUs

GPU_LOST = _code("gpu_lost", "The GPU has fallen off the bus.", _REPAIRED)
GPU_GONE = _code("gpu_gone", "A GPU that served devices is no longer on the PCI bus.",
    "see whether the host finds it: lspci -nn | grep 10de; if it was removed for good, remove its entry, "
    "then: yunion-mps reload; or, if it has none, wait for the next boot, which gives it up")
GPU_FAULT = _code("gpu_fault", "The driver reported a fatal GPU error (Xid).",
    "reset it (nvidia-smi --gpu-reset -i {gpu}) or reboot, then: yunion-mps reload")
GPU_OTHER_DRIVER = _code("gpu_other_driver",
    "The GPU is bound to another kernel driver, such as vfio-pci, or to none.",
    "bind it to the NVIDIA driver again, and it is used; or remove its entry, then: yunion-mps reload")
#: Codes of GPUs that no driver call can reach now; what was to be done to them waits until they are back.
GPU_ABSENT = frozenset({GPU_LOST, GPU_GONE, GPU_OTHER_DRIVER})
GPU_MISSING = _code("gpu_missing", "This host does not have the GPU that an entry names.",
    "see which GPUs there are: yunion-mps gpus; then correct or remove the entry, and: yunion-mps reload")
GPU_REPLACED = _code("gpu_replaced", "Another card is in the place of the GPU that an entry means.",
    "if the entry means the new card: yunion-mps reload; otherwise correct or remove the entry, and reload")
RECORD_DAMAGED = _code("record_damaged",
    "The record of which GPU each entry means cannot be read or written, so render nodes are not trusted.",
    "if the entry means the GPU to which it leads now: yunion-mps reload; otherwise write the UUID of the "
    "GPU as path, then: yunion-mps reload")
RECORD_HIDDEN = _code("record_hidden",
    "Only root can read the record of which GPU each entry means.", "run this command as root")
PATH_OUTDATED = _code("path_outdated", "The path of an entry leads to another GPU than the entry means.",
    "find the UUID of the GPU: yunion-mps gpus -o json; write it as path; then: yunion-mps reload")
RENDER_NODE_MISSING = _code("render_node_missing",
    "The host's GPUs have no render nodes: nvidia-drm is not loaded, or udev has made no links.",
    "modprobe nvidia-drm; udevadm trigger; or write the PCI address or UUID of the GPU as path")
ENTRY_REFUSED = _code("entry_refused", "An entry divides its GPU in a way that the GPU does not allow.",
    "correct the entry, then verify it: yunion-mps config check; then: yunion-mps reload")
GPU_ERROR = _code("gpu_error", "The driver cannot use the GPU, or reports no information about it.",
    _REPAIRED)
#: Codes of GPUs that serve nothing until the operator has repaired something: those that are not there, that
#: another card has replaced, or that are broken.
GPU_NEEDS = frozenset({
    GPU_GONE, GPU_OTHER_DRIVER, GPU_MISSING, GPU_REPLACED, RENDER_NODE_MISSING, RECORD_DAMAGED,
    GPU_LOST, GPU_FAULT, GPU_ERROR,
})
XID = _code("xid", "The driver reported a non-fatal GPU error (Xid).", "check its jobs: yunion-mps who")
MIG_ENABLED = _code("mig_enabled", "The GPU is in MIG mode, so MPS cannot serve it as a whole.",
    "disable MIG mode: nvidia-smi -i {gpu} -mig 0; then: yunion-mps reload; or write mig in its entry")
MIG_PENDING = _code("mig_pending", "The MIG layout of the configuration is not in effect yet.",
    "wait a moment; if that does not help: journalctl -u yunion-mps-daemon")
MIG_IN_USE = _code("mig_in_use",
    "Leases, MPS servers or other processes use the GPU, or instances that the MIG layout removes.",
    "wait for them to end: yunion-mps who; admit no new jobs meanwhile: yunion-mps reload --drain; "
    "or do not wait for leases: yunion-mps reload --now; end a process: yunion-mps terminate PID")
MIG_FOREIGN_INSTANCE = _code("mig_foreign_instance",
    "A MIG instance that another program created or divided is in the way of the layout.",
    "replace it if nothing uses it: yunion-mps reload --now; or write a layout that includes it; "
    "list all instances: nvidia-smi mig -i {gpu} -lgi")
MIG_RESET_REQUIRED = _code("mig_reset_required", "The GPU must be reset before its MIG mode can change.",
    "reboot; or: systemctl stop yunion-mps-daemon; nvidia-smi --gpu-reset -i {gpu}; "
    "systemctl start yunion-mps-daemon")
MIG_NO_PERMISSION = _code("mig_no_permission",
    "The daemon may not change the MIG mode or instances of the GPU.",
    "run it as root; in a container, give it all of the host's devices; "
    "see: systemctl status yunion-mps-daemon")
MIG_NOT_SUPPORTED = _code("mig_not_supported",
    "The driver does not support MIG here, for example in a virtual machine with a vGPU.",
    "remove mig from the entry, then: yunion-mps reload")
MIG_INSUFFICIENT_RESOURCES = _code("mig_insufficient_resources",
    "The GPU has no room for an instance of the layout.",
    "see what is there: nvidia-smi mig -i {gpu} -lgi; replace what nothing uses: yunion-mps reload --now")
MIG_REFUSED = _code("mig_refused", "The driver refused to change the MIG mode or its instances.",
    "see: nvidia-smi mig -i {gpu} -lgi; dmesg | grep -i nvidia; the daemon retries automatically")
MIG_RECORD_DAMAGED = _code("mig_record_damaged",
    "The record of which MIG instances the daemon created, and of what the GPU had before, cannot be read.",
    "discard the records of all GPUs, which ends jobs, and after which all instances count as another "
    "program's: systemctl stop yunion-mps-daemon; mv /var/lib/yunion-mps/state.db "
    "/run/yunion-mps/records.json /root/; systemctl start yunion-mps-daemon; yunion-mps reload --now")
#: Codes of layouts that wait for what ends by itself, such as leases and jobs, or for the operator.
LAYOUT_WAITS = frozenset({MIG_PENDING, MIG_IN_USE})
LAYOUT_NEEDS = frozenset({
    MIG_FOREIGN_INSTANCE, MIG_RESET_REQUIRED, MIG_REFUSED, MIG_NO_PERMISSION, MIG_NOT_SUPPORTED,
    MIG_INSUFFICIENT_RESOURCES, MIG_RECORD_DAMAGED,
})
MIG_CHANGED = _code("mig_changed", "Another program changed the MIG mode or the instances of a GPU.",
    f"find what else manages MIG, such as nvidia-mig-manager, and stop it; {_EVENTS}")
MIG_INSTANCE_GONE = _code("mig_instance_gone", "The MIG instance of the devices no longer exists.",
    "if the MIG layout includes it, wait until it is created again: yunion-mps gpus; "
    "or release its lease: yunion-mps lease release {lease}")
MPS_UNSUPPORTED = _code("mps_unsupported", "The GPU is too old for MPS.",
    "remove it from the device file, then: yunion-mps reload")
MEMORY_UNKNOWN = _code("memory_unknown",
    "The driver does not report the memory of the GPU, which shares the host's, so MPS cannot limit it.",
    "write memory: 96GiB in its entry in host_container_device.yml, or use type: NVIDIA_GPU_SHARE there; "
    "if it has no entry, write one; then: yunion-mps reload")
TIME_SLICE_CHANGED = _code("time_slice_changed", "Another program changed the time slice of a GPU.",
    f"find what else sets it, and stop it; {_EVENTS}")
BUDGET_NOT_ENFORCED = _code("budget_not_enforced",
    "Nothing enforces budgets on the GPU, because it is time-sliced or older than Volta.",
    "run only jobs that stay within their budgets; find those that do not: yunion-mps who")

VGPU = _code("vgpu", "The GPU is a vGPU, or hosts vGPUs for virtual machines.",
    "test it: yunion-mps doctor --selftest; if it fails, pass through a whole GPU")
CLIENT_LIMIT = _code("client_limit", "The GPU has almost reached the MPS client limit.",
    "list the clients: yunion-mps who --clients")
DEVICE_NODES = _code("device_nodes",
    "A device node of the GPU is missing, or users are not permitted to open it.",
    "create the nodes: nvidia-modprobe -u -c=0; check their modes: ls -l /dev/nvidia*")

# -- compute modes

COMPUTE_MODE_PROHIBITED = _code("compute_mode_prohibited",
    "The GPU's compute mode is Prohibited, and cuda_mps_compute_mode is keep.",
    "change it: nvidia-smi -i {gpu} -c DEFAULT; then: yunion-mps reload")
COMPUTE_MODE_EXCLUSIVE = _code("compute_mode_exclusive",
    "The GPU's compute mode is not Default, which time-slicing and MIG require.",
    "set it: yunion-mps reload; if cuda_mps_compute_mode is keep: nvidia-smi -i {gpu} -c DEFAULT, and reload")
COMPUTE_MODE_FIXED = _code("compute_mode_fixed",
    "The GPU cannot be used in its compute mode, which the driver does not support changing.",
    "change the mode where that is possible, such as on the host of the virtual machine, and it is used; "
    "or remove its entry, then: yunion-mps reload")
#: Codes of GPUs that do not serve as configured until the operator changes their modes.
MODE_NEEDS = frozenset({MIG_ENABLED, COMPUTE_MODE_PROHIBITED, COMPUTE_MODE_EXCLUSIVE, COMPUTE_MODE_FIXED})
TIME_SLICE_REFUSED = _code("time_slice_refused",
    "The GPU's time slice cannot be set, so its devices have the one that it had before.",
    "if it lasts, see why: nvidia-smi compute-policy -i {gpu} --list; or remove time_slice from the entry of "
    "the GPU, then: yunion-mps reload")
COMPUTE_MODE_REFUSED = _code("compute_mode_refused", "The GPU's compute mode cannot be set.",
    "the GPU is used as soon as its mode is set; if it lasts, set it: nvidia-smi -i {gpu} -c "
    "EXCLUSIVE_PROCESS, or DEFAULT for a GPU without MPS or in MIG mode; or set cuda_mps_compute_mode: keep, "
    "then: yunion-mps reload")
SETTING_NOT_RESTORED = _code("setting_not_restored",
    "The driver refuses to restore what a setting of a GPU, such as its compute mode, was before the "
    "daemon's first change.",
    "if it lasts, restore it with nvidia-smi, which the daemon notices")
#: Codes of settings that the driver refuses, so that the daemon tries them again.
SETTING_REFUSED = frozenset({TIME_SLICE_REFUSED, COMPUTE_MODE_REFUSED, SETTING_NOT_RESTORED})
COMPUTE_MODE_UNSUPPORTED = _code("compute_mode_unsupported",
    "The driver does not support changing the GPU's compute mode, as on a vGPU; the GPU serves in the mode "
    "that it has.",
    "to accept that, write cuda_mps_compute_mode: keep in the entry of the GPU, then: yunion-mps reload")
COMPUTE_MODE_CHANGED = _code("compute_mode_changed",
    "The GPU's compute mode differs from the configured one.",
    "set it again: yunion-mps reload; or leave it unmanaged: cuda_mps_compute_mode: keep")

# -- the driver

DRIVER_MISSING = _code("driver_missing", "The NVIDIA driver's library is not installed.",
    "install the NVIDIA driver with its libraries, then check it: nvidia-smi")
DRIVER_NOT_LOADED = _code("driver_not_loaded", "The NVIDIA driver's kernel module is not loaded.",
    "load it: modprobe nvidia; if that fails, see: dmesg | grep -i nvidia")
DRIVER_MISMATCH = _code("driver_mismatch",
    "The versions of the driver's library and its kernel module differ.",
    "reboot, or reload the kernel module: the driver was updated while the old module was in use")
DRIVER_HUNG = _code("driver_hung", "A call to the NVIDIA driver does not return.",
    "see: dmesg | grep -iE 'nvrm|xid'; reboot if the driver stays hung")
DRIVER_ERROR = _code("driver_error", "The NVIDIA driver refused a call.",
    "see: dmesg | grep -i nvidia; try: nvidia-smi")

# -- control daemons, MPS servers and their limits

DOMAIN_STOPPED = _code("domain_stopped", "The control daemon is not running.",
    "wait for it to start, or start it: yunion-mps reload")
DOMAIN_STARTING = _code("domain_starting", "The control daemon is starting and does not answer yet.",
    f"wait a moment; {_EVENTS}")
DOMAIN_APPLYING = _code("domain_applying", "The limits are being set and read back.",
    f"wait a moment; {_EVENTS}")
DOMAIN_STOPPING = _code("domain_stopping", "The control daemon is waiting for its jobs to end.",
    f"{_CLIENTS}; end one: yunion-mps terminate {{pid}}")
DOMAIN_NOT_READY = _code("domain_not_ready",
    "The domain that serves the GPU is not ready; see the reason of the domain.",
    _EVENTS)
NO_DOMAIN = _code("no_domain", "No control daemon serves the GPU.", "start one: yunion-mps reload")
GPU_NOT_SERVED = _code("gpu_not_served",
    "The running control daemon does not serve the GPU; it is replaced once its jobs have ended.",
    f"wait for its jobs to end; {_CLIENTS}")
PROGRAM_MISSING = _code("program_missing", "A required program is not installed.",
    "install it; for MPS: nvidia-cuda-mps-control")
CONTROL_DAEMON_EXITED = _code("control_daemon_exited", "The control daemon exited unexpectedly.", _RETRIED)
CONTROL_DAEMON_SILENT = _code("control_daemon_silent",
    "The control daemon is running but does not answer, or cannot be reached.",
    f"wait for its jobs to end; it then restarts automatically; {_CLIENTS}")
CONTROL_DAEMON_BUSY = _code("control_daemon_busy",
    "Other processes are connected to the control daemon and keep it from answering.",
    "end the processes that the reason names, or let only one group connect: set cuda_mps_pipe_group")
CONTROL_DAEMON_ERROR = _code("control_daemon_error", "The control daemon gave an unexpected answer.",
    _RETRIED)
CONTROL_DAEMON_LEFT = _code("control_daemon_left",
    "A control daemon from an earlier run is still running and was not adopted.",
    _DOCTOR)
OTHER_CONTROL_DAEMON = _code("other_control_daemon",
    "A control daemon of another program is running; its clients get none of the configured limits.",
    "stop it once its jobs have ended: echo quit | CUDA_MPS_PIPE_DIRECTORY=DIRECTORY nvidia-cuda-mps-control")
ADOPTION_REFUSED = _code("adoption_refused", "A running control daemon cannot be adopted.",
    "stop it once its jobs have ended, or change the configuration to match it")
SERVERS_ORPHANED = _code("servers_orphaned",
    "MPS servers are still running, but their control daemon is gone.",
    f"wait for their jobs to end; {_CLIENTS}")
SERVER_FAILED = _code("server_failed", "An MPS server failed, and its jobs with it.",
    "wait for its jobs to end; it then accepts new ones; list them: yunion-mps who --clients")
SERVER_BUSY = _code("server_busy",
    "An MPS server accepts no commands, because another user's job waits for it to end, or because it was "
    "told to end after its jobs.",
    "wait until its jobs have ended; or end only this job, which may end the other jobs of its server: "
    "yunion-mps terminate --force {pid}")
SERVER_START_FAILED = _code("server_start_failed", "MPS servers fail to start.",
    "see the end of {server_log}, and: dmesg | grep -iE 'nvrm|xid'; yunion-mps doctor; starts are tried "
    "again automatically")
#: Codes of devices whose reason is that of their domain, which is told for the domain once.
OF_DOMAINS = frozenset({DOMAIN_NOT_READY, SERVER_START_FAILED})
PROCESSES_UNKNOWN = _code("processes_unknown",
    "The processes of a lease or device are not all known, so none was terminated and nothing released.",
    "try again once the MPS server answers; or terminate what is known, at the risk of that server's other "
    "jobs: yunion-mps terminate TARGET --force; or release the lease, and leave its processes alone: "
    "yunion-mps lease release {lease}")
LIMITS_NOT_IN_EFFECT = _code("limits_not_in_effect", "A limit was set, but a different value was read back.",
    _RETRIED)
LIMITS_OVERWRITTEN = _code("limits_overwritten",
    "Another program changed the control daemon's limits; the daemon has restored them.",
    "find that program and stop it")
LIMITS_PENDING = _code("limits_pending",
    "New limits take effect once the MPS servers with the old ones have ended.",
    "list their jobs: yunion-mps who --clients; drain the servers: yunion-mps reload --drain")
SETTING_PENDING = _code("setting_pending",
    "A setting of a GPU, such as its time slice, is changed or restored once leases or MPS servers have "
    "ended.",
    "wait for the leases, MPS servers and processes that it names to end")
SETTING_IN_USE = _code("setting_in_use",
    "A setting of a GPU, such as its time slice, is changed or restored once processes without lease and MPS "
    "have ended.",
    "wait for the processes that it names to end, or end them")
#: Why a setting waits: for what a drain waits for, and for what may never end by itself.
SETTING_WAITS = frozenset({SETTING_PENDING, SETTING_IN_USE})

#: Why devices cannot be leased yet after a change: a control daemon starts or ends, or a mode is being set.
SETTLING = frozenset({
    DOMAIN_STOPPED, DOMAIN_STARTING, DOMAIN_APPLYING, DOMAIN_STOPPING, NO_DOMAIN, GPU_NOT_SERVED,
    CONTROL_DAEMON_BUSY, COMPUTE_MODE_CHANGED,
})

# -- devices, leases and jobs

LEASES_PENDING = _code("leases_pending",
    "A device is added or removed once the leases of the previous division have ended.",
    "wait for the leases and MPS servers to end; see who holds and uses the devices: yunion-mps who")
LEASE_OUTDATED = _code("lease_outdated",
    "The control daemon of a lease is gone, so processes started with the lease have no limits; or its GPU "
    "is now in MIG mode, so they cannot use it.",
    "release it and run the job with a new lease: yunion-mps lease release {lease}")
LEASE_UNREADABLE = _code("lease_unreadable",
    "A lease in the state file cannot be read, because a newer version wrote it or it is damaged; its "
    "devices, or all devices if these are unknown, are not leased until its process ends or it is released.",
    "as root, once its job has ended: yunion-mps lease release {lease}; or install the newer yunion-mps that "
    "wrote it")
CLIENT_WAITING = _code("client_waiting",
    "A process is waiting for an MPS server because another user's server is running.",
    "wait for the other user's jobs; list them: yunion-mps who --clients; "
    "how users can share this host: yunion-mps config check")
OTHER_USER = _code("other_user",
    "The control daemon serves another user now, and MPS serves one user at a time.",
    "see whose jobs run: yunion-mps who; how users can share this host: yunion-mps config check")
CLIENT_TERMINATED = _code("client_terminated", "A job was terminated by its owner or by root.", _EVENTS)
CLIENT_KILLED = _code("client_killed",
    "A job was killed because it did not end in time when the daemon stopped.",
    _EVENTS)
PROCESS_OUTSIDE_MPS = _code("process_outside_mps",
    "A process uses the GPU outside MPS, so no budget limits it.",
    _END_JOB)
PROCESS_WITHOUT_LEASE = _code("process_without_lease",
    "A process uses a time-sliced GPU or a MIG instance without a lease, so no budget covers its memory.",
    f"{_END_JOB}; start jobs with: yunion-mps run COMMAND")
#: Why devices may be unavailable only for a while: until their control daemon has started or has been
#: replaced, or until a process that uses them has ended.
TEMPORARY = frozenset({DOMAIN_NOT_READY, GPU_NOT_SERVED, PROCESS_WITHOUT_LEASE})
OVER_BUDGET = _code("over_budget", "A device's processes use more memory than its budget.", _END_JOB)
OVER_BUDGET_TERMINATED = _code("over_budget_terminated",
    "A job's newest process was terminated because the job's processes together exceeded its budget.",
    "request more memory, or use fewer processes; or leave such jobs alone: over_budget: report")
PROCESS_MEMORY_UNKNOWN = _code("process_memory_unknown",
    "The memory of processes on a GPU is unknown, so over_budget: terminate has no effect there.",
    "update the driver; run the daemon on the host, not in a container with PIDs of its own")
ENVIRONMENT = _code("environment",
    "An environment variable makes a process bypass MPS, or use limits other than its device's.",
    "let yunion-mps set the environment: yunion-mps run COMMAND, or yunion-mps env DEVICE")
SELFTEST_FAILED = _code("selftest_failed", "A small CUDA program did not run within a device's limits.",
    _DOCTOR)
NOTHING_FREE = _code("nothing_free", "No suitable device is free now.",
    "see who holds the devices: yunion-mps who; or wait for one")
#: Why a request is refused or queued although it is feasible: it is granted once the cause has passed.
NOT_FREE = frozenset({NOTHING_FREE, OTHER_USER, SERVER_START_FAILED})
NOT_CONFIRMED = _code("not_confirmed",
    "Jobs, leases or MIG instances would be lost that were not listed when the loss was confirmed.",
    "list what would be lost now, and confirm that: yunion-mps reload --now")
RESERVED = _code("reserved", "The devices are reserved by `reserved_for` in host_container_device.yml.",
    "use other devices, or remove reserved_for from the entry of their GPU")
SLURM_DEVICES_CHANGED = _code("slurm_devices_changed",
    "The host's devices have changed since Slurm's gres.conf was written, or slurm.conf lists other types.",
    "copy the lines of yunion-mps slurm gres-conf --install; then restart slurmctld and slurmd")
SLURM_DEVICE_HELD = _code("slurm_device_held",
    "A device that Slurm assigns to jobs is leased outside Slurm.",
    "see who holds it: yunion-mps who; set reserved_for: slurm in host_container_device.yml")
INFEASIBLE = _code("infeasible", "The request could not be satisfied even if every device were free.",
    "list the host's devices: yunion-mps list")

# -- the host and the daemon

DISABLED = _code("disabled", "MPS is disabled: enable_cuda_mps is false.",
    "set enable_cuda_mps: true in host.conf or host_local.conf, then: yunion-mps reload")
NO_USABLE_GPU = _code("no_usable_gpu", "No GPU on this host can serve devices.",
    "see the problem of each GPU and entry: yunion-mps doctor; then: yunion-mps reload")
RELOAD_NEEDED = _code("reload_needed",
    "The configuration files have changed since the daemon read them.",
    "see what would change: yunion-mps plan; then: yunion-mps reload")
INVALID_CONFIGURATION = _code("invalid_configuration", "A configuration file has an error.",
    "correct it, then verify it: yunion-mps config check")
CONFIGURATION_IGNORED = _code("configuration_ignored",
    "A minor setting has an error, so the daemon ignores it.",
    "correct that line, then: yunion-mps reload")
MULTIUSER_UNSUPPORTED = _code("multiuser_unsupported",
    "NVIDIA's control program or a GPU does not support cuda_mps_multiuser.",
    "set cuda_mps_multiuser: false; how users can share this host: yunion-mps config check")
METRICS_FILE_FAILED = _code("metrics_file_failed", "The metrics text file cannot be written.",
    "make its directory writable for root, or set another path; the daemon retries automatically")
CDI_DIRECTORY_FAILED = _code("cdi_directory_failed",
    "The CDI files through which containers find devices cannot be written.",
    "make the directory writable for root; the daemon retries automatically")
CDI_DRIVER_FAILED = _code("cdi_driver_failed",
    "NVIDIA's CDI file, from which containers get the driver, cannot be used.",
    "generate it again: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
EVENTS_NOT_WRITTEN = _code("events_not_written",
    "Events cannot be written to the state file and are kept in a temporary copy.",
    "free disk space for the state file: df -h /var/lib/yunion-mps")
STATE_FILE_DAMAGED = _code("state_file_damaged",
    "The state file was lost, damaged or replaced; the message says what was rebuilt and what is lost.",
    "check the disk: dmesg | grep -iE 'i/o error|ext4|xfs'; exclude /var/lib/yunion-mps when you restore a "
    "backup; see: yunion-mps events --kind daemon")
VERSION_DIFFERS = _code("version_differs", "The running daemon's version differs from the installed one.",
    "switch to the installed version without ending jobs: yunion-mps daemon-reexec")
PIPE_DIRECTORY = _code("pipe_directory",
    "The pipe or log directory, or a directory above it, is unsafe or not accessible to clients.",
    "run the command that yunion-mps status names; see its path: namei -l DIRECTORY")
DIRECTORY_TAKEN = _code("directory_taken",
    "The pipe or log directory was not safe because of other users, so the daemon uses one in /run.",
    "run the command that the message names, then: yunion-mps reload, which moves a control daemon without "
    "leases and jobs back; or choose another one in host.conf")
SOCKETS_REMOVED = _code("sockets_removed",
    "A cleanup program such as systemd-tmpfiles removes the MPS sockets at a certain age.",
    "exclude the directory from the cleanup, for example in tmpfiles.d(5)")
DISK_FULL = _code("disk_full", "The pipe or log directory is full.", "free disk space: df -h DIRECTORY")
SHM_SMALL = _code("shm_small", "MPS needs /dev/shm, which is too small or not writable.",
    "enlarge it: mount -o remount,size=1G /dev/shm; docker run --shm-size 1g")
ACCESS_DENIED = _code("access_denied", "SELinux or AppArmor denies a program access that it needs.",
    "see what was denied: ausearch -m avc; journalctl -k | grep -i apparmor")
SHORTAGE = _code("shortage", "The daemon ran out of memory, file descriptors, processes or threads.",
    "check the daemon's limits: systemctl show yunion-mps-daemon | grep -E 'Limit|Tasks|Memory'")
BUSY = _code("busy", "The daemon cannot do this right now.", "try again later")
DAEMON_UNREACHABLE = _code("daemon_unreachable", "The daemon does not answer.",
    "see: systemctl status yunion-mps-daemon")
API_SERVER_ERROR = _code("api_server_error",
    "The Kubernetes API server is unreachable or refused a request of the kubelet plugin; pods keep running.",
    "see: journalctl -u yunion-mps-kubelet-plugin; check the plugin's kubeconfig or service account")
NOT_ALLOWED = _code("not_allowed", "The caller is not permitted to do this.", "retry as root or as the owner")
NOT_FOUND = _code("not_found", "The named object does not exist.", "check the name: yunion-mps list")
INVALID_REQUEST = _code("invalid_request", "The API does not support this request.", "see: /v1/openapi.json")
LEASE_EXISTS = _code("lease_exists",
    "The caller already has a lease with this name or idempotency key, from a different request.",
    "release it: yunion-mps lease release NAME; or use another name")
HOST_ERROR = _code("host_error",
    "A file, directory, user or process on the host is not in the required state.",
    _DOCTOR)
FAILED = _code("failed", "The operation failed for a reason without a code of its own.", _EVENTS)
# fmt: on
