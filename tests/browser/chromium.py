"""Chromium without a window, driven over the DevTools protocol through a pair of pipes: no port, no library.

with Chromium() as browser:
    page = browser.page("http://127.0.0.1:9435/", width=360, dark=True)
    page.wait("document.querySelector('#host').textContent")  # until this is true; returns it
    page.press("Tab")
    assert page.errors() == []                              # nor errors, nor what the policy forbade

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.daemon_host import PATIENCE_S, eventually
from simhost.host import Closes
from waiting import readable

Json = dict[str, Any]

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser")
_ARGUMENTS = (
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--hide-scrollbars", "--disable-background-networking", "--disable-component-update",
    "--disable-dev-shm-usage", "--force-color-profile=srgb", "--lang=en-GB", "about:blank",
)  # fmt: skip
_WATCH = """
window.errors = [];
addEventListener("securitypolicyviolation", (e) => errors.push(`${e.violatedDirective} ${e.blockedURI}`));
addEventListener("error", (e) => errors.push(`error: ${e.message ?? e.target.outerHTML}`), true);
addEventListener("unhandledrejection", (e) => errors.push(`rejection: ${e.reason}`));
"""
#: Limits every timer of the page to 100 ms.
_BRIEF_PAUSES = "const wait = setTimeout; window.setTimeout = (done, ms) => wait(done, Math.min(ms, 100));"
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}


class Chromium(Closes):
    def __init__(self) -> None:
        program = next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
        assert program, "chromium-headless-shell is not there: run scripts/setup"
        self._folder = tempfile.mkdtemp(prefix="chromium.", dir="/tmp")
        its_in, self._out = _high_pipe()
        self._in, its_out = _high_pipe()

        def give_pipes() -> None:
            os.dup2(its_in, 3)
            os.dup2(its_out, 4)

        self._process = subprocess.Popen(
            [program, f"--user-data-dir={self._folder}", *_ARGUMENTS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=give_pipes,
            pass_fds=(3, 4),
            start_new_session=True,
            env={**os.environ, "TZ": "UTC", "HOME": self._folder},
        )
        os.close(its_in)
        os.close(its_out)
        self._pages: list[str] = []
        self._last = 0
        self._read = b""
        self._answers: dict[int, Json] = {}
        #: What it told by itself, by session.
        self.events: list[Json] = []
        self.answering: dict[str, Callable[[Json], None]] = {}

    def page(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        reduced: bool = True,
        brief_pauses: bool = False,
    ) -> Page:
        """A new page of this size, which has begun to load.

        With `brief_pauses`, it asks for what is new at least every 0.1 s.
        """
        target = self.tell("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._pages.append(target)
        session = self.tell("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        page.resize(width, height)
        page.tell("Page.enable")
        page.tell("Log.enable")
        page.tell("Runtime.enable")
        page.tell("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
        if brief_pauses:
            page.tell("Page.addScriptToEvaluateOnNewDocument", {"source": _BRIEF_PAUSES})
        page.prefer(dark=dark, reduced=reduced)
        page.tell("Page.navigate", {"url": url})
        return page

    def close_pages(self) -> None:
        """Close all pages: an open one goes on asking for what is new."""
        while self._pages:
            self.tell("Target.closeTarget", {"targetId": self._pages.pop()})

    def tell(self, method: str, parameters: Json | None = None, session: str = "") -> Json:
        """Have it do something, and return what it answers."""
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while number not in self._answers:  # what answers an event asks as well, and may hear of ours
            self._note(self._next())
        heard = self._answers.pop(number)
        assert "error" not in heard, (method, heard["error"])
        return dict(heard["result"])

    def listen(self) -> None:
        """Take note of what it has told by itself up to now."""
        self.tell("Browser.getVersion")

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        eventually(self._is_removed, f"the end of {self._folder}")

    def _is_removed(self) -> bool:
        """Its helpers end after it, and may write until then."""
        shutil.rmtree(self._folder, ignore_errors=True)
        return not Path(self._folder).exists()

    def _note(self, heard: Json) -> None:
        if "id" in heard:
            self._answers[heard["id"]] = heard
        if "method" in heard:
            self.events.append(heard)
            if heard["method"] in self.answering:
                self.answering[heard["method"]](heard)

    def _next(self) -> Json:
        end_s = time.monotonic() + PATIENCE_S
        while b"\0" not in self._read:
            assert readable(self._in, max(0.0, end_s - time.monotonic())), (
                f"Chromium says nothing for {PATIENCE_S:g} s"
            )
            piece = os.read(self._in, 1 << 20)
            assert piece, "Chromium has ended"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))


class Page:
    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self.session = session

    def tell(self, method: str, parameters: Json | None = None) -> Json:
        return self._browser.tell(method, parameters, self.session)

    def ask(self, expression: str) -> Any:
        parameters = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.tell("Runtime.evaluate", parameters)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = PATIENCE_S) -> Any:
        shown = "document.body.innerText"
        return eventually(
            lambda: self.ask(f"document.readyState !== 'loading' && ({expression})"),
            expression,
            timeout_s,
            lambda: str(self.ask(shown))[:3000],
        )

    def wait_text(self, text: str, where: str = "body") -> str:
        """Wait until the words are there to be seen, and return all that is."""
        place = f"document.querySelector({json.dumps(where)})"
        return str(self.wait(f"{place}?.innerText.includes({json.dumps(text)}) && {place}.innerText"))

    def press(self, key: str, *, shift: bool = False) -> None:
        code = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, 0), "modifiers": 8 * shift}
        text = {"Enter": "\r", " ": " "}.get(key)
        self.tell("Input.dispatchKeyEvent", {"type": "keyDown", **code, **({"text": text} if text else {})})
        self.tell("Input.dispatchKeyEvent", {"type": "keyUp", **code})

    def type(self, text: str) -> None:
        self.tell("Input.insertText", {"text": text})

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.tell("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, *, dark: bool, reduced: bool = True) -> None:
        """What the user prefers, as media queries tell it."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced else "no-preference"},
        ]
        self.tell("Emulation.setEmulatedMedia", {"features": features})

    def errors(self) -> list[str]:
        """Errors, and what the security policy forbade, since the page was loaded."""
        self._browser.listen()
        own = [one for one in self._browser.events if one.get("sessionId") == self.session]
        logged = [
            one["params"]["entry"]["text"]
            for one in own
            if one["method"] == "Log.entryAdded" and one["params"]["entry"]["level"] == "error"
        ]
        thrown = [str(one["params"]) for one in own if one["method"] == "Runtime.exceptionThrown"]
        return [*self.ask("window.errors"), *logged, *thrown]

    def picture(self) -> bytes:
        """Return the whole page as PNG, however high it is."""
        self.resize(int(self.ask("innerWidth")), int(self.ask("document.documentElement.scrollHeight")))
        return base64.b64decode(self.tell("Page.captureScreenshot", {"format": "png"})["data"])


def _high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are not those that the browser expects."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in low)
    for one in low:
        os.close(one)
    return high[0], high[1]
