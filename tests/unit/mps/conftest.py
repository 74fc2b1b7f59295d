"""The bench that tests of a domain act with, and its parts that most of them need."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from yunion_mps.core.models import DomainPlan
from yunion_mps.core.paths import ROOT_VARIABLE

from .driving import Bench, DomainRun, Jobs


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench on which no control daemon of another test, or of this machine, is taken for one of ours."""
    with tempfile.TemporaryDirectory(prefix="mps.") as place, ExitStack() as stack:
        Path(place).chmod(0o755)
        monkeypatch.setenv(ROOT_VARIABLE, f"{place}/root")
        yield Bench(Path(place), stack)


@pytest.fixture
def place(bench: Bench) -> Path:
    return bench.place


@pytest.fixture
def plan(bench: Bench) -> DomainPlan:
    return bench.plan


@pytest.fixture
def other(bench: Bench) -> DomainPlan:
    return bench.planned((2880,), 12.5)


@pytest.fixture
def jobs(bench: Bench) -> Jobs:
    return bench.jobs


@pytest.fixture
def run(bench: Bench) -> DomainRun:
    return bench.serving()
