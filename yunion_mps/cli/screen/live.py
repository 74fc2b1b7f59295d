"""The live view: what comes of keys, signals and the daemon's answers, until somebody ends it."""

from __future__ import annotations

import os
import queue
import select
import signal
import time

from yunion_mps.cli.screen.asking import Answers, Watch
from yunion_mps.cli.screen.frame import VIEWS, Look, Silence, clock, frame
from yunion_mps.cli.screen.scene import ORDERS, Scene, scene
from yunion_mps.cli.screen.terminal import ENDING, Terminal, Woken
from yunion_mps.cli.screen.text import is_utf8
from yunion_mps.errors import YunionError
from yunion_mps.overview.uses import NOBODY, Clients


def live(first: Answers, interval_s: int) -> None:
    """Show it until somebody ends it; a signal then does what it does, once the terminal is right."""
    utf8 = is_utf8()
    terminal = Terminal(utf8=utf8, colour=not os.environ.get("NO_COLOR"))
    with Woken() as woken:
        view = _View(terminal, first, interval_s, utf8=utf8)
        terminal.enter()
        try:
            number = _run(view, terminal, woken, Watch(first, interval_s, woken.wake))
        finally:
            terminal.leave()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class _View:
    """What is looked at, and how."""

    def __init__(self, terminal: Terminal, first: Answers, interval_s: int, *, utf8: bool) -> None:
        self._terminal = terminal
        self._interval_s = interval_s
        self._answers = first
        self._clients: Clients = NOBODY
        self._clients_s = time.time()
        self._errors: dict[bool, YunionError] = {}  # by what was asked: the clients, or the rest
        self._scene: Scene | None = None
        self._last_offset = 0
        self._page = 1
        self._look = Look(*terminal.size(), utf8=utf8)

    def learn(self, watch: Watch) -> bool:
        """Take what the daemon said; false where that was nothing. Raises a fault of the one who asked."""
        learnt = False
        while True:
            try:
                news = watch.news.get_nowait()
            except queue.Empty:
                return learnt
            learnt, self._scene = True, None
            if news.error is not None and not isinstance(news.error, YunionError):
                raise news.error
            if news.error is not None:
                self._errors[news.about_clients] = news.error
                continue
            self._errors.pop(news.about_clients, None)
            if isinstance(news.answer, Clients):
                self._clients, self._clients_s = news.answer, time.time()
            elif news.answer:
                self._answers = news.answer

    def press(self, key: str) -> bool:
        """Do what the key means; false where that is to quit."""
        look, offset = self._look, min(self._look.offset, self._last_offset)
        moves = {
            "up": offset - 1, "k": offset - 1, "down": offset + 1, "j": offset + 1,
            "page up": offset - self._page, "page down": offset + self._page, " ": offset + self._page,
            "home": 0, "g": 0, "end": self._last_offset, "G": self._last_offset,
        }  # fmt: skip
        if key in moves:
            offset = min(max(moves[key], 0), self._last_offset)
            self._look = look._replace(offset=offset)
        elif key == "s":
            self._look = look._replace(order=_next(ORDERS, look.order), offset=0)
        elif key == "v":
            self._look = look._replace(view=_next(VIEWS, look.view), offset=0)
        return key not in ("q", "Q")

    def draw(self) -> None:
        """Draw it, in the size that the terminal has now."""
        columns, rows = self._terminal.size()
        self._look = self._look._replace(columns=columns, rows=rows)
        if self._scene is None:
            self._scene = scene(self._answers, self._clients)
        shown = frame(self._scene, self._look, self._silence(), time.time(), self._interval_s)
        self._last_offset, self._page = shown.last_offset, shown.page
        self._terminal.draw(shown.lines)

    def _silence(self) -> Silence | None:
        """Why what is shown is old, None where it is not."""
        if about_all := self._errors.get(False):
            return Silence(self._answers.taken_s, about_all.message, about_all.hint)
        if about_clients := self._errors.get(True):
            why = f"who uses the GPUs, since {clock(self._clients_s)}: {about_clients.message}"
            return Silence(None, why, about_clients.hint)
        if self._clients.troubles:
            return Silence(None, self._clients.troubles[0])
        return None


def _run(view: _View, terminal: Terminal, woken: Woken, watch: Watch) -> int:
    """Go on until a key or a signal ends it; returns that signal, 0 for a key."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(woken, select.POLLIN)
    view.draw()
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        numbers = woken.signals() if woken.fileno() in ready else []
        for number in numbers:
            if number in ENDING:
                return number
        if signal.SIGTSTP in numbers:
            terminal.stop()
        elif signal.SIGCONT in numbers:
            terminal.enter()
        elif signal.SIGWINCH in numbers:
            terminal.forget()
        if 0 in ready:
            try:
                keys = terminal.keys()
            except (EOFError, OSError):  # the terminal is gone
                return 0
            if not all(view.press(key) for key in keys):
                return 0
        view.learn(watch)
        view.draw()


def _next(names: tuple[str, ...], name: str) -> str:
    return names[(names.index(name) + 1) % len(names)]
