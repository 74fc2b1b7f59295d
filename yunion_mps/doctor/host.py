"""What a check gets and what it returns: the host, each part of which is read once, and findings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from yunion_mps.config import load
from yunion_mps.errors import Problem, YunionError
from yunion_mps.http.client import DaemonClient
from yunion_mps.http.operations import GET_DEVICE, GET_DEVICES, GET_STATUS
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import machine_id, scan
from yunion_mps.models import Config, DomainPlan, Gpu, Inventory, Plan, PlannedGpu
from yunion_mps.mps.conversation import peer_of
from yunion_mps.paths import Paths
from yunion_mps.planning.plan import make_plan

if TYPE_CHECKING:
    from yunion_mps.answers import Device, DeviceDetails, Status


T = TypeVar("T")

#: What the parts below may take of a check's time, so that their own error is reported.
_SHARE = 0.8

OK = "ok"
SKIPPED = "skipped"  # it cannot be checked here: no daemon, no permission, no GPU
UNKNOWN = "unknown"  # the check broke, or took too long
WARNING = "warning"
PROBLEM = "problem"
#: From the worst to the best, which is the order of the report, with the exit statuses of monitoring plugins
#: (Nagios, Icinga, NRPE); what was skipped alone is unknown.
NAGIOS_CODES = {PROBLEM: 2, WARNING: 1, UNKNOWN: 3, SKIPPED: 3, OK: 0}


class Finding(NamedTuple):
    """One line of the report; without a `code`, a warning or problem has the code of its check."""

    level: str
    what: str
    hint: str = ""
    code: str = ""


Findings = Iterable[Finding]


def ok(what: str) -> Finding:
    """All is well."""
    return Finding(OK, what)


def skipped(what: str, hint: str = "") -> Finding:
    """Not checked, and why."""
    return Finding(SKIPPED, what, hint)


def warning(what: str, hint: str, code: str = "") -> Finding:
    """Some programs will fail, or get something else than they should."""
    return Finding(WARNING, what, hint, code)


def problem(what: str, hint: str, code: str = "") -> Finding:
    """Programs fail now, or run without their limits."""
    return Finding(PROBLEM, what, hint, code)


class Check(NamedTuple):
    """One thing to look at: `code` is what its findings mean, `well` the finding of a check without any.

    A check is unknown if it takes more than so many `times` the host's timeout.
    """

    name: str
    code: str
    look: Callable[[Host], Findings]
    well: str = ""
    times: float = 1


def check(
    name: str, code: str, well: str = "", times: float = 1
) -> Callable[[Callable[[Host], Findings]], Check]:
    """Declare a function of a module in `report.MODULES` as a check of the host.

    It changes nothing, and returns or yields findings; it raises YunionError if it cannot be checked here.
    """
    return lambda look: Check(name, code, look, well, times)


class SkipError(YunionError):
    """A check has nothing to look at here, by default because no GPU is divided, or may not look."""

    def __init__(self, message: str = "no GPU is divided here", hint: str = "") -> None:
        super().__init__(message, hint)


class Lazy(Generic[T]):
    """What `work` returns or raises, called by the first thread that asks; others wait for that."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._found: list[T] = []
        self._error: YunionError | None = None

    def __call__(self) -> T:
        with self._lock:
            if self._error:
                raise self._error
            if not self._found:
                try:
                    self._found.append(self._work())
                except YunionError as error:
                    self._error = error
                    raise
            return self._found[0]


