"""The divided GPUs: whether MPS can do there what we promise."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from yunion_mps.core.enums import (
    ABOUT_BUDGET,
    ABOUT_COMPUTE_MODE,
    ABOUT_DEVICES,
    ABOUT_ENTRY,
    ABOUT_GPU,
    ABOUT_MIG_LAYOUT,
    MIG,
    MPS,
    TERMINATE,
    TIME_SLICING,
)
from yunion_mps.core.errors import YunionError
from yunion_mps.core.models import DEFAULT, EXCLUSIVE_PROCESS, PROHIBITED, Gpu, Plan
from yunion_mps.core.reasons import (
    BUDGET_NOT_ENFORCED,
    CLIENT_LIMIT,
    COMPUTE_MODE_CHANGED,
    COMPUTE_MODE_EXCLUSIVE,
    COMPUTE_MODE_FIXED,
    GPU_ERROR,
    GPU_FAULT,
    GPU_LOST,
    LAYOUT_WAITS,
    MIG_ENABLED,
    MIG_RESET_REQUIRED,
    NO_DOMAIN,
    NO_REASON,
    PROCESS_MEMORY_UNKNOWN,
    RECORD_HIDDEN,
    RELOAD_NEEDED,
    TEMPORARY,
    VGPU,
    hint_of,
)
from yunion_mps.core.text import count, list_of
from yunion_mps.doctor.checks import (
    SKIPPED,
    WHICH_GPUS,
    Finding,
    Findings,
    Host,
    SkipError,
    finding_of,
    host_check,
    invisible,
    ok,
    problem,
    skipped,
    warning,
)
from yunion_mps.host.files import read_text
from yunion_mps.host.proc import process_name
from yunion_mps.mps.processes import is_server
from yunion_mps.planning.division import enforces_budgets, max_clients

if TYPE_CHECKING:
    pass

_UPDATE_DRIVER = "update the driver, or set over_budget: report"
_SAME_NAMESPACE = "run doctor and the daemon on the host, not in a container with PIDs of its own"
#: Reasons of the domain that serves a GPU, which the check of the daemon reports.
_OF_DOMAINS = TEMPORARY | {NO_DOMAIN}

#: Reasons of which the kernel's log says more.
_OF_HARDWARE = (GPU_LOST, GPU_FAULT, GPU_ERROR)
_SEE_KERNEL_LOG = "see: yunion-mps gpus; dmesg | grep -iE 'nvrm|xid'"
#: A warning is given from this share of the limit.
_WARNING_SHARE = 0.9
#: Profile in a vGPU's name inside a virtual machine: `GRID T4-16C`, `NVIDIA A40-48Q`, `A100-1-5C` (NVIDIA:
#: Virtual GPU Software User Guide).
_VGPU = re.compile(r"-(?:\d-)?\d+(?:ME)?[ABCQ]$")


@host_check("GPUs", GPU_ERROR)
def gpus(host: Host) -> Findings:
    """The GPUs and entries, as the daemon knows them; without a daemon, as they would be divided."""
    findings = _known_findings(host)
    try:
        findings += _own_findings(host)
        gpus = _gpus_to_check(host)
    except YunionError:
        if findings:
            return findings
        raise
    if not gpus and not findings:
        raise SkipError
    if all(finding.level == SKIPPED for finding in findings):
        findings.append(ok(f"{_describe_divided(gpus)}, all working"))
    return findings


def _describe_divided(gpus: Sequence[Gpu]) -> str:
    """Return `2 divided (7 MIG instances)`."""
    addresses: set[str] = set()
    instances = 0
    for gpu in gpus:
        addresses.add(gpu.physical_address)
        instances += gpu.is_instance
    text = f"{len(addresses)} divided"
    return f"{text} ({count(instances, 'MIG instance')})" if instances else text


def _known_findings(host: Host) -> list[Finding]:
    """Return what the daemon says of GPUs and entries, except of MIG mode, which `mig` reports."""
    kinds = (ABOUT_GPU, ABOUT_DEVICES, ABOUT_MIG_LAYOUT, ABOUT_ENTRY)
    findings = []
    for condition in host.conditions(*kinds):
        finding = finding_of(condition)
        if finding.code in _OF_HARDWARE:
            finding = finding._replace(hint=_SEE_KERNEL_LOG)
        if finding.code != MIG_ENABLED:
            findings.append(finding)
    return findings


def _own_findings(host: Host) -> list[Finding]:
    """Return what the daemon does not say: it does not run, or has not polled a GPU since that failed."""
    plan = host.plan()[0]
    known = host.known_gpus()
    findings = [] if host.known_status() else _missing_entries(plan)
    for gpu in _gpus_to_check(host):
        daemons = known.get(gpu.pci_address)
        reason = gpu.reason
        if daemons is None:
            reason = reason or plan.unavailable.get(gpu.pci_address, NO_REASON)
        elif daemons["reason"]:
            continue
        if reason:
            level = warning if reason.code in LAYOUT_WAITS else problem
            hint = hint_of(reason.code, gpu=gpu.pci_address)
            if reason.code in _OF_HARDWARE:
                hint = _SEE_KERNEL_LOG
            findings.append(level(f"{_gpu_name(gpu)}: {reason}", hint, reason.code))
    return findings


def _gpus_to_check(host: Host) -> list[Gpu]:
    """Return our GPUs, except those in MIG mode that are divided as a whole, which `mig` reports."""
    split = {layout.gpu_uuid for layout in host.plan()[0].layouts}
    return [gpu for gpu in host.our_gpus() if gpu.reason or not gpu.mig_enabled or gpu.uuid in split]


def _missing_entries(plan: Plan) -> list[Finding]:
    """Return the findings about entries whose GPUs are missing, and about those that this user cannot see."""
    findings = []
    for entry in plan.missing:
        code = entry.reason.code
        if code != RECORD_HIDDEN:
            text = f"path {entry.path} ({entry.place}): {entry.reason}"
            findings.append(problem(text, hint_of(code), code))
    if len(findings) < len(plan.missing):
        unseen = invisible(WHICH_GPUS)
        findings.append(skipped(unseen.message, unseen.hint))
    return findings


@host_check("MIG", MIG_ENABLED, "off on every GPU that is divided as a whole")
def mig(host: Host) -> Findings:
    """MIG mode, now and after the next reset.

    Source: NVML API Reference, section "Multi Instance GPU Management", nvmlDeviceGetMigMode.
    """
    modes = {layout.gpu_uuid: layout.enabled for layout in host.plan()[0].layouts}
    _refuse_if_none_answers(host.our_gpus())
    for gpu in host.our_gpus():
        is_changing = gpu.mig_pending not in (None, gpu.mig_enabled)
        if gpu.mig_enabled and gpu.uuid not in modes:
            hint = f"nvidia-smi -i {gpu.pci_address} -mig 0, or write mig in its entry to use its instances"
            if is_changing:
                hint = f"reset the GPU to switch it off: {hint_of(MIG_RESET_REQUIRED, gpu=gpu.pci_address)}"
            known = host.known_gpus().get(gpu.pci_address)
            if known and known["devices"]:
                hint = f"once no lease holds its instances (yunion-mps lease list): {hint}"
            yield problem(f"{_gpu_name(gpu)} is in MIG mode, so it cannot be shared as a whole", hint)
        elif is_changing and gpu.mig_pending != modes.get(str(gpu.uuid), False):
            yield _foreign_mode_change(gpu)


def _foreign_mode_change(gpu: Gpu) -> Finding:
    """Return the warning that another program has requested a MIG mode, in effect after the next reset."""
    mode, requested = ("on", "off") if gpu.mig_enabled else ("off", "on")
    text = f"{_gpu_name(gpu)}: MIG mode is {mode}, and will be {requested} after the next reset"
    means = "its devices will then be unavailable; running jobs are not affected until then"
    hint = f"cancel the change: nvidia-smi -i {gpu.pci_address} -mig {int(bool(gpu.mig_enabled))}"
    return warning(f"{text}: {means}", hint, MIG_RESET_REQUIRED)


@host_check("vGPU", VGPU, "no divided GPU is a vGPU or hosts vGPUs")
def vgpu(host: Host) -> Findings:
    """GPUs that are vGPUs, or that host vGPUs for virtual machines."""
    if not any(gpu.name for gpu in host.our_gpus()):
        raise SkipError("the driver reports no GPU's name, by which vGPUs are known")
    for gpu in host.our_gpus():
        if gpu.name and _VGPU.search(gpu.name):
            text = (
                f"{_gpu_name(gpu)} is a vGPU: not every vGPU type and release supports MPS or enforces its "
                "limits"
            )
            yield warning(
                text, "test it: yunion-mps doctor --selftest; if it fails, pass through a whole GPU"
            )
        guests = _virtual_machines(host, gpu)
        if guests:
            text = (
                f"{_gpu_name(gpu)} hosts {guests} for virtual machines, which use its memory and compute time"
            )
            yield problem(text, "remove the vGPUs, or remove the GPU from the device file")


@host_check("budgets", BUDGET_NOT_ENFORCED, "enforced on every divided GPU")
def budgets(host: Host) -> Findings:
    _refuse_if_none_answers(host.mps_gpus())
    findings = [finding_of(condition) for condition in host.conditions(ABOUT_BUDGET)]
    known = host.known_gpus()
    for gpu in host.mps_gpus():
        if gpu.reason or enforces_budgets(gpu) or gpu.pci_address in known:
            continue
        text = f"{_gpu_name(gpu)} is older than Volta: no budget is enforced"
        if gpu.compute_capability is None:
            text = f"the driver does not report the compute capability of {_gpu_name(gpu)}: unless it is "
            text += "Volta or newer, no budget is enforced"
        hint = "run only jobs that stay within their budgets by themselves"
        findings.append(warning(f"{text}, and each client can use the whole GPU", hint))
    sliced = _time_sliced(host)
    if findings or not sliced:
        return findings
    return [ok(f"enforced on every divided GPU except {sliced}")]


def _refuse_if_none_answers(gpus: Sequence[Gpu]) -> None:
    """Raise SkipError if all GPUs are broken, because nothing is known about them then."""
    if all(gpu.reason for gpu in gpus):
        raise SkipError("no divided GPU answers")


def _time_sliced(host: Host) -> str:
    """Return `the time-sliced ones: 00:06.0, 00:07.0`; empty if no GPU is."""
    sharing = host.plan()[0].sharing
    sliced = [gpu.address for gpu in host.our_gpus() if sharing.get(gpu.pci_address) == TIME_SLICING]
    return f"the time-sliced ones: {', '.join(sliced)}" if sliced else ""


@host_check("job budgets", PROCESS_MEMORY_UNKNOWN)
def job_budgets(host: Host) -> Findings:
    """Check whether `over_budget: terminate` can act: it needs the memory of each process."""
    actions = host.plan()[0].over_budget
    gpus = [gpu for gpu in host.mps_gpus() if not gpu.reason]
    _refuse_if_none_answers(gpus)
    terminating = [gpu for gpu in gpus if actions.get(gpu.uuid or "") == TERMINATE]
    if not terminating:
        return [ok("over_budget is report on every divided GPU")]
    users = host.users()
    findings = []
    for gpu in terminating:
        finding = _check_processes(gpu, users.get(gpu.uuid or ""))
        if finding:
            findings.append(finding)
    if findings:
        return findings
    sliced = _time_sliced(host)
    except_for = f", but not on {sliced}" if sliced else ""
    return [ok(f"over_budget is terminate on {_describe_number(terminating)}{except_for}")]


def _check_processes(gpu: Gpu, memory_mib: Mapping[int, int | None] | None) -> Finding | None:
    """Return why a job on this GPU cannot be terminated, given the memory of its processes by PID."""
    if memory_mib is None:
        return warning(f"{_gpu_name(gpu)} does not report its processes", _UPDATE_DRIVER)
    running = [mib for pid, mib in memory_mib.items() if process_name(pid)]
    if memory_mib and not running:
        text = f"the processes on {_gpu_name(gpu)} are not visible here"
        return warning(f"{text}: over_budget: terminate has no effect on them", _SAME_NAMESPACE)
    if None in running:
        text = f"the driver does not report how much memory the processes on {_gpu_name(gpu)} use"
        return warning(f"{text}: over_budget: terminate has no effect on them", _UPDATE_DRIVER)
    return None


def _describe_number(gpus: Sequence[Gpu]) -> str:
    """Return `2 GPUs and 7 MIG instances`."""
    instances = [gpu for gpu in gpus if gpu.is_instance]
    parts = []
    if len(instances) < len(gpus):
        parts.append(count(len(gpus) - len(instances), "GPU"))
    if instances:
        parts.append(count(len(instances), "MIG instance"))
    return " and ".join(parts)


@host_check("compute mode", COMPUTE_MODE_CHANGED)
def compute_mode(host: Host) -> Findings:
    """The compute modes, which decide what programs outside MPS can do.

    While leases delay a change of how a GPU is shared, the GPU has the mode of its current way of sharing.

    Source: NVIDIA: Multi-Process Service, section "GPU Compute Modes".
    """
    plan = host.plan()[0]
    of_the_daemon = host.conditions(ABOUT_COMPUTE_MODE)
    reported = {condition["gpu"] for condition in of_the_daemon}
    is_served = _is_served(host)
    not_compared = _gpus_without_comparison(host, plan)
    uuids = {gpu.parent or gpu.uuid for gpu in host.our_gpus() if gpu.pci_address not in not_compared}
    gpus = [gpu for gpu in host.inventory().gpus if gpu.uuid in uuids and not gpu.reason]
    findings = [finding_of(condition) for condition in of_the_daemon]
    for gpu in gpus:
        mode = plan.compute_modes.get(gpu.uuid or "")
        finding = _check_mode(gpu, mode, is_served=is_served)
        if finding and mode and _is_as_the_daemon_wants(host, gpu):
            text = f"{_gpu_name(gpu)} is in compute mode {gpu.compute_mode}; the files require {mode}, but "
            text += "the daemon has not read them since they changed"
            finding = warning(text, hint_of(RELOAD_NEEDED), RELOAD_NEEDED)
        if finding and gpu.address not in reported:
            findings.append(finding)
    if findings:
        return findings
    if not gpus:
        raise SkipError("no GPU's compute mode can be compared now")
    return [ok(_describe_modes(gpus, plan, is_served=is_served))]


def _gpus_without_comparison(host: Host, plan: Plan) -> set[str]:
    """Return the addresses of the GPUs whose modes are not compared with the plan's."""
    addresses: set[str] = set()
    for address, gpu in host.known_gpus().items():
        way = gpu["sharing"]
        is_shared_as_before = way and way != plan.sharing.get(address, MIG)
        if is_shared_as_before or gpu["reason_code"] == COMPUTE_MODE_FIXED:
            addresses.add(address)
    for address, reason in plan.unavailable.items():
        if reason.code == COMPUTE_MODE_EXCLUSIVE:  # reported by `gpus`
            addresses.add(address)
    return addresses


