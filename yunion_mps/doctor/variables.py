"""What a program's variables mean for MPS, and what `docker run` gives a container. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from yunion_mps.config.document import nearest_key
from yunion_mps.doctor.host import Finding, problem, warning
from yunion_mps.models import CDI_KIND, DomainPlan

PIPE = "CUDA_MPS_PIPE_DIRECTORY"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

#: Those that decide what a client of MPS gets (NVIDIA's MPS documentation, its appendix).
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
#: Variables of others that look like them, and are no mistakes.
_OTHERS = (
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_DEVICE_WAITS_ON_EXCEPTION",
    "CUDA_VERSION",
    "CUDA_HOME",
    "CUDA_PATH",
)

#: `0=5760M,1=4G`; anything else is silently ignored.
_LIMIT = re.compile(r"\d+=\d+[KMGkmg]?[Bb]?$")
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024}

_HOW = (
    'start it with: yunion-mps run COMMAND; or set the variables of a device: eval "$(yunion-mps env DEVICE)"'
)


def misspelt(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that no program reads, and that were likely meant to be another."""
    for name in sorted(variables):
        if name in RELEVANT or name in _OTHERS:
            continue
        near = name.upper() if name.upper() in RELEVANT else nearest_key(name, RELEVANT)
        if near:
            yield problem(f"{name} has no effect (did you mean {near}?)", f"write {near} instead")
        elif name.startswith("CUDA_MPS_"):
            real = ", ".join(known for known in RELEVANT if known.startswith("CUDA_MPS_"))
            yield warning(f"{name} is not a known MPS variable", f"known variables: {real}")


def values(variables: Mapping[str, str], domain: DomainPlan) -> Iterator[Finding]:
    """What a client of the domain gets otherwise than was likely meant."""
    seen = _seen(variables.get(VISIBLE), domain)
    yield from _visible(variables, domain)
    yield from _order(variables, domain)
    yield from _memory(variables.get(MEMORY), seen, domain)
    yield from _threads(variables.get(THREADS), domain)


def no_place(variables: Mapping[str, str], default: str, served: Sequence[str]) -> Finding:
    """The finding for an environment whose pipe directory is none of ours."""
    place = variables.get(PIPE)
    if place is None:
        what = f"{PIPE} is not set: it looks in {default}, which no yunion-mps control daemon serves"
    else:
        what = (
            f"{PIPE} is {place}, which no yunion-mps control daemon serves (they serve "
            f"{' and '.join(served)})"
        )
    what += "; it runs without limits, or fails because the GPU is in mode Exclusive_Process"
    return problem(what, _HOW)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _seen(visible: str | None, domain: DomainPlan) -> list[str]:
    """The UUIDs of the GPUs that it sees, in its own order; CUDA stops at the first that it does not know."""
    if visible is None:
        return list(domain.gpu_uuids)
    found: list[str] = []
    for word in _words(visible):
        uuid = _one(word, domain)
        if uuid is None:
            break
        found.append(uuid)
    return found


def _one(word: str, domain: DomainPlan) -> str | None:
    if word.isdigit():
        return domain.gpu_uuids[int(word)] if int(word) < len(domain.gpu_uuids) else None
    return next((uuid for uuid in domain.gpu_uuids if word and uuid.startswith(word)), None)


def _visible(variables: Mapping[str, str], domain: DomainPlan) -> Iterator[Finding]:
    text = variables.get(VISIBLE)
    if text is None:
        if len(domain.gpu_uuids) > 1:
            what = f"{VISIBLE} is not set: it sees all {len(domain.gpu_uuids)} GPUs of its control daemon"
            yield warning(what, _HOW)
        return
    words = _words(text)
    unknown = [word for word in words if domain.gpu_uuids and _one(word, domain) is None]
    if any(word.startswith("MIG-") for word in words):
        yield problem(f"{VISIBLE} names a MIG device ({text}), which yunion-mps does not serve", _HOW)
    elif unknown:
        what = f"{VISIBLE} is {text!r}: its control daemon has no GPU {unknown[0]!r}"
        yield problem(f"{what}, so CUDA ignores it and every entry after it", _HOW)
    elif any(word.isdigit() for word in words):
        what = f"{VISIBLE} is {text!r}: with MPS, numbers count the control daemon's GPUs, not nvidia-smi's"
        yield warning(what, f"name GPUs by UUID: {','.join(_seen(text, domain))}")


def _order(variables: Mapping[str, str], domain: DomainPlan) -> Iterator[Finding]:
    text = variables.get(ORDER)
    if text not in (None, "PCI_BUS_ID", "FASTEST_FIRST"):
        yield problem(f"{ORDER} is {text!r}, which is not a valid value", f"write {ORDER}=PCI_BUS_ID")
    by_number = any(word.isdigit() for word in _words(variables.get(VISIBLE, "0")))
    if text != "PCI_BUS_ID" and by_number and len(domain.gpu_uuids) > 1:
        what = (
            f"{ORDER} is {text or 'not set'}: CUDA numbers GPUs from the fastest, nvidia-smi by PCI address"
        )
        yield warning(what, f"write {ORDER}=PCI_BUS_ID, or name GPUs by UUID")


