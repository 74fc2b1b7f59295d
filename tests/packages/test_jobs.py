"""Jobs as units: a lease of a unit ends with the unit."""

from __future__ import annotations

from typing import Any

import pytest

from packages.driver import CLIENT
from packages.family import Family
from packages.machine import Machine
from packages.operator import Operator
from packages.versions import Packages

pytestmark = pytest.mark.parametrize("family", ["trixie-deb"], indirect=True, scope="class")

JOB = "yunion-mps-job@train.service"
#: The machine's GPU is older than Volta, where no limit is enforced.
OPTIONS = "--allow-unlimited"
#: The users that systemd makes for DynamicUser= (its UIDS-GIDS.md).
DYNAMIC = range(61184, 65520)


def lease_of(operator: Operator, name: str) -> dict[str, Any]:
    """The lease that the unit's main process holds."""
    leases = operator.ask("leases")["leases"]
    pid = int(operator.machine.show("MainPID", name))
    return next(lease for lease in leases if lease["pid"] == pid)


def begin(machine: Machine, command: str) -> None:
    """Say what the job is, and start it."""
    machine.run("mkdir", "-p", "/etc/yunion/jobs")
    machine.write("/etc/yunion/jobs/train", f"COMMAND={command}\nOPTIONS={OPTIONS}\n")
    machine.run("systemctl", "start", JOB)


@pytest.fixture(scope="class")
def host(family: Family, operator: Operator, current: Packages) -> Operator:
    """A machine that serves."""
    operator.configure()
    family.install(current)
    operator.start()
    return operator


class TestJobs:
    """One machine, one job after another."""

    def test_a_job_by_the_template_reaches_the_control_daemon_and_its_lease_ends_with_it(
        self, host: Operator
    ) -> None:
        machine = host.machine
        begin(machine, f"python3 -IS {CLIENT}")
        machine.wait_until("it is attached", lambda: "attached" in machine.journal(JOB))
        lease = lease_of(host, JOB)
        assert (lease["binding"], len(lease["devices"])) == ("process", 1)
        assert lease["uid"] in DYNAMIC
        assert host.ask("devices?unused=true")["total"] == 3
        machine.run("systemctl", "stop", JOB)
        machine.wait_until("all are free", lambda: host.ask("devices?unused=true")["total"] == 4)

    def test_what_a_job_leaves_behind_ends_with_its_unit_and_the_lease_was_its_main_processs(
        self, host: Operator
    ) -> None:
        machine = host.machine
        machine.write("/srv/leaves.sh", "#!/bin/sh\nsetsid sleep 4711 &\n")
        machine.run("chmod", "+x", "/srv/leaves.sh")
        begin(machine, "/srv/leaves.sh")
        machine.wait_until("it has ended", lambda: machine.show("ActiveState", JOB) == "inactive")
        assert machine.shell("pgrep -f 'sleep 471[1]' || true") == ""
        machine.wait_until("all are free", lambda: host.ask("devices?unused=true")["total"] == 4)

    def test_a_unit_that_is_killed_gives_its_device_back(self, host: Operator) -> None:
        machine = host.machine
        begin(machine, "sleep 4712")
        machine.wait_until("it has a device", lambda: host.ask("devices?unused=true")["total"] == 3)
        machine.run("systemctl", "kill", "--signal=KILL", JOB)
        machine.wait_until("all are free", lambda: host.ask("devices?unused=true")["total"] == 4)

    def test_a_unit_with_a_tmp_of_its_own_is_told_that_it_cannot_reach_the_control_daemon(
        self, host: Operator
    ) -> None:
        command = ["systemd-run", "--wait", "--pipe", "--property=PrivateTmp=yes"]
        done = host.machine.run(*command, "yunion-mps", "run", OPTIONS, "true", check=False)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "true runs without limits: /tmp/nvidia-mps/pipe/control cannot be reached" in said
        assert "PrivateTmp" in said
        assert host.ask("devices?unused=true")["total"] == 4
