"""A mapping of ours: each key once, none that we do not know, and no merges."""

from __future__ import annotations

from collections.abc import Sequence

from yunion_mps.config.document import Node, line_of, pairs_of
from yunion_mps.config.values import nearest_key
from yunion_mps.errors import Problem

#: A mapping's keys by their text: where the key and its value stand.
Nodes = dict[str, tuple[Node, Node]]

NO_MERGE = ("merge keys (<<) are not followed", "write the keys out")


def nodes_of(file: str, mapping: Node) -> tuple[Nodes, list[Problem]]:
    """Return the keys of the mapping, and what is wrong: of a key that is given twice the first counts."""
    nodes: Nodes = {}
    problems = []
    for name, key, node in pairs_of(mapping):
        if name in nodes:
            remedy = f"keep one of the two lines (the other is line {line_of(nodes[name][0])})"
            problems.append(Problem(file, line_of(key), f"{name} is given twice", remedy))
        else:
            nodes[name] = (key, node)
    return nodes, problems


def unknown_keys(
    file: str, nodes: Nodes, known: Sequence[str], owner: tuple[str, str], reported: str | None = None
) -> list[Problem]:
    """A problem for each key that is none of the `known` ones, but for `reported`, which has its own.

    `owner` is what has the keys, in two forms: `a NVIDIA_MPS entry`, `an entry`.
    """
    problems = []
    for name, (key, _) in nodes.items():
        if name == "<<":
            problems.append(Problem(file, line_of(key), *NO_MERGE))
        elif name not in known and name != reported:
            near = nearest_key(name, known)
            remedy = f"remove it; the keys of {owner[1]} are {', '.join(known)}"
            if near:
                remedy = f"did you mean {near}?"
            shown = name or "a key that is no text"
            problems.append(Problem(file, line_of(key), f"{shown} is no key of {owner[0]}", remedy))
    return problems


def misspelt(name: str, nodes: Nodes, known: Sequence[str]) -> bool:
    """Whether a key that is not there is meant by one that is unknown, and so told of already."""
    return any(nearest_key(other, [name]) for other in nodes if other not in known)
