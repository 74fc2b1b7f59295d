"""The GPUs that are divided: whether they answer, and whether MPS can do there what is promised."""

from __future__ import annotations

import glob
import os
import re

from yunion_mps.doctor.host import NO_GPU, Host, SkipError, read
from yunion_mps.doctor.report import Finding, Findings, check, ok, problem, warning
from yunion_mps.errors import YunionError
from yunion_mps.models import DEFAULT, EXCLUSIVE_PROCESS, PROHIBITED, Gpu
from yunion_mps.mps.processes import is_server
from yunion_mps.planning import enforces_budgets, max_clients

#: From this share of the limit on, it is worth a warning.
_NEARLY = 0.9
#: The driver in a virtual machine names a vGPU by its profile: `GRID T4-16C`, `NVIDIA A40-48Q`, `A100-1-5C`.
_VGPU = re.compile(r"-(?:\d-)?\d+(?:ME)?[ABCQ]$")


@check("GPUs")
def gpus(host: Host) -> Findings:
    """Whether each of our GPUs answers, and can serve."""
    ours, unavailable = host.our_gpus(), host.plan()[0].unavailable
    hint = "see: yunion-mps gpus; dmesg | grep -iE 'nvrm|xid'"
    found = []
    for gpu in ours:
        reason = gpu.reason or ("" if gpu.mig_enabled else unavailable.get(gpu.pci_address, ""))
        if reason:
            found.append(problem(f"{_named(gpu)}: {reason}", hint))
    return found or [ok(f"{len(ours)} divided, each answers")]


@check("MIG", "off on every GPU that is divided")
def mig(host: Host) -> Findings:
    """MIG mode, in which a GPU as a whole has no MPS."""
    for gpu in host.our_gpus():
        if gpu.mig_enabled:
            hint = f"nvidia-smi -i {gpu.pci_address} -mig 0, or take it out of the device file"
            yield problem(f"{_named(gpu)} is in MIG mode, which excludes MPS on it as a whole", hint)


@check("vGPU", "no GPU that is divided is a vGPU, or has any")
def vgpu(host: Host) -> Findings:
    """GPUs that are one virtual machine's share already, or whose memory is given to virtual machines."""
    for gpu in host.our_gpus():
        if gpu.name and _VGPU.search(gpu.name):
            what = f"{_named(gpu)} is a vGPU: not every vGPU type and release has MPS or keeps its limits"
            yield warning(what, "try it: yunion-mps doctor --selftest; better pass a whole GPU through")
        guests = _guests(host, gpu)
        if guests:
            what = f"{_named(gpu)} serves {guests} for virtual machines, which take its memory and time"
            yield problem(what, "end them, or take it out of the device file")


@check("budgets", "enforced on every GPU that is divided")
def budgets(host: Host) -> Findings:
    """Whether limits are enforced at all."""
    for gpu in host.our_gpus():
        if not gpu.reason and not enforces_budgets(gpu):
            what = f"{_named(gpu)} is older than Volta: no budget is enforced, each client can use all of it"
            yield warning(what, "use such GPUs only for jobs that keep to their budgets by themselves")


@check("compute mode")
def compute_mode(host: Host) -> Findings:
    """The modes: what a program does that misses the control daemon depends on them."""
    wanted = host.plan()[0].compute_modes
    serves = _serves(host)
    ours = [gpu for gpu in host.our_gpus() if gpu.compute_mode]
    found = [finding for gpu in ours if (finding := _mode(gpu, wanted.get(gpu.uuid or ""), serves=serves))]
    if found:
        return found
    if not ours:
        raise SkipError(NO_GPU)
    modes = ", ".join(sorted({str(gpu.compute_mode) for gpu in ours}))
    if not wanted:
        return [ok(f"{modes}, which cuda_mps_compute_mode: keep leaves as it is")]
    return [ok(modes if serves else f"{modes}; the daemon sets {EXCLUSIVE_PROCESS} at its start")]


def _mode(gpu: Gpu, wanted: str | None, *, serves: bool) -> Finding | None:
    setting = f"nvidia-smi -i {gpu.pci_address} -c"
    if gpu.compute_mode == PROHIBITED and (serves or wanted is None):
        return problem(
            f"{_named(gpu)} is Prohibited: no CUDA program can use it", f"{setting} {DEFAULT.upper()}"
        )
    if serves and wanted and gpu.compute_mode != wanted:
        what = f"{_named(gpu)} is {gpu.compute_mode}, not {wanted}: a program that misses the control daemon"
        hint = f"find what changed it (yunion-mps events --kind compute_mode); {setting} {wanted.upper()}"
        return problem(f"{what} runs without limits", hint)
    if not serves and gpu.compute_mode == EXCLUSIVE_PROCESS:
        what = (
            f"{_named(gpu)} is {EXCLUSIVE_PROCESS} without a control daemon: it takes one program at a time"
        )
        hint = f"start the daemon (systemctl start yunion-mps-daemon), or: {setting} {DEFAULT.upper()}"
        return warning(f"{what}, others find it busy or unavailable", hint)
    return None


@check("client limit")
def client_limit(host: Host) -> Findings:
    """How many clients each GPU has of those that MPS allows there."""
    driver, override = host.inventory().driver, host.config()[0].cuda_mps_max_clients
    users = host.users()
    counts = []
    for gpu in host.our_gpus():
        if not gpu.uuid or gpu.reason:
            continue
        limit = max_clients(gpu, driver, override)
        number = sum(not is_server(pid) for pid in users.get(gpu.uuid, {}))
        counts.append((number, limit))
        if number >= limit:
            what = f"GPU {gpu.address} has {number} clients, and MPS allows {limit}: the next one is refused"
            yield problem(what, "end some (yunion-mps clients), or give each job fewer processes")
        elif number >= limit * _NEARLY:
            what = f"GPU {gpu.address} has {number} clients of the {limit} that MPS allows"
            yield warning(what, "see who they are: yunion-mps clients")
    if not counts:
        raise SkipError(NO_GPU)
    if all(number < limit * _NEARLY for number, limit in counts):
        most, limits = max(number for number, _ in counts), [limit for _, limit in counts]
        yield ok(f"at most {most} on a GPU, of {min(limits)}")


def _serves(host: Host) -> bool:
    try:
        return any(domain["pid"] for domain in host.status()["domains"])
    except YunionError:
        return any(host.control_pid(domain) for domain in host.domains())


def _guests(host: Host, gpu: Gpu) -> str:
    """What sysfs shows of virtual machines on the GPU; empty if there are none."""
    folder = os.path.join(host.paths.pci_devices, gpu.pci_address)
    mediated = glob.glob(os.path.join(folder, "mdev_supported_types/*/devices/*"))
    if mediated:
        return f"{len(mediated)} vGPU{'s' if len(mediated) > 1 else ''}"
    number = read(os.path.join(folder, "sriov_numvfs")).decode(errors="replace").strip()
    return f"{number} virtual functions" if number.isdigit() and int(number) else ""


def _named(gpu: Gpu) -> str:
    return f"GPU {gpu.address} ({gpu.name})" if gpu.name else f"GPU {gpu.address}"
