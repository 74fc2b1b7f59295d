"""/etc/yunion/host_container_device.yml: our entries; entries of other types are other software's."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from yunion_mps.config.document import (
    FileProblemError,
    MappingNode,
    Node,
    SequenceNode,
    line_of,
    nearest,
    nearest_key,
    quote,
    read_document,
    value_of,
)
from yunion_mps.config.mapping import (
    MappingReader,
    Nodes,
    distinct_pairs,
    look_alike_mistake,
    merge_mistake,
)
from yunion_mps.config.values import (
    MAX_OVERRIDE,
    MAX_TIME_SLICED_DEVICES,
    SHARING_KEYS,
    InvalidValueError,
    ValueKind,
    boolean,
    decimal_number,
    layout,
    max_devices,
    memory,
    one_line,
    one_of,
    whole_number,
)
from yunion_mps.core.enums import (
    ENTRY_TYPES,
    KEEP,
    MPS,
    PRIORITIES,
    REPORT,
    RESERVATIONS,
    SET_EXCLUSIVE,
    TERMINATE,
    TIME_SLICES,
    TIME_SLICING,
)
from yunion_mps.core.errors import Problem
from yunion_mps.core.gpu_path import parse_gpu_path
from yunion_mps.core.mig import DISABLED
from yunion_mps.core.paths import Paths
from yunion_mps.core.settings import Config, DeviceEntry, Mistake, SliceEntry, Source

#: The units of pools, as in Alibaba Cloud's ACK, which also has 1 GiB as the default.
MEMORY_UNITS = {"1GiB": 1024, "128MiB": 128}

_EXAMPLE = {"path": "path: /dev/dri/renderD128", "virtual_number": "virtual_number: 4"}
#: The keys that divide a GPU; an entry has one of them.
_DIVIDING = ("virtual_number", "slices", "memory_unit")
#: Keys that only our entries have; beside `devices`, too, they can only be meant for one of them.
_OUR_KEYS = (
    *_DIVIDING,
    "memory",
    "memory_reserve",
    "thread_percentage",
    "thread_overcommit",
    "reserved_for",
    "over_budget",
    "cuda_mps_compute_mode",
    *SHARING_KEYS,
)
_KEYS = ("path", "type", *_OUR_KEYS)
#: The way of sharing by an entry's type.
_TYPES = {name: sharing for sharing, name in ENTRY_TYPES.items()}
#: The keys of an entry by its way of sharing.
_VALID = {
    MPS: tuple(name for name in _KEYS if name != "time_slice"),
    TIME_SLICING: (
        "path",
        "type",
        "virtual_number",
        "memory",
        "time_slice",
        "reserved_for",
        "cuda_mps_compute_mode",
        "mig",
        "mig_restore",
    ),
}
#: The keys that an entry with a MIG layout cannot have: its instances are divided equally, if at all.
_NOT_WITH_MIG = (
    *_DIVIDING[1:],
    "memory",
    "memory_reserve",
    "thread_percentage",
    "thread_overcommit",
    "time_slice",
)
_FILE_KEYS = ("devices", "gpu_memory_unit")
#: What a key is written with if it is not in lower case with underscores: `virtualNumber`, `virtual-number`.
_WORD_BREAK = re.compile(r"(?<=[a-z])(?=[A-Z])|[- ]")
#: Keys of an entry that are only valid with another one.
_VALID_WITH = {
    "memory_reserve": ("memory_unit",),
    "thread_percentage": ("memory_unit",),
    "thread_overcommit": ("slices", "memory_unit"),
}

_SLICE_KINDS: dict[str, ValueKind] = {
    "memory": memory(1),
    "thread_percentage": decimal_number(0.1, 100, decimals=1),
    "priority": one_of(*PRIORITIES),
}
#: All keys that the file can have because of us, at any level.
DEVICE_FILE_KEYS = tuple(dict.fromkeys((*_FILE_KEYS, *_KEYS, *_SLICE_KINDS)))
_SLICE_EXAMPLE = "{memory: 8GiB, thread_percentage: 50}"


def read_devices(config: Config, paths: Paths) -> tuple[Config, list[Problem]]:
    """Return the configuration with our part of the device file, and the problems of that file.

    A file that `container_device_config_file` does not name may be missing: then, as with Cloudpods,
    `cuda_mps_replicas` applies to every GPU.
    """
    file = paths.under(config.container_device_config_file)
    is_named = config.sources["container_device_config_file"].line is not None
    if not is_named and not os.path.lexists(file):
        return config, []
    reader = _Reader(file, max_devices(config.cuda_mps_max_clients))
    try:
        divided = reader.read(config)
    except FileProblemError as error:
        return config, [*reader.problems, error.problem]
    return divided, sorted(reader.problems, key=lambda problem: problem.line or 0)


class _Reader(MappingReader):
    def __init__(self, file: str, max_devices: int) -> None:
        super().__init__(file)
        self._max_devices = max_devices

    def read(self, config: Config) -> Config:
        config = config._replace(files=(*config.files, self._file))
        nodes = self._file_nodes(read_document(self._file, "host_container_device.yml", _FILE_KEYS))
        items = self._items(nodes)
        if "gpu_memory_unit" in nodes:
            unit = self._read_optional("gpu_memory_unit", one_of(*MEMORY_UNITS), nodes)
            place = self._source(nodes["gpu_memory_unit"].key)
            unit_mib = MEMORY_UNITS[unit] if unit else config.gpu_memory_unit_mib
            config = config._replace(gpu_memory_unit_mib=unit_mib, gpu_memory_unit_at=place)
        entries = [self._entry(item) for item in items]
        return config._replace(devices=tuple(filter(None, entries)))

    def _file_nodes(self, root: Node | None) -> Nodes:
        """Return the file's keys; unknown keys are ignored unless they look like ours.

        As with Cloudpods, a file that is empty or has no `devices` has no entries.
        """
        if root is None:
            return {}
        if not isinstance(root, MappingNode):
            message = f"contains {quote(root)}, not a mapping"
            raise FileProblemError(self._problem(root, message, "begin the file with devices:"))
        pairs = distinct_pairs(root, _key_name)
        for pair in pairs.invalid:
            self._report_mistake(pair.key, merge_mistake(pair))
        for duplicate in pairs.duplicates:
            if duplicate.pair.name in _FILE_KEYS:
                mistake = duplicate.mistake
                if duplicate.pair.name == "devices":
                    mistake = mistake._replace(hint="put all entries under one devices: key")
                self._report_mistake(duplicate.pair.key, mistake)
        for pair in pairs.by_name.values():
            self._check_file_key(pair.name, pair.key, has_devices="devices" in pairs.by_name)
        return {name: pair for name, pair in pairs.by_name.items() if name in _FILE_KEYS}

    def _check_file_key(self, name: str, key: Node, *, has_devices: bool) -> None:
        """Refuse a key beside `devices` that is nearly one of ours."""
        if name in _FILE_KEYS:
            return
        mistake = look_alike_mistake(name, (*_FILE_KEYS, *_KEYS))
        if mistake:
            self._report_mistake(key, mistake)
            return
        near = nearest_key(name, (*_FILE_KEYS, *_OUR_KEYS))
        if near in _OUR_KEYS:
            guess = "" if near == name else f" (did you mean {near}?)"
            text = f"unknown key {name} beside devices{guess}"
            self._report(key, text, "indent it below an entry of devices")
        elif near:
            self._report(key, f"unknown key {name} (did you mean {near}?)")
        elif name in _KEYS and not has_devices:
            self._report(
                key, "missing key devices", "begin the file with devices:, and each entry with a dash"
            )

    def _items(self, nodes: Nodes) -> list[Node]:
        """Return the entries; none if `devices` is missing or null."""
        if "devices" not in nodes or nodes["devices"].value.tag.endswith(":null"):
            return []
        entries = nodes["devices"].value
        if not isinstance(entries, SequenceNode):
            message = f"devices is {quote(entries)}, not a list"
            raise FileProblemError(
                self._problem(entries, message, "write each entry after a dash: - path: …")
            )
        return list(entries.value)

    def _entry(self, item: Node) -> DeviceEntry | None:
        """Return the entry; None if it is other software's or has no valid path.

        An entry with another problem is returned, too, so that its path is still checked; if its division is
        invalid, it has one device.
        """
        if not isinstance(item, MappingNode):
            text = f"an entry of devices is {quote(item)}, not a mapping"
            self._report(item, text, "write - path: …, type: … and virtual_number: …")
            return None
        nodes, duplicates = self._nodes_of(item, _key_name)
        sharing = self._sharing(item, nodes)
        if sharing is None:
            return None
        self.problems += duplicates
        owner = f"an {ENTRY_TYPES[sharing]} entry"
        self._check_keys(nodes, _VALID[sharing], owner, _type_key(nodes))
        path = self._read_required(item, "path", _path, nodes, sharing)
        divided = self._divided(item, nodes, sharing)
        reserved_for = self._read_optional("reserved_for", one_of(*RESERVATIONS), nodes) or ""
        over_budget = self._read_optional("over_budget", one_of(REPORT, TERMINATE), nodes) or ""
        memory_mib = self._read_optional("memory", memory(1), nodes)
        mode = self._read_optional("cuda_mps_compute_mode", one_of(SET_EXCLUSIVE, KEEP), nodes) or ""
        if path is None:
            return None
        return divided._replace(
            path=path,
            path_at=self._source(nodes["path"].value),
            reserved_for=reserved_for,
            over_budget=over_budget,
            cuda_mps_compute_mode=mode,
            memory_mib=memory_mib,
            memory_at=self._source(nodes["memory"].value) if memory_mib else None,
        )

    def _divided(self, item: Node, nodes: Nodes, sharing: str) -> DeviceEntry:
        """Return how the entry divides its GPU, or each instance of its MIG layout."""
        names = self._read_optional("mig", layout, nodes) or ()
        restore = self._read_optional("mig_restore", boolean, nodes) or False
        if "mig_restore" in nodes and "mig" not in nodes:
            self._report(nodes["mig_restore"].key, "mig_restore is not allowed without mig", "remove it")
        if "mig" not in nodes or names == (DISABLED,):
            mig_at = self._source(nodes["mig"].key) if names else None
            divide = self._time_sliced if sharing == TIME_SLICING else self._division
            return divide(item, nodes)._replace(mig=names, mig_restore=restore, mig_at=mig_at)
        for name in _NOT_WITH_MIG:
            if name in nodes and name in _VALID[sharing]:  # another one's problem is reported
                hint = "remove it; virtual_number divides each instance"
                if name == "memory":
                    hint = "remove it; each instance has the memory of its profile"
                self._report(nodes[name].key, f"{name} is not allowed with mig", hint)
        max_devices = MAX_TIME_SLICED_DEVICES if sharing == TIME_SLICING else self._max_devices
        number = self._read_optional("virtual_number", whole_number(1, max_devices), nodes) or 0
        if not names:  # its problem is reported; without a layout, the GPU itself is divided
            number = number or 1
        divided_by = nodes["virtual_number"] if "virtual_number" in nodes else nodes["mig"]
        entry = self._new_entry(number, divided_by.key)
        mig_at = self._source(nodes["mig"].key)
        return entry._replace(sharing=sharing, mig=names, mig_restore=restore, mig_at=mig_at)

    def _new_entry(self, virtual_number: int, node: Node) -> DeviceEntry:
        """Return an entry that has no path yet; `node` is what divides its GPU."""
        return DeviceEntry(
            path="",
            virtual_number=virtual_number,
            path_at=Source(self._file, None),
            divided_at=self._source(node),
        )

    def _time_sliced(self, item: Node, nodes: Nodes) -> DeviceEntry:
        """Return the entry of a time-sliced GPU; one device if its number is invalid."""
        number = whole_number(1, MAX_TIME_SLICED_DEVICES)
        if any(name in nodes for name in _DIVIDING[1:]):  # its problem is reported
            count = self._read_optional("virtual_number", number, nodes)
        else:
            count = self._read_required(item, "virtual_number", number, nodes, TIME_SLICING)
        time_slice = self._read_optional("time_slice", one_of(*TIME_SLICES), nodes)
        node = nodes["virtual_number"].value if "virtual_number" in nodes else item
        entry = self._new_entry(count or 1, node)
        return entry._replace(sharing=TIME_SLICING, time_slice=time_slice or "")

    def _division(self, item: Node, nodes: Nodes) -> DeviceEntry:
        """Return the entry's division of its GPU; one device if it is invalid."""
        entry = self._new_entry(1, item)
        present = [name for name in _DIVIDING if name in nodes]
        if present == ["virtual_number", "memory_unit"] and nodes["virtual_number"].value.value == "0":
            present = ["memory_unit"]
        if len(present) > 1:
            first, second = sorted(present, key=lambda name: (line_of(nodes[name].key), name))[:2]
            line = line_of(nodes[first].key)
            text = f"{second} divides the GPU, but {first} on line {line} already does"
            self._report(nodes[second].key, text, "keep one of the two")
            return entry
        division = present[0] if present else "virtual_number"
        if present:
            # A list may be defined elsewhere, with an alias here: its key is where the entry has it.
            node = nodes[division].key if division == "slices" else nodes[division].value
            entry = entry._replace(divided_at=self._source(node))
        self._check_division(division, nodes)
        if division == "virtual_number":
            count = self._read_required(item, division, whole_number(1, self._max_devices), nodes)
            return entry._replace(virtual_number=count or 1)
        overcommit = self._read_optional("thread_overcommit", decimal_number(1, MAX_OVERRIDE, 2), nodes)
        if division == "slices":
            slices = self._slices(nodes[division].value)
            if not slices:
                return entry
            return entry._replace(virtual_number=0, slices=slices, thread_overcommit=overcommit)
        unit = self._read_optional(division, one_of(*MEMORY_UNITS), nodes)
        reserve = self._read_optional("memory_reserve", memory(0), nodes)
        percentage = self._read_optional("thread_percentage", whole_number(1, 100), nodes)
        if unit is None:
            return entry
        return entry._replace(
            virtual_number=0,
            memory_unit_mib=MEMORY_UNITS[unit],
            memory_reserve_mib=reserve or 0,
            thread_overcommit=overcommit,
            thread_percentage=percentage or 0,
        )

    def _check_division(self, division: str, nodes: Nodes) -> None:
        """Refuse keys that are only valid with another kind of division."""
        for name, required in _VALID_WITH.items():
            if name in nodes and division not in required:
                text = f"{name} is not allowed with {division}, only with {' or '.join(required)}"
                hint = "remove it"
                if name == "thread_percentage" and division == "slices":
                    hint = "write it in each slice"
                if name == "thread_overcommit":
                    hint += ", or set cuda_mps_thread_percentage in host.conf"
                self._report(nodes[name].key, text, hint)

    def _slices(self, node: Node) -> tuple[SliceEntry, ...]:
        """Return the slices; none if any of them has a problem."""
        if not isinstance(node, SequenceNode) or not node.value:
            shown = "an empty list" if isinstance(node, SequenceNode) else f"{quote(node)}, not a list"
            self._report(node, f"slices is {shown}", f"write each device after a dash: - {_SLICE_EXAMPLE}")
            return ()
        before = len(self.problems)
        if len(node.value) > self._max_devices:
            text = f"slices has {len(node.value)} devices, more than a GPU can have"
            self._report(node, text, f"write at most {self._max_devices}")
        slices = tuple(self._slice(item) for item in node.value)
        return slices if len(self.problems) == before else ()

    def _slice(self, item: Node) -> SliceEntry:
        if not isinstance(item, MappingNode):
            self._report(item, f"a slice is {quote(item)}, not a mapping", f"write - {_SLICE_EXAMPLE}")
            return SliceEntry(0)
        nodes, duplicates = self._nodes_of(item, _key_name)
        self.problems += duplicates
        self._check_keys(nodes, tuple(_SLICE_KINDS), "a slice")
        if "memory" not in nodes and not _misspelt("memory", nodes, tuple(_SLICE_KINDS)):
            self._report(item, "a slice has no memory", "add memory, for example memory: 8GiB")
        values: dict[str, Any] = {"memory": 0}
        for name, kind in _SLICE_KINDS.items():
            if name in nodes:
                values[name] = self._read_optional(name, kind, nodes)
        memory_mib = values.pop("memory")
        return SliceEntry(memory_mib, **values)

    def _sharing(self, item: Node, nodes: Nodes) -> str | None:
        """Return how the entry shares its GPU, even if its type is misspelt, which is reported.

        None if it is other software's.
        """
        name = _type_key(nodes)
        if name is None:
            hint = f"write type: {ENTRY_TYPES[MPS]}, or the type of other software"
            self._report(item, "an entry has no type", hint)
            return None
        node = nodes[name].value
        if name != "type":
            mistake = look_alike_mistake(name, ("type",))
            mistake = mistake or Mistake(f"unknown key {name} (did you mean type?)")
            self._report_mistake(nodes[name].key, mistake)
        value = value_of(node)
        if not isinstance(value, str):
            self._report(node, f"type is {quote(node)}, not a string", f"write type: {ENTRY_TYPES[MPS]}")
            return None
        near = value if value in _TYPES else nearest(value, list(_TYPES))
        if near and near != value:
            self._report(node, f"unknown type {value} (did you mean {near}?)")
        if near is None:
            self._check_foreign_entry(quote(node), nodes)
        return _TYPES[near] if near else None

    def _check_foreign_entry(self, entry_type: str, nodes: Nodes) -> None:
        """Refuse keys that only our entries have: the type, which selects other software, is wrong."""
        for name in SHARING_KEYS:
            if name in nodes:
                text = f"{name} is not allowed in an entry of the type {entry_type}"
                types = [f"type: {ENTRY_TYPES[sharing]}" for sharing, keys in _VALID.items() if name in keys]
                self._report(nodes[name].key, text, f"write {' or '.join(types)}, or remove it")

    def _read_required(self, item: Node, name: str, kind: ValueKind, nodes: Nodes, sharing: str = MPS) -> Any:
        if name not in nodes:
            alternatives = _DIVIDING if name in _DIVIDING else (name,)
            if not any(_misspelt(alternative, nodes, _KEYS) for alternative in alternatives):
                text = f"an {ENTRY_TYPES[sharing]} entry has no {name}"
                self._report(item, text, f"add {name}, for example {_EXAMPLE[name]}")
        return self._read_optional(name, kind, nodes)


def _key_name(written: str) -> str:
    """Return the name of a key that is written in another way which Cloudpods' jsonutils also reads."""
    name = _WORD_BREAK.sub("_", written).lower()
    known = (*_FILE_KEYS, *_KEYS, *_SLICE_KINDS)
    return name if name in known else written


def _misspelt(name: str, nodes: Nodes, valid: Sequence[str]) -> bool:
    """Return whether an unknown key, which is reported already, is a misspelling of this missing one."""
    return any(nearest_key(other, [name]) for other in nodes if other not in valid)


def _type_key(nodes: Nodes) -> str | None:
    """Return the key with the entry's type, or a misspelling of it."""
    if "type" in nodes:
        return "type"
    for name in nodes:
        if nearest_key(name, ["type"]) or look_alike_mistake(name, ["type"]):
            return name
    return None


def _path(key: str, node: Node) -> str:
    """Accept what can be a GPU, whether this host has it now or not."""
    path = one_line(key, node, "a render node, a PCI address or a GPU's UUID")
    if parse_gpu_path(path) is None:
        hint = "write a render node such as /dev/dri/renderD128, a PCI address or a GPU's UUID"
        raise InvalidValueError(key, node, "which cannot be a GPU", hint)
    return path
