"""`yunion-mps top`: shows who uses what, updated until a key or signal ends it, or once."""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Union

import click

from yunion_mps.cli.calls import call_daemon, listed_devices, newest_events
from yunion_mps.cli.options import Duration
from yunion_mps.cli.output import hint_text, incomplete_note, is_utf8, terminal_size, wrapped
from yunion_mps.cli.top.frame import HINT, VIEWS, WHOLE, Outage, ViewState, frame
from yunion_mps.cli.top.rows import ORDERS, Poll, Scene, scene
from yunion_mps.cli.top.terminal import STOP_SIGNALS, SignalWakeup, Terminal
from yunion_mps.core.errors import YunionError
from yunion_mps.host import threads
from yunion_mps.http.operations import GET_CLIENTS, GET_GPUS, GET_LEASES, GET_STATUS
from yunion_mps.views.overview import HostAnswers

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceJson, GpuJson

    _News = Union[Poll, BaseException]

_HINT = "print everything once: yunion-mps top --once; or follow the events: yunion-mps events --follow"
#: No line is wider.
_PIPE_COLUMNS = 1000
_NEWEST_EVENTS = 20
#: Values that change without an event, such as compute modes, are at most this old.
_STALE_S = 30.0
#: A query is repeated after this many times its own duration, so that querying costs next to nothing.
_PAUSE_FACTOR = 20.0
_MAX_PAUSE_S = 60.0
#: The longest pause before a failed query is repeated, however long the interval is.
_RETRY_S = 2.0


@click.command("top", short_help="Watch GPUs, devices and jobs.")
@click.option("--once", is_flag=True, help="Print everything once, and exit.")
@click.option(
    "-d", "--interval", type=Duration(1, 3600), default="2s", show_default=True, metavar="DURATION",
    help="Time between updates.",
)  # fmt: skip
def top(once: bool, interval: int) -> None:
    """Watch GPUs and devices live: how much of each budget is used, by which job, and recent events.

    After an address, ! marks a device over its budget or a process outside MPS, and ? a process whose device
    is unknown, such as one without a lease on a time-sliced GPU or MIG instance. A line names the columns
    that a narrow terminal hides. Set NO_COLOR in the environment to turn off colours.

    If the daemon stops answering, top shows the last data and the reason, and tries again. It exits with 0
    when you quit, and with 3 if the daemon is unreachable at the start.

    \b
    Keys:
      q        quit
      s        change the order: busiest, device, user, longest
      v        change the view: all, only GPUs, only devices
      arrows   scroll (also j, k, PgUp, PgDn, Home and End)

    \b
    Examples:
      yunion-mps top
      yunion-mps top --interval 10
      yunion-mps top --once | less -S
    """
    if not once:
        _refuse_without_screen()
    first = poll()
    if once:
        sys.stdout.write(_once(first))
    else:
        live(first, interval)


def _refuse_without_screen() -> None:
    """Raise YunionError if the terminal cannot be drawn on, or keys cannot be read."""
    if not (os.isatty(0) and os.isatty(1)):
        raise YunionError("top needs a terminal", _HINT)
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        name = os.environ.get("TERM") or "not set"
        raise YunionError(f"top cannot draw on this terminal: TERM is {name}", _HINT)


def _once(first: Poll) -> str:
    """Format everything, in the width of the terminal, or complete if there is none."""
    state = ViewState(terminal_size()[0] or _PIPE_COLUMNS, WHOLE, utf8=is_utf8())
    shown = frame(scene(first), state, outage=None, now_s=time.time(), interval_s=0)
    text = ""
    for styled in shown.lines:
        line = "".join(part for part, _ in styled).rstrip()
        if line.startswith(HINT):
            text += hint_text(line[len(HINT) :], HINT)
        else:
            text += wrapped(line)
    return text + incomplete_note(first.answers.clients["errors"])


def poll(before: Poll | None = None) -> Poll:
    """Query the daemon; raises YunionError. The devices are those of `before` if nothing has happened."""
    status = call_daemon(GET_STATUS)
    events = newest_events(_NEWEST_EVENTS, severe_first=True)
    leases = call_daemon(GET_LEASES)
    devices_s = time.monotonic()
    versions = (events["last"], status["devices"], status["gpus"], status["started"])
    gpus: Sequence[GpuJson]
    devices: Sequence[DeviceJson]
    if before and versions == before.seen and devices_s - before.devices_s < _STALE_S:
        devices_s = before.devices_s
        gpus = before.answers.gpus
        devices = before.answers.devices
    else:
        gpus = call_daemon(GET_GPUS)["gpus"]
        devices = listed_devices()
    clients = call_daemon(GET_CLIENTS, seen=True)
    answers = HostAnswers(
        status=status,
        gpus=gpus,
        devices=devices,
        leases=leases["leases"],
        waiting=leases["waiting"],
        clients=clients,
    )
    return Poll(time.time(), answers, events["events"], versions, devices_s)


