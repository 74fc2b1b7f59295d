"""/etc/yunion/host_container_device.yml: our entries; other types belong to other software."""

from __future__ import annotations

import os
from typing import Any

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
from yunion_mps.config.values import Kind, WrongValueError, nearest, nearest_key, text, whole_number
from yunion_mps.errors import Problem
from yunion_mps.models import DEV_TYPE, DeviceEntry, Source

_EXAMPLE = {"path": "path: /dev/dri/renderD128", "virtual_number": "virtual_number: 4"}
_NO_MERGE = ("merge keys (<<) are not followed", "write the keys out")
_KEYS = ("path", "type", "virtual_number")


def read_devices(file: str, *, must_exist: bool, most: int) -> tuple[tuple[DeviceEntry, ...], list[Problem]]:
    """Return our entries in the file's order and what is wrong; `most` bounds a `virtual_number`.

    A file that host.conf does not name (`must_exist` False) may be missing, as with Cloudpods: then the
    file divides no GPU, and `cuda_mps_replicas` says how each is divided.
    """
    if not must_exist and not os.path.lexists(file):
        return (), []
    problems: list[Problem] = []
    try:
        items = _items(file, read_document(file), problems)
    except FileProblemError as error:
        return (), [*problems, error.problem]
    kinds: dict[str, Kind] = {"path": _path, "virtual_number": whole_number(1, most)}
    entries = [_entry(file, item, kinds, problems) for item in items]
    return tuple(entry for entry in entries if entry), sorted(problems, key=lambda problem: problem.line or 0)


def _items(file: str, root: Node | None, problems: list[Problem]) -> list[Node]:
    if root is None:
        raise FileProblemError(
            Problem(file, None, "is empty", "write devices: [] to divide no GPU by this file")
        )
    if not isinstance(root, yaml.MappingNode):
        what = f"holds {written(root)}, not a mapping"
        raise FileProblemError(Problem(file, line_of(root), what, "begin the file with devices:"))
    found: Node | None = None
    for name, key, node in pairs_of(root):
        if name == "devices" and found is not None:
            problems.append(
                Problem(file, line_of(key), "devices is given twice", "put all entries under one")
            )
        elif name == "devices":
            found = node
        elif nearest_key(name, ["devices"]):
            problems.append(Problem(file, line_of(key), f"{name} is no key", "did you mean devices?"))
    if found is None:
        if not problems:
            problems.append(
                Problem(file, line_of(root), "has no key devices", "begin the file with devices:")
            )
        return []
    if not isinstance(found, yaml.SequenceNode):
        what = f"devices is {written(found)}, not a list"
        problems.append(Problem(file, line_of(found), what, "write each entry after a dash: - path: …"))
        return []
    return list(found.value)


def _entry(file: str, item: Node, kinds: dict[str, Kind], problems: list[Problem]) -> DeviceEntry | None:
    """One entry, None where it is another software's or names no path.

    One with a problem, which is then in `problems`, is returned as well: its path can still be checked. A
    `virtual_number` that cannot be used counts as 1 for that.
    """
    if not isinstance(item, yaml.MappingNode):
        what = f"an entry of devices is {written(item)}, not a mapping"
        problems.append(Problem(file, line_of(item), what, "write - path: …, type: … and virtual_number: …"))
        return None
    nodes: dict[str, tuple[Node, Node]] = {}
    twice = []
    for name, key, node in pairs_of(item):
        if name in nodes:
            remedy = f"keep one of the two lines (the other is line {line_of(nodes[name][0])})"
            twice.append(Problem(file, line_of(key), f"{name} is given twice", remedy))
        else:
            nodes[name] = (key, node)
    if not _is_ours(file, item, nodes, problems):
        return None
    problems += twice
    problems += _unknown_keys(file, nodes)
    values = {name: _value(file, item, name, kinds[name], nodes, problems) for name in kinds}
    if values["path"] is None:
        return None
    places = {name: Source(file, line_of(nodes[name][1] if name in nodes else item)) for name in kinds}
    return DeviceEntry(
        values["path"], values["virtual_number"] or 1, places["path"], places["virtual_number"]
    )


def _is_ours(file: str, item: Node, nodes: dict[str, tuple[Node, Node]], problems: list[Problem]) -> bool:
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
    return [Problem(file, line_of(key), *_NO_MERGE)] if DEV_TYPE in types else []


def _pairs(node: Node) -> list[tuple[str, Node, Node]]:
    return list(pairs_of(node)) if isinstance(node, yaml.MappingNode) else []


def _type_key(nodes: dict[str, tuple[Node, Node]]) -> str | None:
    """The key that says whose the entry is, or that is meant to."""
    return "type" if "type" in nodes else next((name for name in nodes if nearest_key(name, ["type"])), None)


def _unknown_keys(file: str, nodes: dict[str, tuple[Node, Node]]) -> list[Problem]:
    problems = []
    reported = _type_key(nodes)
    for name, (key, _) in nodes.items():
        if name == "<<":
            problems.append(Problem(file, line_of(key), *_NO_MERGE))
        elif name not in _KEYS and name != reported:
            near = nearest_key(name, _KEYS)
            remedy = (
                f"did you mean {near}?" if near else f"remove it; the keys of an entry are {', '.join(_KEYS)}"
            )
            shown = name or "a key that is no text"
            problems.append(Problem(file, line_of(key), f"{shown} is no key of a {DEV_TYPE} entry", remedy))
    return problems


def _path(key: str, node: Node) -> str:
    return text(key, node, "a render node, a PCI address or a GPU's UUID")


def _value(
    file: str, item: Node, name: str, kind: Kind, nodes: dict[str, tuple[Node, Node]], problems: list[Problem]
) -> Any:
    if name not in nodes:
        if not any(nearest_key(other, [name]) for other in nodes if other not in _KEYS):
            what = f"a {DEV_TYPE} entry has no {name}"
            problems.append(Problem(file, line_of(item), what, f"add {name}, for example {_EXAMPLE[name]}"))
        return None
    node = nodes[name][1]
    try:
        return kind(name, node)
    except WrongValueError as error:
        problems.append(Problem(file, line_of(node), error.what, error.remedy))
        return None
