"""The daemon's start, until READY and until the first answer, for few and for many GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.floors import control_ms, python_ms
from bench.running import MOST_GPUS_OF_A_DOMAIN, Daemon, make_host
from bench.values import Aim, Line, Rounds, Samples, Settings
from simhost import SimHost

GROUP = "start"
FLOOR = "python3 -I -c pass, then a bare control daemon"
#: The number of GPUs, and how many rounds in a full and in a quick run.
SIZES = ((1, 25, 7), (4, 25, 5), (8, 15, 3), (64, 6, 1))
#: With four GPUs it is what the quicker one of the peers takes, which starts one control daemon for all.
AIMS = {(1, "host"): Aim(3), (1, "gpu"): Aim(3), (4, "host"): Aim(52, "ms")}


def lines(settings: Settings) -> Iterator[Line]:
    for gpus, full, quick in SIZES:
        with (
            make_host(min(gpus, MOST_GPUS_OF_A_DOMAIN), scope="host") as one_domain,
            make_host(gpus, scope="gpu") as domain_each,
        ):
            yield from _lines(gpus, settings.rounds(full, quick), {"host": one_domain, "gpu": domain_each})


def _lines(gpus: int, count: int, hosts: dict[str, SimHost]) -> Iterator[Line]:
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
            GROUP, f"start until READY, {what}", rounds.of(scope), floor, FLOOR, AIMS.get((gpus, scope))
        )
        first = Samples(tuple(answered[scope][-count:]), "ms")
        yield Line(GROUP, f"start until the first answer, {what}", first, floor, FLOOR)


def _start(host: SimHost, answered: list[float]) -> float:
    with Daemon(host) as daemon:
        answered.append(daemon.answered_ms())
        return daemon.ready_ms
