"""The packages' scripts, function by function; tests/packages runs them on real machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packages.versions import REQUIRED_MIB
from unit.hostile_names import WORST
from unit.mps.other_processes import STRANGER

from .conftest import ROOT, Host

NAMES = ("host.conf", "host_container_device.yml")
CLOUDPODS = "hypervisor: kvm\nadmin_password: secret\nenable_cuda_mps: true\n"
REFUSED = "<3>/etc/yunion/host.conf:5: enable_cuda_mps is 3\n<3>fix these lines"


@pytest.fixture(autouse=True)
def examples(host: Host) -> None:
    for name in NAMES:
        (host.root / "examples" / name).write_text((ROOT / "etc/yunion" / name).read_text())


def configuration(host: Host) -> dict[str, str]:
    return (
        {path.name: path.read_text() for path in (host.root / "etc").iterdir()}
        if (host.root / "etc").exists()
        else {}
    )


def files(directory: Path, *names: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_text("")


# -- the two files


def test_missing_configuration_is_created_from_the_examples(host: Host) -> None:
    said = host.good("make_configuration")
    assert [line.split(" was created")[0] for line in said] == [
        f"yunion-mps-daemon: {host.root}/etc/{name}" for name in NAMES
    ]
    assert configuration(host) == {name: (ROOT / "etc/yunion" / name).read_text() for name in NAMES}


def test_no_device_file_is_created_beside_an_existing_host_conf(host: Host) -> None:
    (host.root / "etc/host.conf").write_text(CLOUDPODS)
    assert host.good("make_configuration") == []
    assert configuration(host) == {"host.conf": CLOUDPODS}


def test_only_the_first_installation_creates_files() -> None:
    """An upgrade does not bring back what an operator has taken away."""
    script = (ROOT / "packaging/yunion-mps-daemon/postinstall.sh").read_text()
    assert '[ -n "$2" ] || /usr/lib/yunion-mps/maintain first' in script  # dpkg
    assert "\n1) /usr/lib/yunion-mps/maintain first ;;" in script  # rpm
    assert (
        "make_configuration"
        not in (ROOT / "packaging/scriptlets/maintain.sh").read_text().partition("compile_bytecode() {")[0]
    )


def test_existing_files_survive_installation_and_purge(host: Host) -> None:
    (host.root / "etc/host.conf").write_text(CLOUDPODS)
    (host.root / "etc/host_container_device.yml").symlink_to("elsewhere.yml")  # and dangles
    host.good("make_configuration")
    host.good("purge")
    assert (host.root / "etc/host.conf").read_text() == CLOUDPODS
    assert (host.root / "etc/host_container_device.yml").is_symlink()


# -- before anything is unpacked


def test_a_disk_that_is_nearly_full_is_refused(host: Host) -> None:
    host.program("stat", "echo 1000 4096")
    done = host.call("check_host")
    assert done.returncode == 1
    assert done.stderr == (
        f"yunion-mps-daemon: /usr has 3 MiB free, but {REQUIRED_MIB} MiB are required: "
        "free disk space (df -h /usr), and try again\n"
    )


@pytest.mark.parametrize("directory", ["/usr", "/etc"])
def test_an_unwritable_directory_is_refused(host: Host, directory: str) -> None:
    host.program("mktemp", f'case $2 in {directory}/*) exit 1 ;; esac; exec /usr/bin/mktemp "$@"')
    done = host.call("check_host")
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"yunion-mps-daemon: {directory} is not writable: check whether it is mounted"
    )


def test_a_valid_host_passes_silently(host: Host) -> None:
    assert host.good("check_host") == []


# -- a daemon that ran before


def yunion_mps(host: Host, **answers: str) -> None:
    cases = "".join(
        f"{name.replace('_', '-')}*) printf '%s\\n' '{text}' ;;\n" for name, text in answers.items()
    )
    host.program("yunion-mps", f'case "$*" in\n{cases}esac')


def test_an_upgrade_reexecutes_the_daemon_in_its_process(host: Host) -> None:
    yunion_mps(host, plan="Kind,Subject", daemon_reexec="The daemon was re-executed as PID 7")
    assert host.good("go_on") == ["yunion-mps-daemon: The daemon was re-executed as PID 7"]
    assert host.calls()[1:] == [
        "yunion-mps-daemon --check",
        "yunion-mps plan --output csv",
        "yunion-mps daemon-reexec",
        # What serves over TCP, too.
        "systemctl --quiet try-restart yunion-mps-gateway.service",
        "systemctl --quiet start yunion-mps-gateway.path",
    ]


def test_programs_of_a_wheel_on_path_are_not_used(host: Host) -> None:
    yunion_mps(host, plan="Kind,Subject", daemon_reexec="The daemon was re-executed as PID 7")
    wheel = host.root / "local"
    files(wheel, "yunion-mps", "yunion-mps-daemon")
    for path in wheel.iterdir():
        path.write_text("#!/bin/sh\nexit 6\n")
        path.chmod(0o755)
    assert host.good(f"PATH={wheel}:$PATH; go_on") == [
        "yunion-mps-daemon: The daemon was re-executed as PID 7"
    ]


def test_an_upgrade_shows_pending_configuration_changes_first(host: Host) -> None:
    yunion_mps(
        host, plan="Nothing was changed; a reload would:\n| limit | 00:06.0 |", daemon_reexec="It runs"
    )
    said = host.good("go_on")
    assert "applies these changes:" in said[0]
    assert said[1:] == ["| limit | 00:06.0 |", "yunion-mps-daemon: It runs"]


def test_an_upgrade_of_a_stopped_service_reports_invalid_files(host: Host) -> None:
    host.program("systemctl", 'case "$*" in *is-active*) exit 3 ;; esac')
    host.program("yunion-mps-daemon", f"cat >&2 <<'END'\n{REFUSED}\nEND\nexit 6")
    (said,) = host.good("go_on")
    assert "enable_cuda_mps is 3); correct it, then: systemctl restart yunion-mps-daemon.service" in said
    assert not [call for call in host.calls() if " start" in call or " restart" in call]


def test_a_missing_driver_is_not_reported_as_invalid_configuration(host: Host) -> None:
    host.program("systemctl", 'case "$*" in *is-active*) exit 3 ;; esac')
    host.program("yunion-mps-daemon", "echo '<3>no NVIDIA driver: it is not installed' >&2; exit 1")
    (said,) = host.good("go_on")
    assert "version cannot start on this host (no NVIDIA driver: it is not installed); correct it" in said


def test_the_old_daemon_continues_if_the_files_are_rejected(host: Host) -> None:
    host.program("yunion-mps-daemon", f"cat >&2 <<'END'\n{REFUSED}\nEND\nexit 6")
    (said,) = host.good("go_on")
    assert (
        "rejects the configuration (/etc/yunion/host.conf:5: enable_cuda_mps is 3); the previous daemon"
        in said
    )
    assert said.endswith("correct it, then: yunion-mps daemon-reexec")  # a reload would leave the old program
    assert host.calls()[1:] == ["yunion-mps-daemon --check"]


def test_no_job_is_ended_if_the_daemon_cannot_reexecute(host: Host) -> None:
    host.program("yunion-mps", "echo 'yunion-mps: the state file is full' >&2; exit 1")
    (said,) = host.good("go_on")
    assert (
        "the previous daemon continues: the state file is full; when no job is running: systemctl restart"
        in said
    )
    assert not [call for call in host.calls() if "restart" in call or "stop" in call]


def test_an_upgrade_starts_no_stopped_daemon(host: Host) -> None:
    host.program("systemctl", "exit 3")
    assert host.good("go_on") == []
    assert host.calls() == [
        "systemctl --quiet is-active yunion-mps-daemon.service",
        "systemctl --quiet is-enabled yunion-mps-daemon.service",
    ]


def test_foreign_control_daemons_are_reported_and_not_touched(host: Host) -> None:
    host.program("systemctl", "exit 3")
    host.control_daemon(5, "-d", CUDA_MPS_PIPE_DIRECTORY="/tmp/nvidia-mps/pipe")
    host.control_daemon(6, "-f", CUDA_MPS_PIPE_DIRECTORY="/tmp/nvidia-mps/pipe", YUNION_MPS_DOMAIN="host")
    host.control_daemon(7, "", CUDA_MPS_PIPE_DIRECTORY="/tmp/nvidia-mps/pipe")  # a front-end
    (said,) = host.good("go_on")
    assert said.endswith("(PID 5) of another program serves /tmp/nvidia-mps/pipe; it is not touched")


@pytest.mark.parametrize(
    ("in_container", "listed"), [(False, ""), (True, "5 a container's\n6 a container's\n")]
)
def test_a_control_daemon_of_a_user_or_container_is_not_reported(
    host: Host, in_container: bool, listed: str
) -> None:
    """Who may run a program of that name may mark it as ours, too."""
    host.program("systemctl", "exit 3")
    place, inside = "/tmp/nvidia-mps/pipe", [str(host.root)] * in_container
    host.control_daemon(5, "-d", *inside, CUDA_MPS_PIPE_DIRECTORY=place)
    host.control_daemon(6, "-f", *inside, CUDA_MPS_PIPE_DIRECTORY=place, YUNION_MPS_DOMAIN="host")
    for pid in () if in_container else ("5", "6"):
        os.chown(host.root / "proc" / pid, STRANGER, STRANGER)
    assert host.good("go_on") == []
    assert host.call("control_daemons").stdout == listed
    assert host.call("others").stdout == ""


def test_a_control_daemon_whose_program_was_upgraded_is_found(host: Host) -> None:
    (host.root / "proc/4").mkdir()  # a kernel thread
    process = host.control_daemon(5, "-f", YUNION_MPS_DOMAIN="host")
    (process / "exe").unlink()
    (process / "exe").symlink_to("/usr/bin/nvidia-cuda-mps-control (deleted)")
    assert host.call("control_daemons").stdout == "5 ours\n"


def test_our_mark_inside_another_variable_does_not_count(host: Host) -> None:
    host.control_daemon(5, "-d", NOTE="a\nYUNION_MPS_DOMAIN=host", OLD_YUNION_MPS_DOMAIN="host")
    assert host.call("control_daemons").stdout == "5 another's\n"


@pytest.mark.parametrize("said", [WORST, "a\\nb", "a\\033[2Jb", "\\c"])
def test_messages_are_one_line_without_control_characters(host: Host, said: str) -> None:
    """In Debian's sh, echo turns a backslash and digits into ESC."""
    host.program("systemctl", "exit 3")
    quoted = said.replace("\ud800", "")
    host.control_daemon(5, "-d", CUDA_MPS_PIPE_DIRECTORY=quoted)
    (host.root / "said").write_text(quoted)
    shown = host.good("go_on") + host.good(
        f'say "$(cat {host.root}/said)"; say "$(first "$(cat {host.root}/said)")"'
    )
    assert [line for line in shown if not line.startswith("yunion-mps-daemon: ")] == []
    assert [line for line in shown if not line.isprintable()] == []
    if said.isprintable():
        assert all(said in line for line in shown)


