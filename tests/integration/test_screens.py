"""`yunion-mps top` on a terminal: what it draws, what keys, signals and sizes do, and how it leaves it."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.core.models import Event
from yunion_mps.core.units import rfc3339

from integration.daemon_host import eventually
from integration.tmux import Tmux
from unit.cli.busy_host import CAROLS_REQUEST, OUTSIDE_MPS, OVER_BUDGET, TWO_DEVICES, hold_leases, make_busy
from unit.cli.conftest import PROGRAM
from unit.http import snapshots
from unit.http.fake_services import LEASE, clients
from unit.http.server_host import ServerHost

TOP = "yunion-mps top --interval 1"
#: How a terminal is set, in a line that can be compared.
SETTINGS = "stty -g | cksum"
#: The screen that is expected, to the letter.
BAR = "░" * 10
SCREEN_80 = f"""\
yunion-mps 0.1.0  HH:MM:SS  degraded  driver 535.261.03
1 GPU; 4 devices: 3 used, 1 free; 2 leases, 1 request queued; 2 processes
Problem: 00:06.0-1 uses 6000 of 5760 MiB: PID 4260 of alice (python train.py)
  Hint: ask its owner, or terminate it: yunion-mps terminate 4260
Problem: PID 4711 of mallory (./old-job) uses GPU 00:06.0 (300 MiB) outside MPS…
1 more; show all: yunion-mps status
GPU                   USED GiB  TOTAL POWER W UTIL % IN USE     PROCS NAME
00:06.0    ██▊░░░░░░░      6.2   22.5                3 of 4         2 Tesla P40
DEVICE                USED GiB BUDGET    PEAK UTIL % USER         PID COMMAND
00:06.0-1! ██████████      5.9    5.6     5.0     42 alice       4260 python tr…
00:06.0!   {BAR}      0.3                    42 mallory     4711 ./old-job
00:06.0-2  {BAR}      0.0    5.6                bob              job-17
00:06.0-3  {BAR}      0.0    5.6                bob              job-17
00:06.0-0  {BAR}             5.6                free
(hidden: TEMP C, SM %, AGE; show all: yunion-mps top --once | cat)
EVENTS
HH:MM:SS info    domain host: applying -> ready
HH:MM:SS WARNING domain host: ready -> backoff (killed by signal 9)
"""
FOOT = " q  quit  s  sort: busiest  v  view: all  ↑↓  scroll  every 1 s"


@pytest.fixture
def host() -> Iterator[ServerHost]:
    """The reference case, in use in every way, on which two things have happened."""
    with ServerHost(snapshots.reference()) as host:
        now_s = time.time()
        one = {**LEASE, "since": rfc3339(now_s - 7205)}
        hold_leases(
            host, one, {**TWO_DEVICES, "since": rfc3339(now_s - 5 * 86400 - 60)}, waiting=(CAROLS_REQUEST,)
        )
        host.clients.listed = clients(OVER_BUDGET, {**OUTSIDE_MPS, "started": rfc3339(now_s - 10805)})
        host.record(Event("warning", "domain", "host", "ready -> backoff", "killed by signal 9"))
        host.record(Event("info", "domain", "host", "applying -> ready"))
        yield host


def terminal(host: ServerHost, term: str = "screen-256color") -> Tmux:
    path = f"{Path(PROGRAM).parent}{os.pathsep}{os.environ['PATH']}"
    return Tmux({**os.environ, "YUNION_MPS_ROOT": host.paths.root, "PATH": path}, 80, 24, term)


@pytest.fixture
def screen(host: ServerHost) -> Iterator[Tmux]:
    with terminal(host) as screen:
        yield screen


def start_top(screen: Tmux, command: str = TOP) -> list[str]:
    """Begin it; returns what it draws once it knows who uses the GPUs."""
    screen.type(command, "Enter")
    return screen.wait("mallory.*old-job")


def without_times(lines: list[str]) -> list[str]:
    return [re.sub(r"\d\d:\d\d:\d\d", "HH:MM:SS", line) for line in lines]


def padded_lines(text: str, rows: int) -> list[str]:
    lines = text.splitlines()
    return [*lines, *[""] * (rows - 1 - len(lines)), FOOT]


def watch_until(screen: Tmux, text: str, rows: int, command: str = TOP) -> None:
    """Begin it, and wait for this screen: a line of it may be there before those below it."""
    start_top(screen, command)
    eventually(lambda: without_times(screen.lines()) == padded_lines(text, rows), "the screen")


def test_another_size_is_drawn_at_once_and_again_as_before(screen: Tmux) -> None:
    start_top(screen, "yunion-mps top --interval 3600")
    screen.resize(120, 40)
    screen.wait(r"^DEVICE .* AGE +COMMAND$")
    screen.wait("  Hint: ask its owner, or terminate it: yunion-mps terminate 4711")
    screen.resize(80, 24)
    expected = padded_lines(SCREEN_80, 24)[:-1]
    eventually(lambda: without_times(screen.lines())[:-1] == expected, "the screen as it was")


@pytest.mark.parametrize("term", ["vt100", "linux", "xterm-256color"])
def test_it_is_the_same_whatever_the_terminal_is_called(host: ServerHost, term: str) -> None:
    with terminal(host, term) as screen:
        watch_until(screen, SCREEN_80, 24)


@pytest.mark.parametrize(("columns", "rows"), [(20, 6), (1, 1)])
def test_top_works_on_a_small_terminal(screen: Tmux, columns: int, rows: int) -> None:
    start_top(screen)
    screen.resize(columns, rows)
    eventually(lambda: len(screen.lines()) <= rows and screen.lines()[-1:] != [], "the small screen")
    if rows >= 6:
        screen.wait(r"^00:06\.0-1")
    assert screen.tell("alternate_on") == "1"
    screen.resize(80, 24)
    eventually(
        lambda: without_times(screen.lines())[:6] == SCREEN_80.splitlines()[:6], "the screen as it was"
    )


def test_keys_sort_and_choose_what_is_to_be_seen(screen: Tmux) -> None:
    start_top(screen)
    firsts = []
    for order in ("device", "user", "longest", "busiest"):
        screen.type("s")
        lines = screen.wait(f"sort: {order}")
        place = next(place for place, line in enumerate(lines) if line.startswith("DEVICE"))
        firsts.append(lines[place + 1].split(" ")[0])
    assert firsts == ["00:06.0-0", "00:06.0-1!", "00:06.0-2", "00:06.0-1!"]
    screen.type("v")
    assert not any(line.startswith("DEVICE") for line in screen.wait("view: GPUs"))
    screen.type("v")
    assert not any(line.startswith("GPU ") for line in screen.wait("view: devices"))
    screen.type("x", "Escape", "F5", "Left", "v")
    screen.wait("view: all")


def test_keys_scroll_through_3072_devices() -> None:
    with ServerHost(snapshots.large(3072)) as many, terminal(many) as screen:
        many.clients.listed = clients()
        hold_leases(many)
        screen.type(TOP, "Enter")
        screen.wait(r"DEVICE 1-(\d+)/3072")
        screen.type("s")
        lines = screen.wait("sort: device")
        first = next(line for line in lines if line.startswith("DEVICE"))
        page = int(first.split("-")[1].split("/")[0])
        for keys, begin in (
            (("Down",), 2),
            (("j", "j"), 4),
            (("PageDown",), 4 + page),
            (("PageUp", "Up"), 3),
            (("End",), 3072 - page + 1),
            (("k",), 3072 - page),
            (("Home",), 1),
            (("Up",), 1),
        ):
            screen.type(*keys)
            screen.wait(f"DEVICE {begin}-{begin + page - 1}/3072")
        assert next(line for line in screen.lines() if "-0 " in line).startswith("00:00.0-0 ")


def screen_after_exit(screen: Tmux) -> list[str]:
    """What is on the terminal once the shell has it back as it was before."""
    screen.wait("^left with ")
    screen.wait_prompt()
    assert (screen.tell("alternate_on"), screen.tell("cursor_flag")) == ("0", "1")
    screen.type(SETTINGS, "Enter")
    eventually(lambda: len(settings(screen)) == 2, "the settings")
    before, after = settings(screen)
    assert before == after
    return screen.lines()


def settings(screen: Tmux) -> list[str]:
    return [line for line in screen.lines() if re.fullmatch(r"\d+ \d+", line)]


def start(screen: Tmux) -> None:
    """Begin it from a shell that tells its settings, and then how it ended."""
    screen.type(SETTINGS, "Enter")
    eventually(lambda: settings(screen), "the settings")
    screen.wait_prompt()
    start_top(screen, f"{TOP}; echo left with $?")


def pid_of_top(screen: Tmux) -> int:
    shell = int(screen.tell("pane_pid"))
    return int(Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0])


@pytest.mark.parametrize(("key", "status"), [("q", 0), ("C-c", 130), ("C-\\", 131)])
def test_a_key_ends_it_and_the_terminal_is_as_before(screen: Tmux, key: str, status: int) -> None:
    start(screen)
    screen.type(key)
    screen.wait(f"^left with {status}$")
    screen_after_exit(screen)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_and_the_terminal_is_as_before(screen: Tmux, number: signal.Signals) -> None:
    start(screen)
    os.kill(pid_of_top(screen), number)
    screen.wait(f"^left with {128 + number}$")
    screen_after_exit(screen)


def is_stopped(terminal: str) -> bool:
    """Whether the terminal takes no output, because of Ctrl-S."""
    opened = os.open(terminal, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        poll = select.poll()
        poll.register(opened, select.POLLOUT)
        return not poll.poll(0)
    finally:
        os.close(opened)


def test_a_signal_ends_it_even_if_ctrl_s_has_stopped_the_terminal(screen: Tmux) -> None:
    start(screen)
    pid = pid_of_top(screen)
    terminal = screen.tell("pane_tty")
    assert not is_stopped(terminal)
    screen.type("C-s")
    eventually(lambda: is_stopped(terminal), "the terminal's halt")
    os.kill(pid, signal.SIGTERM)
    screen.wait("^left with 143$")
    screen_after_exit(screen)


@pytest.mark.parametrize("answer", [{"events": [{}], "last": 1}, {}], ids=["what draws", "what asks"])
def test_a_fault_of_its_own_leaves_the_terminal_as_before(
    screen: Tmux, host: ServerHost, answer: dict[str, object]
) -> None:
    screen.resize(120, 60)
    start(screen)
    host.events.answer = answer
    screen.wait("^left with 1$")
    assert any("KeyError" in line for line in screen_after_exit(screen))


def test_ctrl_z_restores_the_terminal_and_top_can_continue(screen: Tmux) -> None:
    start(screen)
    screen.type("C-z")
    screen.wait("Stopped")
    screen.wait_prompt()
    assert (screen.tell("alternate_on"), screen.tell("cursor_flag")) == ("0", "1")
    screen.type("fg", "Enter")
    screen.wait("mallory.*old-job")
    assert (screen.tell("alternate_on"), screen.tell("cursor_flag")) == ("1", "0")
    screen.type("q")
    screen.wait_prompt()


def test_nothing_is_written_while_nothing_changes_but_the_clock(screen: Tmux, host: ServerHost) -> None:
    """What is drawn again is only the line that is another: that is what keeps it from flickering."""
    start(screen)
    pid = pid_of_top(screen)

    def written() -> int:
        return int(re.search(r"wchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[1])  # type: ignore[index]

    lines = screen.lines()
    before = written()
    eventually(lambda: screen.lines()[0] != lines[0], "another second")
    assert written() - before < 2000  # questions to the daemon are counted as well
    assert screen.lines()[1:] == lines[1:]


def test_top_continues_while_the_clients_are_unknown(screen: Tmux, host: ServerHost) -> None:
    host.clients.listed = clients(errors=("the driver is slow to answer",))
    screen.type(TOP, "Enter")
    screen.wait("1 GPU; 4 devices: 3 used, 1 free; 2 leases, 1 request queued; 0 processes")
    screen.wait("^Incomplete: the driver is slow to answer$")
    hold_leases(host)
    screen.wait("1 GPU; 4 devices: 0 used, 4 free; 0 leases; 0 processes")
    screen.type("s")
    screen.wait("sort: device")
    make_busy(host)
    screen.wait("; 2 leases, 1 request queued; 2 processes")
    screen.wait_without("Incomplete")


def test_there_are_colours_and_none_with_no_color_set(screen: Tmux) -> None:
    start_top(screen)
    assert any("\x1b[31m" in line for line in screen.lines(styled=True))
    screen.type("q")
    screen.wait_without("mallory")
    screen.wait_prompt()
    watch_until(screen, SCREEN_80, 24, f"NO_COLOR=1 {TOP}")
    assert not any("\x1b[" in line for line in screen.lines(styled=True))


def test_in_a_locale_without_utf_8_the_bars_are_ascii(host: ServerHost) -> None:
    with terminal(host) as screen:
        lines = start_top(screen, f"LC_ALL=C {TOP}")
    assert "".join(lines).isascii()
    assert "00:06.0-1! [########]      5.9    5.6     5.0     42 alice       4260 python tr~" in lines
    assert "00:06.0    [##------]      6.2   22.5                3 of 4         2 Tesla P40" in lines
    assert lines[-1] == FOOT.replace("↑↓", "j k")
