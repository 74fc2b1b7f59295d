"""The package leaves in bad times."""

from __future__ import annotations

import pytest

from packages.family import Family
from packages.machine import UNIT
from packages.operator import HOST_CONF, Operator
from packages.versions import Packages

on_deb = pytest.mark.parametrize("family", ["bookworm-deb"], indirect=True, scope="class")
# trixie's rpm runs the packages' scripts with a /tmp of their own.
on_both = pytest.mark.parametrize("family", ["bookworm-deb", "trixie-rpm"], indirect=True, scope="class")


@on_both
@pytest.mark.parametrize("number", ["4", '"many"'], ids=["right", "broken"])
def test_a_removal_restores_what_a_killed_daemon_left(
    family: Family, operator: Operator, current: Packages, number: str
) -> None:
    """Also where its files are broken since, so that no daemon could start any more."""
    machine = family.machine
    operator.configure()
    family.install(current)
    operator.start()
    machine.write(f"/etc/systemd/system/{UNIT}.d/once.conf", "[Service]\nRestart=no\n")
    machine.run("systemctl", "daemon-reload")
    operator.kill(operator.daemon())
    machine.wait_until("systemd sees it", lambda: machine.show("ActiveState") == "failed")
    assert operator.modes() == ["Exclusive_Process"]
    operator.configure(number)
    done = family.remove()
    assert "everything is restored" in done.stdout + done.stderr
    assert "its control daemon does not quit" not in done.stdout + done.stderr
    operator.see_it_rests()


@on_deb
def test_a_removal_names_the_jobs_it_ends_and_keeps_foreign_files(
    family: Family, operator: Operator, current: Packages
) -> None:
    machine = family.machine
    operator.configure()
    machine.shell(
        "mkdir -p /srv/logs/kafka; touch /srv/logs/server.log /srv/logs/kafka/server.log\n"
        f"echo 'cuda_mps_log_directory: /srv/logs' >>{HOST_CONF}"
    )
    family.install(current)
    operator.start()
    pid = operator.begin_job("working")
    done = family.remove()
    said = f"1 job(s) on the GPUs have 10 s to end; after that, they are ended: PID {pid} of nobody"
    assert said in done.stdout + done.stderr
    operator.end_job("working", pid)
    family.purge()
    assert machine.shell("find /srv/logs -type f | sort").split() == [
        "/srv/logs/kafka/server.log",
        "/srv/logs/server.log",
    ]
    assert machine.run("test", "-e", "/tmp/nvidia-mps", check=False).returncode == 1