# -- the end


def test_a_removal_first_names_the_jobs_that_it_ends(host: Host) -> None:
    yunion_mps(
        host,
        who="pid,user,command\n4711,alice,a,b\n4712,,c",
        config="key,value,from\ncuda_mps_stop_timeout_s,25,host.conf:3",
    )
    (said,) = host.good("systemd_runs() { :; }; going")
    assert said == (
        "yunion-mps-daemon: 2 job(s) on the GPUs have 25 s to end; after that, they are ended:"
        " PID 4711 of alice, PID 4712 of an unknown user"
    )
    calls = host.calls()
    assert calls.index("yunion-mps who --clients --output csv") < calls.index(
        "systemctl stop yunion-mps-daemon.service"
    )


@pytest.mark.parametrize("left", ["modes", "control daemon"])
def test_a_removal_restores_the_modes_of_a_killed_daemon(host: Host, left: str) -> None:
    host.program("nsenter", 'shift 3; exec "$@"')
    host.program("yunion-mps-daemon", "exit 1")
    if left == "modes":
        files(host.root / "run/yunion-mps", "former-compute-modes.json")
    else:
        host.control_daemon(6, "-f", CUDA_MPS_PIPE_DIRECTORY="/pipe", YUNION_MPS_DOMAIN="host")
    (said,) = host.good("systemd_runs() { :; }; going")
    assert "to try again: yunion-mps-daemon --restore" in said
    calls = host.calls()
    assert calls.index("systemctl stop yunion-mps-daemon.service") < calls.index(
        "yunion-mps-daemon --restore"
    )
    # rpm's scripts may have a /tmp of their own, where no control daemon would be found and asked to end.
    assert f"nsenter --mount --target 1 {host.bin}/yunion-mps-daemon --restore" in calls


