"""The MPS processes of this host: NVIDIA's control daemons and servers, and which of them are ours.

A process is identified by itself, never by its socket: any user can fill a socket's queue, and a socket
outlives its process. Our control daemons have a mark in their environment, which their servers inherit
(measured). PID and start time are also recorded, because an environment cannot always be read.

A control daemon that another program started is ours only by order of an operator or the package
(`yunion-mps-daemon --adopt PID`). The order is recorded for that one process, by PID and start time,
where only root can write, and a reboot deletes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from yunion_mps.core.errors import HostError
from yunion_mps.core.models import DomainPlan, PlannedGpu, Pool, Slice, known_members
from yunion_mps.core.paths import ROOT_VARIABLE, Paths
from yunion_mps.host.files import open_regular, write_atomically
from yunion_mps.host.proc import (
    all_pids,
    children_of,
    credentials_of,
    environment_of,
    parent_of,
    process_name,
    program_name,
    started_ticks,
)
from yunion_mps.host.processes import Process, find_program

PROGRAM = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
PACKAGES = (
    "install it: nvidia-cuda-mps on Debian (non-free), nvidia-compute-utils-<release> on Ubuntu, "
    "nvidia-driver-cuda on RHEL and its derivatives (NVIDIA's repository), xorg-x11-drv-nvidia-cuda on "
    "Fedora (RPM Fusion)"
)
#: Marks a control daemon as ours, in the environment that it was started with.
MARK = "YUNION_MPS_DOMAIN"
#: The server's name as the kernel truncates it (TASK_COMM_LEN less its NUL), as it does the control daemon's.
_NAME = SERVER[:15]
#: Where NVIDIA's control daemon serves without CUDA_MPS_PIPE_DIRECTORY.
#: Source: nvidia-cuda-mps-control(1), section "ENVIRONMENT".
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"
#: Where a control daemon writes its logs by default.
DEFAULT_LOG_DIRECTORY = "/var/log/nvidia-mps"
#: How long after its fork a process may have no environment yet, before exec; 44 ms under load (measured).
EXEC_S = 2.0
#: How long a process may take to end after its clients' timeout, and after SIGTERM before SIGKILL.
GRACE_S = 2.0
#: How long after SIGKILL a process that does not end is reported again.
UNKILLABLE_S = 60.0
#: Stands for the PID of a control daemon that is about to be started.
_STARTING = 0


def find_control_program() -> str:
    """Return the path of NVIDIA's control program.

    Raises HostError that names the packages that contain it if it is missing.
    """
    return find_program(PROGRAM, PACKAGES)


# -- environments


def client_variables(pipe_directory: str) -> dict[str, str]:
    """Return the front-end's environment, built from scratch, so that ours cannot redirect it."""
    return {"CUDA_MPS_PIPE_DIRECTORY": pipe_directory, "LC_ALL": "C", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def control_environment(plan: DomainPlan, program: str = "") -> dict[str, str]:
    """Return the control daemon's environment, built from scratch: only these GPUs, in NVML's order.

    Source: NVIDIA: Multi-Process Service, section "Appendix: Environment Variables", CUDA_VISIBLE_DEVICES.
    """
    root = Paths.from_environment().root
    return {
        **client_variables(plan.pipe_directory),
        "PATH": server_path(program),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_LOG_DIRECTORY": plan.log_directory,
        "CUDA_VISIBLE_DEVICES": ",".join(plan.gpu_uuids),
        MARK: plan.name,
        **({} if root == "/" else {ROOT_VARIABLE: root}),
    }


def server_path(program: str) -> str:
    """Return the control daemon's PATH, where it searches for its server.

    So its own directory comes first.
    """
    usual = client_variables("")["PATH"]
    own = os.path.dirname(program)
    if not own or own in usual.split(os.pathsep):
        return usual
    return f"{own}{os.pathsep}{usual}"


def pipe_directory_in(environment: Mapping[str, str]) -> str:
    return os.path.normpath(environment.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPE_DIRECTORY)


def log_directory_in(environment: Mapping[str, str]) -> str:
    """Return where a control daemon writes its logs.

    Source: nvidia-cuda-mps-control(1), section "ENVIRONMENT", CUDA_MPS_LOG_DIRECTORY.
    """
    return os.path.normpath(environment.get("CUDA_MPS_LOG_DIRECTORY") or DEFAULT_LOG_DIRECTORY)


# -- which processes are ours


class MpsProcess(NamedTuple):
    """A control daemon of ours, or an MPS server of one."""

    pid: int
    #: When it started, in clock ticks since boot, which makes its PID unique.
    started_ticks: int
    pipe_directory: str
    log_directory: str
    #: The GPUs that it serves.
    gpu_uuids: tuple[str, ...]
    is_server: bool = False
    #: The plan that it was started for, None if not recorded.
    plan: DomainPlan | None = None

    def __str__(self) -> str:
        kind = "an MPS server" if self.is_server else "a control daemon"
        return f"{kind} (PID {self.pid})"


FindProcesses = Callable[[], Sequence[MpsProcess]]


def our_processes() -> list[MpsProcess]:
    """Return our running control daemons and MPS servers, the lowest PIDs first.

    It reads all processes, 4 us each; 20 us if a daemon ended while it started a control daemon, which may
    still run a script that executes the program. Raises ShortageError if they cannot be listed.
    """
    records = _records()
    recorded = {row.pid: row for row in records}
    plans = {(row.pipe_directory, row.gpu_uuids): row.plan for row in records}
    processes = []
    for pid in reversed(all_pids()):
        program = program_name(pid)
        is_candidate = program in (PROGRAM, SERVER) or pid in recorded
        if _STARTING in recorded and program:
            is_candidate = True
        process = _identify(pid, program, recorded.get(pid)) if is_candidate else None
        if process:
            processes.append(process._replace(plan=plans.get((process.pipe_directory, process.gpu_uuids))))
    return processes


def could_be_ours(pid: int) -> bool:
    """Return whether it is NVIDIA's control program, run by root or our user."""
    return program_name(pid) == PROGRAM and _is_trusted(pid, is_server=False)


def _is_trusted(pid: int, *, is_server: bool) -> bool:
    """Return whether only root, or our user, can have started the process and set its environment.

    A server runs as its clients' user, but keeps the group of its control daemon (measured), which that user
    cannot have. A set-user-ID program keeps the real user of the process that started it.
    """
    owner = credentials_of(pid)
    if owner is None:
        return False
    if {0, os.geteuid()}.issuperset(owner.uids):
        return True
    return is_server and {0, os.getegid()}.issuperset(owner.gids)


def _identify(pid: int, program: str, recorded: MpsProcess | None) -> MpsProcess | None:
    started = started_ticks(pid)
    # A child of a control daemon is its server, even before exec.
    is_server = program == SERVER or program_name(parent_of(pid)) == PROGRAM
    if started is None or not _is_trusted(pid, is_server=is_server):
        return None
    if recorded and recorded.started_ticks == started:
        return recorded
    environment = _environment_after_exec(pid)
    pipe_directory = environment.get("CUDA_MPS_PIPE_DIRECTORY", "")
    log_directory = environment.get("CUDA_MPS_LOG_DIRECTORY", "")
    process = MpsProcess(
        pid=pid,
        started_ticks=started,
        pipe_directory=pipe_directory,
        log_directory=log_directory,
        gpu_uuids=tuple(environment.get("CUDA_VISIBLE_DEVICES", "").split(",")),
        is_server=is_server,
    )
    if MARK in environment:
        return process if _has_our_root(pid, environment) else None
    order = _order_of_server(started, environment) if is_server else adoption_order(pid)
    if order is None:
        return None
    return process._replace(pipe_directory=order.pipe_directory, gpu_uuids=order.gpu_uuids)


def _environment_after_exec(pid: int) -> dict[str, str]:
    """Return the environment of a process; waits while it is empty, before exec."""
    while not (environment := environment_of(pid)):
        ticks = started_ticks(pid)
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        forked_s = (ticks or 0) / os.sysconf("SC_CLK_TCK")
        if ticks is None or now_s - forked_s > EXEC_S:
            break
        time.sleep(0.0005)
    return environment


def _has_our_root(pid: int, environment: Mapping[str, str]) -> bool:
    """Return whether a daemon with our root directory started it, not one in a container, for example."""
    if environment.get(ROOT_VARIABLE, "/") != Paths.from_environment().root:
        return False
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/"))
    except OSError:
        return False


# -- records


class AdoptionOrder(NamedTuple):
    """The order to adopt a control daemon that another program started."""

    pid: int
    #: When it started, in clock ticks since boot, which makes its PID unique.
    started_ticks: int
    #: The GPUs that it serves.
    gpu_uuids: tuple[str, ...]
    #: Whether it certainly numbers its GPUs in this order; limits refer to GPUs by number.
    in_order: bool
    pipe_directory: str

    def can_serve(self, plan: DomainPlan) -> bool:
        """Return whether each limit of the plan can be set for the right GPU."""
        return self.in_order or len(set(plan.memory_limits_mib)) <= 1


def adoption_order(pid: int) -> AdoptionOrder | None:
    """Return the order to adopt this process; None if there is none."""
    order = _read_order()
    if order is None or order.pid != pid or order.started_ticks != started_ticks(pid):
        return None
    return order


def _order_of_server(started: int, environment: Mapping[str, str]) -> AdoptionOrder | None:
    """Return the order for the control daemon that started this MPS server, which lacks our mark."""
    order = _read_order()
    if order is None or order.pipe_directory != pipe_directory_in(environment):
        return None
    return order if started >= order.started_ticks else None


def record_order(order: AdoptionOrder) -> None:
    """Record the order to adopt the process; raises HostError if it cannot be written."""
    path = Paths.from_environment().adopted
    try:
        write_atomically(path, json.dumps(order._asdict()))
    except OSError as error:
        raise HostError(f"{path} cannot be written: {error.strerror}", "run as root") from None


def record(plan: DomainPlan, pid: int = _STARTING) -> None:
    """Record that a control daemon of ours is about to start, and then its PID.

    If that cannot be written, its mark still identifies it.
    """
    process = MpsProcess(
        pid=pid,
        started_ticks=started_ticks(pid) or 0,
        pipe_directory=plan.pipe_directory,
        log_directory=plan.log_directory,
        gpu_uuids=plan.gpu_uuids,
    )
    with contextlib.suppress(OSError):
        write_atomically(
            _record_path(plan), json.dumps({**process._asdict(), "plan": domain_plan_json(plan)})
        )


def forget(plan: DomainPlan) -> None:
    path = _record_path(plan)
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))  # unless it contains other records