def _is_as_the_daemon_wants(host: Host, gpu: Gpu) -> bool:
    """Return whether the daemon knows the GPU's compute mode and finds nothing wrong with it."""
    known = host.known_gpus().get(gpu.pci_address)
    status = host.known_status()
    if not known or not status or known["compute_mode"] != gpu.compute_mode or known["reason"]:
        return False
    return gpu.address not in [problem["gpu"] for problem in status["problems"]]


def _describe_modes(gpus: Sequence[Gpu], plan: Plan, *, is_served: bool) -> str:
    """Describe the modes, all of which are right: those that are set, kept, and not known."""
    modes: set[str] = set()
    unknown: list[str] = []
    unchanged: list[str] = []
    for gpu in gpus:
        if gpu.compute_mode is None:
            unknown.append(gpu.address)
        else:
            modes.add(gpu.compute_mode)
        if gpu.pci_address in plan.kept_modes:
            unchanged.append(gpu.address)
    parts = [", ".join(sorted(modes))] if modes else []
    if unchanged:
        place = "" if len(unchanged) == len(gpus) else f" on {', '.join(unchanged)}"
        parts.append(f"left unchanged{place} because cuda_mps_compute_mode is keep")
    elif not plan.compute_modes and not unknown:
        parts.append("left unchanged because no GPU can be divided")
    if plan.compute_modes and not is_served:
        future = ", ".join(sorted(set(plan.compute_modes.values())))
        parts.append(f"the daemon will set {future} when it starts")
    if unknown:
        parts.append(f"the driver does not report that of {', '.join(unknown)}, which stays as it is")
    return "; ".join(parts)


