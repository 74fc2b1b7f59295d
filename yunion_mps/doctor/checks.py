"""What a check is: a function of the host that returns findings, each with a level, a text and a hint.

`Host` has the facts that checks use; each is read once, when a check first needs it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from yunion_mps.config import load
from yunion_mps.core.enums import (
    ABOUT_BUDGET,
    ABOUT_COMPUTE_MODE,
    ABOUT_DEVICES,
    ABOUT_ENTRY,
    ABOUT_GPU,
    ABOUT_MIG_LAYOUT,
    ABOUT_PIPE_DIRECTORY,
    ABOUT_PROCESS,
    MIG,
    MPS,
    NOT_USED,
    NOTICE,
    PROBLEM,
    WARNING,
)
from yunion_mps.core.errors import Problem, YunionError
from yunion_mps.core.models import DomainPlan, Gpu, Inventory, Plan, PlannedGpu
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import (
    CLIENT_WAITING,
    PROCESS_OUTSIDE_MPS,
    RECORD_HIDDEN,
    Reason,
    hint_within_doctor,
)
from yunion_mps.core.settings import Config
from yunion_mps.core.text import printable
from yunion_mps.http.client import DaemonClient
from yunion_mps.http.operations import GET_DEVICE, GET_DEVICES, GET_GPUS, GET_STATUS
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import Scanner, load_served, machine_id, with_saved
from yunion_mps.mps.conversation import peer_of
from yunion_mps.planning.plan import below_root, make_plan

if TYPE_CHECKING:
    from yunion_mps import answers
    from yunion_mps.answers import DeviceDetailsJson, DeviceJson, DomainJson, StatusJson, StatusProblemJson

T = TypeVar("T")

#: The share of a check's time that reading a fact may take, so that the fact's own error is reported.
_FACT_TIME_SHARE = 0.8

#: The kinds and codes of conditions that checks of their own report; the others, that of the daemon does.
_CHECKED_KINDS = frozenset({
    ABOUT_GPU, ABOUT_DEVICES, ABOUT_MIG_LAYOUT, ABOUT_ENTRY, ABOUT_COMPUTE_MODE, ABOUT_BUDGET,
    ABOUT_PIPE_DIRECTORY,
})  # fmt: skip
_CHECKED_CODES = frozenset({CLIENT_WAITING, PROCESS_OUTSIDE_MPS})

OK = "ok"
NOTHING_DIVIDED = "no GPU of this host is divided into devices"
WITHOUT_MPS = "no GPU of this host is shared through MPS"
#: What an ordinary user cannot see of the entries.
WHICH_GPUS = "which GPUs the entries mean"
SKIPPED = "skipped"  # it cannot be checked here: no daemon, no permission, no GPU
UNKNOWN = "unknown"  # the check failed or took too long
#: Levels in the order of the report, the worst first, with the exit statuses of monitoring plugins (Nagios,
#: Icinga, NRPE).
#: Source: Monitoring Plugins Development Guidelines, section "Plugin Return Codes".
NAGIOS_CODES = {PROBLEM: 2, WARNING: 1, UNKNOWN: 3, SKIPPED: 3, OK: 0}


class SkipError(YunionError):
    """There is nothing to check, by default because no GPU is divided, or no permission to."""

    def __init__(self, message: str = NOTHING_DIVIDED, hint: str = "") -> None:
        super().__init__(message, hint)


def invisible(hidden: str) -> SkipError:
    """Return the error for something that this user cannot see, such as another user's processes."""
    if os.geteuid() != 0:
        return SkipError(f"only root can see {hidden}", "run doctor as root")
    return SkipError(
        f"even root cannot see {hidden} here", "run doctor outside containers, with all capabilities"
    )


