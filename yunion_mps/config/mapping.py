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
from yunion_mps.config.values import InvalidValueError, ValueKind
from yunion_mps.core.errors import Problem
from yunion_mps.core.settings import Mistake, Source

#: The pairs of a mapping by the names of their keys.
Nodes = dict[str, Pair]


class Duplicate(NamedTuple):
    """A pair whose key is in the mapping already, with another value."""

    pair: Pair
    #: The pair that has the key already.
    first: Pair

    @property
    def mistake(self) -> Mistake:
        hint = f"keep one of the two lines (the other is line {line_of(self.first.key)})"
        return Mistake(f"duplicate key {self.pair.name}", hint)


class DistinctPairs(NamedTuple):
    """The pairs of a mapping."""

    by_name: dict[str, Pair]
    duplicates: list[Duplicate]
    #: The merge keys that merge nothing.
    invalid: list[Pair]


def distinct_pairs(mapping: Node, name_of: Callable[[str], str]) -> DistinctPairs:
    """Return the pairs of a mapping.

    A key twice with the same value is no duplicate. Of duplicates, the first one counts.

    name_of: returns the name of a key as written.
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
    return DistinctPairs(pairs, duplicates, invalid)


def merge_mistake(pair: Pair) -> Mistake:
    """Return what is wrong with a merge key that merges nothing."""
    text = f"<< is {quote(pair.value)}, not a mapping"
    return Mistake(text, "write <<: and the alias of a mapping, or remove it")


def look_alike_mistake(name: str, keys: Iterable[str]) -> Mistake | None:
    """Return what is wrong if `name` is one of `keys` but for characters that look like spaces."""
    look_alikes = look_alike(name)
    plain = without_look_alikes(name).strip(" -").rstrip(":")
    if not look_alikes or plain not in keys:
        return None
    return Mistake(f"key {plain} is written with {look_alikes}", "write it with spaces only")


class MappingReader:
    """Reads mappings of one file, and collects all problems instead of stopping at the first."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.problems: list[Problem] = []

    def _report(self, node: Node, text: str, hint: str = "") -> None:
        self.problems.append(self._problem(node, text, hint))

    def _report_mistake(self, node: Node, mistake: Mistake) -> None:
        self._report(node, mistake.what, mistake.hint)

    def _problem(self, node: Node | None, text: str, hint: str = "") -> Problem:
        return Problem(self._file, line_of(node) if node else None, text, hint)

    def _nodes_of(self, mapping: Node, name_of: Callable[[str], str] = str) -> tuple[Nodes, list[Problem]]:
        """Return the mapping's keys, and a problem for each duplicate and each invalid merge.

        `name_of` returns the name of a key as written. Of duplicates, the first one counts.
        """
        pairs = distinct_pairs(mapping, name_of)
        mistakes = [(duplicate.pair.key, duplicate.mistake) for duplicate in pairs.duplicates]
        mistakes += [(pair.key, merge_mistake(pair)) for pair in pairs.invalid]
        problems = [self._problem(key, mistake.what, mistake.hint) for key, mistake in mistakes]
        return pairs.by_name, problems

    def _check_keys(
        self, nodes: Nodes, valid: Sequence[str], owner: str, reported: str | None = None
    ) -> None:
        """Refuse each key that is not `valid`, except `reported`, which is a problem already.

        `owner` names the mapping: `an NVIDIA_MPS entry`.
        """
        for name, pair in nodes.items():
            if name not in valid and name != reported:
                self._report_mistake(pair.key, _unknown_key(name, valid, owner))

    def _read_optional(self, name: str, kind: ValueKind, nodes: Nodes) -> Any:
        """Return the value; None if it is missing, or invalid, which is reported."""
        if name not in nodes:
            return None
        node = nodes[name].value
        try:
            return kind(name, node)
        except InvalidValueError as error:
            self._report(node, error.what, error.hint)
            return None

    def _source(self, node: Node) -> Source:
        return Source(self._file, line_of(node))


def _unknown_key(name: str, valid: Sequence[str], owner: str) -> Mistake:
    """Return what is wrong with a key that `owner` (`an NVIDIA_MPS entry`) does not have."""
    mistake = look_alike_mistake(name, valid)
    if mistake:
        return mistake
    near = nearest_key(name, valid)
    key = f"unknown key {name}" if name else "a key that is not a string"
    if near:
        return Mistake(f"{key} in {owner} (did you mean {near}?)")
    hint = f"remove it; the valid keys of {owner} are {', '.join(valid)}"
    return Mistake(f"{key} in {owner}", hint)
