"""What a simulated host is to be, read from the YAML of `simhost --gpus FILE` or from Python values.

See README.md in this folder for all keys. Whatever is not given is made up, the same each time and unique.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from .catalog import COMPUTE_MODES, ERRORS, KINDS, LINK_SPEEDS, LINK_WIDTHS
from .layout import (
    MAX_FAILURES,
    MAX_GPUS,
    MAX_PROCESSES,
    PROCESS_COMPUTE,
    PROCESS_GRAPHICS,
    PROCESS_MPS,
)

# As nvidia-smi's table has them: compute, a client of MPS, graphics.
PROCESS_TYPES = {"C": PROCESS_COMPUTE, "M+C": PROCESS_MPS, "G": PROCESS_GRAPHICS}

# The one GPU of the reference case in the project's design.
REFERENCE = {
    "gpus": [{"kind": "tesla-p40", "uuid": "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400", "pci": "0000:00:06.0"}]
}

_NAMESPACE = uuid.UUID("5d6e1a52-7b0c-4f0e-9c1d-3a2f6f1c5e10")
_PCI = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([01][0-9a-fA-F])\.0")
_FIRST_RENDER = 128  # the kernel numbers render nodes from 128
_GPU_KEYS = (
    "kind", "count", "name", "uuid", "pci", "memory_mib", "compute_capability", "compute_mode", "mig",
    "numa_node", "render", "minor", "link", "vendor_device", "virtual_number", "processes", "lost",
)  # fmt: skip

Description = Union[Mapping[str, Any], Sequence[Mapping[str, Any]]]
Pci = tuple[int, int, int]  # domain, bus, device; the function is always 0


class DescriptionError(ValueError):
    """A description of a simulated host is wrong: says where, what, and what would be right."""


@dataclass(frozen=True)
class ProcessDescription:
    """A process on a GPU; `used_mib` is None if the driver cannot tell, `sm` (percent) without a sample."""

    pid: int
    used_mib: int | None
    type: str = "C"
    sm: int | None = None


@dataclass(frozen=True)
class GpuDescription:
    """One GPU, everything decided."""

    kind: str
    name: str
    uuid: str
    pci: Pci
    vendor: int
    device: int
    memory_mib: int
    capability: tuple[int, int]
    compute_mode: int  # nvmlComputeMode_t
    mig: bool | None  # None: the kind has no MIG
    numa_node: int  # -1: none, as the kernel says it
    render: int | None
    minor: int
    link: tuple[int, int]  # the most that the slot gives: generation, lanes
    current_link: tuple[int, int]
    virtual_number: int
    processes: tuple[ProcessDescription, ...]
    lost: bool

    @property
    def address(self) -> str:
        """The PCI address as Linux writes it, e.g. 0000:00:06.0."""
        return "{:04x}:{:02x}:{:02x}.0".format(*self.pci)


@dataclass(frozen=True)
class FailureDescription:
    """A rule by which NVML calls fail; `gpu` and `times` None mean all and until cleared."""

    call: str
    error: str
    gpu: int | None = None
    times: int | None = None
    delay_ms: int = 0


@dataclass(frozen=True)
class HostDescription:
    """A whole host; the GPUs are in the order of their PCI addresses, which is NVML's."""

    driver_version: str
    cuda_version: tuple[int, int]
    gpus: tuple[GpuDescription, ...]
    failures: tuple[FailureDescription, ...]


