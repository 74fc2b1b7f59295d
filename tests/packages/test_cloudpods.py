"""A host with Cloudpods' own package changes over by one command."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.cloudpods import SERVES, cloudpods
from packages.family import Family
from packages.machine import UNIT
from packages.operator import DEVICES, HOST_CONF, Operator
from packages.versions import Packages

on_deb = pytest.mark.parametrize("family", ["bookworm-deb"], indirect=True, scope="class")
#: The formats replace another package in different orders.
on_both = pytest.mark.parametrize("family", ["bookworm-deb", "trixie-rpm"], indirect=True, scope="class")


@pytest.fixture(scope="session")
def theirs(folder: Path) -> Packages:
    return cloudpods(folder)


@pytest.fixture(scope="class")
def their(family: Family, operator: Operator, theirs: Packages) -> int:
    operator.configure()
    family.install(theirs)
    operator.start()
    operator.machine.wait_until(
        "that it serves", lambda: operator.machine.run("test", "-e", SERVES, check=False).returncode == 0
    )
    (control,) = operator.control_daemons()
    return control


@on_both
def test_our_package_replaces_cloudpods_without_ending_jobs(
    family: Family, operator: Operator, their: int, current: Packages
) -> None:
    machine = operator.machine
    job = operator.begin_job("theirs")
    before = [machine.run("cat", path).stdout for path in (HOST_CONF, DEVICES)]
    done = family.install(current)
    assert f"Cloudpods' control daemon (PID {their}) was adopted with its jobs" in done.stdout + done.stderr
    assert family.version() == current.version
    operator.see_it_serves()
    assert operator.control_daemons() == [operator.control_daemon()] == [their]
    (domain,) = operator.ask("status")["domains"]
    assert domain["pending"] == ""
    ours = operator.begin_job("ours")
    assert operator.is_at_work("theirs")
    assert machine.run("systemctl", "is-enabled", UNIT).stdout.strip() == "enabled"
    assert [machine.run("cat", path).stdout for path in (HOST_CONF, DEVICES)] == before
    assert machine.run("test", "-e", "/opt/yunion/bin/mps-daemon", check=False).returncode == 1
    daemon = operator.daemon()
    with operator.restarted_at_once():
        operator.kill(daemon)
        machine.wait_until("another daemon", lambda: operator.daemon() not in (0, daemon))
        machine.wait_until("it serves", lambda: machine.show("ActiveState") == "active")
    machine.run("yunion-mps", "daemon-reexec")
    operator.see_it_serves()
    assert operator.control_daemons() == [operator.control_daemon()] == [their]
    assert operator.is_at_work("theirs")
    assert operator.is_at_work("ours")
    operator.end_job("theirs", job)
    operator.end_job("ours", ours)
    machine.run("systemctl", "stop", UNIT)
    assert operator.control_daemons() == []
    assert operator.modes() == ["Exclusive_Process"], "the modes before Cloudpods' daemon were not recorded"


@on_deb
def test_jobs_of_a_crashed_daemon_keep_their_limits(
    family: Family, operator: Operator, their: int, current: Packages
) -> None:
    machine = operator.machine
    operator.control("set_default_active_thread_percentage 50")
    job = operator.begin_job("theirs")
    (server,) = operator.servers()
    operator.kill(operator.daemon())
    machine.wait_until("it failed", lambda: machine.show("ActiveState") == "failed")
    assert operator.control_daemons() == [their]
    done = family.install(current)
    assert f"Cloudpods' control daemon (PID {their}) was adopted with its jobs" in done.stdout + done.stderr
    operator.see_it_serves()
    assert operator.control_daemons() == [operator.control_daemon()] == [their]
    assert operator.is_at_work("theirs")
    (domain,) = operator.ask("status")["domains"]
    assert f"the MPS server (PID {server})" in domain["pending"]
    operator.end_job("theirs", job)


@on_deb
def test_a_control_daemon_that_cannot_be_adopted_ends_after_its_jobs(
    family: Family, operator: Operator, their: int, current: Packages
) -> None:
    machine = operator.machine
    machine.shell(f"echo 'cuda_mps_scope: gpu' >>{HOST_CONF}")
    done = family.install(current)
    assert f"(PID {their}) cannot be adopted: cuda_mps_scope is gpu" in done.stdout + done.stderr
    machine.wait_until("its end", lambda: their not in operator.control_daemons())
    machine.wait_until("ours", lambda: operator.ask("status")["state"] == "ready")
    assert operator.control_daemons() == [operator.control_daemon()]


@on_both
def test_returning_to_cloudpods_package_ends_no_job_before_a_restart(
    family: Family, operator: Operator, theirs: Packages, current: Packages
) -> None:
    """As docs/cloudpods.md says it."""
    machine = operator.machine
    operator.configure(more="metrics_listen: 127.0.0.1:9434\ncuda_mps_stop_timeout_s: 1")
    family.install(current)
    operator.start()
    ours, job = operator.control_daemon(), operator.begin_job("ours")
    done = family.install(theirs)
    restart = f"systemctl restart {UNIT}"
    said = f"running jobs continue; to switch over when they have ended: {restart}"
    assert said in done.stdout + done.stderr
    assert operator.control_daemons() == [ours]
    assert operator.is_at_work("ours")
    machine.shell(restart)
    machine.wait_until("their control daemon", lambda: operator.control_daemons() not in ([], [ours]))
    operator.end_job("ours", job)
    units = machine.shell("systemctl list-units --plain --no-legend 'yunion-mps-*'").splitlines()
    assert [line.split()[0] for line in units] == [UNIT]
    assert machine.run("test", "-e", "/usr/lib/yunion-mps", check=False).returncode == 1
