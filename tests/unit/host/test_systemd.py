"""Notifications to systemd, its watchdog, and the job units of processes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.host.control_groups import parse_control_groups
from yunion_mps.host.proc import job_unit_of
from yunion_mps.host.systemd import Notifier, watchdog_interval_s

from unit.as_user import needs_root

# The socket is never closed: the daemon needs it as long as it lives.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """systemd's end of NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        address = f"{tmp_path}/notify"
        found.bind(address)
        found.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        yield found


def received(inbox: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(inbox.recv(65536).decode())
        except BlockingIOError:
            return messages


def test_ready_stopping_and_watchdog_are_sent_with_a_status_text(inbox: socket.socket) -> None:
    notifier = Notifier()
    notifier.status("starting")
    notifier.ready("4 of 4 devices available")
    notifier.alive()
    notifier.stopping("waiting for PID 7 (訓練, jürgen)", 90)
    assert received(inbox) == [
        "STATUS=starting",
        "STATUS=4 of 4 devices available\nREADY=1",
        "WATCHDOG=1",
        "STOPPING=1\nEXTEND_TIMEOUT_USEC=90000000\nSTATUS=waiting for PID 7 (訓練, jürgen)",
    ]


def test_an_unchanged_status_is_not_sent_again(inbox: socket.socket) -> None:
    notifier = Notifier()
    notifier.ready("serving")
    for text in ("serving", "serving", "degraded", "degraded", "serving"):
        notifier.status(text)
    assert received(inbox) == ["STATUS=serving\nREADY=1", "STATUS=degraded", "STATUS=serving"]


def test_a_reload_is_sent_with_the_monotonic_time(inbox: socket.socket) -> None:
    before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    Notifier().reloading("the program is executed again")
    first, second, third = received(inbox)[0].split("\n")
    assert (first, third) == ("RELOADING=1", "STATUS=the program is executed again")
    assert before_us <= int(second.partition("=")[2]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def test_an_abstract_socket_is_written_to_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        name = f"yunion-mps-test-{os.getpid()}"
        inbox.bind(f"\0{name}")
        inbox.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        Notifier().ready("serving")
        assert received(inbox) == ["STATUS=serving\nREADY=1"]


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_without_systemd_notifications_do_nothing(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notifier = Notifier()
    notifier.ready("serving")
    notifier.status("serving")
    notifier.stopping("stopping", 1)
    notifier.alive()


@pytest.mark.parametrize(
    ("usec", "pid", "interval_s"),
    [
        ("30000000", None, 15.0),
        ("30000000", "own", 15.0),
        ("30000000", "1", None),
        ("0", None, None),
        ("", None, None),
        ("soon", None, None),
        (None, None, None),
    ],
)
def test_the_watchdog_expects_a_sign_of_life_twice_in_its_time(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, interval_s: float | None
) -> None:
    values = {"WATCHDOG_USEC": usec, "WATCHDOG_PID": str(os.getpid()) if pid == "own" else pid}
    for name, value in values.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert watchdog_interval_s() == interval_s


UNIT = "yunion-mps-job@train.service"


def process(proc: Path, pid: int, cgroups: str | None) -> None:
    (proc / str(pid)).mkdir()
    counts, threads, started = "0 " * 10, 1, 4711
    stat = f"{pid} (train) S 1 {pid} {pid} 0 -1 4194560 {counts}{threads} 0 {started}\n"
    (proc / f"{pid}/stat").write_text(stat)
    if cgroups is not None:
        (proc / f"{pid}/cgroup").write_text(cgroups)


@pytest.mark.parametrize(
    ("cgroups", "unit"),
    [
        (f"0::/system.slice/system-yunion\\x2dmps\\x2djob.slice/{UNIT}\n", UNIT),
        (f"9:name=systemd:/system.slice/{UNIT}\n4:memory:/\n0::/\n", UNIT),
        (f"0::/machine.slice/vm.scope/payload/system.slice/{UNIT}/inner\n", UNIT),
        (f"0::/system.slice/{UNIT}/yunion-mps-job@other.service\n", UNIT),
        ("0::/system.slice/yunion-mps-daemon.service\n", ""),
        (f"0::/user.slice/user-1000.slice/user@1000.service/app.slice/{UNIT}\n", ""),
        (f"0::/user.slice/user-1000.slice/user@1000.service/system.slice/{UNIT}\n", ""),
        ("0::/user.slice/user-1000.slice/session-1.scope\n", ""),
        (f"0::/system.slice/my-{UNIT}\n", ""),
        ("0::/\n", ""),
        ("", ""),
    ],
)
def test_a_job_s_unit_is_known_by_the_control_group_of_its_process(
    tmp_path: Path, cgroups: str, unit: str
) -> None:
    process(tmp_path, 4260, cgroups)
    mounts = tmp_path / "cgroup"
    for group in parse_control_groups(cgroups):
        place = mounts / ("systemd" if group.hierarchy else "unified")
        (place / group.path[1:]).mkdir(parents=True, exist_ok=True)
    assert job_unit_of(4260, str(tmp_path), str(mounts)) == unit
    assert job_unit_of(4261, str(tmp_path)) is None, "it has ended"
    process(tmp_path, 4262, None)
    assert job_unit_of(4262, str(tmp_path)) == "", "there are no control groups"
    assert job_unit_of(0, str(tmp_path)) == "", "it is in a PID namespace that cannot be seen"


@needs_root
def test_a_group_that_a_user_has_made_is_no_job_s_unit(tmp_path: Path) -> None:
    """As below a service whose group systemd has delegated to its user."""
    process(tmp_path, 4260, f"0::/system.slice/other.service/system.slice/{UNIT}\n")
    delegated = tmp_path / "cgroup/system.slice/other.service"
    (delegated / f"system.slice/{UNIT}").mkdir(parents=True)
    assert job_unit_of(4260, str(tmp_path), str(tmp_path / "cgroup")) == UNIT
    os.chown(delegated, 2000, 2000)
    assert job_unit_of(4260, str(tmp_path), str(tmp_path / "cgroup")) == ""


def test_the_unit_of_a_zombie_is_unknown() -> None:
    """Control groups of version 1 say `/` of it, as of a process that is in none of our units."""
    zombie = os.fork()
    if not zombie:
        os._exit(0)
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    assert job_unit_of(zombie) is None
    os.waitpid(zombie, 0)