class Lazy(Generic[T]):
    """The result or error of `work`, called by the first thread that needs it; others wait for it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._result: list[T] = []
        self._error: YunionError | None = None

    def __call__(self) -> T:
        with self._lock:
            if self._error:
                raise self._error
            if not self._result:
                try:
                    self._result.append(self._work())
                except YunionError as error:
                    self._error = error
                    raise
            return self._result[0]


class Host:
    """The host as its files, NVML, the kernel and the daemon show it.

    timeout_s: the time for one check.
    """

    def __init__(self, paths: Paths, timeout_s: float) -> None:
        self.paths = paths
        self.timeout_s = timeout_s
        client = DaemonClient(paths, timeout_s * _FACT_TIME_SHARE)
        #: The configuration and the problems of its files.
        self.config: Lazy[tuple[Config, list[Problem]]] = Lazy(lambda: load(paths))
        #: Initialised NVML; raises DriverError.
        self.nvml: Lazy[Nvml] = Lazy(lambda: _open_nvml(timeout_s * _FACT_TIME_SHARE))
        #: The driver and the GPUs; raises DriverError.
        self.inventory: Lazy[Inventory] = Lazy(self._inventory)
        #: The plan, and its problems that depend on the GPUs; raises DriverError and HostError.
        self.plan: Lazy[tuple[Plan, list[Problem]]] = Lazy(
            lambda: make_plan(self.config()[0], self.inventory(), machine_id(paths))
        )
        #: The daemon's /v1/status; raises UnreachableError, NotAllowedError.
        self.status: Lazy[StatusJson] = Lazy(lambda: client.call(GET_STATUS))
        #: The daemon's devices as in /v1/devices; raises like `status`.
        self.devices: Lazy[list[DeviceJson]] = Lazy(
            lambda: client.call(GET_DEVICES, limit=0)["isolated_devices"]
        )
        #: The daemon's GPUs as in /v1/gpus; raises like `status`.
        self.gpus: Lazy[list[answers.GpuJson]] = Lazy(lambda: client.call(GET_GPUS)["gpus"])
        #: Memory in MiB of the processes on GPUs, by GPU UUID and PID; raises DriverError.
        self.users: Lazy[dict[str, dict[int, int | None]]] = Lazy(lambda: self.nvml().processes())
        #: The running domains, or else the planned ones; their directories are below the root.
        self.domains: Lazy[list[DomainPlan]] = Lazy(self._domains)
        self._client = client

    def _inventory(self) -> Inventory:
        scanned = Scanner(self.paths).scan(self.nvml())
        are_named = bool(self.config()[0].devices)
        return with_saved(scanned, load_served(self.paths), are_named=are_named)

    @property
    def foreign_root(self) -> bool:
        """Whether the root is not /; then processes that use directories outside it do not count."""
        return self.paths.root != "/"

    def device(self, name: str) -> DeviceDetailsJson:
        """Return the daemon's details of a device, with its environment.

        Raises YunionError if the daemon does not run, denies access, or knows no such device.
        """
        return self._client.call(GET_DEVICE, id=name)

    def known_status(self) -> StatusJson | None:
        """Return the daemon's /v1/status; None if it does not run or access is denied."""
        try:
            return self.status()
        except YunionError:
            return None

    def conditions(self, *kinds: str) -> list[StatusProblemJson]:
        """Return what the daemon says is wrong or pending with these kinds of things.

        Empty if it does not run, or is of an older version that does not say what a problem is about.
        """
        return [condition for condition in self._all_conditions() if condition.get("kind") in kinds]

    def conditions_of_processes(self, code: str) -> list[StatusProblemJson]:
        """Return what the daemon says of processes, with this code."""
        return [condition for condition in self.conditions(ABOUT_PROCESS) if condition["code"] == code]

    def other_conditions(self) -> list[StatusProblemJson]:
        """Return what the daemon says is wrong or pending and no other check reports."""
        others: list[StatusProblemJson] = []
        for condition in self._all_conditions():
            if condition.get("kind") not in _CHECKED_KINDS and condition["code"] not in _CHECKED_CODES:
                others.append(condition)
        return others

    def _all_conditions(self) -> list[StatusProblemJson]:
        status = self.known_status()
        return status["problems"] if status else []

    def known_gpus(self) -> dict[str, answers.GpuJson]:
        """Return the daemon's GPUs by PCI address; empty if it does not run or denies access."""
        if not self.known_status():
            return {}
        try:
            return {gpu["pci_address"]: gpu for gpu in self.gpus()}
        except YunionError:
            return {}

    def served_gpus(self) -> dict[str, answers.GpuJson]:
        """Return those of the daemon's GPUs that it divides, by PCI address.

        If the configuration has changed or has errors, these are not the planned ones.
        """
        served: dict[str, answers.GpuJson] = {}
        for address, gpu in self.known_gpus().items():
            has_devices = gpu["devices"] and gpu["sharing"] not in (None, MIG)
            is_pool = gpu["memory_free_mib"] is not None
            if has_devices or is_pool:
                served[address] = gpu
        return served

    def unread_gpus(self) -> set[str]:
        """Return the PCI addresses of the GPUs that the files divide and the daemon does not.

        It has not read the files since they changed. Raises like `plan`.
        """
        plan, _ = self.plan()
        divided = plan.sharing.keys() | {layout.gpu_uuid for layout in plan.layouts}
        unread: set[str] = set()
        for address, gpu in self.known_gpus().items():
            is_divided = address in divided or gpu["uuid"] in divided
            if is_divided and gpu["state"] == NOT_USED and not gpu["reason"]:
                unread.add(address)
        return unread

    def known_pids(self) -> dict[str, int | None]:
        """Return the control daemons' PIDs by domain, as the daemon reports them."""
        status = self.known_status()
        return {domain["name"]: domain["pid"] for domain in status["domains"]} if status else {}

    def is_mps_disabled(self) -> bool:
        """Return whether MPS is disabled and no domain runs, so that NVIDIA's software is not needed."""
        config, problems = self.config()
        return not config.enable_cuda_mps and not problems and not self.domains()

    def uses_mps(self) -> bool:
        """Return whether a domain runs, or the configuration shares GPUs through MPS."""
        entries = self.config()[0].devices
        return not entries or any(entry.uses_mps for entry in entries) or bool(self.domains())

    def mps_domains(self) -> list[DomainPlan]:
        """Return the domains.

        Raises SkipError if there are none, and DriverError if the daemon waits for the driver.
        """
        domains = self.domains()
        if not domains:
            raise self.nothing_divided() if self.uses_mps() else SkipError(WITHOUT_MPS)
        return domains

    def hides_entries(self) -> bool:
        """Return whether only root can read which GPUs the entries mean; raises like `plan`."""
        return any(entry.reason.code == RECORD_HIDDEN for entry in self.plan()[0].missing)

    def nothing_divided(self, otherwise: str = NOTHING_DIVIDED) -> SkipError:
        """Return why there is nothing to check; raises like `plan` if that is not known."""
        if self.config()[0].enable_cuda_mps and self.hides_entries():
            return invisible(WHICH_GPUS)
        return SkipError(otherwise)

    def our_gpus(self) -> list[Gpu]:
        """Return the GPUs that are or would be divided into devices.

        One that only the daemon knows, because it is no longer present, has the daemon's reason. One that the
        daemon has not read of is left out.

        Raises SkipError if there are none, and what `plan` raises.
        """
        plan, _ = self.plan()
        served = dict(self.served_gpus())
        uuids = plan.gpu_uuids
        addresses = plan.unavailable.keys() | served.keys()
        unread = self.unread_gpus()
        gpus: list[Gpu] = []
        for gpu in self.inventory().gpus:
            if gpu.pci_address in unread:
                continue
            served.pop(gpu.pci_address, None)
            if gpu.uuid in uuids or gpu.pci_address in addresses:
                gpus.append(gpu)
        for address, unserved in served.items():
            reason = Reason(unserved["reason"], unserved["reason_code"])
            gpus.append(Gpu(address, unserved["uuid"], unserved["name"], reason=reason))
        if not gpus:
            raise self.nothing_divided()
        return gpus

    def ways_of_sharing(self) -> dict[str, str]:
        """Return how the GPUs are shared, by PCI address: as the daemon says, or as planned."""
        ways = dict(self.plan()[0].sharing)
        for address, gpu in self.known_gpus().items():
            if gpu["sharing"]:
                ways[address] = gpu["sharing"]
        return ways

    def mps_gpus(self) -> list[Gpu]:
        """Return those of our GPUs that are shared through MPS.

        Raises SkipError if there are none, and what `plan` raises.
        """
        ways = self.ways_of_sharing()
        gpus = [gpu for gpu in self.our_gpus() if ways.get(gpu.pci_address, MPS) == MPS]
        if not gpus:
            raise self.nothing_divided(WITHOUT_MPS)
        return gpus

    def control_pid(self, domain: DomainPlan) -> int | None:
        """Return the PID of the control daemon that listens in the domain's directory."""
        peer = peer_of(domain.pipe_directory)
        return peer.pid if peer else None

    def control_pids(self) -> set[int]:
        """Return the PIDs of the control daemons that listen in our domains' directories."""
        pids = [self.control_pid(domain) for domain in self.domains()]
        return set(filter(None, pids))

    def _domains(self) -> list[DomainPlan]:
        status = self.known_status()
        if status:
            return [_plan_of(domain) for domain in status["domains"]]
        with contextlib.suppress(YunionError):
            if not self.hides_entries():
                return [below_root(domain, self.paths) for domain in self.plan()[0].domains]
        config = self.config()[0]
        if not config.enable_cuda_mps:
            return []
        # The GPUs are unknown, and so are the directories of any but a host-wide domain.
        host_wide = DomainPlan(
            name="host",
            pipe_directory=config.cuda_mps_pipe_directory,
            log_directory=config.cuda_mps_log_directory,
            gpus=(),
            thread_percentage=100.0,
        )
        return [below_root(host_wide, self.paths)]


