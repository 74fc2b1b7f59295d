"""Clients and servers of MPS without a GPU: stand-ins that NVIDIA's real control daemon takes for real.

    with StandIns(host) as stand_ins:             # from now on host.env's control daemon can start a server
        client = stand_ins.client(pipe_directory) # a process that attaches as a CUDA program does
        assert [client.says(), client.says()] == ["asking", "attached"]

What the control daemon (535, 550) does with them is real: its lists and log, who waits for whom, how servers
start, end and are ended. What goes on between a server and its clients is not, and neither is what a server
does without its control daemon, which was never observed here: `behave` lets tests have both.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from waiting import readable

from .environment import host_environment
from .host import Closes, SimHost
from .install import BuildError, compiled, libcuda

SERVER = "nvidia-cuda-mps-server"
CONTROL = "nvidia-cuda-mps-control"
#: A command that every control daemon answers with one line.
PING = "get_default_active_thread_percentage"
#: What the front-end prints, if it prints anything, while another one is connected.
_REJECTED = "Cannot send command"
#: A shell script that prints the default percentage and the servers. While another front-end is connected,
#: such as that of yunion-mps, it asks again, because the control daemon has not received the question.
ASK = (
    f'until told=$(printf "{PING}\\nget_server_list\\n" | {CONTROL} 2>&1); '
    f'[ "$told" ] && [ "${{told#{_REJECTED}}}" = "$told" ]; do sleep 0.05; done; echo "$told"'
)
#: So long that only something that never comes is missed.
PATIENCE_S = 60.0
_SOURCE = Path(__file__).with_name("mps-server") / "server.c"
CLIENT = Path(__file__).with_name("mps_client.py")

# The control daemon looks for its server on its own PATH, and nowhere else.
_WRAPPER = """\
#!/bin/sh
PATH={folder}:$PATH
exec {program} "$@"
"""


def is_rejected(output: str) -> bool:
    """Return whether a front-end that began with PING has printed this because another was connected."""
    return not output or output.startswith(_REJECTED)


def program_version() -> str:
    """The release of NVIDIA's control program here, so that a driver of the same can be simulated."""
    program = shutil.which(CONTROL, path=host_environment(Path("/"))["PATH"])
    if program is None:
        raise BuildError(f"{CONTROL} is not there: run scripts/setup")
    found = re.search(rb"\0(\d{3}\.[\d.]+\d)\0", Path(program).read_bytes())
    if found is None:
        raise BuildError(f"{program} does not say its release")
    return found[1].decode()


class StandIns(Closes):
    """The stand-ins of one host, in a folder of its root that comes first on its PATH; a context manager."""

    def __init__(self, host: SimHost) -> None:
        program = shutil.which(CONTROL, path=host.env["PATH"])
        if program is None:
            raise BuildError(f"{CONTROL} is not there: run scripts/setup")
        self._host = host
        self._clients: list[Client] = []
        #: Whether the control daemon asks a server to end (550), or tells it to (535).
        self.asked = b"get_server_status" in Path(program).read_bytes()
        self.folder = host.root / "usr/bin"
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(built_server(), self.folder / SERVER)
        self._write(
            CONTROL,
            _WRAPPER.format(folder=shlex.quote(str(self.folder)), program=shlex.quote(program)),
            0o755,
        )
        self.behave()
        host.env["PATH"] = f"{self.folder}{os.pathsep}{host.env['PATH']}"

    def install_libcuda(self) -> None:
        """Make the stand-in of libcuda the driver's library on this host."""
        library = self._host.root / f"lib/libcuda.so.{self._host.description.driver_version}"
        shutil.copy(libcuda(), library)
        (self._host.root / "lib/libcuda.so.1").symlink_to(library.name)

    def behave(self, *words: str) -> None:
        """What servers do from now on: the words of mps-server/server.c, none for nothing special."""
        self._write("behaviour", " ".join([*(["asked"] if self.asked else []), *words]), 0o644)

    def client(self, pipe_directory: Path, uid: int | None = None) -> Client:
        """Start a client, of another user where `uid` says so (only root can)."""
        self._clients.append(Client(self._host, pipe_directory, uid))
        return self._clients[-1]

    def attached(self, pipe_directory: Path) -> Client:
        """A client that its server has taken: a job at work."""
        client = self.client(pipe_directory)
        while (word := client.says()) != "attached":
            if word != "asking":
                raise AssertionError(f"the client {client.pid} is {word or 'gone'}, and not attached")
        return client

    def servers(self) -> list[int]:
        """The PIDs of all servers that run, also of those whose control daemon is gone."""
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and self._is_server(entry)]

    def close(self) -> None:
        """End all clients and servers that are left; control daemons belong to what started them."""
        for client in self._clients:
            client.end()
        for pid in self.servers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_server(self, pid: str) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/exe") == str(self.folder / SERVER)
        except OSError:
            return False

    def _write(self, name: str, text: str, mode: int) -> None:
        """Write a file of the folder so that no reader gets half of it."""
        new = self.folder / f".{name}.new"
        new.write_text(text)
        new.chmod(mode)
        new.replace(self.folder / name)


class Client:
    """A process that wants to be served; it lives until it is ended, or its server ends it."""

    def __init__(self, host: SimHost, pipe_directory: Path, uid: int | None) -> None:
        command = [sys.executable, "-IS", str(CLIENT), *([] if uid is None else [str(uid)])]
        env = {**host.env, "CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory)}
        self._process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, bufsize=0)
        self.pid = self._process.pid

    def says(self, timeout_s: float = PATIENCE_S) -> str:
        """The next thing that happens to it, in a word of mps_client.py; waits for that. Empty at its end."""
        assert self._process.stdout is not None
        if not readable(self._process.stdout, timeout_s):
            raise AssertionError(f"nothing happened to the client {self.pid} in {timeout_s:g} s")
        return self._process.stdout.readline().decode().strip()

    @property
    def has_news(self) -> bool:
        """Whether something has happened to it that `says` has not told yet."""
        assert self._process.stdout is not None
        return readable(self._process.stdout, 0)

    def end(self) -> None:
        """End it as a job ends, where it still runs; also a stopped one."""
        assert self._process.stdout is not None
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)
        self._process.wait()
        self._process.stdout.close()


def built_server(*more_flags: str) -> Path:
    return compiled("mps-server", [_SOURCE], more_flags)
