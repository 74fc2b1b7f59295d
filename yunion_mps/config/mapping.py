"""Mappings of a YAML file: their keys and values, and the problems that are found in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yunion_mps.config.document import NO_MERGE, Node, line_of, nearest_key, pairs_of
from yunion_mps.config.values import InvalidValueError, Kind
from yunion_mps.errors import Problem
from yunion_mps.settings import Source

#: The nodes of each key and its value in a mapping, by the key's text.
Nodes = dict[str, tuple[Node, Node]]


class MappingReader:
    """Reads mappings of one file, and collects all problems instead of stopping at the first."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.problems: list[Problem] = []

    def _report(self, node: Node, what: str, hint: str = "") -> None:
        self.problems.append(self._problem(node, what, hint))

    def _problem(self, node: Node | None, what: str, hint: str = "") -> Problem:
        return Problem(self._file, line_of(node) if node else None, what, hint)

    def _nodes_of(self, mapping: Node) -> tuple[Nodes, list[Problem]]:
        """Return the mapping's keys, and a problem for each duplicate; the first one counts."""
        nodes: Nodes = {}
        problems = []
        for name, key, node in pairs_of(mapping):
            if name in nodes:
                hint = f"keep one of the two lines (the other is line {line_of(nodes[name][0])})"
                problems.append(self._problem(key, f"duplicate key {name}", hint))
            else:
                nodes[name] = (key, node)
        return nodes, problems

    def _check_keys(
        self, nodes: Nodes, valid: Sequence[str], owner: str, reported: str | None = None
    ) -> None:
        """Refuse each key that is not `valid`, except `reported`, which is a problem already.

        `owner` names the mapping: `an NVIDIA_MPS entry`.
        """
        for name, (key, _) in nodes.items():
            if name == "<<":
                self._report(key, *NO_MERGE)
            elif name not in valid and name != reported:
                near = nearest_key(name, valid)
                what = f"{f'unknown key {name}' if name else 'a key that is not a string'} in {owner}"
                if near:
                    self._report(key, f"{what} (did you mean {near}?)")
                else:
                    self._report(key, what, f"remove it; the valid keys of {owner} are {', '.join(valid)}")

    def _read_optional(self, name: str, kind: Kind, nodes: Nodes) -> Any:
        """Return the value; None if it is missing, or invalid, which is reported."""
        if name not in nodes:
            return None
        node = nodes[name][1]
        try:
            return kind(name, node)
        except InvalidValueError as error:
            self._report(node, error.what, error.hint)
            return None

    def _places(self, node: Node) -> tuple[Source, Source]:
        """Return the places of an entry that has no path yet: unknown, and that of its division."""
        return Source(self._file, None), Source(self._file, line_of(node))
