"""The daemon of this checkout, under a root of its own in the run's directory; it keeps the compute mode."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from gpu_check.values import Skip, Surroundings, Trouble, seconds

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHARES = 4

_IMPORTS = "import yunion_mps.daemon.run, pynvml, yaml, sdnotify, h11"
_HOST_CONF = """\
enable_cuda_mps: true
cuda_mps_compute_mode: keep
cuda_mps_pipe_directory: /mps/pipe
cuda_mps_log_directory: /mps/log
"""
_DEVICES = """\
devices:
- path: {uuid}
  type: NVIDIA_MPS
  virtual_number: {shares}
"""


def python() -> str:
    """A Python that can run the daemon; raises Skip where none can."""
    said = ""
    for path in (f"{CHECKOUT}/.venv/bin/python", sys.executable):
        if not os.access(path, os.X_OK):
            continue
        result = subprocess.run(
            [path, "-c", _IMPORTS], capture_output=True, text=True, env=_with_checkout(os.environ), timeout=60
        )
        if result.returncode == 0:
            return path
        said = (result.stderr.strip().splitlines() or [""])[-1]
    raise Skip(f"this checkout's daemon cannot run here: {said}")


def _with_checkout(environment: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    parts = [CHECKOUT, environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(part for part in parts if part)}


class Ours:
    """yunion-mps-daemon; it can be started again. A context manager that stops it and its control daemon."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._python = python()
        self.root = around.fresh("r")
        self.pipe, self.log = f"{self.root}/mps/pipe", f"{self.root}/mps/log"
        self._address = f"{self.root}/notify"
        self.process: subprocess.Popen[bytes] | None = None
        outer = os.environ.get("YUNION_MPS_ROOT", "")
        os.makedirs(f"{self.root}/etc/yunion")
        os.chmod(self.root, 0o755)
        for name in ("sys", "dev"):
            os.symlink(f"{outer}/{name}", f"{self.root}/{name}")
        self._write("etc/machine-id", "0123456789abcdef0123456789abcdef\n")
        self._write("etc/yunion/host.conf", _HOST_CONF)
        devices = _DEVICES.format(uuid=around.host.gpu["uuid"], shares=SHARES)
        self._write("etc/yunion/host_container_device.yml", devices)
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._inbox.bind(self._address)

    def _write(self, name: str, text: str) -> None:
        with open(f"{self.root}/{name}", "w", encoding="utf-8") as file:
            file.write(text)

    def start(self, timeout_s: float = 30.0) -> float:
        """Start it; how long until it said READY. Raises Trouble where it does not."""
        self._drain()
        start_s = time.monotonic()
        host = self._around.host
        environment = {
            **_with_checkout(host.environment),
            "YUNION_MPS_ROOT": self.root,
            "NOTIFY_SOCKET": self._address,
            "PATH": os.pathsep.join(
                [os.path.dirname(host.server), os.path.dirname(host.control), host.environment["PATH"]]
            ),
        }
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        with open(f"{self.root}/log", "ab") as log:
            self.process = subprocess.Popen(
                [self._python, "-m", "yunion_mps.daemon"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.root,
            )
        while not self._said_ready():
            if self.process.poll() is not None:
                raise Trouble(f"our daemon ended with {self.process.returncode}: {self.last_words()}")
            if time.monotonic() > start_s + timeout_s:
                raise Trouble(f"our daemon was not READY after {seconds(timeout_s)}: {self.last_words()}")
        return time.monotonic() - start_s

    def _said_ready(self) -> bool:
        self._inbox.settimeout(0.1)
        try:
            return b"READY=1" in self._inbox.recv(4096)
        except socket.timeout:
            return False

    def _drain(self) -> None:
        self._inbox.settimeout(0)
        with contextlib.suppress(OSError):
            while self._inbox.recv(4096):
                pass

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self.process is not None:
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status; None where it still runs."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return self.process.poll()

    def words(self) -> str:
        """Its log."""
        with (
            contextlib.suppress(OSError),
            open(f"{self.root}/log", encoding="utf-8", errors="replace") as file,
        ):
            return file.read()
        return ""

    def last_words(self) -> str:
        """The end of its log in one line."""
        return (
            " / ".join(line.strip() for line in self.words().strip().splitlines()[-3:]) or "it said nothing"
        )

    def __enter__(self) -> Ours:  # noqa: PYI034 - typing.Self is not in 3.9
        return self

    def __exit__(self, *error: object) -> None:
        self.signal(signal.SIGTERM)
        if self.process is not None and self.wait(6.0) is None:
            self.signal(signal.SIGKILL)
            self.wait(2.0)
        self._inbox.close()
