"""Mappings of a YAML file: their keys and values, and the problems that are found in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from yunion_mps.config.document import (
    Node,
    Pair,
    is_invalid_merge,
    is_same,
    line_of,
    look_alike,
    nearest_key,
    pairs_of,
    quote,
    without_look_alikes,
)
from yunion_mps.config.values import InvalidValueError, Kind
from yunion_mps.errors import Problem
from yunion_mps.settings import Source

#: The nodes of each key and its value in a mapping, by the key's text.
Nodes = dict[str, tuple[Node, Node]]


class Duplicate(NamedTuple):
    """A pair whose key is in the mapping already, with another value; `first` is that other pair."""

    pair: Pair
    first: Pair

    @property
    def what(self) -> str:
        return f"duplicate key {self.pair.name}"

    @property
    def hint(self) -> str:
        return f"keep one of the two lines (the other is line {line_of(self.first.key)})"


def distinct_pairs(
    mapping: Node, name_of: Callable[[str], str]
) -> tuple[dict[str, Pair], list[Duplicate], list[Pair]]:
    """Return the pairs of a mapping by name, the duplicates, and the merge keys that merge nothing.

    `name_of` returns the name of a key as written. A key twice with the same value is no duplicate. Of
    duplicates, the first one counts.
    """
    pairs: dict[str, Pair] = {}
    duplicates: list[Duplicate] = []
    invalid: list[Pair] = []
    for written in pairs_of(mapping):
        pair = written._replace(name=name_of(written.name))
        if is_invalid_merge(pair):
            invalid.append(pair)
            continue
        first = pairs.get(pair.name) if pair.name else None
        if first is None or first.is_merged:
            pairs[pair.name] = pair
        elif not is_same(first.value, pair.value):
            duplicates.append(Duplicate(pair, first))
    return pairs, duplicates, invalid


def merge_problem(pair: Pair) -> tuple[str, str]:
    """Return what is wrong with a merge key that merges nothing, and the hint."""
    return f"<< is {quote(pair.value)}, not a mapping", "write <<: and the alias of a mapping, or remove it"


def look_alike_problem(name: str, keys: Iterable[str]) -> tuple[str, str] | None:
    """Return the problem and hint if `name` is one of `keys` but for characters that look like spaces."""
    odd = look_alike(name)
    plain = without_look_alikes(name).strip(" -").rstrip(":")
    return (
        (f"key {plain} is written with {odd}", "write it with spaces only") if odd and plain in keys else None
    )


class MappingReader:
    """Reads mappings of one file, and collects all problems instead of stopping at the first."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.problems: list[Problem] = []

    def _report(self, node: Node, what: str, hint: str = "") -> None:
        self.problems.append(self._problem(node, what, hint))

    def _problem(self, node: Node | None, what: str, hint: str = "") -> Problem:
        return Problem(self._file, line_of(node) if node else None, what, hint)

    def _nodes_of(self, mapping: Node, name_of: Callable[[str], str] = str) -> tuple[Nodes, list[Problem]]:
        """Return the mapping's keys, and a problem for each duplicate and each invalid merge.

        `name_of` returns the name of a key as written. Of duplicates, the first one counts.
        """
        pairs, duplicates, invalid = distinct_pairs(mapping, name_of)
        problems = [self._problem(one.pair.key, one.what, one.hint) for one in duplicates]
        problems += [self._problem(pair.key, *merge_problem(pair)) for pair in invalid]
        return {name: (pair.key, pair.value) for name, pair in pairs.items()}, problems

    def _check_keys(
        self, nodes: Nodes, valid: Sequence[str], owner: str, reported: str | None = None
    ) -> None:
        """Refuse each key that is not `valid`, except `reported`, which is a problem already.

        `owner` names the mapping: `an NVIDIA_MPS entry`.
        """
        for name, (key, _) in nodes.items():
            if name not in valid and name != reported:
                odd = look_alike_problem(name, valid)
                if odd:
                    self._report(key, *odd)
                    continue
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
