"""The checkout's daemon on the GPU: its budgets, recovery and adoption."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

from gpu_check.clients import Client, attempt, fates, pump, start_beating, watch
from gpu_check.processes import Control, listener, stat_of
from gpu_check.steps_memory import in_words, measure
from gpu_check.values import Report, Step, StepContext, StepError, StepSkipped, seconds

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
    """A Python that can run the daemon; raises StepSkipped if none can."""
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
    raise StepSkipped(f"this checkout's daemon cannot run here: {said}")


def _with_checkout(environment: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    parts = [CHECKOUT, environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(part for part in parts if part)}


class DaemonUnderTest:
    """yunion-mps-daemon, which can be restarted; a context manager that stops it and its control daemon."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._python = python()
        self.root = context.fresh("r")
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
        devices = _DEVICES.format(uuid=context.host.gpu["uuid"], shares=SHARES)
        self._write("etc/yunion/host_container_device.yml", devices)
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._inbox.bind(self._address)

    def _write(self, name: str, text: str) -> None:
        with open(f"{self.root}/{name}", "w", encoding="utf-8") as file:
            file.write(text)

    def start(self, timeout_s: float = 30.0) -> float:
        """Start it, and return how long it took until READY; raises StepError if it is not READY in time."""
        self._drain()
        start_s = time.monotonic()
        host = self._context.host
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
                raise StepError(
                    f"yunion-mps-daemon exited with status {self.process.returncode}: {self.last_words()}"
                )
            if time.monotonic() > start_s + timeout_s:
                raise StepError(
                    f"yunion-mps-daemon was not READY after {seconds(timeout_s)}: {self.last_words()}"
                )
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
        """Return its exit status, or None if it is still running."""
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
        """The last lines of its log, in one line."""
        lines = self.words().strip().splitlines()[-3:]
        return " / ".join(re.sub(r"^<\d>", "", line).strip() for line in lines) or "no output"

    def __enter__(self) -> DaemonUnderTest:  # noqa: PYI034 - typing.Self is not in 3.9
        return self

    def __exit__(self, *error: object) -> None:
        self.signal(signal.SIGTERM)
        if self.process is not None and self.wait(6.0) is None:
            self.signal(signal.SIGKILL)
            self.wait(2.0)
        self._inbox.close()


#: A stop gives running clients some time to end.
_STOP_S = 14.0


def recovery(context: StepContext, report: Report) -> None:
    """Start the daemon, test a budget, and kill its control daemon without and with clients."""
    with DaemonUnderTest(context) as daemon:
        try:
            ready_s = daemon.start()
            report.answer("ready", f"It was READY after {seconds(ready_s)}.")
            limit = _memory_total_mib(context) // SHARES
            found = measure(context, daemon.pipe, limit)
            report.raw("budget", found)
            report.answer("budget", in_words(f"A client of one of {SHARES} devices", found))
            report.answer("alone", _kill_control(context, report, daemon, "alone", []))
            with ExitStack() as stack:
                clients = [stack.enter_context(Client(context, name, pipe=daemon.pipe)) for name in "ab"]
                start_beating(clients, context)
                report.answer("clients", _kill_control(context, report, daemon, "clients", clients))
        finally:
            report.verbatim("Log of yunion-mps-daemon", "\n".join(daemon.words().splitlines()[-60:]))


def _memory_total_mib(context: StepContext) -> int:
    """NVML's total memory, which budgets are parts of, such as `143771 MiB`; it is more than CUDA's."""
    words = context.host.settings.get("memory_total", "").split()
    return int(words[0]) if words and words[0].isdigit() else int(context.host.gpu["memory_mib"])


def _kill_control(
    context: StepContext, report: Report, daemon: DaemonUnderTest, name: str, clients: list[Client]
) -> str:
    """Kill the daemon's control daemon; describe when another one listens and when a new client runs."""
    old = listener(daemon.pipe)
    if not old:
        raise StepError("no control daemon listens in the pipe directory of yunion-mps-daemon")
    since_s = time.monotonic()
    os.kill(old, signal.SIGKILL)
    listening_s = None
    while time.monotonic() < since_s + 10:
        if listener(daemon.pipe) not in (0, old):
            listening_s = time.monotonic() - since_s
            break
        time.sleep(0.002)  # a poll: nothing tells that a socket listens
    met = attempt(context, daemon.pipe, 10)
    all_s = time.monotonic() - since_s
    watch(clients, 1.0)
    found, words = fates(clients, since_s)
    report.raw(
        f"kill_{name}", {"listening_s": listening_s, "new": met.as_json(), "clients": found, "all_s": all_s}
    )
    began = f"was listening {seconds(listening_s)} later" if listening_s else "was not listening within 10 s"
    return (
        f"A new control daemon {began}; a client that was started then {met.words()} and had ended "
        f"{seconds(all_s)} after the SIGKILL" + (f"; {words}." if clients else ".")
    )


