"""Levers on a running daemon: its end at a chosen step, and its wall clock; see levers.c."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from simhost.install import LIBRARY, compiled

_SOURCE = Path(__file__).with_name("levers.c")
_PAGE = struct.Struct("=QQqq")


class Levers:
    """The page that a daemon started with `environment` shares with the test."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "levers"
        self._path.write_bytes(bytes(_PAGE.size))
        with self._path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _PAGE.size)

    @property
    def environment(self) -> dict[str, str]:
        """What to start the daemon with; the levers then are that daemon's."""
        self._page[:] = bytes(_PAGE.size)
        return {"LD_PRELOAD": str(compiled("levers", [_SOURCE], LIBRARY)), "LEVERS": str(self._path)}

    @property
    def steps(self) -> int:
        """How often it has changed something outside itself."""
        return int(_PAGE.unpack(self._page[:])[0])

    def kill_before(self, step: int) -> None:
        """End it by SIGKILL just before its step of that number."""
        self._page[8:16] = struct.pack("=Q", step)

    def set_clock(self, offset_s: int) -> None:
        """Shift its wall clock against the host's."""
        self._page[16:24] = struct.pack("=q", offset_s)

    def close(self) -> None:
        self._page.close()
