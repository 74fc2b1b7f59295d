"""`yunion-mps gateway` beside a daemon, as its unit runs it, and a client over TCP.

with Gateway(daemon) as gateway:
    gateway.start()                          # it ends by itself where host.conf opens nothing
    gateway.get(port, "/metrics")            # (status, body), None if nothing listens there
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import socket
import subprocess
from pathlib import Path

from integration.daemon_host import PATIENCE_S, Daemon, eventually

#: Names of the ports that this process has been given, so that no other test gets one before it is bound.
_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """A port of the loopback device that is free now, and that neither the kernel nor another test gets."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(lowest // 3, lowest))  # Hypothesis seeds `random` alike in all workers
        name = socket.socket(socket.AF_UNIX)
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            name.bind(f"\0yunion-mps-test-port-{port}")
            _RESERVED.append(name)
            return port
        name.close()


class Gateway:
    """One gateway; nothing of it is left at the end. A context manager."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._log_file = daemon.host.root / "var/log/gateway.stderr"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, user: int | None = None) -> Gateway:
        """Start it once the daemon has published addresses, as the path unit does; by this user."""
        eventually(self.addresses.exists, "the published addresses", trouble=lambda: self.daemon.log)
        self.end()
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                ["yunion-mps", "gateway"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.daemon.env, executable=self._program, user=user, group=user,
                extra_groups=None if user is None else [],
            )  # fmt: skip
        return self

    @property
    def addresses(self) -> Path:
        return self.daemon.host.root / "run/yunion-mps/gateway.json"

    @property
    def _program(self) -> str:
        paths = (Path(one) / "yunion-mps" for one in self.daemon.env["PATH"].split(":"))
        return str(next(path for path in paths if path.exists()))

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def wait_listening(self, port: int) -> Gateway:
        eventually(lambda: self.get(port, "/"), f"an answer at port {port}", trouble=lambda: self.log)
        return self

    def wait(self) -> int:
        assert self._process
        return self._process.wait(PATIENCE_S)

    def get(
        self,
        port: int,
        target: str = "/metrics",
        method: str = "GET",
        accept: str = "*/*",
        host: str = "localhost",
    ) -> tuple[int, str] | None:
        """Status and body of an answer; None if nothing listens."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            try:
                connection.request(method, target, headers={"Accept": accept, "Host": host})
                response = connection.getresponse()
                return response.status, response.read().decode()
            except ConnectionError:
                return None

    def answer(self, port: int, target: str = "/metrics", *words: str, **headers: str) -> tuple[int, str]:
        found = self.get(port, target, *words, **headers)
        assert found
        return found

    def serves(self, port: int, text: str = "yunion_mps_up 1.0") -> None:
        def look() -> bool:
            answer = self.get(port)
            return answer is not None and answer[0] == 200 and text in answer[1].splitlines()

        eventually(look, f"{text} at port {port}", trouble=lambda: self.log)

    def end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def __enter__(self) -> Gateway:  # noqa: PYI034 - typing.Self is not in 3.9
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
