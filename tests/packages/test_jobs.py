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
    """The lease that the unit's command holds, whose parent is the unit's main process."""
    leases = operator.ask("leases")["leases"]
    pid = operator.machine.show("MainPID", name)
    children = operator.machine.shell(f"cat /proc/{pid}/task/{pid}/children").split()
    return next(lease for lease in leases if str(lease["pid"]) in children)


def begin(machine: Machine, command: str, options: str = OPTIONS) -> None:
    machine.run("mkdir", "-p", "/etc/yunion/jobs")
    machine.write("/etc/yunion/jobs/train", f"COMMAND={command}\nOPTIONS={options}\n")
    machine.run("systemctl", "start", JOB)


@pytest.fixture(scope="class")
def host(family: Family, operator: Operator, current: Packages) -> Operator:
    operator.configure()
    family.install(current)
    operator.start()
    return operator


class TestJobs:
    def test_a_template_job_has_a_lease_that_ends_with_it(self, host: Operator) -> None:
        machine = host.machine
        begin(machine, f"python3 -IS {CLIENT}")
        machine.wait_until("it is attached", lambda: "attached" in machine.journal(JOB))
        lease = lease_of(host, JOB)
        assert (lease["binding"], len(lease["devices"])) == ("process", 1)
        assert lease["uid"] in DYNAMIC
        assert host.ask("devices?unused=true")["total"] == 3
        machine.run("systemctl", "stop", JOB)
        machine.wait_until("all are free", lambda: host.ask("devices?unused=true")["total"] == 4)
        assert host.has_disconnected(lease["pid"]), "before it died of SIGTERM"

    def test_leftover_processes_end_with_the_job_unit(self, host: Operator) -> None:
        """They are disconnected from MPS first, although the job has ended by itself."""
        machine = host.machine
        client = f"python3 -IS {CLIENT} stubborn"
        machine.write("/srv/leaves.sh", f"#!/bin/sh\nsetsid {client} & echo $!\nsleep 1; sleep 4711 &\n")
        machine.run("chmod", "+x", "/srv/leaves.sh")
        begin(machine, "/srv/leaves.sh", f"{OPTIONS} --safe-stop=1s")
        machine.wait_until("it has ended", lambda: machine.show("ActiveState", JOB) == "inactive")
        assert machine.shell("pgrep -f 'sleep 471[1]|stubbor[n]' || true") == ""
        assert "killed" not in machine.journal(JOB), "systemd had nothing to kill"
        machine.wait_until("all are free", lambda: host.ask("devices?unused=true")["total"] == 4)

    def test_a_killed_unit_releases_its_device(self, host: Operator) -> None:
        machine = host.machine
        begin(machine, "sleep 4712")
        machine.wait_until("it has a device", lambda: host.ask("devices?unused=true")["total"] == 3)
        machine.run("systemctl", "kill", "--signal=KILL", JOB)
        machine.wait_until("all are free", lambda: host.ask("devices?unused=true")["total"] == 4)

    def test_a_job_is_stopped_safely_even_if_its_run_is_killed(self, host: Operator) -> None:
        """ExecStop= does it; without it, systemd would kill the rest of the unit at once."""
        machine = host.machine
        begin(machine, f"python3 -IS {CLIENT}")
        (client,) = machine.wait_until("it is attached", lambda: host.ask("clients")["clients"])
        host.kill(int(machine.show("MainPID", JOB)))
        machine.wait_until("it has failed", lambda: machine.show("ActiveState", JOB) == "failed")
        assert host.has_disconnected(client["pid"]), "before it died of SIGTERM"
        assert machine.show("Result", JOB) == "exit-code"
        machine.wait_until("all are free", lambda: host.ask("devices?unused=true")["total"] == 4)
        machine.run("systemctl", "reset-failed", JOB)

    def test_no_job_releases_the_lease_of_another_job(self, host: Operator) -> None:
        machine, thief = host.machine, "yunion-mps-job@thief.service"
        begin(machine, "sleep 4718")
        machine.wait_until("it has a device", lambda: host.ask("devices?unused=true")["total"] == 3)
        lease = lease_of(host, JOB)
        command = f"yunion-mps lease release {lease['id']}"
        machine.write("/etc/yunion/jobs/thief", f"COMMAND={command}\nOPTIONS={OPTIONS}\n")
        machine.run("systemctl", "start", thief)
        machine.wait_until("it has failed", lambda: machine.show("ActiveState", thief) == "failed")
        assert f"belongs to {JOB}" in machine.journal(thief)
        machine.run("systemctl", "reset-failed", thief)
        assert lease_of(host, JOB)["id"] == lease["id"]
        machine.run("systemctl", "stop", JOB)
        machine.wait_until("all are free", lambda: host.ask("devices?unused=true")["total"] == 4)

    def test_a_restarted_unit_releases_its_previous_device(self, host: Operator) -> None:
        machine = host.machine
        begin(machine, "sleep 4713")
        machine.wait_until("it has a device", lambda: host.ask("devices?unused=true")["total"] == 3)
        (before,) = host.ask("leases")["leases"]
        machine.run("systemctl", "restart", JOB)
        machine.wait_until(
            "another lease",
            lambda: [one["id"] for one in host.ask("leases")["leases"]] not in ([], [before["id"]]),
        )
        assert lease_of(host, JOB)["pid"] != before["pid"]
        assert host.ask("devices?unused=true")["total"] == 3
        machine.run("systemctl", "stop", JOB)
        machine.wait_until("all are free", lambda: host.ask("devices?unused=true")["total"] == 4)

    def test_the_template_passes_quoted_words_of_the_command(self, host: Operator) -> None:
        machine = host.machine
        machine.write("/srv/my words.sh", '#!/bin/sh\nprintf "<%s>" "$@"\necho\n')
        machine.run("chmod", "+x", "/srv/my words.sh")
        begin(machine, r"""'"/srv/my words.sh" "two words" 100%n %i $HOME ${OPTIONS} ; "" '""")
        machine.wait_until("it has ended", lambda: machine.show("ActiveState", JOB) == "inactive")
        assert "<two words><100%n><%i><$HOME><${OPTIONS}><;><>" in machine.journal(JOB)

    def test_an_infeasible_request_fails_the_unit_with_a_reason(self, host: Operator) -> None:
        machine = host.machine
        begin(machine, "sleep 4714", "--device 00:06.0-9")
        machine.wait_until("it has failed", lambda: machine.show("ActiveState", JOB) == "failed")
        assert "there is no device 00:06.0-9" in machine.journal(JOB)
        assert host.ask("devices?unused=true")["total"] == 4
        machine.run("systemctl", "reset-failed", JOB)

    def test_stopping_a_queued_job_leaves_nothing_behind(self, host: Operator) -> None:
        machine = host.machine
        taken = [host.ask("devices")["isolated_devices"][0]["addr"]]
        assert taken == ["00:06.0-0"]
        machine.run(
            "systemd-run",
            "--unit=holder",
            "yunion-mps",
            "run",
            OPTIONS,
            "--device",
            taken[0],
            "sleep",
            "4715",
        )
        machine.wait_until("it is taken", lambda: host.ask("devices?unused=true")["total"] == 3)
        begin(machine, "sleep 4716", f"{OPTIONS} --device {taken[0]}")
        machine.wait_until("it waits", lambda: len(host.ask("leases")["waiting"]) == 1)
        machine.run("systemctl", "stop", JOB)
        machine.wait_until("that the queue is empty", lambda: not host.ask("leases")["waiting"])
        assert machine.show("ActiveState", JOB) == "inactive"
        machine.run("systemctl", "stop", "holder")
        machine.wait_until("all are free", lambda: host.ask("devices?unused=true")["total"] == 4)

    def test_a_unit_with_a_private_tmp_gets_an_error_that_says_so(self, host: Operator) -> None:
        command = ["systemd-run", "--wait", "--pipe", "--property=PrivateTmp=yes"]
        done = host.machine.run(*command, "yunion-mps", "run", OPTIONS, "true", check=False)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "warning: true runs without limits: /tmp/nvidia-mps/pipe/control cannot be reached" in said
        assert "PrivateTmp" in said
        assert host.ask("devices?unused=true")["total"] == 4

    def test_a_removal_stops_and_disables_jobs_that_do_not_use_mps(
        self, family: Family, host: Operator
    ) -> None:
        machine = host.machine
        begin(machine, "sleep 4717")
        machine.run("systemctl", "enable", JOB)
        done = family.remove()
        assert f"these jobs are stopped: {JOB}\n" in done.stdout + done.stderr
        assert machine.shell("pgrep -f 'sleep 471[7]' || true") == ""
        assert machine.shell("systemctl list-units --all --plain --no-legend 'yunion-mps-*'") == ""
        assert machine.shell("find /etc/systemd/system -name '*yunion*'") == ""
        assert machine.run("systemctl", "is-system-running").stdout.strip() == "running"
