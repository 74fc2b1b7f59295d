"""The `slices` of an entry: the unequal devices of one GPU."""

from __future__ import annotations

import yaml

from yunion_mps.config.document import Node, line_of, written
from yunion_mps.config.mapping import misspelt, nodes_of, unknown_keys
from yunion_mps.config.values import Kind, WrongValueError, memory, number, one_of
from yunion_mps.errors import Problem
from yunion_mps.models import PRIORITIES, SliceEntry

_KINDS: dict[str, Kind] = {
    "memory": memory(1),
    "thread_percentage": number(0.1, 100, decimals=1),
    "priority": one_of(*PRIORITIES),
}
_KEYS = tuple(_KINDS)
_EXAMPLE = "{memory: 8GiB, thread_percentage: 50}"


def read_slices(file: str, node: Node, most: int) -> tuple[tuple[SliceEntry, ...], list[Problem]]:
    """Return the slices and what is wrong; with a problem there are none. `most` bounds their number."""
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        shown = "an empty list" if isinstance(node, yaml.SequenceNode) else f"{written(node)}, not a list"
        remedy = f"write each device after a dash: - {_EXAMPLE}"
        return (), [Problem(file, line_of(node), f"slices is {shown}", remedy)]
    problems: list[Problem] = []
    if len(node.value) > most:
        what = f"slices has {len(node.value)} devices, more than any GPU may have"
        problems.append(Problem(file, line_of(node), what, f"write at most {most}"))
    slices = tuple(_slice(file, item, problems) for item in node.value)
    return (() if problems else slices), problems


def _slice(file: str, item: Node, problems: list[Problem]) -> SliceEntry:
    if not isinstance(item, yaml.MappingNode):
        what = f"a slice is {written(item)}, not a mapping"
        problems.append(Problem(file, line_of(item), what, f"write - {_EXAMPLE}"))
        return SliceEntry(0)
    nodes, twice = nodes_of(file, item)
    problems += twice + unknown_keys(file, nodes, _KEYS, ("a slice", "a slice"))
    if "memory" not in nodes and not misspelt("memory", nodes, _KEYS):
        problems.append(
            Problem(file, line_of(item), "a slice has no memory", "add memory, for example memory: 8GiB")
        )
    values = {}
    for name in _KEYS:
        if name in nodes:
            node = nodes[name][1]
            try:
                values[name] = _KINDS[name](name, node)
            except WrongValueError as error:
                problems.append(Problem(file, line_of(node), error.what, error.remedy))
    return SliceEntry(values.pop("memory", 0), **values)
