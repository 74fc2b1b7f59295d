"""The questions about this project's own daemon: the checkout's code, with `keep` as the compute mode."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time

from gpu_check.bench import Bench, question
from gpu_check.host import CHECKOUT
from gpu_check.mps import measure_memory
from gpu_check.processes import Client, QuestionError, duration, listener, process_state, wait_for

#: Into how many devices the GPU is divided, and after the reload.
_DEVICES = 4
_DEVICES_AFTER = 2

_HOST_CONF = """\
enable_cuda_mps: true
cuda_mps_compute_mode: keep
cuda_mps_pipe_directory: /mps/pipe
cuda_mps_log_directory: /mps/log
"""
_DEVICE_FILE = """\
devices:
- path: {uuid}
  type: {kind}
  virtual_number: {number}
"""


class DaemonUnderTest:
    """yunion-mps-daemon in a root directory of its own; it can be started again after its end."""

    def __init__(self, bench: Bench, kind: str = "NVIDIA_MPS") -> None:
        """Write its configuration, for a GPU of this type."""
        self._bench = bench
        self._kind = kind
        self._root = bench.fresh()
        self._pipe = f"{self._root}/mps/pipe"
        self._log = f"{self._root}/daemon.log"
        os.makedirs(f"{self._root}/etc/yunion")
        outer = os.environ.get("YUNION_MPS_ROOT", "")
        for name in ("sys", "dev"):
            os.symlink(f"{outer}/{name}", f"{self._root}/{name}")
        self._write("etc/machine-id", "0123456789abcdef0123456789abcdef\n")
        self._write("etc/yunion/host.conf", _HOST_CONF)
        self.divide(_DEVICES)
        self._environment = dict(bench.host.environment)
        del self._environment["CUDA_VISIBLE_DEVICES"]
        self._environment["YUNION_MPS_ROOT"] = self._root
        self._environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        bench.at_close(self.close)

    def _write(self, name: str, text: str) -> None:
        with open(f"{self._root}/{name}", "w", encoding="utf-8") as file:
            file.write(text)

    def divide(self, number: int) -> None:
        """Write the device file."""
        text = _DEVICE_FILE.format(uuid=self._bench.host.gpu["uuid"], kind=self._kind, number=number)
        self._write("etc/yunion/host_container_device.yml", text)

    def start(self) -> float:
        """Start it, and return after how many seconds it was READY; raises QuestionError if it was not."""
        begun_s = time.monotonic()
        address = self._bench.fresh()
        command = [sys.executable, "-m", "yunion_mps.daemon"]
        environment = {**self._environment, "NOTIFY_SOCKET": address}
        self._is_ready = False
        # It is closed after READY, because a socket that nobody reads would soon stop the daemon.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox, open(self._log, "ab") as log:
            inbox.bind(address)
            inbox.setblocking(False)  # noqa: FBT003 - its only argument
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=CHECKOUT)
            wait_for(lambda: self._hear_ready(inbox) or self.process.poll() is not None, 30)
        if not self._is_ready:
            self.show_log()
            raise QuestionError(f"yunion-mps-daemon was not READY (exit status {self.process.poll()})")
        return time.monotonic() - begun_s

    def _hear_ready(self, inbox: socket.socket) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._is_ready = b"READY=1" in inbox.recv(4096)
        return self._is_ready

    def control(self, other_than: int = 0) -> int:
        """Return the PID of its control daemon, or of another one; raises QuestionError if none listens."""
        end_s = time.monotonic() + 15
        pid = listener(self._pipe)
        while pid in (0, other_than):
            if time.monotonic() > end_s:
                raise QuestionError("no control daemon of yunion-mps-daemon listens")
            time.sleep(0.005)  # a poll: nothing tells that a socket listens
            pid = listener(self._pipe)
        return pid

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from yunion_mps.cli import main; main()", *arguments]

    def call(self, *arguments: str) -> str:
        """Return what `yunion-mps` prints, and its exit status; raises subprocess.TimeoutExpired."""
        command = self._command(*arguments)
        result = subprocess.run(command, capture_output=True, text=True, env=self._environment, timeout=40)
        return f"{result.stdout}{result.stderr}(exit status {result.returncode})"

    def show(self, *arguments: str) -> None:
        """Show what `yunion-mps` prints."""
        self._bench.show(f"yunion-mps {' '.join(arguments)}", self.call(*arguments))

    def job(self, name: str, mode: str, number: int = 0) -> Client:
        """Start a client through `yunion-mps run`."""
        limited = ["--"] if self._kind == "NVIDIA_MPS" else ["--allow-unlimited", "--"]
        run = self._command("run", *limited)
        return self._bench.client(name, mode, number=number, environment=self._environment, prefix=run)

    def beating(self, names: str) -> list[Client]:
        """Start a job for each letter, and wait until all launch kernels; raises QuestionError."""
        jobs = [self.job(f"job {name}", "beat") for name in names]
        for job in jobs:
            job.wait_event("beat")
        return jobs

    def show_log(self) -> None:
        """Show its log."""
        with open(self._log, encoding="utf-8", errors="replace") as file:
            self._bench.show("The log of yunion-mps-daemon", file.read())

    def close(self) -> None:
        """Stop it; what is left then is ended after the question."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


