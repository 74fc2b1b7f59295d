"""The programs: the daemon's start, recovery, memory and processor time; `list` and `run`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.running import (
    MAX_GPUS_PER_DOMAIN,
    PYTHON,
    Daemon,
    control_ms,
    make_host,
    program,
    python_ms,
    run_ms,
    running,
)
from bench.values import Aim, BenchError, Line, Rounds, Samples, Settings
from simhost import SimHost

_START_FLOOR = "python3 -I -c pass, then a bare control daemon"
#: The number of GPUs, and how many rounds in a full and in a quick run.
_START_SIZES = ((1, 25, 7), (4, 25, 5), (8, 15, 3), (64, 6, 1))
#: With four GPUs it is what the quicker one of the peers takes, which starts one control daemon for all.
_START_AIMS = {(1, "host"): Aim(3), (1, "gpu"): Aim(3), (4, "host"): Aim(52, "ms")}


def start_lines(settings: Settings) -> Iterator[Line]:
    for gpus, full, quick in _START_SIZES:
        with (
            make_host(min(gpus, MAX_GPUS_PER_DOMAIN), scope="host") as one_domain,
            make_host(gpus, scope="gpu") as domain_each,
        ):
            yield from _start_lines(
                gpus, settings.rounds(full, quick), {"host": one_domain, "gpu": domain_each}
            )


def _start_lines(gpus: int, count: int, hosts: dict[str, SimHost]) -> Iterator[Line]:
    answered: dict[str, list[float]] = {scope: [] for scope in hosts}
    steps = [
        ("python", partial(python_ms, hosts["host"])),
        ("control", partial(control_ms, hosts["host"])),
        *((scope, partial(_start, host, answered[scope])) for scope, host in hosts.items()),
    ]
    rounds = Rounds("ms")
    rounds.run(count, steps)
    floor = rounds.sum_of("python", "control")
    for scope in hosts:
        number = len(hosts[scope].gpus)
        what = f"{number} GPU{'s' if number > 1 else ''}, scope {scope}"
        yield Line(
            f"start until READY, {what}",
            rounds.of(scope),
            floor,
            _START_FLOOR,
            _START_AIMS.get((gpus, scope)),
        )
        first = Samples(tuple(answered[scope][-count:]), "ms")
        yield Line(f"start until the first answer, {what}", first, floor, _START_FLOOR)


def _start(host: SimHost, answered: list[float]) -> float:
    with Daemon(host) as daemon:
        answered.append(daemon.answered_ms())
        return daemon.ready_ms


_RECOVERY_FLOOR = "a bare control daemon"
_RECOVERY_AIM = Aim(20)
#: The number of GPUs, what has a control daemon, and how many rounds in a full and in a quick run.
_RECOVERY_SIZES = ((1, "host", 15, 4), (8, "host", 10, 2), (8, "gpu", 10, 2))


def recovery_lines(settings: Settings) -> Iterator[Line]:
    for gpus, scope, full, quick in _RECOVERY_SIZES:
        with make_host(gpus, scope=scope) as host:
            rounds = Rounds("ms")
            steps = [("floor", partial(control_ms, host)), ("recovery", partial(_recovery_ms, host))]
            rounds.run(settings.rounds(full, quick), steps)
        count = gpus if scope == "gpu" else 1
        what = f"recovery of {_some(count, 'control daemon')}, {_some(gpus, 'GPU')}"
        yield Line(what, rounds.of("recovery"), rounds.of("floor"), _RECOVERY_FLOOR, _RECOVERY_AIM)


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _recovery_ms(host: SimHost) -> float:
    """Each round with a daemon of its own: after a second death soon after the first it would wait."""
    with Daemon(host) as daemon:
        before = daemon.status()["domains"]
        taken_ms = daemon.recovery_ms([domain["pid"] for domain in before])
        after = daemon.status()["domains"]
    for old, new in zip(before, after):
        if new["state"] != "ready" or new["restarts"] != 1 or new["pid"] == old["pid"]:
            raise BenchError(f"the control daemon did not recover: {new}")
    return taken_ms


_FLOOR = 'python3 -I -c "import click"'
#: GPUs, devices of each, rounds in a full and in a quick run, and the aim.
_SIZES = ((1, 4, 40, 10, Aim(1.5)), (16, 48, 30, 5, Aim(2.5)), (64, 48, 20, 3, None))


def list_lines(settings: Settings) -> Iterator[Line]:
    for gpus, virtual_number, full, quick, aim in _SIZES:
        devices = gpus * virtual_number
        with running(gpus, virtual_number) as daemon:
            daemon.answered_ms()
            argv = [program(daemon.host, "yunion-mps"), "isolated-device-list", "--limit", "0"]
            _check(daemon.host, argv, devices)
            steps = [
                ("floor", partial(python_ms, daemon.host, "import click", sys.executable)),
                ("list", partial(run_ms, argv, daemon.host.env)),
            ]
            rounds = Rounds("ms")
            rounds.run(settings.rounds(full, quick), steps)
        yield Line(f"list, {devices:,} devices printed", rounds.of("list"), rounds.of("floor"), _FLOOR, aim)


def _check(host: SimHost, argv: list[str], devices: int) -> None:
    """A listing that is quick because it is short would be worth nothing."""
    printed = host.run(argv)
    rows = [line for line in printed.stdout.splitlines() if "NVIDIA_MPS" in line]
    if printed.returncode or len(rows) != devices:
        raise BenchError(f"{' '.join(argv)} shows {len(rows)} of {devices} devices; {printed.stderr}")


#: At most so many times a listing: both are one question to the daemon, asked by the same program.
_RUN_AIM = Aim(1.5)


def run_lines(settings: Settings) -> Iterator[Line]:
    with running(1) as daemon:
        daemon.answered_ms()
        host = daemon.host
        ours = program(host, "yunion-mps")
        command = [ours, "run", "--", "printenv", "YUNION_MPS_DEVICE"]
        if host.run(command).stdout.strip() != "00:06.0-0":
            raise BenchError(f"{' '.join(command)} does not give the first device")
        rounds = Rounds("ms")
        steps = [
            ("true", partial(run_ms, [program(host, "true")], host.env)),
            ("list", partial(run_ms, [ours, "isolated-device-list", "--limit", "0"], host.env)),
            ("run", partial(run_ms, [ours, "run", "--", "true"], host.env)),
        ]
        rounds.run(settings.rounds(40, 10), steps)
    yield Line("run -- true", rounds.of("run"), rounds.of("list"), "yunion-mps list, 4 devices", _RUN_AIM)
    yield Line("run -- true, beside true", rounds.of("run"), rounds.of("true"), "true")


#: What the smaller one of the peers takes, with four GPUs: the aim there.
PEER_MIB = 24

#: GPUs, and devices of each.
SIZES = ((1, 4), (4, 4), (64, 48))
MEMORY_FLOOR = "an idle python3 -I"
_CPUCLOCK_SCHED = 2  # the clock of all of a process's threads, as clock_getcpuclockid(3) makes it
_SETTLE_S = 1.0


def memory_lines(settings: Settings) -> Iterator[Line]:
    """RSS and PSS of daemons with few and with many devices, after they have answered once."""
    del settings
    for gpus, virtual_number in SIZES:
        with running(gpus, virtual_number) as daemon, _idle_python() as floor_pid:
            daemon.answered_ms()
            time.sleep(_SETTLE_S)  # nothing signals the end of its work after the answer
            for kind in ("Rss", "Pss"):
                what = (
                    f"{kind.upper()}, {gpus} GPU{'s' if gpus > 1 else ''}, {gpus * virtual_number:,} devices"
                )
                measured = Samples((memory_mib(daemon.pid, kind),), "MiB")
                floor = Samples((memory_mib(floor_pid, kind),), "MiB")
                aim = Aim(PEER_MIB if gpus == 4 else 40, "MiB") if kind == "Rss" else None
                yield Line(what, measured, floor, MEMORY_FLOOR, aim)


def processor_lines(settings: Settings) -> Iterator[Line]:
    """Processor time of idle daemons, all watched in the same minute."""
    wait_s = settings.rounds(60, 10)
    with contextlib.ExitStack() as stack:
        daemons = {gpus: stack.enter_context(running(gpus, number)) for gpus, number in SIZES}
        for daemon in daemons.values():
            daemon.answered_ms()
        time.sleep(_SETTLE_S)  # nothing signals the end of its work after the answer
        before = {gpus: processor_s(daemon.pid) for gpus, daemon in daemons.items()}
        time.sleep(wait_s)  # what they use while nothing asks them is what is measured
        taken = {gpus: processor_s(daemon.pid) - before[gpus] for gpus, daemon in daemons.items()}
    for gpus, taken_s in taken.items():
        what = f"idle for {wait_s} s, {gpus} GPU{'s' if gpus > 1 else ''}"
        share = Samples((taken_s / wait_s * 100,), "%")
        yield Line(what, share, None, "one core", Aim(0.1, "%"))


def memory_mib(pid: int, kind: str) -> float:
    """What a process has in memory by /proc/PID/smaps_rollup: its `Rss` or `Pss`."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    raise BenchError(f"the kernel does not tell the {kind} of process {pid}")


def processor_s(pid: int) -> float:
    """Processor time of a process in seconds, also of its threads that have ended.

    What /proc/PID/stat has in steps of 10 ms, this clock has in nanoseconds.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


@contextlib.contextmanager
def _idle_python() -> Iterator[int]:
    waiting = [PYTHON, "-I", "-c", "print(flush=True); input()"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is not None:
                process.stdout.readline()
            yield process.pid
        finally:
            process.kill()
