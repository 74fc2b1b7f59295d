"""What a simulated host is to be, read from the YAML of `simhost --gpus FILE` or from Python values.

See README.md in this folder for all keys. Whatever is not given is made up, the same each time and unique.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Union

from .catalog import COMPUTE_MODES, KINDS, OTHER_KINDS, Kind, OtherKind
from .layout import MAX_GPUS, MAX_OTHERS

# The one GPU of the reference case in the project's design.
REFERENCE = {
    "gpus": [{"kind": "tesla-p40", "uuid": "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400", "pci": "0000:00:06.0"}]
}

_NAMESPACE = uuid.UUID("5d6e1a52-7b0c-4f0e-9c1d-3a2f6f1c5e10")
_PCI = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([01][0-9a-fA-F])\.0")
FIRST_RENDER = 128  # the kernel numbers render nodes from 128

Description = Union[Mapping[str, Any], Sequence[Mapping[str, Any]]]
Pci = tuple[int, int, int]  # domain, bus, device; the function is always 0
Rule = tuple[Callable[[Any], object], str]  # whether a value is right, and what it must be


class DescriptionError(ValueError):
    """A description of a simulated host is wrong: says where, what, and what would be right."""


def address_of(pci: Pci) -> str:
    """Return the PCI address as Linux writes it, e.g. 0000:00:06.0."""
    return "{:04x}:{:02x}:{:02x}.0".format(*pci)


class OtherDescription(NamedTuple):
    """One device of another vendor."""

    kind: OtherKind
    pci: Pci
    numa_node: int
    render: int | None

    @property
    def address(self) -> str:
        return address_of(self.pci)


class GpuDescription(NamedTuple):
    """One GPU, everything decided."""

    kind: Kind
    kind_name: str
    name: str
    uuid: str
    pci: Pci
    memory_mib: int
    compute_mode: int  # nvmlComputeMode_t
    mig: bool
    numa_node: int  # -1: none, as the kernel says it
    render: int | None
    minor: int
    virtual_number: int
    processes: list[dict[str, Any]]  # as SimGpu.add_process takes them
    lost: bool
    present: bool

    @property
    def address(self) -> str:
        return address_of(self.pci)

    @property
    def capability(self) -> tuple[int, int]:
        return self.kind.capability


class HostDescription(NamedTuple):
    """A whole host; the GPUs are in the order of their PCI addresses, which is NVML's."""

    driver_version: str
    cuda_version: tuple[int, int]
    driver_loaded: bool
    drm_loaded: bool
    gpus: list[GpuDescription]
    others: list[OtherDescription]


def _number(least: int, most: int) -> Rule:
    return (lambda it: type(it) is int and least <= it <= most), f"a whole number from {least} to {most}"


def _text(most: int) -> Rule:
    return (
        lambda it: isinstance(it, str) and 0 < len(it) <= most and it.isascii(),
        f"a text of 1 to {most} ASCII characters",
    )


def _like(pattern: str, example: str) -> Rule:
    return (lambda it: isinstance(it, str) and re.fullmatch(pattern, it)), f"a text like {example}, in quotes"


def _one_of(known: Iterable[str]) -> Rule:
    return [*known].__contains__, f"one of: {', '.join(known)}"


_FLAG: Rule = (lambda it: isinstance(it, bool)), "true or false"
_LIST: Rule = (lambda it: isinstance(it, (list, tuple))), "a list"
_HOST: dict[str, Rule] = {
    "driver": ((lambda it: isinstance(it, Mapping)), "a mapping"),
    "gpus": _LIST,
    "others": _LIST,
}
_DRIVER = {
    "version": _text(60),
    "cuda": _like(r"\d{1,3}\.\d", '"12.2"'),
    "loaded": _FLAG,
    "drm": _FLAG,
}
_PCI_RULE = _like(_PCI.pattern, "'0000:00:06.0'")
_NUMA_NODE = _number(-1, 1023)
_RENDER: Rule = (lambda it: it is None or (type(it) is int and 0 <= it <= 255)), "null or 0 to 255"
_GPU = {
    "kind": _one_of(KINDS),
    "count": _number(1, MAX_GPUS),
    "name": _text(90),
    "uuid": _text(60),
    "pci": _PCI_RULE,
    "memory_mib": _number(0, 1 << 40),
    "compute_mode": _one_of(COMPUTE_MODES),
    "mig": _FLAG,
    "numa_node": _NUMA_NODE,
    "render": _RENDER,
    "virtual_number": _number(1, 1000),
    "processes": _LIST,
    "lost": _FLAG,
    "present": _FLAG,
}
_OTHER = {"kind": _one_of(OTHER_KINDS), "pci": _PCI_RULE, "numa_node": _NUMA_NODE, "render": _RENDER}