@question("What becomes of jobs if our control daemon and our daemon are killed?", 100, "programs daemon")
def deaths(bench: Bench) -> None:
    daemon = DaemonUnderTest(bench)
    daemon.start()
    jobs = daemon.beating("ab")
    control = daemon.control()
    since_s = time.monotonic()
    os.kill(control, signal.SIGKILL)
    successor = daemon.control(other_than=control)
    took = duration(time.monotonic() - since_s)
    bench.answer(f"{took} after SIGKILL of control daemon {control}, {successor} listens.")
    bench.answer(f"{bench.fates(jobs, since_s, 2)}.")
    daemon.show("status")
    begun_s = time.monotonic()
    jobs.append(daemon.job("a new job", "beat"))
    wait_for(lambda: bool(jobs[2].events("beat")) or jobs[2].is_over(), 15)
    bench.answer(f"{bench.fates(jobs, begun_s, 1)}.")
    control = daemon.control()
    since_s = time.monotonic()
    daemon.process.kill()
    daemon.process.wait()
    ready = duration(daemon.start())
    bench.answer(
        f"After SIGKILL of yunion-mps-daemon, with control daemon {control}, the next one was READY after "
        f"{ready}, with control daemon {daemon.control()}."
    )
    bench.answer(f"{bench.fates(jobs, since_s, 2)}.")
    daemon.show("list")
    since_s = time.monotonic()
    daemon.show("terminate", str(jobs[2].pid), "--yes")
    bench.answer(f"After `yunion-mps terminate` of the new job: {bench.fates(jobs, since_s, 2)}.")
    daemon.show_log()


@question("Does our daemon work from start to stop, and do its budgets hold?", 120, "programs daemon")
def life(bench: Bench) -> None:
    daemon = DaemonUnderTest(bench)
    bench.answer(f"It was READY after {duration(daemon.start())}.")
    daemon.show("list", "--output", "wide")
    times = []
    for _ in range(5):
        begun_s = time.monotonic()
        said = daemon.call("run", "true")
        times.append(time.monotonic() - begun_s)
    bench.answer(f"`yunion-mps run true`: {duration(statistics.median(times))}, median of 5; {said}.")
    _tell_budget(bench, daemon, _DEVICES)
    daemon.show("doctor", "--selftest")
    jobs = daemon.beating("a")
    daemon.show("who")
    daemon.show("status")
    daemon.divide(_DEVICES_AFTER)
    since_s = time.monotonic()
    daemon.show("reload")
    bench.answer(f"After a reload to {_DEVICES_AFTER} devices: {bench.fates(jobs, since_s, 1)}.")
    jobs[0].close()
    begun_s = time.monotonic()
    daemon.show("reload", "--drain", "--timeout", "30s")
    bench.answer(f"After the job, `reload --drain` took {duration(time.monotonic() - begun_s)}.")
    _tell_budget(bench, daemon, _DEVICES_AFTER)
    jobs = daemon.beating("b")
    control = daemon.control()
    since_s = time.monotonic()
    daemon.process.terminate()
    wait_for(lambda: daemon.process.poll() is not None, 20)
    took = duration(time.monotonic() - since_s)
    bench.answer(f"SIGTERM with a running job: exit status {daemon.process.poll()} after {took}.")
    bench.answer(f"{bench.fates(jobs, since_s, 1)}; the control daemon {process_state(control)}.")
    daemon.show_log()


def _tell_budget(bench: Bench, daemon: DaemonUnderTest, number: int) -> None:
    """Measure what a job gets on one of so many devices."""
    budget_mib = int(bench.host.gpu["memory.total"].split()[0]) // number
    _, words = measure_memory(daemon.job("a job", "memory", budget_mib))
    bench.answer(f"The budget of one of {number} devices {words}.")
    total = bench.host.multiprocessors
    job = daemon.job("a job", "throughput", total)
    job.tell()
    bench.answer(f"Its percentage: {job.wait_event('result')['used']} of {total} SMs.")
    job.close()


@question("Does our daemon share the GPU by time-slicing, and what does it show of jobs?", 60, "daemon")
def time_slicing(bench: Bench) -> None:
    daemon = DaemonUnderTest(bench, "NVIDIA_GPU_SHARE")
    bench.answer(f"It was READY after {duration(daemon.start())}.")
    jobs = daemon.beating("ab")
    since_s = time.monotonic()
    for command in ("list", "who", "gpus", "status"):
        daemon.show(command)
    bench.answer(f"{bench.fates(jobs, since_s, 1)}.")
    daemon.show_log()
