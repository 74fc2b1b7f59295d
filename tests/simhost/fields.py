"""Reading one mapping of a description: every value checked, every error naming its place and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class DescriptionError(ValueError):
    """A description of a simulated host is wrong: says where, what, and what would be right."""


def closest(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for a near miss, else the known words."""
    names = list(known)
    near = difflib.get_close_matches(str(word), names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"one of: {', '.join(names)}"


class Fields:
    """A mapping at a place such as `gpus[2]`, whose keys are all known."""

    def __init__(self, value: object, place: str, known: Iterable[str]) -> None:
        names = list(known)
        if not isinstance(value, Mapping):
            raise DescriptionError(
                f"{place or 'the description'}: must be a mapping with the keys {', '.join(names)}"
            )
        self._values: Mapping[Any, Any] = value
        self._place = place
        for key in value:
            if key not in names:
                raise DescriptionError(f"{self.place(str(key))}: unknown key; {closest(key, names)}")

    def place(self, key: str) -> str:
        """Return how an error names the value of `key`."""
        return f"{self._place}.{key}" if self._place else key

    def error(self, key: str, problem: str) -> DescriptionError:
        """Return the error that the value of `key` has `problem`."""
        return DescriptionError(f"{self.place(key)}: {problem}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def raw(self, key: str, default: object = None) -> object:
        """Return the value as it stands."""
        return self._values.get(key, default)

    def integer(self, key: str, default: int, least: int, most: int) -> int:
        """Return a whole number from `least` to `most`."""
        value = self._values.get(key, default)
        if type(value) is int and least <= value <= most:
            return value
        raise self.error(key, f"must be a whole number from {least} to {most}, not {value!r}")

    def text(self, key: str, default: str, most: int) -> str:
        """Return a text of 1 to `most` ASCII characters."""
        value = self._values.get(key, default)
        if not isinstance(value, str) or not value or len(value) > most or not value.isascii():
            raise self.error(key, f"must be a text of 1 to {most} ASCII characters, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def choice(self, key: str, default: str | None, known: Iterable[str]) -> str:
        """Return one of the known words; without a default the key is required."""
        names = list(known)
        if key not in self._values and default is None:
            raise self.error(key, f"missing; {closest('', names)}")
        value = self._values.get(key, default)
        if value not in names or not isinstance(value, str):
            raise self.error(key, f"{value!r} is not known; {closest(value, names)}")
        return value

    def items(self, key: str) -> list[Any]:
        """Return a list, empty where there is none."""
        value = self._values.get(key, [])
        if not isinstance(value, (list, tuple)):
            raise self.error(key, f"must be a list, not {value!r}")
        return list(value)
