"""An operator's life with the package on one machine: each step begins where the one before ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from packages.family import NAME, Family
from packages.machine import UNIT, Machine
from packages.operator import DEVICES, HOST_CONF, USER, Operator
from packages.traces import Traces
from packages.versions import Packages

GATEWAY = "yunion-mps-gateway.service"
_DEBS, _RPMS = ["bullseye-deb", "bookworm-deb", "trixie-deb"], ["bookworm-rpm", "trixie-rpm"]
_SCRAPE = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9434/metrics').read().decode())"


#: What depends on how a format installs, upgrades and removes.
of_the_package = pytest.mark.parametrize("family", [*_DEBS, *_RPMS], indirect=True, scope="class")
#: What depends on the release's systemd and Python, and on files that are the same in both formats
#: (tests/packaging/test_contents.py).
of_the_release = pytest.mark.parametrize("family", _DEBS, indirect=True, scope="class")


@pytest.fixture(autouse=True)
def step(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip what follows a step that failed: its machine is not where it should be."""
    life = request.cls
    broken = getattr(life, "broken", {})
    machine = request.node.callspec.params["family"]
    if machine in broken:
        pytest.skip(f"after: {broken[machine]}")
    before = request.session.testsfailed
    yield
    if request.session.testsfailed > before:
        life.broken = {**broken, machine: request.node.name}


@pytest.fixture(scope="class")
def machine(family: Family) -> Machine:
    return family.machine


@pytest.fixture(scope="class")
def traces(machine: Machine) -> Traces:
    return Traces(machine)