class _Fields:
    """A mapping at a place such as `gpus[2]`, whose keys are all known."""

    def __init__(self, value: object, place: str, known: Iterable[str]) -> None:
        names = ", ".join(known)
        if not isinstance(value, Mapping):
            raise DescriptionError(f"{place or 'the description'}: must be a mapping with the keys {names}")
        self._values: Mapping[Any, Any] = value
        self.place = place
        for key in value:
            if key not in names.split(", "):
                raise self.error(str(key), f"unknown key; one of: {names}")

    def error(self, key: str, problem: str) -> DescriptionError:
        return DescriptionError(f"{self.place}.{key}: {problem}" if self.place else f"{key}: {problem}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any, right: Callable[[Any], object], must_be: str) -> Any:
        """The value, or the default, if it is right."""
        value = self._values.get(key, default)
        if not right(value):
            raise self.error(key, f"must be {must_be}, not {value!r}")
        return value

    def raw(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def integer(self, key: str, default: int, least: int, most: int) -> int:
        right = f"a whole number from {least} to {most}"
        return int(self.get(key, default, lambda value: type(value) is int and least <= value <= most, right))

    def text(self, key: str, default: str, most: int) -> str:
        def is_right(value: object) -> bool:
            return isinstance(value, str) and 0 < len(value) <= most and value.isascii()

        return str(self.get(key, default, is_right, f"a text of 1 to {most} ASCII characters"))

    def flag(self, key: str) -> bool:
        return bool(self.get(key, False, lambda value: isinstance(value, bool), "true or false"))

    def choice(self, key: str, default: str | None, known: Iterable[str]) -> str:
        return str(self.get(key, default, [*known].__contains__, f"one of: {', '.join(known)}"))

    def matched(self, key: str, default: str, pattern: str, example: str) -> re.Match[str]:
        """The match of a text with the pattern."""
        found = re.fullmatch(pattern, str(self.raw(key, default)))
        if not found or not isinstance(self.raw(key, default), str):
            raise self.error(key, f"must be a text like {example}, in quotes, not {self.raw(key)!r}")
        return found

    def items(self, key: str, most: int) -> list[Any]:
        def is_right(value: object) -> bool:
            return isinstance(value, (list, tuple)) and len(value) <= most

        return list(self.get(key, [], is_right, f"a list of at most {most}"))


def parse_description(value: object) -> HostDescription:
    """Check a description, or a list of GPUs alone; raises DescriptionError at the first problem."""
    whole = {"gpus": value} if isinstance(value, (list, tuple)) else value
    fields = _Fields(whole, "", ("driver", "gpus", "failures"))
    driver = _Fields(fields.raw("driver", {}), "driver", ("version", "cuda"))
    version, cuda = driver.text("version", "535.261.03", 60), _pair(driver, "cuda", "12.2")
    gpus = _gpus(fields)
    failures = [
        parse_failure(entry, f"failures[{number}]", len(gpus))
        for number, entry in enumerate(fields.items("failures", MAX_FAILURES))
    ]
    return HostDescription(version, cuda, tuple(sorted(gpus, key=lambda gpu: gpu.pci)), tuple(failures))


def parse_failure(entry: object, place: str, gpus: int) -> FailureDescription:
    """Check one failure on a host of so many GPUs; `place` is how an error names it."""
    fields = _Fields(entry, place, ("call", "error", "gpu", "times", "delay_ms"))
    right = "an NVML call, e.g. nvmlDeviceGetUUID, or a pattern"
    return FailureDescription(
        fields.get("call", None, lambda call: str(call).startswith(("nvml", "*")), right),
        fields.choice("error", None, ERRORS),
        fields.integer("gpu", 0, 0, gpus - 1) if "gpu" in fields else None,
        fields.integer("times", 1, 1, 1_000_000) if "times" in fields else None,
        fields.integer("delay_ms", 0, 0, 86_400_000),
    )


def _gpus(fields: _Fields) -> list[GpuDescription]:
    """Read `gpus`; what an entry asks for is not given to another one."""
    wanted: list[_Fields] = []
    for number, entry in enumerate(fields.items("gpus", MAX_GPUS)):
        one = _Fields(entry, f"gpus[{number}]", _GPU_KEYS)
        wanted += [one] * one.integer("count", 1, 1, MAX_GPUS)
    if not 1 <= len(wanted) <= MAX_GPUS:
        raise fields.error("gpus", f"must be 1 to {MAX_GPUS} GPUs, e.g. [{{kind: tesla-p40}}]")
    taken: dict[str, set[object]] = {key: {one.raw(key) for one in wanted} for key in ("minor", "render")}
    reserved = {_pci(one) for one in wanted if "pci" in one}
    # 0000:00:06.0, the reference case's, is the first; sixteen on each bus
    slots = ((0, slot // 16, 6 + slot % 16) for slot in itertools.count())
    free = (pci for pci in slots if pci not in reserved)

    def unused(key: str, number: int) -> int:
        found = next(one for one in itertools.count(number) if one not in taken[key])
        taken[key].add(found)
        return found

    gpus = []
    for number, one in enumerate(wanted):
        render: int | None = None
        if "render" not in one:
            render = unused("render", _FIRST_RENDER + number)
        elif one.raw("render") is not None:
            render = one.integer("render", 0, 0, 255)
        minor = one.integer("minor", 0, 0, 255) if "minor" in one else unused("minor", number)
        gpus.append(_gpu(one, _pci(one) if "pci" in one else next(free), render, minor))
    for key in ("uuid", "pci", "minor", "render"):
        for value, count in Counter(getattr(gpu, key) for gpu in gpus).items():
            if count > 1 and value is not None:
                raise fields.error("gpus", f"{count} GPUs have the same {key}, {value}")
    return gpus


def _gpu(fields: _Fields, pci: Pci, render: int | None, minor: int) -> GpuDescription:
    kind_name = fields.choice("kind", None, KINDS)
    kind = KINDS[kind_name]
    mig = fields.flag("mig")
    if mig and not kind.mig:
        able = ", ".join(name for name, kind in KINDS.items() if kind.mig)
        raise fields.error("mig", f"a {kind_name} has no MIG mode; these have: {able}")
    vendor = fields.matched(
        "vendor_device", f"10de:{kind.device:04x}", "([0-9a-fA-F]{4}):([0-9a-fA-F]{4})", "10de:1b38"
    )
    places = ("speed", "width", "current_speed", "current_width")
    link = _Fields(fields.raw("link", {}), f"{fields.place}.link", places)
    most = (_generation(link, "speed", kind.generation), _lanes(link, "width", 16))
    made_uuid = f"GPU-{uuid.uuid5(_NAMESPACE, '{} {:x}:{:x}:{:x}'.format(kind_name, *pci))}"
    return GpuDescription(
        kind=kind_name,
        name=fields.text("name", kind.name, 90),
        uuid=fields.text("uuid", made_uuid, 60),
        pci=pci,
        vendor=int(vendor[1], 16),
        device=int(vendor[2], 16),
        memory_mib=fields.integer("memory_mib", kind.memory_mib, 1, 1 << 40),
        capability=_pair(fields, "compute_capability", "{}.{}".format(*kind.capability)),
        compute_mode=COMPUTE_MODES[fields.choice("compute_mode", "default", COMPUTE_MODES)],
        mig=mig if kind.mig else None,
        numa_node=fields.integer("numa_node", -1, -1, 1023),
        render=render,
        minor=minor,
        link=most,
        current_link=(_generation(link, "current_speed", most[0]), _lanes(link, "current_width", most[1])),
        virtual_number=fields.integer("virtual_number", 4, 1, 1000),
        processes=tuple(
            _process(entry, f"{fields.place}.processes[{number}]")
            for number, entry in enumerate(fields.items("processes", MAX_PROCESSES))
        ),
        lost=fields.flag("lost"),
    )


def _pair(fields: _Fields, key: str, default: str) -> tuple[int, int]:
    match = fields.matched(key, default, r"(\d{1,3})\.(\d)", '"12.2"')
    return int(match[1]), int(match[2])


def _pci(fields: _Fields) -> Pci:
    match = fields.matched("pci", "", _PCI.pattern, "'0000:00:06.0'")
    return int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16)


def _generation(link: _Fields, key: str, default: int) -> int:
    """The PCIe generation of GT/s a lane."""
    speeds = {float(words.split()[0]): generation for generation, words in LINK_SPEEDS.items()}
    of_default = next(speed for speed, generation in speeds.items() if generation == default)
    return speeds[
        link.get(key, of_default, speeds.__contains__, "the GT/s of a PCIe generation, e.g. 2.5 or 8")
    ]


def _lanes(link: _Fields, key: str, default: int) -> int:
    right = f"a number of lanes ({', '.join(map(str, LINK_WIDTHS))})"
    return int(link.get(key, default, LINK_WIDTHS.__contains__, right))


def _process(entry: object, place: str) -> ProcessDescription:
    fields = _Fields(entry, place, ("pid", "used_mib", "type", "sm"))
    used = None if fields.raw("used_mib", 0) is None else fields.integer("used_mib", -1, 0, 1 << 40)
    kind = fields.choice("type", "C", PROCESS_TYPES)
    sm = fields.integer("sm", 0, 0, 100) if "sm" in fields else None
    return ProcessDescription(fields.integer("pid", 0, 1, 1 << 22), used, kind, sm)
