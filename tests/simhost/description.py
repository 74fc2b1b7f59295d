"""What a simulated host is to be, read from the YAML of `simhost --gpus FILE` or from Python values.

See README.md in this folder for all keys. Whatever is not given is made up, the same each time and unique.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union

from .catalog import KINDS, LINK_SPEEDS, LINK_WIDTHS
from .fields import Fields
from .layout import MAX_FAILURES, MAX_GPUS, MAX_PROCESSES
from .nvml import COMPUTE_MODES, ERRORS
from .values import PROCESS_TYPES, FailureDescription, GpuDescription, HostDescription, ProcessDescription

# The one GPU of the reference case in the project's design.
REFERENCE = {
    "gpus": [{"kind": "tesla-p40", "uuid": "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400", "pci": "0000:00:06.0"}]
}

_NAMESPACE = uuid.UUID("5d6e1a52-7b0c-4f0e-9c1d-3a2f6f1c5e10")
_PCI = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([01][0-9a-fA-F])\.0")
_FIRST_RENDER = 128  # the kernel numbers render nodes from 128
_SINGLE = ("uuid", "pci", "minor", "render")  # cannot be the same for several GPUs
_GPU_KEYS = (
    "kind", "count", "name", "uuid", "pci", "memory_mib", "compute_capability", "compute_mode", "mig",
    "numa_node", "render", "minor", "link", "vendor_device", "virtual_number", "processes", "lost",
)  # fmt: skip


Value = TypeVar("Value", int, str)
Description = Union[Mapping[str, Any], Sequence[Mapping[str, Any]]]


def parse_description(value: object) -> HostDescription:
    """Check a description, or a list of GPUs alone; raises DescriptionError at the first problem."""
    fields = Fields(
        {"gpus": value} if isinstance(value, (list, tuple)) else value, "", ("driver", "gpus", "failures")
    )
    driver = Fields(fields.raw("driver", {}), "driver", ("version", "cuda"))
    version = driver.text("version", "535.261.03", 60)
    cuda = _pair(driver, "cuda", "12.2")
    entries = fields.items("gpus")
    if not entries:
        raise fields.error("gpus", f"must be a list of 1 to {MAX_GPUS} GPUs, e.g. [{{kind: tesla-p40}}]")
    gpus = _Gpus()
    gpu_fields = [Fields(entry, f"gpus[{number}]", _GPU_KEYS) for number, entry in enumerate(entries)]
    for entry_fields in gpu_fields:
        gpus.reserve(entry_fields)
    for entry_fields in gpu_fields:
        gpus.read(entry_fields)
    failures = [
        parse_failure(entry, f"failures[{number}]", len(gpus.done))
        for number, entry in enumerate(fields.items("failures"))
    ]
    if len(failures) > MAX_FAILURES:
        raise fields.error("failures", f"at most {MAX_FAILURES}")
    return HostDescription(version, cuda, tuple(sorted(gpus.done, key=lambda gpu: gpu.pci)), tuple(failures))


def _pair(fields: Fields, key: str, default: str) -> tuple[int, int]:
    value = fields.raw(key, default)
    match = re.fullmatch(r"(\d{1,3})\.(\d)", str(value))
    if isinstance(value, bool) or not match:
        raise fields.error(key, f'must be like "12.2", not {value!r}')
    return int(match[1]), int(match[2])


def parse_failure(entry: object, place: str, gpus: int) -> FailureDescription:
    """Check one failure on a host of so many GPUs; `place` is how an error names it."""
    fields = Fields(entry, place, ("call", "error", "gpu", "times", "delay_ms"))
    call = fields.text("call", "", 60)
    if not call.startswith(("nvml", "*")):
        raise fields.error(
            "call", f"must be an NVML call, e.g. nvmlDeviceGetUUID, or a pattern, not {call!r}"
        )
    return FailureDescription(
        call,
        fields.choice("error", None, ERRORS),
        fields.integer("gpu", 0, 0, gpus - 1) if "gpu" in fields else None,
        fields.integer("times", 1, 1, 1_000_000) if "times" in fields else None,
        fields.integer("delay_ms", 0, 0, 86_400_000),
    )


class _Gpus:
    """The GPUs read so far; knows what is taken."""

    def __init__(self) -> None:
        self.done: list[GpuDescription] = []
        self._taken: dict[str, dict[object, str]] = {key: {} for key in _SINGLE}
        self._reserved: dict[str, set[object]] = {key: set() for key in _SINGLE}
        self._next_slot = 0

    def reserve(self, fields: Fields) -> None:
        """Keep what an entry asks for by name from being given to one before it."""
        for key in ("minor", "render"):
            self._reserved[key].add(fields.raw(key))
        if "pci" in fields:
            self._reserved["pci"].add(_pci(fields))

    def read(self, fields: Fields) -> None:
        """Read one entry of `gpus`, which may stand for several."""
        count = fields.integer("count", 1, 1, MAX_GPUS)
        if len(self.done) + count > MAX_GPUS:
            raise fields.error("count", f"more than {MAX_GPUS} GPUs in all")
        for key in _SINGLE:
            if count > 1 and fields.raw(key) is not None:
                raise fields.error(key, f"cannot be the same for {count} GPUs: give each its own entry")
        for _ in range(count):
            self.done.append(self._one(fields))

    def _one(self, fields: Fields) -> GpuDescription:
        kind_name = fields.choice("kind", None, KINDS)
        kind = KINDS[kind_name]
        number = len(self.done)
        pci = self._address(fields)
        mig = fields.flag("mig", False)
        if mig and not kind.mig:
            able = ", ".join(name for name, kind in KINDS.items() if kind.mig)
            raise fields.error("mig", f"a {kind_name} has no MIG mode; these have: {able}")
        vendor, device = _vendor_device(fields, kind.device)
        link, current_link = _link(fields, kind.generation)
        made_uuid = f"GPU-{uuid.uuid5(_NAMESPACE, '{} {:x}:{:x}:{:x}'.format(kind_name, *pci))}"
        render = None
        if "render" not in fields or fields.raw("render") is not None:
            wanted = fields.integer("render", self._free("render", _FIRST_RENDER + number), 0, 255)
            render = self._take(fields, "render", wanted)
        return GpuDescription(
            kind=kind_name,
            name=fields.text("name", kind.name, 90),
            uuid=self._take(fields, "uuid", fields.text("uuid", made_uuid, 60)),
            pci=pci,
            vendor=vendor,
            device=device,
            memory_mib=fields.integer("memory_mib", kind.memory_mib, 1, 1 << 40),
            capability=_pair(fields, "compute_capability", "{}.{}".format(*kind.capability)),
            compute_mode=COMPUTE_MODES[fields.choice("compute_mode", "default", COMPUTE_MODES)],
            mig=mig if kind.mig else None,
            numa_node=fields.integer("numa_node", -1, -1, 1023),
            render=render,
            minor=self._take(fields, "minor", fields.integer("minor", self._free("minor", number), 0, 255)),
            link=link,
            current_link=current_link,
            virtual_number=fields.integer("virtual_number", 4, 1, 1000),
            processes=_processes(fields),
            lost=fields.flag("lost", False),
        )

    def _take(self, fields: Fields, key: str, value: Value) -> Value:
        taken = self._taken[key]
        if value in taken:
            raise fields.error(key, f"{value} is already that of {taken[value]}: choose another")
        taken[value] = fields.place(key)
        return value

    def _free(self, key: str, value: int) -> int:
        while value in self._taken[key] or value in self._reserved[key]:
            value += 1
        return value

    def _address(self, fields: Fields) -> tuple[int, int, int]:
        if "pci" in fields:
            pci = _pci(fields)
        else:
            while True:  # 0000:00:06.0, the reference case's, is the first; sixteen on each bus
                pci = (0, self._next_slot // 16, 6 + self._next_slot % 16)
                self._next_slot += 1
                if pci not in self._reserved["pci"]:
                    break
        if pci in self._taken["pci"]:
            address = "{:04x}:{:02x}:{:02x}.0".format(*pci)
            raise fields.error(
                "pci", f"{address} is already that of {self._taken['pci'][pci]}: choose another"
            )
        self._taken["pci"][pci] = fields.place("pci")
        return pci


def _pci(fields: Fields) -> tuple[int, int, int]:
    match = _PCI.fullmatch(str(fields.raw("pci")))
    if not match:
        raise fields.error(
            "pci", f"must be a text like '0000:00:06.0', in quotes, of function 0; not {fields.raw('pci')!r}"
        )
    return int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16)


def _vendor_device(fields: Fields, device: int) -> tuple[int, int]:
    value = fields.raw("vendor_device", f"10de:{device:04x}")
    match = re.fullmatch(r"([0-9a-fA-F]{4}):([0-9a-fA-F]{4})", str(value))
    if not match:
        raise fields.error("vendor_device", f"must be like 10de:1b38, not {value!r}")
    return int(match[1], 16), int(match[2], 16)


def _link(fields: Fields, generation: int) -> tuple[tuple[int, int], tuple[int, int]]:
    link = Fields(
        fields.raw("link", {}), fields.place("link"), ("speed", "width", "current_speed", "current_width")
    )
    most = (_generation(link, "speed", generation), _lanes(link, "width", 16))
    return most, (_generation(link, "current_speed", most[0]), _lanes(link, "current_width", most[1]))


def _generation(link: Fields, key: str, default: int) -> int:
    value = link.raw(key)
    for generation, words in LINK_SPEEDS.items():
        if value is not None and str(value) in (words, words.split()[0], words.split(".0 ")[0]):
            return generation
    if value is None:
        return default
    raise link.error(key, f"must be the GT/s of a PCIe generation, e.g. 2.5, 8 or 16, not {value!r}")


def _lanes(link: Fields, key: str, default: int) -> int:
    value = link.raw(key, default)
    if isinstance(value, bool) or value not in LINK_WIDTHS:
        raise link.error(
            key, f"must be a number of lanes ({', '.join(map(str, LINK_WIDTHS))}), not {value!r}"
        )
    return int(value)


def _processes(fields: Fields) -> tuple[ProcessDescription, ...]:
    entries = fields.items("processes")
    if len(entries) > MAX_PROCESSES:
        raise fields.error("processes", f"at most {MAX_PROCESSES} a GPU")
    done = []
    for number, entry in enumerate(entries):
        process = Fields(entry, f"{fields.place('processes')}[{number}]", ("pid", "used_mib", "type"))
        used = process.integer("used_mib", 0, 0, 1 << 40) if process.raw("used_mib") is not None else None
        if "used_mib" not in process:
            raise process.error("used_mib", "missing; MiB, or null where the driver cannot tell")
        done.append(ProcessDescription(process.integer("pid", 0, 1, 1 << 22), used,
                                       process.choice("type", "C", PROCESS_TYPES)))  # fmt: skip
    return tuple(done)
