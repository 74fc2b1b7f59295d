"""/etc/yunion/host_container_device.yml: our entries; other types belong to other software."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import yaml

from yunion_mps.config.document import (
    FileProblemError,
    Node,
    line_of,
    pairs_of,
    read_document,
    value_of,
    written,
)
from yunion_mps.config.mapping import NO_MERGE, Nodes, misspelt, nodes_of, unknown_keys
from yunion_mps.config.slices import read_slices
from yunion_mps.config.values import (
    LARGEST_OVERRIDE,
    Kind,
    WrongValueError,
    in_mib,
    memory,
    nearest,
    nearest_key,
    number,
    one_of,
    text,
    whole_number,
)
from yunion_mps.errors import Problem
from yunion_mps.models import DEV_TYPE, DeviceEntry, Source

#: The units in which memory is handed out, as in Alibaba Cloud's ACK; the first is the default, as there.
MEMORY_UNITS = ("1GiB", "128MiB")

_EXAMPLE = {"path": "path: /dev/dri/renderD128", "virtual_number": "virtual_number: 4"}
#: What says how a GPU is divided; an entry has one of them.
_DIVIDING = ("virtual_number", "slices", "memory_unit")
_KEYS = ("path", "type", *_DIVIDING, "memory_reserve", "thread_overcommit")
_FILE_KEYS = ("devices", "gpu_memory_unit")


class DeviceFile(NamedTuple):
    """Our part of the file: the entries in its order, and the unit of requests for memory in units."""

    entries: tuple[DeviceEntry, ...] = ()
    memory_unit_mib: int = in_mib(MEMORY_UNITS[0])
    memory_unit_at: Source = Source("default", None)


def read_devices(file: str, *, must_exist: bool, most: int) -> tuple[DeviceFile, list[Problem]]:
    """Return our part of the file and what is wrong; `most` bounds the number of devices of an entry.

    A file that host.conf does not name (`must_exist` False) may be missing, as with Cloudpods: then the
    file divides no GPU, and `cuda_mps_replicas` says how each is divided.
    """
    if not must_exist and not os.path.lexists(file):
        return DeviceFile(), []
    problems: list[Problem] = []
    try:
        nodes = _file_nodes(file, read_document(file), problems)
        items = _items(file, nodes)
    except FileProblemError as error:
        return DeviceFile(), [*problems, error.problem]
    found = DeviceFile()
    if "gpu_memory_unit" in nodes:
        key, node = nodes["gpu_memory_unit"]
        unit = _checked(file, "gpu_memory_unit", node, one_of(*MEMORY_UNITS), problems)
        found = DeviceFile((), in_mib(unit or MEMORY_UNITS[0]), Source(file, line_of(key)))
    entries = [_entry(file, item, most, problems) for item in items]
    found = found._replace(entries=tuple(entry for entry in entries if entry))
    return found, sorted(problems, key=lambda problem: problem.line or 0)


def _file_nodes(file: str, root: Node | None, problems: list[Problem]) -> Nodes:
    """The file's keys; those that are not nearly ours are left alone."""
    if root is None:
        raise FileProblemError(
            Problem(file, None, "is empty", "write devices: [] to divide no GPU by this file")
        )
    if not isinstance(root, yaml.MappingNode):
        what = f"holds {written(root)}, not a mapping"
        raise FileProblemError(Problem(file, line_of(root), what, "begin the file with devices:"))
    nodes: Nodes = {}
    for name, key, node in pairs_of(root):
        near = None if name in _FILE_KEYS else nearest_key(name, _FILE_KEYS)
        if near:
            problems.append(Problem(file, line_of(key), f"{name} is no key", f"did you mean {near}?"))
        elif name in _FILE_KEYS and name in nodes:
            remedy = "put all entries under one" if name == "devices" else "keep one of the two lines"
            problems.append(Problem(file, line_of(key), f"{name} is given twice", remedy))
        else:
            nodes.setdefault(name, (key, node))
    if "devices" not in nodes and not problems:
        problems.append(Problem(file, line_of(root), "has no key devices", "begin the file with devices:"))
    return nodes


def _items(file: str, nodes: Nodes) -> list[Node]:
    if "devices" not in nodes:
        return []
    found = nodes["devices"][1]
    if not isinstance(found, yaml.SequenceNode):
        what = f"devices is {written(found)}, not a list"
        remedy = "write each entry after a dash: - path: …"
        raise FileProblemError(Problem(file, line_of(found), what, remedy))
    return list(found.value)


def _entry(file: str, item: Node, most: int, problems: list[Problem]) -> DeviceEntry | None:
    """One entry, None where it is another software's or names no path.

    One with a problem, which is then in `problems`, is returned as well: its path can still be checked. What
    cannot be used of how it divides the GPU counts as one device for that.
    """
    if not isinstance(item, yaml.MappingNode):
        what = f"an entry of devices is {written(item)}, not a mapping"
        problems.append(Problem(file, line_of(item), what, "write - path: …, type: … and virtual_number: …"))
        return None
    nodes, twice = nodes_of(file, item)
    if not _is_ours(file, item, nodes, problems):
        return None
    problems += twice
    problems += unknown_keys(file, nodes, _KEYS, (f"a {DEV_TYPE} entry", "an entry"), _type_key(nodes))
    path = _required(file, item, "path", _path, nodes, problems)
    divided = _divided(file, item, nodes, most, problems)
    if path is None:
        return None
    at = Source(file, line_of(nodes["path"][1]))
    return divided._replace(path=path, path_at=at)


