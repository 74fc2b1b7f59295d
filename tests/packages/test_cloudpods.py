"""A host with Cloudpods: one command, and our daemon does what its daemon did."""

from __future__ import annotations

import pytest

from packages.cloudpods import PROGRAM, cloudpods_deb, cloudpods_rpm
from packages.family import Family, Rpm
from packages.machine import UNIT, Machine
from packages.operator import DEVICES, HOST_CONF, Operator
from packages.versions import Packages

CONTROL = "nvidia-cuda-mps-control"


@pytest.fixture(scope="class")
def machine(family: Family, operator: Operator, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine on which Cloudpods' daemon is installed, enabled and started."""
    machine, folder = family.machine, tmp_path_factory.mktemp("cloudpods")
    operator.configure()
    if isinstance(family, Rpm):
        machine.run("rpm", "--install", machine.install_file(cloudpods_rpm(folder)))
    else:
        machine.run("dpkg", "--install", machine.install_file(cloudpods_deb(folder)))
    machine.run("systemctl", "enable", "--now", UNIT)
    machine.wait_until("its control daemon serves", lambda: len(operator.processes(CONTROL)) == 1)
    return machine


@pytest.mark.parametrize("family", ["bookworm-deb", "bookworm-rpm"], indirect=True, scope="class")
class TestChangeOver:
    """The steps."""

    def test_one_command_and_our_daemon_serves_where_cloudpods_did(
        self, machine: Machine, family: Family, operator: Operator, current: Packages
    ) -> None:
        before = {path: (machine.root / path[1:]).read_bytes() for path in (HOST_CONF, DEVICES)}
        (theirs,) = operator.processes(CONTROL)
        family.install(current)
        operator.see_it_serves()
        assert operator.control_daemon() != theirs
        assert len(operator.processes(CONTROL)) == 1
        assert machine.run("systemctl", "is-enabled", UNIT).stdout.strip() == "enabled"
        assert not (machine.root / PROGRAM[1:]).exists()
        assert {path: (machine.root / path[1:]).read_bytes() for path in before} == before

    def test_going_away_again_leaves_cloudpods_files(
        self, machine: Machine, family: Family, operator: Operator
    ) -> None:
        family.remove()
        if not isinstance(family, Rpm):
            family.purge()
        assert (machine.root / HOST_CONF[1:]).exists()
        assert (machine.root / DEVICES[1:]).exists()


@pytest.mark.parametrize("family", ["bookworm-deb", "bookworm-rpm"], indirect=True, scope="class")
class TestLeftBehind:
    """Cloudpods' daemon was killed; its control daemon lives on, and keeps it from starting again."""

    def test_the_control_daemon_that_it_left_ends_and_ours_serves(
        self, machine: Machine, family: Family, operator: Operator, current: Packages
    ) -> None:
        (theirs,) = operator.processes(CONTROL)
        operator.kill(operator.daemon())
        machine.wait_until("systemd sees it", lambda: machine.show("ActiveState") != "active")
        assert operator.processes(CONTROL) == [theirs]
        done = family.install(current)
        assert f"Cloudpods' control daemon (PID {theirs}) is asked to end" in done.stdout + done.stderr
        operator.see_it_serves()
        assert len(operator.processes(CONTROL)) == 1