def _checked(value: Any, place: str, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """The mapping, whose keys are all known and whose values are right."""
    names = ", ".join(rules)
    if not isinstance(value, Mapping):
        raise DescriptionError(f"{place or 'the description'}: must be a mapping with the keys {names}")
    for key, given in value.items():
        where = f"{place}.{key}" if place else key
        if key not in rules:
            raise DescriptionError(f"{where}: unknown key; one of: {names}")
        is_right, must_be = rules[key]
        if not is_right(given):
            raise DescriptionError(f"{where}: must be {must_be}, not {given!r}")
    return dict(value)


def parse_description(value: object) -> HostDescription:
    """Check a description, or a list of GPUs alone; raises DescriptionError at the first problem."""
    whole = _checked({"gpus": value} if isinstance(value, (list, tuple)) else value, "", _HOST)
    if "gpus" not in whole:
        raise DescriptionError("gpus: must be a list, e.g. [{kind: tesla-p40}]")
    driver = _checked(whole.get("driver", {}), "driver", _DRIVER)
    major, minor = driver.get("cuda", "12.2").split(".")
    gpus, others = _devices(whole["gpus"], whole.get("others", []))
    return HostDescription(
        driver_version=driver.get("version", "535.261.03"),
        cuda_version=(int(major), int(minor)),
        # The kernel module refuses to be loaded on a host without a GPU.
        driver_loaded=driver.get("loaded", any(gpu.present for gpu in gpus)),
        drm_loaded=driver.get("drm", True),
        gpus=sorted(gpus, key=lambda gpu: gpu.pci),
        others=sorted(others, key=lambda other: other.pci),
    )


def _devices(
    gpus: Sequence[Any], others: Sequence[Any]
) -> tuple[list[GpuDescription], list[OtherDescription]]:
    """Check the entries, and give each device an address and a render node that no other has."""
    described = _described_gpus(gpus)
    described_others = _described_others(others)
    slots = _Slots(one for one in (*described, *described_others))
    made = []
    for number, one in enumerate(described):
        made.append(_gpu(one, slots.pci_of(one), slots.render_of(one, FIRST_RENDER + number), number))
    made_others = []
    for one in described_others:
        kind = OTHER_KINDS[one["kind"]]
        render = slots.render_of(one, FIRST_RENDER) if kind.has_render_node else None
        made_others.append(OtherDescription(kind, slots.pci_of(one), one.get("numa_node", -1), render))
    for key, devices in (("uuid", made), ("pci", [*made, *made_others]), ("render", [*made, *made_others])):
        for value, count in Counter(getattr(device, key) for device in devices).items():
            if count > 1 and value is not None:
                raise DescriptionError(f"{count} devices have the same {key}, {value}")
    return made, made_others


class _Slots:
    """The addresses and render nodes that devices do not name: the first that are free."""

    def __init__(self, described: Iterable[dict[str, Any]]) -> None:
        given = [*described]
        self._renders = {one["render"] for one in given if "render" in one}
        reserved = {_pci(one["pci"]) for one in given if "pci" in one}
        # 0000:00:06.0, the reference case's, is the first; sixteen on each bus
        slots = ((0, slot // 16, 6 + slot % 16) for slot in itertools.count())
        self._free_pci = (pci for pci in slots if pci not in reserved)

    def pci_of(self, given: dict[str, Any]) -> Pci:
        return _pci(given["pci"]) if "pci" in given else next(self._free_pci)

    def render_of(self, given: dict[str, Any], first: int) -> int | None:
        if "render" in given:
            render: int | None = given["render"]
            return render
        free = next(number for number in itertools.count(first) if number not in self._renders)
        self._renders.add(free)
        return free


def _described_others(entries: Sequence[Any]) -> list[dict[str, Any]]:
    described = [_checked(entry, f"others[{number}]", _OTHER) for number, entry in enumerate(entries)]
    for number, one in enumerate(described):
        if "kind" not in one:
            raise DescriptionError(f"others[{number}].kind: must be {_OTHER['kind'][1]}")
    if len(described) > MAX_OTHERS:
        raise DescriptionError(f"others: must be at most {MAX_OTHERS} devices")
    return described


def _described_gpus(entries: Sequence[Any]) -> list[dict[str, Any]]:
    described: list[dict[str, Any]] = []
    for number, entry in enumerate(entries):
        one = _checked(entry, f"gpus[{number}]", _GPU)
        if "kind" not in one:
            raise DescriptionError(f"gpus[{number}].kind: must be {_GPU['kind'][1]}")
        if one.get("mig") and not KINDS[one["kind"]].mig:
            raise DescriptionError(f"gpus[{number}].mig: a {one['kind']} has no MIG mode")
        described += [one] * one.get("count", 1)
    if len(described) > MAX_GPUS:
        raise DescriptionError(f"gpus: must be at most {MAX_GPUS} GPUs")
    return described


def _gpu(given: dict[str, Any], pci: Pci, render: int | None, minor: int) -> GpuDescription:
    kind = KINDS[given["kind"]]
    made_uuid = f"GPU-{uuid.uuid5(_NAMESPACE, '{} {:x}:{:x}:{:x}'.format(given['kind'], *pci))}"
    return GpuDescription(
        kind=kind,
        kind_name=given["kind"],
        name=given.get("name", kind.name),
        uuid=given.get("uuid", made_uuid),
        pci=pci,
        memory_mib=given.get("memory_mib", kind.memory_mib),
        compute_mode=COMPUTE_MODES[given.get("compute_mode", "default")],
        mig=given.get("mig", False),
        numa_node=given.get("numa_node", -1),
        render=render,
        minor=minor,
        virtual_number=given.get("virtual_number", 4),
        processes=[*given.get("processes", [])],
        lost=given.get("lost", False),
        present=given.get("present", True),
    )


def parse_pci(text: str) -> Pci:
    """Return the address as numbers; raises DescriptionError if it is none."""
    if not _PCI.fullmatch(text):
        raise DescriptionError(f"{text!r} is not a PCI address like 0000:00:06.0")
    return _pci(text)


def _pci(text: str) -> Pci:
    match = _PCI.fullmatch(text)
    assert match, "it was checked"
    return int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16)