class Host:
    """One host, as the files, NVML, the kernel and the daemon show it."""

    def __init__(self, paths: Paths, timeout_s: float) -> None:
        """`timeout_s`: what one check may take."""
        self.paths = paths
        self.timeout_s = timeout_s
        client = DaemonClient(paths, timeout_s * _SHARE)
        #: The configuration and the problems of both files.
        self.config: Lazy[tuple[Config, list[Problem]]] = Lazy(lambda: load(paths))
        #: NVML, opened; raises DriverError.
        self.nvml: Lazy[Nvml] = Lazy(lambda: _opened(timeout_s * _SHARE))
        #: The driver and the GPUs; raises DriverError.
        self.inventory: Lazy[Inventory] = Lazy(lambda: scan(self.nvml(), paths))
        #: What should be, and what the GPUs show to be wrong with it; raises DriverError and HostError.
        self.plan: Lazy[tuple[Plan, list[Problem]]] = Lazy(
            lambda: make_plan(self.config()[0], self.inventory(), machine_id(paths))
        )
        #: The daemon's /v1/status; raises UnreachableError, NotAllowedError.
        self.status: Lazy[Status] = Lazy(lambda: client.call(GET_STATUS))
        #: The daemon's devices, each as /v1/devices lists it; raises as `status`.
        self.devices: Lazy[list[Device]] = Lazy(lambda: client.call(GET_DEVICES, limit=0)["isolated_devices"])
        #: The memory in MiB that processes use, by GPU UUID and PID; raises DriverError.
        self.users: Lazy[dict[str, dict[int, int | None]]] = Lazy(lambda: self.nvml().processes())
        #: The domains as they run, or as they would; their directories are below the root.
        self.domains: Lazy[list[DomainPlan]] = Lazy(self._domains)
        self._client = client

    @property
    def foreign_root(self) -> bool:
        """Whether another directory than / stands for the host; processes outside it are none of its own."""
        return self.paths.root != "/"

    def device(self, name: str) -> DeviceDetails:
        """What the daemon says of one device, with its environment; raises YunionError."""
        return self._client.call(GET_DEVICE, id=name)

    def known_status(self) -> Status | None:
        """The daemon's /v1/status, None if it does not run or may not be asked."""
        try:
            return self.status()
        except YunionError:
            return None

    def known_pids(self) -> dict[str, int | None]:
        """The PIDs of the control daemons by domain, in the daemon's words."""
        status = self.known_status()
        return {domain["name"]: domain["pid"] for domain in status["domains"]} if status else {}

    def is_off(self) -> bool:
        """Whether this host is to offer no MPS devices, and offers none: it needs nothing of NVIDIA then."""
        config, problems = self.config()
        return not config.enable_cuda_mps and not problems and not self.domains()

    def our_gpus(self) -> list[Gpu]:
        """The GPUs that are divided into devices, or would be; raises SkipError if there are none."""
        plan, _ = self.plan()
        uuids = {uuid for domain in plan.domains for uuid in domain.gpu_uuids}
        gpus = self.inventory().gpus
        ours = [gpu for gpu in gpus if gpu.uuid in uuids or gpu.pci_address in plan.unavailable]
        if not ours:
            raise SkipError
        return ours

    def control_pid(self, domain: DomainPlan) -> int | None:
        """The PID of the control daemon that listens in the domain's directory, None if none does."""
        peer = peer_of(domain.pipe_directory)
        return peer.pid if peer else None

    def control_pids(self) -> set[int]:
        """The control daemons that listen in our domains' directories."""
        return {pid for domain in self.domains() if (pid := self.control_pid(domain))}

    def _domains(self) -> list[DomainPlan]:
        status = self.known_status()
        if status:
            return [_running(domain) for domain in status["domains"]]
        try:
            return [self._rooted(domain) for domain in self.plan()[0].domains]
        except YunionError:
            config = self.config()[0]
            if not config.enable_cuda_mps:
                return []
            # Which GPUs there are is unknown; of the directories, those of the host's one domain are known.
            pipe, log = config.cuda_mps_pipe_directory, config.cuda_mps_log_directory
            return [self._rooted(DomainPlan("host", pipe, log, (), 100.0))]

    def _rooted(self, domain: DomainPlan) -> DomainPlan:
        return domain._replace(
            pipe_directory=self.paths.under(domain.pipe_directory),
            log_directory=self.paths.under(domain.log_directory),
        )


def _opened(timeout_s: float) -> Nvml:
    nvml = Nvml(timeout_s)
    nvml.keep_open()  # the process ends soon, and a thread may be waiting in it then
    return nvml


def _running(domain: Mapping[str, Any]) -> DomainPlan:
    return DomainPlan(
        domain["name"],
        domain["pipe_directory"],
        domain["log_directory"],
        tuple(map(PlannedGpu, domain["gpus"], domain["memory_limits"])),
        domain["thread_percentage"],
    )