def _open_nvml(timeout_s: float) -> Nvml:
    nvml = Nvml(timeout_s)
    nvml.keep_open()  # a thread may be waiting in it when the process ends
    return nvml


def _plan_of(domain: DomainJson) -> DomainPlan:
    gpus = map(PlannedGpu, domain["gpus"], domain["memory_limits_mib"])
    return DomainPlan(
        name=domain["name"],
        pipe_directory=domain["pipe_directory"],
        log_directory=domain["log_directory"],
        gpus=tuple(gpus),
        thread_percentage=domain["thread_percentage"],
    )


class Finding(NamedTuple):
    """A line of the report."""

    level: str
    what: str
    hint: str = ""
    #: The reason code; a warning or problem without one gets that of its check.
    code: str = ""


Findings = Iterable[Finding]


def ok(text: str) -> Finding:
    return Finding(OK, text)


def finding_of(condition: StatusProblemJson) -> Finding:
    """Return what the daemon says is wrong or pending, as a finding."""
    is_problem = condition["level"] in (NOTICE, PROBLEM)
    return Finding(
        level=PROBLEM if is_problem else WARNING,
        what=condition["text"],
        hint=hint_within_doctor(condition["hint"]),
        code=condition["code"],
    )


def skipped(text: str, hint: str = "") -> Finding:
    return Finding(SKIPPED, text, hint)