def _check_mode(gpu: Gpu, planned: str | None, *, is_served: bool) -> Finding | None:
    setting = f"nvidia-smi -i {gpu.pci_address} -c"
    if gpu.compute_mode == PROHIBITED and (is_served or planned is None):
        return problem(
            f"{_gpu_name(gpu)} is in compute mode Prohibited: no CUDA program can use it",
            f"{setting} {DEFAULT.upper()}",
        )
    if is_served and planned and gpu.compute_mode not in (None, planned):
        text = f"{_gpu_name(gpu)} is in compute mode {gpu.compute_mode} instead of {planned}"
        hint = f"find what changed it (yunion-mps events --kind compute_mode); {setting} {planned.upper()}"
        means = "programs that bypass the control daemon run without limits"
        if planned == DEFAULT:
            means = "a single program would keep all others out, so its devices are unavailable"
        return problem(f"{text}: {means}", hint)
    if not is_served and gpu.compute_mode == EXCLUSIVE_PROCESS:
        text = (
            f"{_gpu_name(gpu)} is in mode {EXCLUSIVE_PROCESS} without a control daemon: it accepts one "
            "program at a time"
        )
        hint = f"start the daemon (systemctl start yunion-mps-daemon), or: {setting} {DEFAULT.upper()}"
        return warning(f"{text}, and all others fail because the GPU is busy", hint)
    return None


