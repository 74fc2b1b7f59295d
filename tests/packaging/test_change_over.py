"""The packages' scripts where Cloudpods' package of the same name was before, or comes after."""

from __future__ import annotations

import subprocess

import pytest

from .conftest import Host
from .test_scriptlets import REFUSED


@pytest.fixture
def cloudpods(host: Host) -> Host:
    """Cloudpods' service was enabled and ran, and its control daemon serves; another's serves a container."""
    (host.root / "run/cloudpods").write_text("enabled\nstarted\nnoted\n")
    host.program("nsenter", 'shift 3; exec "$@"')
    host.program("yunion-mps", "echo cuda_mps_pipe_directory,/tmp/nvidia-mps/pipe,default")
    host.program("nvidia-cuda-mps-control", "cat")
    host.control_daemon(5, "-d", CUDA_MPS_PIPE_DIRECTORY="/tmp/nvidia-mps/pipe")
    host.control_daemon(6, "-f", CUDA_MPS_PIPE_DIRECTORY="/mps/of/a/container")
    return host


def systemctl_and_ours(host: Host) -> list[str]:
    return [call for call in host.calls() if call.split()[0] not in ("yunion-mps", "nsenter")]


def test_our_daemon_is_enabled_and_started_if_cloudpods_was(cloudpods: Host) -> None:
    """Its control daemon goes on, and its own daemon gets no chance to tell it to end."""
    note = cloudpods.root / "run/yunion-mps/adopted.json"
    take = f'mkdir -p {note.parent}; echo \'{{"pid": 5, "started_ticks": 77, "x": 0}}\' >{note}'
    cloudpods.program("yunion-mps-daemon", f'case "$1" in --adopt) {take} ;; esac')
    before = "R " + "0 " * 18
    (cloudpods.root / "proc/5/stat").write_text(f"5 (nvidia-cuda-mps) {before}77 0\n")
    with subprocess.Popen(["sleep", "60"]) as daemon:
        cloudpods.program("systemctl", f'case "$1" in show) echo {daemon.pid} ;; esac')
        assert cloudpods.good("go_on") == [
            "yunion-mps-daemon: Cloudpods' control daemon (PID 5) was adopted with its jobs"
        ]
        assert daemon.wait(60) == -9
    assert systemctl_and_ours(cloudpods) == [
        "systemctl --quiet enable yunion-mps-daemon.service",
        "yunion-mps-daemon --check --require-driver",
        "yunion-mps-daemon --adopt 5",
        "systemctl daemon-reload",
        "systemctl show --property MainPID --value yunion-mps-daemon.service",
        "systemctl stop yunion-mps-daemon.service",
        "systemctl start yunion-mps-daemon.service",
    ]
    assert not (cloudpods.root / "run/cloudpods").exists()
    (cloudpods.root / "proc/5/stat").write_text(f"5 (nvidia-cuda-mps) {before}78 0\n")  # another's PID by now
    assert "5 another's" in cloudpods.call("control_daemons").stdout


def test_a_control_daemon_that_cannot_be_adopted_is_told_to_quit(cloudpods: Host) -> None:
    refused = "<3>the control daemon (PID 5) cannot be adopted: cuda_mps_scope is gpu\n<3>it goes on"
    cloudpods.program("yunion-mps-daemon", f"[ $1 = --check ] || {{ echo '{refused}' >&2; exit 1; }}")
    assert cloudpods.good("go_on") == [
        "yunion-mps-daemon: the control daemon (PID 5) cannot be adopted: cuda_mps_scope is gpu",
        "yunion-mps-daemon: Cloudpods' control daemon (PID 5) was asked to exit when its jobs have ended",
    ]
    assert systemctl_and_ours(cloudpods) == [
        "systemctl --quiet enable yunion-mps-daemon.service",
        "yunion-mps-daemon --check --require-driver",
        "yunion-mps-daemon --adopt 5",
        "systemctl stop yunion-mps-daemon.service",
        "nvidia-cuda-mps-control ",
        "systemctl start yunion-mps-daemon.service",
    ]


@pytest.mark.parametrize(("noted", "checked", "taken"), [
    ("started\nnoted\n", "", True), ("noted\n", "", False), ("", "", False), ("started\n", "exit 6", False),
])  # fmt: skip
def test_the_control_daemon_is_adopted_before_cloudpods_rpm_stops_it(
    cloudpods: Host, noted: str, checked: str, *, taken: bool
) -> None:
    (cloudpods.root / "run/cloudpods").write_text(noted)
    cloudpods.program("yunion-mps-daemon", checked)
    cloudpods.good("systemd_runs() { :; }; before_cloudpods_goes")
    assert ("yunion-mps-daemon --adopt 5" in cloudpods.calls()) == taken
    assert not [call for call in cloudpods.calls() if " stop " in call or " start " in call]


def test_without_a_record_of_cloudpods_nothing_is_done(cloudpods: Host) -> None:
    (cloudpods.root / "run/cloudpods").unlink()
    cloudpods.good("systemd_runs() { :; }; before_cloudpods_goes")
    assert cloudpods.calls() == []


def test_our_daemon_is_not_started_if_cloudpods_was_stopped(host: Host) -> None:
    (host.root / "run/cloudpods").write_text("noted\n")
    assert host.good("go_on") == []
    assert host.calls() == []


def test_cloudpods_daemon_keeps_running_if_its_files_are_rejected(host: Host) -> None:
    (host.root / "run/cloudpods").write_text("started\nnoted\n")
    host.program("yunion-mps-daemon", f"cat >&2 <<'END'\n{REFUSED}\nEND\nexit 6")
    (said,) = host.good("go_on")
    assert said.endswith("correct it, then: systemctl restart yunion-mps-daemon.service")
    assert host.calls() == ["yunion-mps-daemon --check --require-driver"]


def test_replacing_our_package_by_cloudpods_ends_no_job(host: Host) -> None:
    (said,) = host.good("systemd_runs() { :; }; replaced")
    assert said.endswith("to switch over when they have ended: systemctl restart yunion-mps-daemon.service")
    assert host.calls() == ["systemctl --quiet stop yunion-mps-gateway.path yunion-mps-gateway.service"]
