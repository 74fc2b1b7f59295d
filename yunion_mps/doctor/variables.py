"""The meaning of a program's variables for MPS, and what a container does not share. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from yunion_mps.config.document import nearest_key
from yunion_mps.containers.command import mounts_in, option_values
from yunion_mps.core.models import DomainPlan
from yunion_mps.core.text import parse_number
from yunion_mps.doctor.checks import Finding, problem, warning

PIPE = "CUDA_MPS_PIPE_DIRECTORY"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

#: Variables that decide what an MPS client gets (NVIDIA: Multi-Process Service, section "Appendix:
#: Environment Variables"; CUDA Programming Guide, section "CUDA Environment Variables").
RELEVANT = (
    PIPE,
    VISIBLE,
    ORDER,
    MEMORY,
    THREADS,
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
#: Other programs' variables that only look like misspellings.
_OTHERS = (
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_DEVICE_WAITS_ON_EXCEPTION",
    "CUDA_VERSION",
    "CUDA_HOME",
    "CUDA_PATH",
)

#: `0=5760M,1=4G`; anything else is silently ignored.
_LIMIT = re.compile(r"[0-9]+=[0-9]+[KMGkmg]?[Bb]?$")
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024}


def start_hint(command: str, device: str) -> str:
    """Return how to start a command as an MPS client, with `yunion-mps run` or with a device's variables."""
    variables = f'eval "$(yunion-mps env {device})"'
    return f"start it with: yunion-mps run {command}; or set the variables of a device: {variables}"


