"""What is wrong with a host is said in a clear line, and the host is as it was before."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from packages.conftest import NewMachine
from packages.family import Deb, Family
from packages.machine import UNIT, Machine, MachineError
from packages.operator import PIPE, Operator
from packages.traces import Traces
from packages.versions import REQUIRED_MIB, Packages
from simhost.mps import CONTROL

both = pytest.mark.parametrize("family", ["bookworm-deb", "trixie-rpm"], indirect=True, scope="class")


@pytest.fixture(scope="class")
def machine(family: Family) -> Machine:
    return family.machine


@pytest.fixture(scope="class")
def configured(operator: Operator, family: Family, current: Packages) -> Operator:
    """On a machine with the package and both files; the service is not started."""
    family.install(current)
    operator.configure()
    return operator


@both
class TestInstallation:
    """Each leaves nothing behind, so they share a machine."""

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, machine: Machine) -> Iterator[None]:
        traces = Traces(machine)
        traces.take()
        yield
        assert traces.left() == []
        assert machine.show("LoadState") == "not-found"

    def test_installation_fails_without_a_recent_python(self, family: Family, current: Packages) -> None:
        machine = family.machine
        machine.shell("mkdir /root/kept; mv /usr/bin/python3* /root/kept")
        machine.write("/usr/bin/python3", "#!/bin/sh\nexit 1\n")  # what an old one says to our question
        machine.run("chmod", "755", "/usr/bin/python3")
        try:
            done = family.install(current, check=False)
        finally:
            machine.shell("rm /usr/bin/python3; mv /root/kept/* /usr/bin; rmdir /root/kept")
        assert done.returncode != 0
        assert "3.9 or later" in done.stdout + done.stderr
        assert family.version() == ""

    def test_installation_fails_if_disk_space_is_short(self, family: Family, current: Packages) -> None:
        machine = family.machine
        machine.shell(
            f"mount -t tmpfs -o size={REQUIRED_MIB - 1}m room /mnt; mkdir /mnt/upper /mnt/work\n"
            "mount -t overlay -o lowerdir=/usr,upperdir=/mnt/upper,workdir=/mnt/work room /usr"
        )
        try:
            done = family.install(current, check=False)
        finally:
            machine.shell("umount --lazy /usr /mnt")
        assert done.returncode != 0
        assert "/usr has " in done.stdout + done.stderr
        assert family.version() == ""

    def test_a_disk_that_fills_up_during_installation_changes_nothing(
        self, family: Family, current: Packages
    ) -> None:
        machine = family.machine
        machine.shell("mkdir /usr/lib/yunion-mps; mount -t tmpfs -o size=256k room /usr/lib/yunion-mps")
        try:
            done = family.install(current, check=False)
        finally:
            machine.shell("umount /usr/lib/yunion-mps; rmdir --ignore-fail-on-non-empty /usr/lib/yunion-mps")
        said = done.stdout + done.stderr
        assert done.returncode != 0
        assert "No space left on device" in said or "needs" in said
        assert family.version() == ""


@both
class TestStart:
    """On one machine that is configured, and each leaves the service stopped."""

    @pytest.fixture(autouse=True)
    def it_rests(self, configured: Operator) -> Iterator[None]:
        yield
        configured.machine.run("systemctl", "stop", UNIT)
        configured.machine.run("systemctl", "reset-failed", UNIT, check=False)  # it may not have failed
        configured.see_it_rests()

    def test_another_programs_control_daemon_is_reported_and_not_touched(self, operator: Operator) -> None:
        machine = operator.machine
        machine.shell(
            f"mkdir -p {PIPE}\n"
            f"systemd-run --unit=foreign --setenv=CUDA_MPS_PIPE_DIRECTORY={PIPE} nvidia-cuda-mps-control -f"
        )
        foreign = int(machine.show("MainPID", "foreign.service"))
        machine.wait_until("it serves", lambda: self._serves(operator))
        started = machine.run("systemctl", "start", UNIT, check=False)
        assert started.returncode != 0
        assert (
            f"a control daemon (PID {foreign}, uid 0) not started by yunion-mps serves" in machine.journal()
        )
        assert machine.show("ActiveState", "foreign.service") == "active"
        assert operator.modes() == ["Default"]
        quit_it = f"echo quit | CUDA_MPS_PIPE_DIRECTORY={PIPE} {CONTROL}"
        assert machine.shell(quit_it) == ""  # as the line says; the service need not be started again
        machine.wait_until("active", lambda: machine.show("ActiveState") == "active")
        operator.see_it_serves()

    def test_an_invalid_configuration_is_not_retried(self, operator: Operator) -> None:
        machine = operator.machine
        operator.configure('"many"')
        assert machine.run("systemctl", "start", UNIT, check=False).returncode != 0
        shown = [machine.show(name) for name in ("ActiveState", "Result", "ExecMainStatus", "NRestarts")]
        assert shown == ["failed", "exit-code", "6", "0"]
        assert "virtual_number" in machine.journal()
        assert operator.modes() == ["Default"]
        operator.configure()

    def test_a_directory_that_the_unit_may_not_write_is_not_retried(self, operator: Operator) -> None:
        machine, directory = operator.machine, "/home/mps/pipe"
        operator.configure(more=f"cuda_mps_pipe_directory: {directory}")
        assert machine.run("systemctl", "start", UNIT, check=False).returncode != 0
        shown = [machine.show(name) for name in ("ActiveState", "Result", "ExecMainStatus", "NRestarts")]
        assert shown == ["failed", "exit-code", "6", "0"]
        why = f"which {UNIT} may not write to (ProtectHome=read-only)"
        what = f"cuda_mps_pipe_directory is {directory}, {why}"
        assert what in machine.journal()
        assert operator.modes() == ["Default"]
        checks = (["yunion-mps", "config", "check"], ["yunion-mps-daemon", "--check"])
        for check in checks:
            done = machine.run(*check, check=False)
            assert (done.returncode, what in done.stderr) == (6, True)
        drop_in = f"/etc/systemd/system/{UNIT}.d"
        machine.write(f"{drop_in}/override.conf", f"[Service]\nReadWritePaths={directory}\n")
        machine.shell(f"mkdir -p {directory}; systemctl daemon-reload")  # as the hint says
        for check in checks:
            machine.run(*check)
        machine.run("systemctl", "start", UNIT)
        assert machine.shell(f"test -S {directory}/control") == ""
        machine.shell(f"systemctl stop {UNIT}; rm -r {drop_in} /home/mps; systemctl daemon-reload")
        assert operator.modes() == ["Default"]
        operator.configure()

    def test_without_a_driver_the_service_waits_for_it(self, operator: Operator) -> None:
        machine = operator.machine
        machine.driver.host.hide_library()
        try:
            machine.run("systemctl", "start", UNIT)
            waits = "waiting for the NVIDIA driver: the NVIDIA driver's library libnvidia-ml.so.1"
            machine.wait_until(waits, lambda: machine.show("StatusText").startswith(waits))
        finally:
            machine.driver.host.show_library()
        operator.see_it_serves()
        assert machine.show("NRestarts") == "0"

    def _serves(self, operator: Operator) -> bool:
        try:
            return operator.control("get_default_active_thread_percentage") == ["100.0"]
        except MachineError:
            return False


@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_the_package_installs_without_a_running_systemd(
    release: str, new_machine: NewMachine, current: Packages
) -> None:
    with new_machine(release, f"{release}-chroot") as machine:
        file = machine.install_file(current.deb)
        command = [
            "chroot",
            str(machine.root),
            "apt-get",
            "install",
            "--yes",
            "--no-install-recommends",
            file,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "systemd is not running" in done.stderr + done.stdout
        machine.boot()
        assert Deb(machine).version() == current.version
        operator = Operator(machine)
        operator.see_it_rests()
        operator.configure()
        operator.start()
        operator.see_it_serves()