class TestLife:
    @of_the_package
    def test_it_installs_offline_and_starts_nothing(
        self, family: Family, operator: Operator, traces: Traces, current: Packages
    ) -> None:
        traces.take()
        done = family.install(current)
        assert "Traceback" not in done.stdout + done.stderr
        assert family.version() == current.version
        assert operator.machine.run("systemctl", "is-enabled", UNIT, check=False).stdout.strip() == "disabled"
        assert operator.machine.run("getent", "group", "yunion-mps").stdout
        operator.see_it_rests()
        version = operator.machine.run("yunion-mps", "--version").stdout
        assert current.version in version
        assert operator.machine.run("systemctl", "is-system-running").stdout.strip() == "running"

    @of_the_package
    def test_systemd_accepts_the_unit_silently_and_rates_it(self, machine: Machine) -> None:
        assert machine.show("LoadState") == "loaded"
        verify = ["systemd-analyze", "verify", "--man=no", machine.show("FragmentPath")]
        verified = machine.run("systemd-run", "--quiet", "--pipe", "--wait", *verify)
        assert [line for line in verified.stderr.splitlines() if "yunion" in line] == []
        rating = machine.run("systemd-analyze", "security", "--no-pager", UNIT).stdout.splitlines()[-1]
        assert float(rating.partition(":")[2].split()[0]) <= 4.0
        users = ("kubelet", "docker", "containerd", "crio", "slurmd", "yunion-host")
        assert {f"{name}.service" for name in users} <= set(machine.show("Before").split())
        driver = ("systemd-modules-load", "nvidia-persistenced")
        assert {f"{name}.service" for name in driver} <= set(machine.show("After").split())

    @of_the_package
    def test_the_preset_does_not_enable_it(self, machine: Machine) -> None:
        machine.run("systemctl", "preset", UNIT)
        assert machine.run("systemctl", "is-enabled", UNIT, check=False).stdout.strip() == "disabled"

    @of_the_release
    def test_status_has_a_hint_before_the_host_is_configured(self, machine: Machine) -> None:
        done = machine.run("yunion-mps", "status", check=False)
        assert done.returncode == 3
        assert "systemctl" in done.stderr
        assert "Traceback" not in done.stderr

    @of_the_package
    def test_the_configuration_can_be_checked(self, operator: Operator, machine: Machine) -> None:
        operator.configure()
        machine.run("yunion-mps", "config", "check")
        operator.see_it_rests()

    @of_the_package
    def test_the_enabled_service_is_ready(self, operator: Operator, machine: Machine) -> None:
        operator.start()
        operator.see_it_serves()
        assert machine.run("systemctl", "is-enabled", UNIT).stdout.strip() == "enabled"

    @of_the_release
    def test_the_devices_are_listed(self, machine: Machine) -> None:
        listed = machine.run("yunion-mps", "isolated-device-list", "--output", "csv").stdout
        assert [f"00:06.0-{slot}" in listed for slot in range(5)] == [True] * 4 + [False]
        table = machine.run("yunion-mps", "isolated-device-list").stdout
        assert "*** Total: 4 Pages: 1 Limit: 20 Offset: 0 Page: 1 ***" in table

    @of_the_package
    def test_only_members_of_the_group_can_use_the_socket(self, machine: Machine) -> None:
        machine.shell("useradd --system --groups yunion-mps friend; useradd --system stranger")
        assert machine.shell("runuser -u friend -- yunion-mps list").count(" free ") == 4
        done = machine.run("runuser", "-u", "stranger", "--", "yunion-mps", "list", check=False)
        assert done.returncode == 4
        assert "yunion-mps" in done.stderr
        machine.shell("userdel friend; userdel stranger")

    @of_the_release
    def test_container_engines_find_the_devices_and_the_hook(self, machine: Machine) -> None:
        edits = "['devices'][2]['containerEdits']"
        look = f"import json; print(*json.load(open('/run/cdi/yunion-mps.json')){edits}['hooks'][0]['args'])"
        machine.shell("for i in $(seq 100); do [ -e /run/cdi/yunion-mps.json ] || sleep 0.1; done")
        assert machine.run("python3", "-c", look).stdout == "yunion-mps cdi-hook 00:06.0-1\n"
        hook = "env -i /usr/bin/yunion-mps cdi-hook 00:06.0-1"
        bundle = (
            f"import json; spec = json.load(open('/run/cdi/yunion-mps.json')); env = spec{edits}['env']; "
        )
        bundle += "json.dump({'process': {'env': env}}, open('/run/config.json', 'w'))"
        machine.run("python3", "-c", bundle)
        state = 'echo "{\\"pid\\": $pid, \\"bundle\\": \\"/run\\"}"'
        taken = machine.shell(f"sleep 60 >/dev/null & pid=$!; {state} | {hook} && yunion-mps who; kill $pid")
        assert "\n00:06.0-1  " in taken
        assert "sleep 60" in taken

    @of_the_package
    def test_the_environment_file_is_the_distributions(self, family: Family, operator: Operator) -> None:
        machine = operator.machine
        before = machine.run("cat", family.environment).stdout
        machine.write(family.environment, f"{before}YUNION_MPS_LOG_LEVEL=debug\n")
        machine.run("systemctl", "restart", UNIT)
        assert "YUNION_MPS_LOG_LEVEL=debug" in machine.shell(
            f"tr '\\0' '\\n' </proc/{operator.daemon()}/environ"
        )
        machine.write(family.environment, before)
        machine.run("systemctl", "restart", UNIT)

    @of_the_release
    def test_the_sandbox_includes_the_control_daemon(self, operator: Operator, machine: Machine) -> None:
        for pid in (operator.daemon(), operator.control_daemon()):
            status = machine.shell(f"cat /proc/{pid}/status")
            assert "NoNewPrivs:\t1" in status
            assert "Seccomp:\t2" in status
            opened = machine.run(
                "nsenter", f"--target={pid}", "--mount", "touch", "/usr/x", "/etc/x", check=False
            )
            assert opened.stderr.count("Read-only file system") == 2

    @of_the_release
    def test_a_reload_with_good_files_changes_what_is_in_effect(
        self, operator: Operator, machine: Machine
    ) -> None:
        before = operator.control_daemon()
        operator.configure(2)
        machine.run("systemctl", "reload", UNIT)
        operator.see_it_serves(2)
        operator.configure(4)
        machine.run("systemctl", "reload", UNIT)
        operator.see_it_serves(4)
        assert operator.control_daemon() == before

    @of_the_release
    def test_a_reload_with_a_bad_file_fails_and_changes_nothing(
        self, operator: Operator, machine: Machine
    ) -> None:
        before = operator.control_daemon()
        operator.configure('"many"')
        done = machine.run("systemctl", "reload", UNIT, check=False)
        assert done.returncode != 0
        assert f"{DEVICES}:4: virtual_number" in machine.journal()
        operator.see_it_serves()
        assert operator.control_daemon() == before
        operator.configure()

    @of_the_release
    def test_tmpfiles_cleanup_does_not_touch_the_pipe_directory(
        self, operator: Operator, machine: Machine
    ) -> None:
        machine.write("/etc/tmpfiles.d/aged.conf", "e /tmp 1777 root root 0\n")
        before = machine.shell("touch /tmp/old; ls -R /tmp/nvidia-mps")
        machine.run("systemd-tmpfiles", "--clean")
        assert machine.shell("ls -R /tmp/nvidia-mps") == before
        assert machine.run("test", "-e", "/tmp/old", check=False).returncode == 1
        machine.run("rm", "/etc/tmpfiles.d/aged.conf")

    @of_the_release
    def test_a_job_of_an_ordinary_user_is_served(self, operator: Operator, machine: Machine) -> None:
        pid = operator.begin_job("job")
        (server,) = operator.servers()
        assert operator.processes("nvidia-cuda-mps-server") == [server]
        assert str(pid) in machine.run("yunion-mps", "who", "--clients").stdout
        assert f"Uid:\t{USER}\t" in machine.shell(f"cat /proc/{server}/status")
        operator.end_job("job", pid)

    @of_the_release
    def test_a_killed_daemon_adopts_its_control_daemon_and_jobs(
        self, operator: Operator, machine: Machine
    ) -> None:
        pid, control = operator.begin_job("work"), operator.control_daemon()
        before = operator.daemon()
        with operator.restarted_at_once():
            operator.kill(before)
            machine.wait_until("another daemon", lambda: self._another(operator, before))
        operator.see_it_serves()
        assert operator.control_daemon() == control
        assert operator.is_at_work("work")
        operator.end_job("work", pid)

    @of_the_release
    def test_a_hung_daemon_is_restarted_without_ending_jobs(
        self, operator: Operator, machine: Machine
    ) -> None:
        assert machine.show("WatchdogUSec") == "30s"
        with operator.restarted_at_once("WatchdogSec=2s"):
            machine.run("systemctl", "restart", UNIT)
            assert machine.show("WatchdogUSec") == "2s"
            pid, control, before = operator.begin_job("hung"), operator.control_daemon(), operator.daemon()
            machine.kill(before, signal.SIGSTOP)
            machine.wait_until("another daemon", lambda: self._another(operator, before))
            assert "watchdog" in machine.journal().lower()
            operator.see_it_serves()
            assert operator.control_daemon() == control
            assert operator.is_at_work("hung")
            operator.end_job("hung", pid)

    @of_the_release
    def test_a_killed_server_ends_only_its_own_jobs(self, operator: Operator, machine: Machine) -> None:
        pid, control = operator.begin_job("unlucky"), operator.control_daemon()
        operator.kill(operator.servers()[0])
        machine.wait_until("its job has ended", lambda: not operator.is_at_work("unlucky"))
        machine.driver.host.gpus[0].remove_process(pid)
        operator.end_job("next", operator.begin_job("next"))
        operator.see_it_serves()
        assert operator.control_daemon() == control

    @of_the_release
    def test_a_killed_control_daemon_is_restarted(self, operator: Operator, machine: Machine) -> None:
        before = operator.control_daemon()
        operator.kill(before)
        machine.wait_until("another", lambda: operator.control_daemon() not in (0, before))
        operator.see_it_serves()

    @of_the_release
    def test_a_stop_restores_the_host_and_a_start_serves_again(
        self, operator: Operator, machine: Machine
    ) -> None:
        machine.run("systemctl", "stop", UNIT)
        operator.see_it_rests()
        assert machine.shell("ls /run/cdi") == "", "no container finds a device of ours"
        machine.run("systemctl", "start", UNIT)
        operator.see_it_serves()

    @of_the_release
    def test_an_unprivileged_process_serves_the_metrics_over_tcp(
        self, operator: Operator, machine: Machine
    ) -> None:
        assert machine.show("ActiveState", GATEWAY) == "inactive"
        operator.configure(more="metrics_listen: 127.0.0.1:9434")
        machine.run("systemctl", "reload", UNIT)
        machine.wait_until("the metrics", lambda: "\nyunion_mps_up 1.0\n" in _scraped(machine))
        status = machine.run("cat", f"/proc/{machine.show('MainPID', GATEWAY)}/status").stdout
        uid, capabilities = (status.partition(f"{key}:")[2].split()[0] for key in ("Uid", "CapBnd"))
        assert (uid != "0", int(capabilities, 16)) == (True, 0)
        rating = machine.run("systemd-analyze", "security", "--no-pager", GATEWAY).stdout.splitlines()[-1]
        assert float(rating.partition(":")[2].split()[0]) <= 1.5
        control = operator.control_daemon()
        machine.run("systemctl", "restart", UNIT)
        machine.wait_until("the metrics", lambda: "\nyunion_mps_up 1.0\n" in _scraped(machine))
        assert operator.control_daemon() != control
        operator.configure()
        machine.run("systemctl", "reload", UNIT)
        machine.wait_until("its end", lambda: machine.show("ActiveState", GATEWAY) == "inactive")
        assert machine.show("Result", GATEWAY) == "success"

    @of_the_release
    def test_after_a_reboot_it_serves_before_others_start_jobs(
        self, operator: Operator, machine: Machine
    ) -> None:
        machine.write(
            "/etc/systemd/system/kubelet.service",
            "[Service]\nType=oneshot\nExecStart=yunion-mps list\nRemainAfterExit=yes\n"
            "[Install]\nWantedBy=multi-user.target\n",
        )
        machine.run("systemctl", "enable", "kubelet")
        machine.reboot()
        operator.see_it_serves()
        assert "\n00:06.0-3  " in machine.journal("kubelet.service")
        machine.run("systemctl", "disable", "--now", "kubelet")
        (machine.root / "etc/systemd/system/kubelet.service").unlink()

    @of_the_package
    def test_a_downgrade_and_an_upgrade_end_no_job(
        self, family: Family, operator: Operator, machine: Machine, previous: Packages, current: Packages
    ) -> None:
        pid, control = operator.begin_job("steady"), operator.control_daemon()
        daemon = operator.daemon()
        machine.run(
            "systemd-run",
            "--unit=holder",
            f"--uid={USER}",  # the control daemon serves that user now
            "--property=SupplementaryGroups=yunion-mps",
            *("yunion-mps", "run", "--allow-unlimited", "sleep", "infinity"),
        )
        machine.wait_until(  # whose command is ours until it has become the other
            "a lease",
            lambda: "sleep infinity" in [one["command"] for one in operator.ask("leases")["leases"]],
        )
        (lease,) = operator.ask("leases")["leases"]
        for packages in (previous, current):
            family.install(packages)
            assert family.version() == packages.version
            assert operator.ask("status")["version"] == packages.version
            operator.see_it_serves()
            assert operator.control_daemon() == control
            assert operator.daemon() == daemon
            assert operator.is_at_work("steady")
            assert operator.ask("leases")["leases"] == [lease]
        machine.run("systemctl", "stop", "holder")
        machine.wait_until("its end", lambda: not operator.ask("leases")["leases"])
        assert "hostname: tested" in (family.machine.root / HOST_CONF.lstrip("/")).read_text()
        operator.end_job("steady", pid)

    @of_the_package
    def test_an_upgrade_with_invalid_configuration_keeps_the_old_daemon(
        self, family: Family, operator: Operator, previous: Packages, current: Packages
    ) -> None:
        control = operator.control_daemon()
        operator.configure('"many"')
        done = family.install(previous)
        assert "virtual_number" in done.stdout + done.stderr
        assert operator.ask("status")["version"] == current.version
        operator.see_it_serves()
        assert operator.control_daemon() == control
        both = f"the daemon runs version {current.version}, but {previous.version} is installed"
        status = operator.machine.run("yunion-mps", "status").stdout
        assert f"Warning:  {both}\n" in status
        assert "without ending jobs: yunion-mps daemon-reexec" in status
        operator.configure()
        reloaded = operator.machine.run("yunion-mps", "reload")
        assert f"{both}: yunion-mps daemon-reexec" in reloaded.stdout + reloaded.stderr
        operator.machine.run("yunion-mps", "daemon-reexec")
        assert operator.ask("status")["version"] == previous.version
        family.install(current)
        assert "is installed" not in operator.machine.run("yunion-mps", "status").stdout
        operator.see_it_serves()

    @of_the_package
    def test_a_removal_keeps_the_configuration_and_stops_everything(
        self, family: Family, operator: Operator, machine: Machine, traces: Traces
    ) -> None:
        family.remove()
        assert family.version() == ""
        machine.wait_until("the unit is gone", lambda: machine.show("LoadState") == "not-found")
        operator.see_it_rests()
        assert "hostname: tested" in (machine.root / HOST_CONF.lstrip("/")).read_text()
        assert traces.programs() == []

    @of_the_package
    def test_a_purge_of_a_running_service_leaves_nothing(
        self, family: Family, operator: Operator, machine: Machine, current: Packages, traces: Traces
    ) -> None:
        for path in (HOST_CONF, DEVICES):  # the operator's own
            (machine.root / path.lstrip("/")).unlink()
        if family.name == "deb":
            family.purge()  # dpkg remembers a package that was removed: examples are for a first installation
        family.install(current)
        operator.start()  # with the examples, as they are
        assert operator.modes() == ["Exclusive_Process"]
        family.purge()
        assert operator.modes() == ["Default"]
        assert traces.left() == []
        assert NAME not in machine.run("systemctl", "list-unit-files", "--no-pager").stdout
        assert machine.run("systemctl", "is-system-running").stdout.strip() == "running"

    def _another(self, operator: Operator, before: int) -> bool:
        active = operator.machine.show("ActiveState") == "active"
        return active and operator.daemon() not in (0, before)


def _scraped(machine: Machine) -> str:
    return str(machine.run("python3", "-c", _SCRAPE, check=False).stdout)
