"""A terminal that a test looks at and types on: tmux, on a server of its own, without any user's settings.

with Tmux(env, 80, 24) as screen:           # a shell
    screen.type("yunion-mps top", "Enter")  # text, and keys by tmux's names
    screen.wait("DEVICE")                   # until the screen holds this; returns its lines
    screen.resize(120, 40)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping

from integration.daemon_host import PATIENCE_S, eventually
from simhost.host import Closes

#: Beyond the environment given, without the prompt of an active .venv: a shell that says nothing of its own.
_SHELL = {"ENV": "", "SHELL": "/bin/sh", "LC_ALL": "C.UTF-8"}


class Tmux(Closes):
    def __init__(
        self, env: Mapping[str, str], columns: int, rows: int, term: str = "screen-256color"
    ) -> None:
        assert shutil.which("tmux"), "tmux is not there: run scripts/setup"
        self._folder = tempfile.mkdtemp(prefix="tmux.", dir="/tmp")
        self._env = {**env, **_SHELL, "TMUX_TMPDIR": self._folder}
        for name in ("TMUX", "COLUMNS", "LINES", "PS1"):
            self._env.pop(name, None)
        size = ["-x", str(columns), "-y", str(rows)]
        self._tmux("-u", "-f", "/dev/null", "new-session", "-d", *size, f"TERM={term} exec sh -i")
        try:
            self._tmux("set-option", "-g", "status", "off")
            self.resize(columns, rows)
            self.wait_prompt()
        except BaseException:
            self.close()
            raise

    def type(self, *words: str) -> None:
        """Press keys: `Enter`, `PageDown`, `C-c` and the like by their names, anything else as it is."""
        self._tmux("send-keys", *words)

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def lines(self, *, styled: bool = False) -> list[str]:
        """What is on the screen now, without what is empty at the end of lines and screen."""
        shown = self._tmux("capture-pane", "-p", *(["-e"] if styled else []))
        return [line.rstrip() for line in shown.rstrip().splitlines()]

    def wait(self, pattern: str, timeout_s: float = PATIENCE_S) -> list[str]:
        found: list[str] = []

        def look() -> bool:
            found[:] = self.lines()
            return any(re.search(pattern, line) for line in found)

        eventually(look, f"{pattern!r} on the screen", timeout_s, lambda: "\n".join(found))
        return list(found)

    def wait_prompt(self) -> None:
        eventually(lambda: (self.lines() or [""])[-1] in ("#", "$"), "the prompt", trouble=self._text)

    def wait_without(self, pattern: str) -> list[str]:
        found: list[str] = []

        def look() -> bool:
            found[:] = self.lines()
            return not any(re.search(pattern, line) for line in found)

        eventually(look, f"a screen without {pattern!r}", PATIENCE_S, lambda: "\n".join(found))
        return list(found)

    def _text(self) -> str:
        return "\n".join(self.lines())

    def tell(self, what: str) -> str:
        """What tmux says of the terminal: `cursor_flag`, `alternate_on`, `pane_pid` and the like."""
        return self._tmux("display-message", "-p", f"#{{{what}}}").strip()

    def close(self) -> None:
        self._tmux("kill-server")
        shutil.rmtree(self._folder)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", *words], env=self._env, capture_output=True, text=True, encoding="utf-8", timeout=60
        )
        assert done.returncode == 0, f"tmux {' '.join(words)}: {done.stderr}"
        return done.stdout
