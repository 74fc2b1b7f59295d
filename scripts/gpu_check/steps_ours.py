"""The daemon of this checkout on this GPU: its budgets, its recovery, what it adopts and what not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

from gpu_check.clients import Client, attempt, fates, pump, start_beating, watch
from gpu_check.processes import Control, listener, stat_of
from gpu_check.steps_memory import in_words, measure
from gpu_check.values import Report, Skip, Step, Surroundings, Trouble, seconds

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHARES = 4

_IMPORTS = "import yunion_mps.daemon.run, pynvml, yaml, h11"
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
    """A Python that can run the daemon; raises Skip if none can."""
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
        """Start it; how long until it said READY. Raises Trouble if it does not."""
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
        """Its exit status; None if it still runs."""
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


#: Our daemon gives live clients some time to end when it is stopped.
_STOP_S = 14.0


def recovery(around: Surroundings, report: Report) -> None:
    """The daemon starts, its budgets are tried, and its control daemon is killed without and with clients."""
    with Ours(around) as ours:
        try:
            ready_s = ours.start()
            report.answer("ready", f"It was READY after {seconds(ready_s)}.")
            limit = _memory_total_mib(around) // SHARES
            found = measure(around, ours.pipe, limit)
            report.raw("budget", found)
            report.answer("budget", in_words(f"A client of one of {SHARES} devices", found))
            report.answer("alone", _kill_control(around, report, ours, "alone", []))
            with ExitStack() as stack:
                clients = [stack.enter_context(Client(around, name, pipe=ours.pipe)) for name in "ab"]
                start_beating(clients, around)
                report.answer("clients", _kill_control(around, report, ours, "clients", clients))
        finally:
            report.verbatim("What our daemon logged", "\n".join(ours.words().splitlines()[-60:]))


def _memory_total_mib(around: Surroundings) -> int:
    """NVML's total, of which budgets are shares: more than CUDA's. From nvidia-smi, e.g. `143771 MiB`."""
    words = around.host.settings.get("memory_total", "").split()
    return int(words[0]) if words and words[0].isdigit() else int(around.host.gpu["memory_mib"])


def _kill_control(around: Surroundings, report: Report, ours: Ours, name: str, clients: list[Client]) -> str:
    """SIGKILL of the daemon's control daemon: how long until another listens, and until a new client runs."""
    old = listener(ours.pipe)
    if not old:
        raise Trouble("no control daemon listens where our daemon should have one")
    since_s = time.monotonic()
    os.kill(old, signal.SIGKILL)
    listening_s = None
    while time.monotonic() < since_s + 10:
        if listener(ours.pipe) not in (0, old):
            listening_s = time.monotonic() - since_s
            break
        time.sleep(0.002)
    met = attempt(around, ours.pipe, 10)
    all_s = time.monotonic() - since_s
    watch(clients, 1.0)
    found, words = fates(clients, since_s)
    report.raw(
        f"kill_{name}", {"listening_s": listening_s, "new": met.as_json(), "clients": found, "all_s": all_s}
    )
    began = f"after {seconds(listening_s)}" if listening_s is not None else "not within 10 s"
    return (
        f"Another control daemon listened {began}; a new client, started then, {met.words()} "
        f"({seconds(all_s)} after the SIGKILL, its end included)" + (f"; {words}." if clients else ".")
    )


def adoption(around: Surroundings, report: Report) -> None:
    """The daemon is killed under live clients and started again; then stopped under them."""
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(around))
        stack.callback(
            lambda: report.verbatim("What our daemon logged", "\n".join(ours.words().splitlines()[-60:]))
        )
        ours.start()
        clients = [stack.enter_context(Client(around, name, pipe=ours.pipe)) for name in "ab"]
        start_beating(clients, around)
        old = listener(ours.pipe)
        since_s = time.monotonic()
        ours.signal(signal.SIGKILL)
        ours.wait(5)
        time.sleep(0.5)  # a control daemon that would end with our daemon has had its time
        lives = "lived on" if listener(ours.pipe) == old and stat_of(old) else "did not live on"
        try:
            again = f"was READY again after {seconds(ours.start(20))}"
        except Trouble as error:
            again = f"was not READY again ({error})"
        same = "the same control daemon" if listener(ours.pipe) == old else "another control daemon"
        watch(clients, 0.5)
        found, words = fates(clients, since_s)
        met = attempt(around, ours.pipe, 8)
        report.raw("adoption", {"again": again, "same": same, "clients": found, "new": met.as_json()})
        report.answer(
            "adopted",
            f"After the daemon's SIGKILL the control daemon {lives}; a new daemon {again}, with {same}; "
            f"{words}; a new client {met.words()}.",
        )
        _stop(report, ours, clients)


def _stop(report: Report, ours: Ours, clients: list[Client]) -> None:
    since_s = time.monotonic()
    ours.signal(signal.SIGTERM)
    pump(clients, since_s + _STOP_S, lambda: ours.wait(0) is not None)
    status = ours.wait(0)
    watch(clients, 0.5)
    found, words = fates(clients, since_s)
    took = seconds(time.monotonic() - since_s)
    ended = (
        f"had not ended {took} after it" if status is None else f"ended with status {status} within {took}"
    )
    report.raw("stop", {"status": status, "clients": found})
    report.answer("stop", f"Told to stop with live clients, it {ended}; {words}.")


def foreign(around: Surroundings, report: Report) -> None:
    """The daemon meets a control daemon that another program started, with live clients."""
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(around))
        control = stack.enter_context(Control(around, pipe=ours.pipe, log=ours.log).start())
        os.chmod(ours.log, 0o755)
        client = stack.enter_context(Client(around, "a", pipe=control.pipe))
        start_beating([client], around)
        since_s = time.monotonic()
        try:
            said = f"was READY after {seconds(ours.start(15))}"
        except Trouble as error:
            said = f"did not start: {error}"
        watch([client], 1.0)
        found, words = fates([client], since_s)
        kept = (
            "still listens"
            if control.alive and listener(control.pipe) == control.pid
            else "does NOT listen any more"
        )
        report.raw("foreign", {"said": said, "client": found, "kept": kept})
        with contextlib.suppress(OSError):
            report.verbatim("What our daemon logged", "\n".join(ours.words().splitlines()[-30:]))
        report.answer("foreign", f"Our daemon {said}; the other control daemon {kept}; {words}.")


STEPS = (
    Step(
        "ours_recovery",
        "Our daemon: budgets and recovery",
        recovery,
        60,
        (
            ("ready", "How long until our daemon is READY?"),
            ("budget", "Is the budget of one of its devices enforced?"),
            ("alone", "How long does recovery from SIGKILL of its control daemon take without clients?"),
            ("clients", "And with live clients?"),
        ),
        frozenset({"mps"}),
    ),
    Step(
        "ours_adoption",
        "Our daemon: adoption and stop",
        adoption,
        60,
        (
            (
                "adopted",
                "What do live clients notice when our daemon is killed and takes its control daemon over?",
            ),
            ("stop", "What do they see when it is stopped?"),
        ),
        frozenset({"mps"}),
    ),
    Step(
        "ours_foreign",
        "Our daemon: a control daemon of another program",
        foreign,
        40,
        (("foreign", "What does our daemon do about it, and what do its clients notice?"),),
        frozenset({"mps"}),
    ),
)