def _record_path(plan: DomainPlan) -> str:
    name = plan.pipe_directory.replace("%", "%25").replace("/", "%2F")
    return f"{Paths.from_environment().control_daemons}/{name}"


def _records() -> list[MpsProcess]:
    recorded = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(Paths.from_environment().control_daemons):
            with contextlib.suppress(TypeError, KeyError):
                members = known_members(MpsProcess, _read_record(entry.path))
                members["gpu_uuids"] = tuple(members["gpu_uuids"])
                members["plan"] = plan_from_json(members.get("plan"))
                recorded.append(MpsProcess(**members))
    return recorded


def domain_plan_json(plan: DomainPlan) -> dict[str, Any]:
    """Return the plan as records have it, with the name of each value."""
    gpus: list[dict[str, Any]] = []
    for gpu in plan.gpus:
        row = gpu._asdict()
        row["slices"] = [share._asdict() for share in gpu.slices]
        row["pool"] = gpu.pool._asdict() if gpu.pool else None
        gpus.append(row)
    return {**plan._asdict(), "gpus": gpus}


#: The values of a GPU, a slice and a pool in records of earlier versions, which had lists, by position.
_GPU_POSITIONS = ("uuid", "memory_limit_mib", "device_count", "thread_percentage", "slices", "pool")
_SLICE_POSITIONS = ("memory_limit_mib", "thread_percentage", "priority")
_POOL_POSITIONS = (
    "gpu_uuid",
    "domain",
    "unit_mib",
    "memory_mib",
    "memory_total_mib",
    "reserve_mib",
    "clients",
    "thread_overcommit",
    "thread_percentage",
)