def warning(text: str, hint: str, code: str = "") -> Finding:
    """Return a finding that some programs will fail, or get something other than they should."""
    return Finding(WARNING, text, hint, code)


def problem(text: str, hint: str, code: str = "") -> Finding:
    """Return a finding that programs fail now, or run without their limits."""
    return Finding(PROBLEM, text, hint, code)


class Check(NamedTuple):
    """A check of the host."""

    name: str
    #: The reason code of its warnings and problems that have none.
    code: str
    run: Callable[[Host], Findings]
    #: What it reports without findings; empty if nothing.
    all_clear: str = ""
    #: It is unknown if it takes longer than so many times the host's timeout.
    timeout_factor: float = 1


def host_check(
    name: str, code: str, all_clear: str = "", timeout_factor: float = 1
) -> Callable[[Callable[[Host], Findings]], Check]:
    """Declare a function in a module of `report.MODULES` as a check of the host.

    It changes nothing, and returns or yields findings; it raises YunionError if it cannot be checked here.
    """
    return lambda run: Check(name, code, run, all_clear, timeout_factor)


def findings_of(check: Check, host: Host) -> list[Finding]:
    """Return the check's findings, or why there are none; never raises."""
    try:
        findings = list(check.run(host))
        if not findings and check.all_clear:
            findings = [ok(check.all_clear)]
    except SkipError as error:
        findings = [skipped(error.message, error.hint)]
    except YunionError as error:
        findings = [skipped(f"not checked: {error.message}", error.hint)]
    except OSError as error:
        hint = "run doctor as root" if os.geteuid() != 0 else "see: dmesg"
        findings = [Finding(UNKNOWN, f"this could not be checked: {error}", hint)]
    except Exception as error:  # noqa: BLE001 - a fault of one check must not hide what the others found
        hint = "report this, with the output of: yunion-mps doctor -o json"
        findings = [Finding(UNKNOWN, f"the check itself failed: {type(error).__name__}: {error}", hint)]
    return [_for_report(finding, check.code) for finding in findings]


def _for_report(finding: Finding, default_code: str) -> Finding:
    """Return the finding with a code, and without control characters.

    Texts quote environments, logs, files and answers; checks compare them unescaped.
    """
    code = finding.code
    if not code and finding.level in (WARNING, PROBLEM):
        code = default_code
    return Finding(finding.level, printable(finding.what), printable(finding.hint), code)