def test_without_systemd_no_mount_namespace_is_entered(host: Host) -> None:
    """In a chroot the process with PID 1 is another system's."""
    files(host.root / "run/yunion-mps", "former-compute-modes.json")
    assert host.good("systemd_runs() { return 1; }; going") == []
    calls = host.calls()
    assert "yunion-mps-daemon --restore" in calls
    assert not [call for call in calls if call.startswith("nsenter")]


def test_template_jobs_are_stopped_after_the_service(host: Host) -> None:
    units = (
        "echo yunion-mps-job@train.service loaded active running Job; echo yunion-mps-job@b.service loaded"
    )
    host.program("systemctl", f'case "$1" in list-units) {units} ;; esac')
    wants = host.root / "wants"
    wants.mkdir()
    for name in ("yunion-mps-job@train.service", "ssh.service"):
        (wants / name).symlink_to("/dangles")
    (said,) = host.good(f"enabled={wants}; systemd_runs() {{ :; }}; going")
    assert said == (
        "yunion-mps-daemon: these jobs are stopped: yunion-mps-job@train.service, yunion-mps-job@b.service"
    )
    calls = [call for call in host.calls() if call.startswith("systemctl ")]
    assert calls[1:] == [
        "systemctl stop yunion-mps-daemon.service",
        "systemctl stop yunion-mps-job@*.service",
        "systemctl reset-failed yunion-mps-daemon.service yunion-mps-job@*.service",
        "systemctl --quiet disable yunion-mps-daemon.service",
        "systemctl --quiet disable yunion-mps-job@train.service",
    ]


