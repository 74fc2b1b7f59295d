"""A host with Cloudpods' own package changes over by one command."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.cloudpods import cloudpods
from packages.family import Family
from packages.machine import UNIT
from packages.operator import DEVICES, HOST_CONF, Operator
from packages.versions import Packages

CONTROL = "nvidia-cuda-mps-control"

pytestmark = pytest.mark.parametrize("family", ["bookworm-deb", "trixie-rpm"], indirect=True, scope="class")


@pytest.fixture(scope="session")
def theirs(folder: Path) -> Packages:
    """Cloudpods' package."""
    return cloudpods(folder)


@pytest.fixture(scope="class")
def their(family: Family, operator: Operator, theirs: Packages) -> int:
    """Cloudpods' package at work; the PID of its control daemon."""
    operator.configure()
    family.install(theirs)
    operator.start()
    operator.machine.wait_until("its control daemon", lambda: len(operator.processes(CONTROL)) == 1)
    return operator.processes(CONTROL)[0]


def test_our_package_takes_the_place_of_the_one_that_runs(
    family: Family, operator: Operator, their: int, current: Packages
) -> None:
    machine = operator.machine
    before = [machine.run("cat", path).stdout for path in (HOST_CONF, DEVICES)]
    family.install(current)
    assert family.version() == current.version
    operator.see_it_serves()
    assert operator.processes(CONTROL) == [operator.control_daemon()] != [their]
    assert machine.run("systemctl", "is-enabled", UNIT).stdout.strip() == "enabled"
    assert [machine.run("cat", path).stdout for path in (HOST_CONF, DEVICES)] == before
    assert machine.run("test", "-e", "/opt/yunion/bin/mps-daemon", check=False).returncode == 1


def test_a_control_daemon_that_its_crash_left_behind_is_taken_over(
    family: Family, operator: Operator, their: int, current: Packages
) -> None:
    machine = operator.machine
    operator.kill(operator.daemon())
    machine.wait_until("it failed", lambda: machine.show("ActiveState") == "failed")
    assert operator.processes(CONTROL) == [their]
    done = family.install(current)
    assert f"Cloudpods' control daemon (PID {their}) is asked to end" in done.stdout + done.stderr
    operator.see_it_serves()
    assert operator.processes(CONTROL) == [operator.control_daemon()] != [their]