def misspelt(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables that no program reads and that were likely meant to be others."""
    for name in sorted(variables):
        if name in RELEVANT or name in _OTHERS:
            continue
        near = name.upper() if name.upper() in RELEVANT else nearest_key(name, RELEVANT)
        if near:
            yield problem(f"{name} has no effect (did you mean {near}?)", f"write {near} instead")
        elif name.startswith("CUDA_MPS_"):
            real = ", ".join(name for name in RELEVANT if name.startswith("CUDA_MPS_"))
            yield warning(f"{name} is not a known MPS variable", f"known variables: {real}")


def check_values(variables: Mapping[str, str], domain: DomainPlan, hint: str) -> Iterator[Finding]:
    """Find values that give a client of the domain something other than was likely meant.

    `hint`: how to start it with the right ones, from `start_hint`.

    Source: NVIDIA: Multi-Process Service, section "Appendix: Environment Variables"; CUDA Programming Guide,
    section "CUDA Environment Variables".
    """
    visible = _visible_gpus(variables.get(VISIBLE), domain)
    yield from _check_visible(variables, domain, hint)
    yield from _check_order(variables, domain)
    yield from _check_memory(variables.get(MEMORY), visible, domain)
    yield from _check_threads(variables.get(THREADS), domain)


def not_served(variables: Mapping[str, str], default: str, served: Sequence[str], hint: str) -> Finding:
    """Return the finding for a pipe directory that none of our control daemons serves.

    default: where CUDA looks without the variable
    served: the pipe directories of our control daemons
    """
    directory = variables.get(PIPE)
    if directory is None:
        text = f"{PIPE} is not set, so CUDA looks in {default}, which no yunion-mps control daemon serves"
    else:
        text = (
            f"{PIPE} is {directory}, which no yunion-mps control daemon serves (they serve "
            f"{' and '.join(served)})"
        )
    text += "; the program runs without limits, or fails because the GPU is in mode Exclusive_Process"
    return problem(text, hint)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _visible_gpus(visible: str | None, domain: DomainPlan) -> list[str]:
    """Return the UUIDs of the visible GPUs in the program's order; CUDA stops at the first unknown entry."""
    if visible is None:
        return list(domain.gpu_uuids)
    uuids: list[str] = []
    for word in _words(visible):
        uuid = _find_gpu(word, domain)
        if uuid is None:
            break
        uuids.append(uuid)
    return uuids


def _find_gpu(word: str, domain: DomainPlan) -> str | None:
    number = parse_number(word)
    if number is not None:
        return domain.gpu_uuids[number] if number < len(domain.gpu_uuids) else None
    for uuid in domain.gpu_uuids:
        if word and uuid.startswith(word):
            return uuid
    return None


def _check_visible(variables: Mapping[str, str], domain: DomainPlan, hint: str) -> Iterator[Finding]:
    text = variables.get(VISIBLE)
    if text is None:
        if len(domain.gpu_uuids) > 1:
            visible = f"all {len(domain.gpu_uuids)} GPUs of its control daemon"
            yield warning(f"{VISIBLE} is not set, so the program sees {visible}", hint)
        return
    words = _words(text)
    unknown = [word for word in words if domain.gpu_uuids and _find_gpu(word, domain) is None]
    if any(word.startswith("MIG-") for word in unknown):
        yield problem(f"{VISIBLE} names a MIG device ({text}), which its control daemon does not serve", hint)
    elif unknown:
        message = f"{VISIBLE} is {text!r}: its control daemon has no GPU {unknown[0]!r}"
        yield problem(f"{message}, so CUDA ignores this entry and all that follow", hint)
    elif any(parse_number(word) is not None for word in words):
        message = f"{VISIBLE} is {text!r}: with MPS, the control daemon numbers GPUs, not nvidia-smi"
        yield warning(message, f"name GPUs by UUID: {','.join(_visible_gpus(text, domain))}")


def _check_order(variables: Mapping[str, str], domain: DomainPlan) -> Iterator[Finding]:
    text = variables.get(ORDER)
    if text not in (None, "PCI_BUS_ID", "FASTEST_FIRST"):
        yield problem(f"{ORDER} is {text!r}, which is not a valid value", f"write {ORDER}=PCI_BUS_ID")
    by_number = any(parse_number(word) is not None for word in _words(variables.get(VISIBLE, "0")))
    if text != "PCI_BUS_ID" and by_number and len(domain.gpu_uuids) > 1:
        message = f"{ORDER} is {text or 'not set'}: CUDA numbers GPUs by speed, nvidia-smi by PCI address"
        yield warning(message, f"write {ORDER}=PCI_BUS_ID, or name GPUs by UUID")


def _check_memory(text: str | None, visible: Sequence[str], domain: DomainPlan) -> Iterator[Finding]:
    if text is None:
        return
    limits = dict(zip(domain.gpu_uuids, domain.memory_limits_mib))
    for entry in text.split(","):
        if not _LIMIT.match(entry):
            message = f"{MEMORY} is {text!r}: {entry!r} is not valid, so nothing is limited"
            yield problem(message, f"write whole numbers without spaces or quotes: {MEMORY}=0=5760M")
            continue
        number, _, size = entry.partition("=")
        index = parse_number(number)
        is_visible = index is not None and index < len(visible)
        if domain.gpu_uuids and not is_visible:
            message = (
                f"{MEMORY} is {text!r}: there is no GPU {number}, because the program sees "
                f"{len(visible)} GPUs, numbered from 0"
            )
            yield problem(
                f"{message}; one such entry disables all limits",
                "number the GPUs that the program sees from 0",
            )
            continue
        limit = limits.get(visible[index]) if index is not None and is_visible else None
        if limit is not None and _mib(size) > limit:
            message = f"{MEMORY} is {text!r}, which exceeds the {limit} MiB that the control daemon allows"
            yield warning(f"{message}, so the program gets {limit} MiB", "a client can only lower its limit")


def _mib(size: str) -> float:
    digits = size.rstrip("KMGBkmgb")
    unit = size[len(digits) :][:1].upper()
    number = float(digits)  # of any length
    return number * _MIB[unit] if unit in _MIB else number / (1 << 20)


def _check_threads(text: str | None, domain: DomainPlan) -> Iterator[Finding]:
    if text is None:
        return
    try:
        percentage = float(text)
    except ValueError:
        percentage = 0.0
    if not 0 < percentage <= 100:
        message = f"{THREADS} is {text!r}, which is not a valid value"
        yield problem(message, f"write a number above 0 and up to 100: {THREADS}=25")
    elif percentage > domain.thread_percentage:
        message = f"{THREADS} is {text}, but the control daemon allows only {domain.thread_percentage:g} %"
        yield warning(f"{message}, so the program gets that share", "a client can only lower its limit")


_SHM = "/dev/shm"


def sharing_problems(words: Sequence[str]) -> list[Finding]:
    """Return what keeps a container from sharing memory and the pipe directory.

    words: those that follow `docker run`, whose --ipc decides which /dev/shm the container has.
    """
    mounts = mounts_in(words)
    findings = []
    if "host" not in option_values(words, "ipc") and not any(source == _SHM for source, _ in mounts):
        text = f"the container has a private {_SHM}, so it cannot share memory with an MPS server"
        findings.append(problem(text, f"add --ipc=host, or -v {_SHM}:{_SHM}"))
    pipe = ""
    for assignment in option_values(words, "env"):
        name, _, value = assignment.partition("=")
        if name == PIPE:
            pipe = value
    directory = os.path.normpath(pipe or "/")
    if directory != "/" and not any(f"{directory}/".startswith(f"{target}/") for _, target in mounts):
        findings.append(problem(f"the container does not see {directory}", f"add -v {directory}:{directory}"))
    return findings