def test_a_removal_with_nothing_to_restore_is_silent(host: Host) -> None:
    assert host.good("systemd_runs() { :; }; going") == []
    assert "yunion-mps-daemon --restore" not in host.calls()


# -- bytecode


def test_a_full_disk_leaves_no_bytecode_and_is_reported(host: Host) -> None:
    (host.root / "usr/module.py").write_text("syntax error\n")  # fails as a full disk does
    (host.root / "usr/good.py").write_text("")
    (said,) = host.good("compile_bytecode")
    assert "cannot write bytecode to" in said
    assert not (host.root / "usr/__pycache__").exists()


# -- the package of the kubelet plugin


@pytest.fixture
def plugin_files(host: Host) -> str:
    """Set its directories, each with a module and old bytecode, beside the daemon's."""
    for name in ("kubernetes", "h2", "daemon"):
        files(host.root / "usr" / name, "module.py")
        files(host.root / "usr" / name / "__pycache__", "former.pyc")
    return f'plugin_files="{host.root}/usr/kubernetes {host.root}/usr/h2"'


def bytecode(host: Host) -> list[str]:
    return sorted(f"{path.parent.parent.name} {path.name.split('.')[0]}" for path in host.root.rglob("*.pyc"))


@pytest.mark.parametrize(
    ("function", "calls", "left"),
    [
        (
            "plugin_installed",
            ["daemon-reload", "try-restart"],
            ["daemon former", "h2 module", "kubernetes module"],
        ),
        ("plugin_going", ["stop", "disable"], ["daemon former"]),
    ],
)
def test_an_upgrade_restarts_only_a_running_plugin_and_a_removal_ends_it(
    host: Host, plugin_files: str, function: str, calls: list[str], left: list[str]
) -> None:
    assert host.good(f"{plugin_files}; systemd_runs() {{ :; }}; {function}") == []
    unit = "yunion-mps-kubelet-plugin.service"
    assert host.calls() == [
        f"systemctl {call}" if call == "daemon-reload" else f"systemctl --quiet {call} {unit}"
        for call in calls
    ]
    assert bytecode(host) == left


def test_a_plugin_that_does_not_restart_is_reported(host: Host, plugin_files: str) -> None:
    host.program("systemctl", 'case "$*" in *try-restart*) exit 1 ;; esac')
    (said,) = host.good(f"{plugin_files}; systemd_runs() {{ :; }}; plugin_installed")
    assert said.endswith("does not run; see: systemctl status yunion-mps-kubelet-plugin.service")