@host_check("client limit", CLIENT_LIMIT)
def client_limit(host: Host) -> Findings:
    driver = host.inventory().driver
    override = host.config()[0].cuda_mps_max_clients
    users = host.users()
    numbers: list[int] = []
    limits: list[int] = []
    is_clear = True
    unknown: list[str] = []
    for gpu in host.mps_gpus():
        if not gpu.uuid or gpu.reason:
            continue
        limit = max_clients(gpu, driver, override)
        if gpu.uuid not in users:
            unknown.append(gpu.address)
            continue
        clients = [pid for pid in users[gpu.uuid] if not is_server(pid)]
        number = len(clients)
        numbers.append(number)
        limits.append(limit)
        is_clear = is_clear and number < limit * _WARNING_SHARE
        if number >= limit:
            text = (
                f"GPU {gpu.address} has {number} clients, and MPS allows {limit}: the next one will be "
                "refused"
            )
            yield problem(
                text, "end some (list them: yunion-mps who --clients), or use fewer processes per job"
            )
        elif number >= limit * _WARNING_SHARE:
            text = f"GPU {gpu.address} has {number} of the {limit} clients that MPS allows"
            yield warning(text, "list them: yunion-mps who --clients")
    if not numbers and unknown:
        raise SkipError(f"the driver does not report the processes on {list_of(unknown)}")
    if not numbers:
        raise SkipError("no divided GPU answers")
    if is_clear:
        text = f"at most {max(numbers)} of {min(limits)} clients on a GPU"
        yield ok(f"{text}; not known for {list_of(unknown)}" if unknown else text)


def _is_served(host: Host) -> bool:
    """Return whether something serves devices now: a control daemon, or the daemon without MPS."""
    status = host.known_status()
    if status is None:
        return bool(host.control_pids())
    for gpu in host.served_gpus().values():
        if gpu["sharing"] not in (MPS, None):
            return True
    return any(domain["pid"] for domain in status["domains"])


def _virtual_machines(host: Host, gpu: Gpu) -> str:
    """Describe the GPU's use by virtual machines, as sysfs shows it; empty if there is none.

    Source: Linux, Documentation/ABI/testing/sysfs-bus-vfio-mdev and Documentation/PCI/pci-iov-howto.rst.
    """
    folder = os.path.join(host.paths.pci_devices, gpu.pci_address)
    mediated = glob.glob(os.path.join(folder, "mdev_supported_types/*/devices/*"))
    if mediated:
        return count(len(mediated), "vGPU")
    number = read_text(os.path.join(folder, "sriov_numvfs")).strip()
    return count(int(number), "virtual function") if number.isdigit() and int(number) else ""


def _gpu_name(gpu: Gpu) -> str:
    return f"GPU {gpu.address} ({gpu.name})" if gpu.name else f"GPU {gpu.address}"
