"""`yunion-mps top`: shows who uses what, updated until a key or signal ends it, or once.

The terminal is drawn without flicker, read key by key, and always restored at the end. It uses plain control
sequences of ECMA-48, which every modern terminal supports, instead of curses: terminfo is not needed, and a
frame is a single write.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Union

import click

from yunion_mps.cli.options import Duration, call, listed_devices
from yunion_mps.cli.output import hint_text, is_utf8, notes, terminal_size, wrapped
from yunion_mps.cli.top.frame import HINT, VIEWS, WHOLE, Line, Outage, ViewState, encode, frame
from yunion_mps.cli.top.rows import ORDERS, Poll, Scene, scene
from yunion_mps.errors import YunionError
from yunion_mps.host import threads
from yunion_mps.host.processes import readable
from yunion_mps.http.operations import GET_CLIENTS, GET_EVENTS, GET_GPUS, GET_LEASES, GET_STATUS
from yunion_mps.overview import Answers

if TYPE_CHECKING:
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

    After an address, ! marks a device over its budget or a process outside MPS, and ? an MPS client whose
    device is unknown. A line names the columns that a narrow terminal hides. Set NO_COLOR in the environment
    to turn off colours.

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
    shown = frame(scene(first), state, None, time.time(), 0)
    text = ""
    for line in ("".join(part for part, _ in line).rstrip() for line in shown.lines):
        text += hint_text(line[len(HINT) :], HINT) if line.startswith(HINT) else wrapped(line)
    return text + notes(("Incomplete", error) for error in first.answers.clients["errors"])


def poll(before: Poll | None = None) -> Poll:
    """Query the daemon; raises YunionError. The devices are those of `before` if nothing has happened."""
    status = call(GET_STATUS)
    events = call(GET_EVENTS, limit=_NEWEST_EVENTS)
    leases = call(GET_LEASES)
    devices_s, seen = time.monotonic(), (events["last"], status["devices"], status["gpus"], status["started"])
    if before and seen == before.seen and devices_s - before.devices_s < _STALE_S:
        gpus, devices, devices_s = before.answers.gpus, before.answers.devices, before.devices_s
    else:
        gpus, devices = call(GET_GPUS)["gpus"], listed_devices()
    clients = call(GET_CLIENTS, seen=True)
    answers = Answers(status, gpus, devices, leases["leases"], leases["waiting"], clients)
    return Poll(time.time(), answers, events["events"], seen, devices_s)


class _Poller:
    """Queries the daemon in the background, puts each answer or error into `news`, and then calls `wake`."""

    def __init__(self, first: Poll, interval_s: float, wake: Callable[[], None]) -> None:
        self.news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._interval_s = interval_s
        self._wake = wake
        self._last = first
        threads.start(self._repeat, threads.ignore_outcome)

    def _repeat(self) -> None:
        is_broken, wait_s = False, self._interval_s
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
    """Draw until a key or a signal ends it; the signal takes effect once the terminal is restored."""
    utf8 = is_utf8()
    terminal = Terminal(utf8=utf8, colour=not os.environ.get("NO_COLOR"))
    with WakeUp() as wake_up:
        view = _View(terminal, first, interval_s, utf8=utf8)
        terminal.enter()
        try:
            number = _run(view, terminal, wake_up, _Poller(first, interval_s, wake_up.wake))
        finally:
            terminal.leave()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _run(view: _View, terminal: Terminal, wake_up: WakeUp, poller: _Poller) -> int:
    """Handle keys, signals and news; return the signal that ends it, 0 for a key."""
    ready = select.poll()
    ready.register(0, select.POLLIN)
    ready.register(wake_up, select.POLLIN)
    view.draw()
    while True:
        descriptors = {descriptor for descriptor, _ in ready.poll()}
        numbers = wake_up.signals() if wake_up.fileno() in descriptors else []
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
        self._state = ViewState(*terminal.size(), utf8=utf8)

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
        state, offset = self._state, min(self._state.offset, self._last_offset)
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
        shown = frame(self._scene, self._state, self._outage(), time.time(), self._interval_s)
        self._last_offset, self._page = shown.last_offset, shown.page
        self._terminal.draw(shown.lines)

    def _outage(self) -> Outage | None:
        if self._error:
            return Outage(self._last.taken_s, self._error.message, self._error.hint)
        if errors := self._last.answers.clients["errors"]:
            return Outage(None, errors[0])
        return None


def _next(names: tuple[str, ...], name: str) -> str:
    return names[(names.index(name) + 1) % len(names)]


#: Switch to the alternate screen without a cursor, and back.
_ENTER = b"\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = b"\x1b[0m\x1b[?25h\x1b[?1049l"
#: Signals that end a program; the terminal is restored before they take effect.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_OTHERS = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
_KEYS = {
    b"A": "up", b"B": "down", b"5~": "page up", b"6~": "page down", b"H": "home", b"F": "end",
    b"1~": "home", b"4~": "end", b"7~": "home", b"8~": "end",
}  # fmt: skip
_KEY = re.compile(rb"\x1b[\[O][0-9;]*([A-Za-z]|[0-9]*~)|\x1b[\[O]?[0-9;]*$|\x1b|[^\x1b]")
#: How long the rest of a key's sequence may take on a slow line.
_REST_OF_KEY_S = 0.1


class WakeUp:
    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._before: dict[signal.Signals, object] = {}

    def wake(self) -> None:
        """Wake the loop; may be called on any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._writer, b"\0")

    def fileno(self) -> int:
        return self._reader

    def signals(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._reader, 4096) if number]
        return []

    def __enter__(self) -> WakeUp:  # noqa: PYI034 - typing.Self is not in 3.9
        for number in (*STOP_SIGNALS, *_OTHERS):
            if signal.getsignal(number) != signal.SIG_IGN:  # as set by nohup
                self._before[number] = signal.signal(number, _only_wake)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]


