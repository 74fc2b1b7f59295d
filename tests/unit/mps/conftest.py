"""The bench that tests of a domain act with, and its parts that most of them need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.core.models import DomainPlan

from .domain_bench import Bench, DomainRun, Jobs, private_bench


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with private_bench(monkeypatch) as bench:
        yield bench


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