def adoption(context: StepContext, report: Report) -> None:
    """Kill the daemon while clients are running, and start it again; then stop it while they are running."""
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonUnderTest(context))
        stack.callback(
            lambda: report.verbatim("Log of yunion-mps-daemon", "\n".join(daemon.words().splitlines()[-60:]))
        )
        daemon.start()
        clients = [stack.enter_context(Client(context, name, pipe=daemon.pipe)) for name in "ab"]
        start_beating(clients, context)
        old = listener(daemon.pipe)
        since_s = time.monotonic()
        daemon.signal(signal.SIGKILL)
        daemon.wait(5)
        time.sleep(0.5)  # enough for a control daemon that ends with the daemon
        lives = "kept running" if listener(daemon.pipe) == old and stat_of(old) else "exited"
        try:
            again = f"was READY after {seconds(daemon.start(20))}"
        except StepError as error:
            again = f"was not READY ({error})"
        same = "the same control daemon" if listener(daemon.pipe) == old else "another control daemon"
        watch(clients, 0.5)
        found, words = fates(clients, since_s)
        met = attempt(context, daemon.pipe, 8)
        report.raw("adoption", {"again": again, "same": same, "clients": found, "new": met.as_json()})
        report.answer(
            "adopted",
            f"After SIGKILL of yunion-mps-daemon, its control daemon {lives}; the next daemon {again}, "
            f"with {same}; {words}; a new client {met.words()}.",
        )
        _stop(report, daemon, clients)


def _stop(report: Report, daemon: DaemonUnderTest, clients: list[Client]) -> None:
    since_s = time.monotonic()
    daemon.signal(signal.SIGTERM)
    pump(clients, since_s + _STOP_S, lambda: daemon.wait(0) is not None)
    status = daemon.wait(0)
    watch(clients, 0.5)
    found, words = fates(clients, since_s)
    took = seconds(time.monotonic() - since_s)
    ended = f"had not exited after {took}" if status is None else f"exited with status {status} within {took}"
    report.raw("stop", {"status": status, "clients": found})
    report.answer("stop", f"After SIGTERM with running clients, it {ended}; {words}.")


def foreign(context: StepContext, report: Report) -> None:
    """Start the daemon beside a control daemon of another program with running clients."""
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonUnderTest(context))
        control = stack.enter_context(Control(context, pipe=daemon.pipe, log=daemon.log).start())
        os.chmod(daemon.log, 0o755)
        client = stack.enter_context(Client(context, "a", pipe=control.pipe))
        start_beating([client], context)
        since_s = time.monotonic()
        try:
            said = f"was READY after {seconds(daemon.start(15))}"
        except StepError as error:
            said = f"did not start: {error}"
        watch([client], 1.0)
        found, words = fates([client], since_s)
        kept = (
            "is still listening"
            if control.alive and listener(control.pipe) == control.pid
            else "is NOT listening any more"
        )
        report.raw("foreign", {"said": said, "client": found, "kept": kept})
        with contextlib.suppress(OSError):
            report.verbatim("Log of yunion-mps-daemon", "\n".join(daemon.words().splitlines()[-30:]))
        report.answer("foreign", f"yunion-mps-daemon {said}; the other control daemon {kept}; {words}.")


STEPS = (
    Step(
        "daemon_recovery",
        "yunion-mps-daemon: budgets and recovery",
        recovery,
        60,
        (
            ("ready", "How long does it take until it is READY?"),
            ("budget", "Is the budget of one of its devices enforced?"),
            ("alone", "How long does recovery from SIGKILL of its control daemon take without clients?"),
            ("clients", "And with running clients?"),
        ),
        frozenset({"mps"}),
    ),
    Step(
        "daemon_adoption",
        "yunion-mps-daemon: adoption and stop",
        adoption,
        60,
        (
            (
                "adopted",
                "How does it affect running clients if it is killed and its control daemon is adopted?",
            ),
            ("stop", "How does a stop affect them?"),
        ),
        frozenset({"mps"}),
    ),
    Step(
        "daemon_foreign",
        "yunion-mps-daemon: a control daemon of another program",
        foreign,
        40,
        (("foreign", "What does the daemon do about it, and how are its clients affected?"),),
        frozenset({"mps"}),
    ),
)