def _only_wake(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing: the signal's number is written to the pipe."""


class Terminal:
    """The terminal on standard input and output, drawn on between `enter` and `leave`."""

    def __init__(self, *, utf8: bool, colour: bool) -> None:
        self._in, self._out = 0, 1
        self._utf8 = utf8
        self._colour = colour
        self._before = termios.tcgetattr(self._in)
        self._drawn: list[bytes] = []
        self._typed = b""

    def size(self) -> tuple[int, int]:
        """Return columns and rows; 80 and 24 if they are unknown, as on a serial line."""
        size = os.get_terminal_size(self._out)
        return size.columns or 80, size.lines or 24

    def enter(self) -> None:
        """Take the terminal: read keys immediately and without echo, and hide the cursor."""
        tty.setcbreak(self._in, termios.TCSANOW)
        self._drawn = []
        os.write(self._out, _ENTER)

    def leave(self) -> None:
        """Restore the terminal; does nothing if it is gone."""
        with contextlib.suppress(OSError, termios.error):
            for action in (termios.TCOOFF, termios.TCOON):  # Ctrl-S would block us; only both undo it
                termios.tcflow(self._out, action)
            os.write(self._out, _LEAVE)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._in, termios.TCSANOW, self._before)

    def stop(self) -> None:
        """Stop as Ctrl-Z does, and redraw when continued."""
        self.leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _only_wake)
        self.enter()

    def draw(self, lines: list[Line]) -> None:
        """Draw these lines: writes only changed lines, and nothing while output is stopped."""
        columns, rows = self.size()
        encoded = [encode(line, columns, utf8=self._utf8, colour=self._colour) for line in lines[:rows]]
        begin = b"" if self._drawn else b"\x1b[0m\x1b[2J"
        pieces = [
            b"\x1b[%d;1H%s" % (row, line)
            for row, line in enumerate(encoded, 1)
            if len(self._drawn) < row or self._drawn[row - 1] != line
        ]
        if not pieces:
            return
        poll = select.poll()
        poll.register(self._out, select.POLLOUT)
        if poll.poll(0):
            data = begin + b"".join(pieces)
            while data:
                data = data[os.write(self._out, data) :]
            self._drawn = encoded

    def invalidate(self) -> None:
        """Redraw every line next time, for example after a resize."""
        self._drawn = []

    def keys(self) -> list[str]:
        """Return the keys pressed, by name if they have no character; raises EOFError."""
        piece = os.read(self._in, 1024)
        if not piece:
            raise EOFError
        self._typed += piece
        found = []
        while match := _KEY.match(self._typed):
            is_last = match.end() == len(self._typed)
            if is_last and _is_incomplete(match[0]) and readable(self._in, _REST_OF_KEY_S):
                self._typed += os.read(self._in, 1024)
                continue
            self._typed = self._typed[match.end() :]
            found.append(_key_name(match[0]))
        return [key for key in found if key]


def _is_incomplete(key: bytes) -> bool:
    return key[:1] == b"\x1b" and re.fullmatch(rb"\x1b([\[O][0-9;]*)?", key) is not None


def _key_name(key: bytes) -> str:
    """Return the key's character or name, "" for an unsupported key."""
    return _KEYS.get(key[2:], "") if key[:1] == b"\x1b" else key.decode("ascii", "ignore")
