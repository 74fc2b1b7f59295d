"""The fixture of the page tests: `yunion-mps web` on a simulated host with jobs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from browser.chromium import Page
from integration.daemon_host import Daemon, eventually
from integration.gateway_host import free_port
from simhost import SimGpu, SimHost
from simhost.host import Closes
from simhost.mps import StandIns


class Served(Closes):
    """`yunion-mps web` on a host, until the end; a context manager."""

    def __init__(self, host: SimHost, port: int = 0, **environment: str) -> None:
        """At this port, or at any; more variables of its environment may be given."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        command = ["yunion-mps", "web", "--listen", f"127.0.0.1:{self.port}"]
        self._process = host.popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**host.env, **environment}
        )
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline()
        assert self.url in self.said, self.said + self._process.stdout.read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Scene(NamedTuple):
    """A daemon with jobs, and the page that shows them."""

    daemon: Daemon
    jobs: Jobs
    served: Served

    def wait_measured(self, device: str, mib: int) -> None:
        """Have the daemon poll until the usage of the last hour has this memory of a device."""

        def is_measured() -> bool:
            self.daemon.polls()
            devices = self.daemon.get("/v1/usage")[1]["devices"]
            return any(one["addr"] == device and mib in one["memory_used_mib"] for one in devices)

        eventually(is_measured, f"{mib} MiB of {device}")


@contextmanager
def scene_on(host: SimHost) -> Iterator[Scene]:
    with StandIns(host), Daemon(host) as daemon:
        daemon.start().wait_ready()
        with Jobs(daemon) as jobs, Served(host) as served:
            yield Scene(daemon, jobs, served)


class Jobs(Closes):
    """Commands with devices of their own, as `yunion-mps run` starts them; a context manager."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._running: dict[int, tuple[subprocess.Popen[str], SimGpu | None]] = {}
        self._folder = daemon.host.root / "tmp/jobs"
        self._folder.mkdir(parents=True, exist_ok=True)

    def start(
        self, name: str, arguments: Sequence[str] = (), *, device: str = "", mib: int | None = None,
        options: Sequence[str] = (),
    ) -> int:  # fmt: skip
        """A job of this name, which uses so much of its device's GPU; returns its PID once it has that.

        Which device, `options` of `yunion-mps run` may say instead.
        """
        program = self._folder / name
        if not program.exists():
            program.write_text("import time\ntime.sleep(3600)\n")
        request = ["--device", device] if not options else list(options)
        command = ["yunion-mps", "run", *request, "--", "python3", name, *arguments]
        process = self._daemon.host.popen(command, cwd=self._folder)
        self._running[process.pid] = process, None
        eventually(lambda: self._has_begun(process), f"the device of {name}")
        if mib is not None:
            (address,) = self._held()[process.pid]
            gpu = next(one for one in self._daemon.host.gpus if _short(one) == address)
            gpu.add_process(process.pid, mib, "M+C")
            self._running[process.pid] = process, gpu
        return process.pid

    def end(self, pid: int) -> None:
        process, gpu = self._running.pop(pid)
        if gpu:
            gpu.remove_process(pid)
        process.kill()
        process.communicate()

    def _has_begun(self, process: subprocess.Popen[str]) -> bool:
        """Whether it has its lease, and has become the command: until then, the lease may be revoked."""
        assert process.poll() is None, process.communicate()
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        return process.pid in self._held() and b"yunion-mps" not in command

    def _held(self) -> dict[int, list[str]]:
        return {one["pid"]: one["gpus"] for one in self._daemon.get("/v1/leases")[1]["leases"]}

    def close(self) -> None:
        for pid in list(self._running):
            self.end(pid)


def texts_of_low_contrast(page: Page) -> list[str]:
    """Texts whose contrast with what is behind them is below 4.5."""
    found = page.ask(Path(__file__).with_name("contrasts.js").read_text())
    assert len(found) > 40
    return [f"{text!r}: {ratio:.2f}" for text, ratio in found if ratio < 4.5]


def sticks_out(page: Page, width: int) -> list[str]:
    """What is wider than a window of this width."""
    assert page.ask("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    outside = "(one) => one.getBoundingClientRect().right > innerWidth + 1"
    script = f"[...document.querySelectorAll('main *')].filter({outside}).map((one) => one.outerHTML)"
    found: list[str] = page.ask(script)
    return found


def _short(gpu: SimGpu) -> str:
    return gpu.description.address.removeprefix("0000:")
