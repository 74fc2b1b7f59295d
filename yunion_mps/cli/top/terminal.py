"""The terminal of `top`: drawn without flicker, read key by key, and always restored at the end.

It uses plain control sequences of ECMA-48, which every modern terminal supports, instead of curses: terminfo
is not needed, and a frame is a single write.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import termios
import tty
from types import FrameType

from yunion_mps.cli.top.frame import Line, encode_line
from yunion_mps.host.processes import readable

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


class SignalWakeup:
    """A pipe that signals and other threads write to, so that poll(2) returns; as a context manager."""

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

    def __enter__(self) -> SignalWakeup:  # noqa: PYI034 - typing.Self is not in 3.9
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
    """Do nothing: the signal's number is written to the pipe."""


class Terminal:
    """The terminal on standard input and output, drawn on between `enter` and `leave`."""

    def __init__(self, *, utf8: bool, colour: bool) -> None:
        self._in = 0
        self._out = 1
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
        encoded = [encode_line(line, columns, utf8=self._utf8, colour=self._colour) for line in lines[:rows]]
        begin = b"" if self._drawn else b"\x1b[0m\x1b[2J"
        pieces: list[bytes] = []
        for index, line in enumerate(encoded):
            if index >= len(self._drawn) or self._drawn[index] != line:
                pieces.append(b"\x1b[%d;1H%s" % (index + 1, line))
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
        keys: list[str] = []
        while match := _KEY.match(self._typed):
            is_last = match.end() == len(self._typed)
            if is_last and _is_incomplete(match[0]) and readable(self._in, _REST_OF_KEY_S):
                self._typed += os.read(self._in, 1024)
                continue
            self._typed = self._typed[match.end() :]
            key = _key_name(match[0])
            if key:
                keys.append(key)
        return keys


def _is_incomplete(key: bytes) -> bool:
    return key[:1] == b"\x1b" and re.fullmatch(rb"\x1b([\[O][0-9;]*)?", key) is not None


def _key_name(key: bytes) -> str:
    """Return the key's character or name, "" for an unsupported key."""
    return _KEYS.get(key[2:], "") if key[:1] == b"\x1b" else key.decode("ascii", "ignore")