def _memory(text: str | None, seen: Sequence[str], domain: DomainPlan) -> Iterator[Finding]:
    if text is None:
        return
    limits = dict(zip(domain.gpu_uuids, domain.memory_limits_mib))
    for entry in text.split(","):
        if not _LIMIT.match(entry):
            what = f"{MEMORY} is {text!r}: {entry!r} is not valid, so nothing is limited"
            yield problem(what, f"write whole numbers without spaces or quotes: {MEMORY}=0=5760M")
            continue
        number, _, size = entry.partition("=")
        if domain.gpu_uuids and int(number) >= len(seen):
            what = (
                f"{MEMORY} is {text!r}: there is no GPU {number}, because it sees {len(seen)} GPUs, "
                "numbered from 0"
            )
            yield problem(
                f"{what}; one such entry disables all limits", "number the GPUs that it sees from 0"
            )
            continue
        limit = limits.get(seen[int(number)]) if int(number) < len(seen) else None
        if limit is not None and _mib(size) > limit:
            what = f"{MEMORY} is {text!r}, which exceeds the {limit} MiB that the control daemon allows"
            yield warning(f"{what}, so it gets {limit} MiB", "a client can only lower its limit")


def _mib(size: str) -> float:
    digits = size.rstrip("KMGBkmgb")
    unit = size[len(digits) :][:1].upper()
    return int(digits) * _MIB[unit] if unit in _MIB else int(digits) / (1 << 20)


def _threads(text: str | None, domain: DomainPlan) -> Iterator[Finding]:
    if text is None:
        return
    try:
        percentage = float(text)
    except ValueError:
        percentage = 0.0
    if not 0 < percentage <= 100:
        what = f"{THREADS} is {text!r}, which is not a valid value"
        yield problem(what, f"write a number above 0 and up to 100: {THREADS}=25")
    elif percentage > domain.thread_percentage:
        what = f"{THREADS} is {text}, but the control daemon allows only {domain.thread_percentage:g} %"
        yield warning(f"{what}, so it gets that share", "a client can only lower its limit")


_ENGINES = ("docker", "podman", "nerdctl")
_SHM = "/dev/shm"


def starts_container(words: Sequence[str]) -> bool:
    """Whether the command starts a container: `docker run ...`."""
    return os.path.basename(words[0]) in _ENGINES and "run" in words


def device_in(words: Sequence[str]) -> str:
    """Our device that it is given by CDI, with all that it needs; empty if it is given none."""
    given = (text.partition("=") for text in _values(words, "--device"))
    return next((name for kind, _, name in given if kind == CDI_KIND), "")


def variables_in(words: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """The variables that it gives its container, the pipe directory as the host names it."""
    found = {}
    for text in _values(words, "-e", "--env"):
        name, equals, value = text.partition("=")
        if equals or name in own:
            found[name] = value if equals else own[name]
    place = os.path.normpath(found.get(PIPE, ""))
    for host_side, container_side in _mounts(words):
        if PIPE in found and (place == container_side or place.startswith(f"{container_side}/")):
            found[PIPE] = host_side + place[len(container_side) :]
    return found


def shared(words: Sequence[str]) -> list[Finding]:
    """What client and server must share, and do not."""
    mounts = _mounts(words)
    found = []
    if "host" not in _values(words, "--ipc") and not any(here == _SHM for here, _ in mounts):
        what = f"the container has a private {_SHM}, so it cannot share memory with an MPS server"
        found.append(problem(what, f"add --ipc=host, or -v {_SHM}:{_SHM}"))
    given = dict(text.partition("=")[::2] for text in _values(words, "-e", "--env"))
    place = os.path.normpath(given.get(PIPE) or "/")
    if place != "/" and not any(f"{place}/".startswith(f"{there}/") for _, there in mounts):
        found.append(problem(f"the container does not see {place}", f"add -v {place}:{place}"))
    return found


def _mounts(words: Sequence[str]) -> list[tuple[str, str]]:
    """The directories of the host, and where the container has them."""
    found = []
    for text in _values(words, "-v", "--volume"):
        parts = text.split(":")
        if len(parts) > 1:
            found.append((os.path.normpath(parts[0]), os.path.normpath(parts[1])))
    for text in _values(words, "--mount"):
        given = dict(part.partition("=")[::2] for part in text.split(","))
        here, there = given.get("source", given.get("src")), given.get("target", given.get("dst"))
        if here and there:
            found.append((os.path.normpath(here), os.path.normpath(there)))
    return found


def _values(words: Sequence[str], *options: str) -> Iterator[str]:
    """What is given with the options, as `--env X=1`, `--env=X=1` and `-eX=1` have it."""
    for place, word in enumerate(words):
        if word in options:
            yield from words[place + 1 : place + 2]
        for option in options:
            long = option.startswith("--")
            if word.startswith(f"{option}=") or (not long and word.startswith(option) and word != option):
                yield word[len(option) :].removeprefix("=")