class _Poller:
    """Queries the daemon in the background, puts each answer or error into `news`, and then calls `wake`."""

    def __init__(self, first: Poll, interval_s: float, wake: Callable[[], None]) -> None:
        self.news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._interval_s = interval_s
        self._wake = wake
        self._last = first
        threads.start_thread(self._repeat, threads.ignore_outcome)

    def _repeat(self) -> None:
        is_broken = False
        wait_s: float = self._interval_s
        while not is_broken:
            time.sleep(wait_s)
            begin_s = time.monotonic()
            wait_s = self._interval_s
            try:
                self._last = poll(self._last)
                self.news.put(self._last)
                wait_s = max(wait_s, min(_PAUSE_FACTOR * (time.monotonic() - begin_s), _MAX_PAUSE_S))
            except BaseException as error:  # noqa: BLE001 - raised where the terminal is restored
                self.news.put(error)
                wait_s = min(wait_s, _RETRY_S)
                is_broken = not isinstance(error, YunionError)
            self._wake()


def live(first: Poll, interval_s: int) -> None:
    """Draw until a key or a signal ends it; the signal takes effect once the terminal is restored.

    Raises KeyboardInterrupt for SIGINT.
    """
    utf8 = is_utf8()
    terminal = Terminal(utf8=utf8, colour=not os.environ.get("NO_COLOR"))
    with SignalWakeup() as wakeup:
        view = _View(terminal, first, interval_s, utf8=utf8)
        terminal.enter()
        try:
            number = _run(view, terminal, wakeup, _Poller(first, interval_s, wakeup.wake))
        finally:
            terminal.leave()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _run(view: _View, terminal: Terminal, wakeup: SignalWakeup, poller: _Poller) -> int:
    """Handle keys, signals and news; return the signal that ends it, 0 for a key."""
    ready = select.poll()
    ready.register(0, select.POLLIN)
    ready.register(wakeup, select.POLLIN)
    view.draw()
    while True:
        descriptors = {descriptor for descriptor, _ in ready.poll()}
        numbers = wakeup.signals() if wakeup.fileno() in descriptors else []
        for number in numbers:
            if number in STOP_SIGNALS:
                return number
        if signal.SIGTSTP in numbers:
            terminal.stop()
        elif signal.SIGCONT in numbers:
            terminal.enter()
        elif signal.SIGWINCH in numbers:
            terminal.invalidate()
        if 0 in descriptors:
            try:
                keys = terminal.keys()
            except (EOFError, OSError):  # the terminal is gone
                return 0
            if not all(view.press(key) for key in keys):
                return 0
        view.update(poller.news)
        view.draw()


class _View:
    def __init__(self, terminal: Terminal, first: Poll, interval_s: int, *, utf8: bool) -> None:
        self._terminal = terminal
        self._interval_s = interval_s
        self._last = first
        self._error: YunionError | None = None
        self._scene: Scene | None = None
        self._last_offset = 0
        self._page = 1
        columns, rows = terminal.size()
        self._state = ViewState(columns, rows, utf8=utf8)

    def update(self, queued: queue.SimpleQueue[_News]) -> None:
        """Take the results of queries; raises an unexpected error of the polling thread."""
        while True:
            try:
                answer = queued.get_nowait()
            except queue.Empty:
                return
            self._scene = None
            self._error = None
            if isinstance(answer, YunionError):
                self._error = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self._last = answer

    def press(self, key: str) -> bool:
        """Handle a key; return False if it means to quit."""
        state = self._state
        offset = min(state.offset, self._last_offset)
        moves = {
            "up": offset - 1, "k": offset - 1, "down": offset + 1, "j": offset + 1,
            "page up": offset - self._page, "page down": offset + self._page, " ": offset + self._page,
            "home": 0, "g": 0, "end": self._last_offset, "G": self._last_offset,
        }  # fmt: skip
        if key in moves:
            self._state = state._replace(offset=min(max(moves[key], 0), self._last_offset))
        elif key == "s":
            self._state = state._replace(order=_next(ORDERS, state.order), offset=0)
        elif key == "v":
            self._state = state._replace(view=_next(VIEWS, state.view), offset=0)
        return key not in ("q", "Q")

    def draw(self) -> None:
        columns, rows = self._terminal.size()
        self._state = self._state._replace(columns=columns, rows=rows)
        if self._scene is None:
            self._scene = scene(self._last)
        shown = frame(
            self._scene,
            self._state,
            outage=self._outage(),
            now_s=time.time(),
            interval_s=self._interval_s,
        )
        self._last_offset = shown.last_offset
        self._page = shown.page
        self._terminal.draw(shown.lines)

    def _outage(self) -> Outage | None:
        if self._error:
            return Outage(self._last.taken_s, self._error.message, self._error.hint)
        if errors := self._last.answers.clients["errors"]:
            return Outage(None, errors[0])
        return None


def _next(names: tuple[str, ...], name: str) -> str:
    return names[(names.index(name) + 1) % len(names)]
