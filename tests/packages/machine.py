"""A booted machine: a copy of an image with a systemd of its own, in systemd-nspawn."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from control_groups import ControlGroup
from packages.driver import Driver
from packages.images import lay_over, take_off
from simhost import Description
from simhost.host import Closes
from waiting import pause

T = TypeVar("T")
Done = subprocess.CompletedProcess[str]

UNIT = "yunion-mps-daemon.service"
#: So long that only something that never comes is missed.
PATIENCE_S = 180.0
_LOOK_S = 0.05
_GRACE_S = 10.0
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}


class MachineError(RuntimeError):
    """The machine does not do what machines do."""


class Machine(Closes):
    """A context manager: at the end nothing is left of it."""

    #: Whether it has version 2 of cgroups, with which its release boots by default.
    is_unified = True

    def __init__(
        self, image: Path, name: str, gpus: Description | None = None, calls: Sequence[str] = ()
    ) -> None:
        """Take a copy of the image; it is not booted yet. `name` is also the host's name.

        `gpus` are others than the reference case's, and `calls` the system calls that a real machine has, and
        systemd-nspawn only where it is asked for them (its --system-call-filter=).
        """
        self._folder = Path(tempfile.gettempdir()) / f"{name}-{uuid.uuid4().hex[:8]}"
        self._folder.mkdir(mode=0o755)
        self.name = name
        self._calls = calls
        self.root = self._folder / "root"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self._group = SystemdGroup(self._folder.name, self._hierarchies())
        try:
            lay_over(image, self.root)
            self.driver = Driver(self._folder / "driver", gpus)
            self.driver.install(self.root)
            (self.root / "etc/hostname").write_text(f"{name}\n")
            (self.root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
        except BaseException:
            self.close()
            raise

    # -- its life

    def boot(self) -> Machine:
        """Switch it on, and wait until its systemd has started everything."""
        self._group.remove()  # of the boot before
        self.driver.load()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.bind(str(self._folder / "notify"))
            with open(self._folder / "console.log", "ab") as console:
                self._nspawn = subprocess.Popen(
                    self._command(),
                    env={
                        **os.environ,
                        "NOTIFY_SOCKET": str(self._folder / "notify"),
                        # As both releases boot by default, also where this machine has not switched yet.
                        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": str(int(self.is_unified)),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    start_new_session=True,
                )
            self._await_ready(notified)
        os.unlink(self._folder / "notify")
        return self

    def power_off(self) -> None:
        assert self._nspawn is not None
        self.run("systemctl", "poweroff", check=False)
        try:
            self._nspawn.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise MachineError(f"{self.name} does not shut down:\n{self.console()}") from None
        finally:
            self._kill()

    def cut_power(self) -> None:
        """Switch it off without a warning."""
        self._kill()

    def reboot(self) -> None:
        """Shut it down and switch it on again, with a driver that has forgotten everything."""
        self.power_off()
        self.boot()

    def close(self) -> None:
        """Switch it off the hard way where it runs, and remove it."""
        self._kill()
        self._group.remove()
        take_off(self.root)
        shutil.rmtree(self._folder)

    def keep_journal(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "console.log").write_text(self.console())
        if self._leader:
            self.run("journalctl", "--sync", check=False)
        journal = ["chroot", str(self.root), "journalctl", "--no-pager", "--output=short-iso-precise"]
        with open(folder / "journal.log", "wb") as file:
            subprocess.run(journal, stdout=file, stderr=file, timeout=PATIENCE_S)

    def console(self) -> str:
        """What systemd-nspawn and the console said; nothing before the first boot."""
        console = self._folder / "console.log"
        return console.read_text(errors="replace") if console.exists() else ""

    # -- what happens in it

    def run(self, *argv: str, check: bool = True, limit_s: float = PATIENCE_S, **env: str) -> Done:
        """Run a command in it as root with the output captured; raises MachineError where it fails."""
        variables = [f"{name}={value}" for name, value in {**_ENVIRONMENT, **env}.items()]
        command = ["nsenter", f"--target={self._leader}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        command += [
            "env",
            "--ignore-environment",
            "--chdir=/",
            *variables,
            "timeout",
            "--kill-after=5",
            str(limit_s),
            *argv,
        ]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s + 20
        )
        if check and done.returncode != 0:
            raise MachineError(f"{' '.join(argv)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def shell(self, script: str, *, check: bool = True, limit_s: float = PATIENCE_S) -> str:
        """The output of a script, of sh -e, both of its streams."""
        done = self.run("sh", "-ec", f"exec 2>&1\n{script}", check=check, limit_s=limit_s)
        return done.stdout

    def show(self, name: str, unit: str = UNIT) -> str:
        """A property of the unit, as `systemctl show` has it."""
        return self.run("systemctl", "show", "--property", name, "--value", unit).stdout.strip()

    def journal(self, unit: str = UNIT) -> str:
        self.run("journalctl", "--sync")
        return self.run("journalctl", "--boot", "--no-pager", "--output=cat", "--unit", unit).stdout

    def kill(self, pid: int, number: signal.Signals) -> None:
        self.run("kill", f"-{number.value}", str(pid))

    def install_file(self, file: Path) -> str:
        shutil.copy(file, self.root / "root" / file.name)
        return f"/root/{file.name}"

    def write(self, path: str, text: str) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def wait_until(self, what: str, condition: Callable[[], T], limit_s: float = PATIENCE_S) -> T:
        """Wait for the condition, and return what it does; raises MachineError after `limit_s`."""
        begun_s = time.monotonic()
        while not (found := condition()):
            if time.monotonic() > begun_s + limit_s:
                status = self.run("systemctl", "status", "--no-pager", "--full", UNIT, check=False).stdout
                raise MachineError(f"{self.name}: not within {limit_s:g} s: {what}\n{status}")
            pause(begun_s, 0.5)
        return found

    # -- systemd-nspawn

    def _hierarchies(self) -> list[Path]:
        return systemd_hierarchies()

    def _command(self) -> list[str]:
        binds = [f"--bind={source}:{target}" for source, target in self.driver.binds.items()]
        return [
            *self._group.enter(),
            "systemd-nspawn",
            f"--directory={self.root}",
            f"--machine={self._folder.name}",
            f"--hostname={self.name}",
            "--boot",
            "--quiet",
            "--private-network",
            "--register=no",
            "--console=pipe",
            "--notify-ready=yes",
            "--link-journal=no",
            "--resolv-conf=off",
            "--timezone=off",
            *([] if self._group.is_systemds else ["--keep-unit"]),
            *([f"--system-call-filter={' '.join(self._calls)}"] if self._calls else []),
            *binds,
        ]

    def _await_ready(self, notified: socket.socket) -> None:
        end_s = time.monotonic() + PATIENCE_S
        leader = 0
        while time.monotonic() < end_s and self._nspawn and self._nspawn.poll() is None:
            notified.settimeout(_LOOK_S)
            with contextlib.suppress(TimeoutError, socket.timeout):
                words = dict(line.partition("=")[::2] for line in notified.recv(4096).decode().splitlines())
                leader = int(words.get("X_NSPAWN_LEADER_PID", leader))
                if words.get("READY") == "1" and leader:
                    self._leader = leader
                    return
        self._kill()
        raise MachineError(f"{self.name} does not boot:\n{self.console()}")

    def _kill(self) -> None:
        """End the machine's first process, and with it all others; nspawn alone would leave them running."""
        if self._nspawn is None:
            return
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children")
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            self._nspawn.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._nspawn.kill()
            self._nspawn.wait()
        self._nspawn, self._leader = None, 0


class SystemdGroup:
    """The group of a machine's systemd, in each hierarchy that systemd uses, if no other systemd makes it."""

    def __init__(self, name: str, places: Sequence[Path]) -> None:
        #: Whether this machine was booted with systemd, which then makes a scope.
        self.is_systemds = os.path.isdir("/run/systemd/system")
        self._group = ControlGroup(f"yunion-mps-test-{name}", [] if self.is_systemds else places)

    def enter(self) -> list[str]:
        """The beginning of a command that is then run in the group."""
        return [] if self.is_systemds else self._group.make().command_in()

    def remove(self) -> None:
        self._group.close()


def systemd_hierarchies() -> list[Path]:
    """Where version 2 is mounted, and version 1's named one for systemd, where there is that as well."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            found.setdefault(kind, Path(place))
    if "cgroup2" not in found:
        raise OSError("no cgroup2 is mounted: mount -t cgroup2 none /sys/fs/cgroup")
    return list(found.values())