def _divided(file: str, item: Node, nodes: Nodes, most: int, problems: list[Problem]) -> DeviceEntry:
    """How the entry divides its GPU, whichever that is; one device where that cannot be used."""
    entry = DeviceEntry("", 1, Source(file, None), Source(file, line_of(item)))
    given = [name for name in _DIVIDING if name in nodes]
    if given == ["virtual_number", "memory_unit"] and nodes["virtual_number"][1].value == "0":
        given = ["memory_unit"]
    if len(given) > 1:
        first, second = sorted((line_of(nodes[name][0]), name) for name in given)[:2]
        what = f"{second[1]} divides the GPU, which {first[1]} in line {first[0]} does already"
        problems.append(Problem(file, second[0], what, "keep one of the two"))
        return entry
    means = given[0] if given else "virtual_number"
    if given:
        key, value = nodes[means]
        at = key if means == "slices" else value  # the list may stand elsewhere, and be an alias here
        entry = entry._replace(divided_at=Source(file, line_of(at)))
    problems += _meaningless(file, means, nodes)
    if means == "virtual_number":
        number_of = _required(file, item, means, whole_number(1, most), nodes, problems)
        return entry._replace(virtual_number=number_of or 1)
    overcommit = _optional(file, "thread_overcommit", number(1, LARGEST_OVERRIDE, 2), nodes, problems)
    if means == "slices":
        slices, wrong = read_slices(file, nodes[means][1], most)
        problems += wrong
        if not slices:
            return entry
        return entry._replace(virtual_number=0, slices=slices, thread_overcommit=overcommit)
    unit = _optional(file, means, one_of(*MEMORY_UNITS), nodes, problems)
    reserve = _optional(file, "memory_reserve", memory(0), nodes, problems)
    if unit is None:
        return entry
    return entry._replace(
        virtual_number=0,
        memory_unit_mib=in_mib(unit),
        memory_reserve_mib=reserve or 0,
        thread_overcommit=overcommit,
    )


def _meaningless(file: str, means: str, nodes: Nodes) -> list[Problem]:
    """The keys that count only where the GPU is divided in another way."""
    problems = []
    counts_with = {"memory_reserve": ("memory_unit",), "thread_overcommit": ("slices", "memory_unit")}
    for name, others in counts_with.items():
        if name in nodes and means not in others:
            what = f"{name} does not count with {means}, only with {' or '.join(others)}"
            remedy = "remove it"
            if name == "thread_overcommit":
                remedy += ", or set cuda_mps_thread_percentage in host.conf"
            problems.append(Problem(file, line_of(nodes[name][0]), what, remedy))
    return problems


def _is_ours(file: str, item: Node, nodes: Nodes, problems: list[Problem]) -> bool:
    """Whether the entry is meant to be ours, though its type may be misspelt, which is then in `problems`."""
    name = _type_key(nodes)
    if name is None and "<<" in nodes:
        problems += _merge(file, nodes["<<"])
        return False
    if name is None:
        remedy = f"write type: {DEV_TYPE}, or another software's type"
        problems.append(Problem(file, line_of(item), "an entry has no type", remedy))
        return False
    key, node = nodes[name]
    if name != "type":
        problems.append(Problem(file, line_of(key), f"{name} is no key", "did you mean type?"))
    value = value_of(node)
    if value == DEV_TYPE:
        return True
    if not isinstance(value, str):
        what = f"type is {written(node)}, not a text"
        problems.append(Problem(file, line_of(node), what, f"write type: {DEV_TYPE}"))
        return False
    if not nearest(value, [DEV_TYPE]):
        return False
    problems.append(Problem(file, line_of(node), f"type {value} is unknown", f"did you mean {DEV_TYPE}?"))
    return True


def _merge(file: str, merge: tuple[Node, Node]) -> list[Problem]:
    """What is wrong with an entry whose type comes by a merge: nothing where that is another software's."""
    key, node = merge
    mappings = node.value if isinstance(node, yaml.SequenceNode) else [node]
    types = [value_of(value) for each in mappings for name, _, value in _pairs(each) if name == "type"]
    return [Problem(file, line_of(key), *NO_MERGE)] if DEV_TYPE in types else []


def _pairs(node: Node) -> list[tuple[str, Node, Node]]:
    return list(pairs_of(node)) if isinstance(node, yaml.MappingNode) else []


def _type_key(nodes: Nodes) -> str | None:
    """The key that says whose the entry is, or that is meant to."""
    return "type" if "type" in nodes else next((name for name in nodes if nearest_key(name, ["type"])), None)


def _path(key: str, node: Node) -> str:
    return text(key, node, "a render node, a PCI address or a GPU's UUID")


def _required(file: str, item: Node, name: str, kind: Kind, nodes: Nodes, problems: list[Problem]) -> Any:
    if name not in nodes:
        meant = _DIVIDING if name in _DIVIDING else (name,)
        if not any(misspelt(one, nodes, _KEYS) for one in meant):
            what = f"a {DEV_TYPE} entry has no {name}"
            problems.append(Problem(file, line_of(item), what, f"add {name}, for example {_EXAMPLE[name]}"))
        return None
    return _checked(file, name, nodes[name][1], kind, problems)


def _optional(file: str, name: str, kind: Kind, nodes: Nodes, problems: list[Problem]) -> Any:
    return _checked(file, name, nodes[name][1], kind, problems) if name in nodes else None


def _checked(file: str, name: str, node: Node, kind: Kind, problems: list[Problem]) -> Any:
    """The value, None where it is wrong, which is then in `problems`."""
    try:
        return kind(name, node)
    except WrongValueError as error:
        problems.append(Problem(file, line_of(node), error.what, error.remedy))
        return None
