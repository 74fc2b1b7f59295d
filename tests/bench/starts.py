"""The daemon's start, until READY and until the first answer, and its recovery of killed control daemons."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.floors import control_ms, python_ms
from bench.running import MAX_GPUS_PER_DOMAIN, Daemon, make_host
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
