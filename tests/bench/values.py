"""What is measured and what it is compared with, as values."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class BenchError(Exception):
    """Something did not work, so that there is nothing to measure."""


@dataclass(frozen=True)
class Samples:
    """What was measured again and again, all in one unit."""

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        """The middle one: what a slow round among many does not move."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles, between which half of all rounds lie; the extremes of fewer than 4."""
        if len(self.values) < 4:
            return min(self.values), max(self.values)
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True)
class Aim:
    """At most so many times the floor, or at most so much of the unit itself."""

    most: float
    of: str = "floor"

    def __str__(self) -> str:
        return f"<= {self.most:g} x" if self.of == "floor" else f"<= {self.most:g} {self.of}"


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    measured: Samples
    floor: Samples | None
    floor_is: str
    aim: Aim | None = None

    @property
    def ratio(self) -> float | None:
        """How many times the floor; None without one."""
        return self.measured.median / self.floor.median if self.floor and self.floor.median else None

    @property
    def met(self) -> bool | None:
        """Whether the aim was met, by the medians; None without an aim."""
        if self.aim is None:
            return None
        value = self.ratio if self.aim.of == "floor" else self.measured.median
        return value is not None and value <= self.aim.most

    def as_json(self, group: str) -> dict[str, Any]:
        return {
            "group": group,
            "what": self.what,
            "unit": self.measured.unit,
            "median": self.measured.median,
            "samples": list(self.measured.values),
            "floor": self.floor_is,
            "floor_median": self.floor.median if self.floor else None,
            "floor_samples": list(self.floor.values) if self.floor else [],
            "ratio": self.ratio,
            "aim": str(self.aim) if self.aim else None,
            "met": self.met,
        }


@dataclass(frozen=True)
class Settings:
    """How thorough a run is."""

    quick: bool

    def rounds(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass
class Rounds:
    """Several things measured in turn, A/B/A/B, so that what disturbs the machine disturbs all of them."""

    unit: str
    taken: dict[str, list[float]] = field(default_factory=dict)

    def run(self, count: int, steps: Sequence[tuple[str, Callable[[], float]]]) -> None:
        """One round that does not count, then `count` rounds of every step."""
        for number in range(-1, count):
            for name, step in steps:
                value = step()
                if number >= 0:
                    self.taken.setdefault(name, []).append(value)

    def of(self, name: str) -> Samples:
        """What a step returned in every round."""
        return Samples(tuple(self.taken[name]), self.unit)

    def sum_of(self, *names: str) -> Samples:
        """The sums of several steps, round by round."""
        return Samples(tuple(map(sum, zip(*(self.taken[name] for name in names)))), self.unit)