def plan_from_json(fields: Any) -> DomainPlan | None:
    """Return the plan of a record; None for anything else, such as a damaged one."""
    try:
        gpus = tuple(_planned_gpu(row) for row in fields["gpus"])
        return DomainPlan(**{**known_members(DomainPlan, fields), "gpus": gpus})
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def _planned_gpu(row: Any) -> PlannedGpu:
    members = _named(row, _GPU_POSITIONS)
    slices: list[Slice] = []
    for share in members["slices"]:
        slices.append(Slice(**known_members(Slice, _named(share, _SLICE_POSITIONS))))
    pool = None
    if members["pool"]:
        pool = Pool(**known_members(Pool, _named(members["pool"], _POOL_POSITIONS)))
    return PlannedGpu(**{**known_members(PlannedGpu, members), "slices": tuple(slices), "pool": pool})


def _named(value: Any, positions: Sequence[str]) -> Mapping[str, Any]:
    """Return the members of a value that an earlier version may have written as a list.

    Raises ValueError for a list of another length.
    """
    if not isinstance(value, list):
        return dict(value)
    if len(value) != len(positions):
        raise ValueError(f"not of {len(positions)} values: {value}")
    return dict(zip(positions, value))


def _read_order() -> AdoptionOrder | None:
    with contextlib.suppress(TypeError, KeyError):
        fields = _read_record(Paths.from_environment().adopted)
        members = known_members(AdoptionOrder, fields)
        members["gpu_uuids"] = tuple(fields["gpu_uuids"])
        return AdoptionOrder(**members)
    return None


