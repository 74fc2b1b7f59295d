"""Packages and machines. The journal of a machine is kept under .cache/packages when its test fails."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from xdist.scheduler import LoadScopeScheduling
from yunion_mps import __version__

from packages.family import FAMILIES, Family
from packages.images import image
from packages.machine import Machine
from packages.operator import Operator
from packages.versions import PREVIOUS, Packages, built
from simhost import Description
from simhost.environment import CHECKOUT

JOURNALS = CHECKOUT / ".cache/packages"
#: The releases that are booted; Python 3.9, the oldest that we run on, is bullseye's.
RELEASES = ("bullseye", "bookworm", "trixie")


class NewMachine(Protocol):
    """Makes a machine of a release, with a name, and with what `Machine` takes beyond."""

    def __call__(
        self, release: str, name: str, gpus: Description | None = None, calls: Sequence[str] = ()
    ) -> AbstractContextManager[Machine]: ...


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


class ByMachine(LoadScopeScheduling):  # type: ignore[misc] # it has no types
    """What shares a machine is run by one process, in its order: the tests of a class and its parameter."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        test, _, parameter = name.partition("[")
        return f"{path}::{test.rpartition('::')[0]}[{parameter}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByMachine:
    """Let two machines run side by side (pytest's -n 2)."""
    return ByMachine(config, log)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run have in common; the journals of the run before are gone."""
    base = tmp_path_factory.getbasetemp()
    found = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    with contextlib.suppress(FileExistsError):
        found.mkdir()
        shutil.rmtree(JOURNALS, ignore_errors=True)
    return found


@pytest.fixture(scope="session")
def versions(shared: Path) -> tuple[Packages, Packages]:
    """The version before, and this one, with the images; one process makes them, and another waits for it."""
    with open(shared / "lock", "w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        images = [pool.submit(image, release) for release in RELEASES]
        packages = [pool.submit(built, shared, version) for version in (PREVIOUS, __version__)]
        for one in images:
            one.result()
        return packages[0].result(), packages[1].result()


@pytest.fixture(scope="session")
def previous(versions: tuple[Packages, Packages]) -> Packages:
    return versions[0]


@pytest.fixture(scope="session")
def current(versions: tuple[Packages, Packages]) -> Packages:
    return versions[1]


@pytest.fixture(scope="session")
def new_machine(request: pytest.FixtureRequest, versions: object) -> NewMachine:
    """A machine of a release, not booted yet; its journal is kept where a test fails while it is there."""

    @contextmanager
    def new(
        release: str, name: str, gpus: Description | None = None, calls: Sequence[str] = ()
    ) -> Iterator[Machine]:
        failed_before = request.session.testsfailed
        with Machine(image(release), name, gpus, calls) as machine:
            all_is_well = False
            try:
                yield machine
                all_is_well = request.session.testsfailed == failed_before
            finally:
                if not all_is_well:
                    machine.keep_journal(JOURNALS / f"{name}-{len(list(JOURNALS.glob('*')))}")

    return new


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for path in sorted(JOURNALS.glob("*/journal.log")):
        terminalreporter.write_line(f"journal: {path.relative_to(CHECKOUT)}")


@pytest.fixture(scope="class")
def family(request: pytest.FixtureRequest, new_machine: NewMachine, folder: Path) -> Iterator[Family]:
    """A machine of the release and the family that the test's parameter names, such as bookworm-deb."""
    release, _, name = request.param.partition("-")
    with new_machine(release, request.param) as machine:
        kind = FAMILIES[name](machine.boot())
        kind.prepare(folder)
        yield kind


@pytest.fixture(scope="class")
def operator(family: Family) -> Operator:
    return Operator(family.machine)
