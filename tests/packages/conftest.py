"""Packages and machines. The journal of a machine is kept under .cache/packages when its test fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from yunion_mps import __version__

from packages.family import FAMILIES, Family
from packages.images import image
from packages.machine import Machine
from packages.operator import Operator
from packages.versions import PREVIOUS, Packages, built
from simhost.environment import CHECKOUT

JOURNALS = CHECKOUT / ".cache/packages"
#: The releases that are booted.
RELEASES = ("bookworm", "trixie")

MakeMachine = Callable[..., Machine]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is built."""
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="session")
def versions(folder: Path) -> tuple[Packages, Packages]:
    """The version before, and this one; the images are made meanwhile."""
    with ThreadPoolExecutor() as pool:
        images = [pool.submit(image, release) for release in RELEASES]
        packages = [pool.submit(built, folder, version) for version in (PREVIOUS, __version__)]
        for one in images:
            one.result()
        return packages[0].result(), packages[1].result()


@pytest.fixture(scope="session")
def previous(versions: tuple[Packages, Packages]) -> Packages:
    """The version before this one."""
    return versions[0]


@pytest.fixture(scope="session")
def current(versions: tuple[Packages, Packages]) -> Packages:
    """The version under test."""
    return versions[1]


@pytest.fixture(scope="class")
def make_machine(request: pytest.FixtureRequest, versions: object) -> Iterator[MakeMachine]:
    """Copy a machine of a release; it is not booted yet."""
    with ExitStack() as stack:

        def make(release: str, name: str) -> Machine:
            journal = JOURNALS / name
            shutil.rmtree(journal, ignore_errors=True)
            machine = stack.enter_context(Machine(image(release), name))
            failed_before = request.session.testsfailed

            def keep() -> None:
                if request.session.testsfailed > failed_before:
                    machine.keep_journal(journal)

            stack.callback(keep)
            return machine

        yield make


@pytest.fixture(scope="class")
def family(request: pytest.FixtureRequest, make_machine: MakeMachine, folder: Path) -> Family:
    """A machine of the release and the family that the test's parameter names, such as bookworm-deb."""
    release, _, name = request.param.partition("-")
    kind = FAMILIES[name](make_machine(release, request.param).boot())
    kind.prepare(folder)
    return kind


@pytest.fixture(scope="class")
def operator(family: Family) -> Operator:
    """Who works on that machine."""
    return Operator(family.machine)