def _read_record(path: str) -> Any:
    """Return the values of a record; None if it is not root's or ours, or invalid."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open_regular(path) as file:
        if os.fstat(file.fileno()).st_uid in (0, os.geteuid()):
            return json.load(file)
    return None


# -- servers, which are children of the control daemon


def server_pids(control_pid: int) -> list[int]:
    """Return the PIDs of the control daemon's servers, including one before exec; empty if it has ended.

    Raises ShortageError if they cannot be read.
    """
    return [pid for pid in children_of(control_pid) if is_server(pid)]


def is_server(pid: int) -> bool:
    """Return whether the process is an MPS server of a control daemon that root or our user runs.

    It is one even before exec. Every user can give a process the name of one.
    """
    return process_name(pid) == _NAME and _is_trusted(pid, is_server=True)


def running_servers(pids: Iterable[int]) -> tuple[int, ...]:
    """Return the PIDs that still belong to MPS servers; works without free descriptors."""
    return tuple(pid for pid in pids if program_name(pid) == SERVER)


def orphaned_servers(pipe_directory: str, find: FindProcesses = our_processes) -> list[int]:
    """Return the PIDs of our servers in the directory whose control daemon has ended.

    find: reads every process.

    Raises ShortageError if they cannot be listed.
    """
    running = find()
    # Also those whose program was renamed.
    control_daemons = {process.pid for process in running if not process.is_server}
    orphans: list[int] = []
    for process in running:
        if not process.is_server or process.pipe_directory != pipe_directory:
            continue
        parent = parent_of(process.pid)
        if parent not in control_daemons and program_name(parent) != PROGRAM:
            orphans.append(process.pid)
    return orphans


def signal_server(pid: int, number: signal.Signals) -> bool:
    """Send a signal if this is still an MPS server; returns whether it is.

    Raises ShortageError if no pidfd can be opened: by its PID, another process could get the signal.
    """
    process = Process.adopt(pid)
    if process is None:
        return False
    try:
        if not running_servers([pid]):
            return False
        process.signal(number)
        process.signal(signal.SIGCONT)  # a stopped process does not even see SIGTERM
        return True
    finally:
        process.close()
