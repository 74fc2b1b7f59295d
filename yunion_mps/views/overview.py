"""The host at one moment: the daemon's answers, who has what and what is wrong according to them. No I/O.

`status`, `who`, `top` and the web page all use it: similar problems are folded, with each hint once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps import __version__
from yunion_mps.core.enums import ABOUT_SERVICE, MPS, NOT_SHARED, PROBLEM_LEVELS, WARNING
from yunion_mps.core.reasons import VERSION_DIFFERS, hint_of
from yunion_mps.observe.holdings import (
    ID_LENGTH,
    Holding,
    holdings,
    in_container,
    is_memory_unknown,
    memory_by_gpu,
)

if TYPE_CHECKING:
    from yunion_mps.answers import (
        ClientListJson,
        DeviceJson,
        GpuJson,
        LeaseRecordJson,
        MpsClientJson,
        QueuedRequestJson,
        StatusJson,
        StatusProblemJson,
    )


_COMMAND_LENGTH = 200
_MAX_WAITING = 5
#: The command that makes the daemon execute the installed version.
REEXEC = "yunion-mps daemon-reexec"


class HostAnswers(NamedTuple):
    """The daemon's answers of about the same time."""

    status: StatusJson
    gpus: Sequence[GpuJson]
    devices: Sequence[DeviceJson]
    leases: Sequence[LeaseRecordJson]
    waiting: Sequence[QueuedRequestJson]
    clients: ClientListJson


class HostOverview(NamedTuple):
    """The answers, and who has what according to them."""

    answers: HostAnswers
    holdings: list[Holding]
    problems: list[StatusProblemJson]
    #: What processes use, in MiB, by GPU address. What they use of a MIG instance counts for its GPU, too, so
    #: only GPUs without `parent` can be added up.
    memory_by_gpu: dict[str, int]

    @classmethod
    def of(cls, answers: HostAnswers) -> HostOverview:
        clients = answers.clients["clients"]
        return cls(
            answers=answers,
            holdings=holdings(answers.devices, answers.leases, clients),
            problems=problems_of(answers.status),
            memory_by_gpu=_memory(answers.gpus, clients),
        )


def _memory(gpus: Sequence[GpuJson], clients: Sequence[MpsClientJson]) -> dict[str, int]:
    memory = memory_by_gpu(clients)
    addresses = {gpu["uuid"]: gpu["addr"] for gpu in gpus}
    for gpu in gpus:
        if gpu["parent"] in addresses and gpu["addr"] in memory:
            whole = addresses[gpu["parent"]]
            memory[whole] = memory.get(whole, 0) + memory[gpu["addr"]]
    return memory


def way_of(gpu: GpuJson) -> str | None:
    """Return how the GPU is shared, such as `time-slicing (short)`; None if it is not used."""
    return f"{gpu['sharing']} ({gpu['time_slice']})" if gpu["time_slice"] else gpu["sharing"]


def notable_way(gpu: GpuJson) -> str:
    """Return `way_of` unless it is the usual one: MPS, or for a MIG instance, to be a whole instance."""
    usual = NOT_SHARED if gpu["parent"] else MPS
    return "" if gpu["sharing"] == usual else way_of(gpu) or ""


def short_name(gpu: GpuJson) -> str:
    """Return its name; for a MIG instance the profile, because its row follows its GPU's."""
    if gpu["mig_profile"]:
        return f"MIG {gpu['mig_profile']}"
    name = gpu["name"] or ""
    return name.removeprefix("NVIDIA ")


def page(host: HostOverview) -> dict[str, object]:
    """Return the contents of the web page, in a form that stays small with thousands of devices.

    A part of a GPU has no fields for unknown values.
    """
    answers = host.answers
    status = answers.status
    free_for = {holding.gpu: holding.free_for for holding in host.holdings if holding.free_for is not None}
    return {
        "state": status["state"],
        "version": status["version"],
        "started": status["started"],
        "driver": status["driver"],
        "devices": status["devices"],
        "leases": len(answers.leases),
        "clients": len(answers.clients["clients"]),
        "problems": _problems(host),
        "wrong": len(host.problems),
        "errors": answers.clients["errors"],
        "gpus": [_gpu(host, gpu, free_for.get(gpu["addr"])) for gpu in answers.gpus],
        "parts": [_part(holding) for holding in host.holdings],
        "waiting": [_queued(request) for request in answers.waiting[:_MAX_WAITING]],
        "queued": len(answers.waiting),
    }


def _problems(host: HostOverview) -> list[dict[str, str]]:
    problems: list[dict[str, str]] = []
    for problem, hint in with_hints(fold_problems(host.problems)):
        problems.append({"title": problem.title, "text": problem.text, "hint": hint})
    return problems


def _queued(request: QueuedRequestJson) -> dict[str, object]:
    command = in_container(request["name"] or request["container"], request["command"] or "")
    return {
        "user": request["user"],
        "requested": request["requested"],
        "since": request["since"],
        "reason": request["reason"],
        "command": _cut(command),
    }


def _gpu(host: HostOverview, gpu: GpuJson, free_for: str | None) -> dict[str, object]:
    """Return a GPU; `free_for` is the only user who can lease its free devices, None for everybody."""
    used_mib = None if is_memory_unknown(gpu) else host.memory_by_gpu.get(gpu["addr"], 0)
    return {
        "addr": gpu["addr"],
        "parent": gpu["parent"],
        "state": gpu["state"],
        "reason": gpu["reason"],
        "memory_mib": gpu["memory_mib"],
        "memory_free_mib": gpu["memory_free_mib"],
        "reserved_for": gpu["reserved_for"],
        "budget_enforced": gpu["budget_enforced"],
        "utilization": gpu["utilization"],
        "temperature_c": gpu["temperature_c"],
        "power_w": gpu["power_w"],
        "power_limit_w": gpu["power_limit_w"],
        "name": short_name(gpu),
        "way": notable_way(gpu),
        "memory_used_mib": used_mib,
        "free_for": free_for,
    }


def _part(holding: Holding) -> dict[str, object]:
    part: dict[str, object] = {
        "gpu": holding.gpu,
        "devices": list(holding.devices),
        "state": holding.state,
        "budget": holding.budget_mib,
    }
    if not holding.in_use:
        return part
    part.update(
        used=holding.known_mib,
        peak=holding.peak_mib,
        sm=holding.sm,
        user=holding.user,
        since=holding.since,
        threads=holding.threads,
    )
    if not holding.available and holding.devices:
        part["unavailable"] = True
    if holding.lease:
        part["lease"] = holding.lease["id"][:ID_LENGTH]
    part["command"] = _cut(holding.label)
    part["pids"] = [process.pid for process in holding.holders if process.pid is not None]
    return {field: value for field, value in part.items() if value is not None}


def _cut(command: str) -> str:
    return command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 1]}…"


class ShownProblem(NamedTuple):
    """A problem, or as many similar ones as `number` counts."""

    level: str
    code: str
    text: str
    hint: str
    number: int = 1

    @property
    def title(self) -> str:
        return self.level.capitalize()


def version_mismatch(status: StatusJson) -> str:
    """Return how the running version differs from the installed one, as after a refused upgrade; or ""."""
    if status["version"] == __version__:
        return ""
    return f"the daemon runs version {status['version']}, but {__version__} is installed"


def problems_of(status: StatusJson) -> list[StatusProblemJson]:
    """Return the problems in the status, and that it is of another version, which only its reader knows."""
    mismatch = version_mismatch(status)
    if not mismatch:
        return status["problems"]
    own: StatusProblemJson = {
        "level": WARNING,
        "code": VERSION_DIFFERS,
        "text": mismatch,
        "hint": hint_of(VERSION_DIFFERS),
        "gpu": None,
        "devices": [],
        "pid": None,
        "kind": ABOUT_SERVICE,
        "subject": "",
        "waits_for": "",
    }
    return sorted([own, *status["problems"]], key=lambda problem: PROBLEM_LEVELS.index(problem["level"]))


def fold_problems(problems: Sequence[StatusProblemJson], limit: int = 3) -> list[ShownProblem]:
    """Keep at most `limit` similar problems of each level, and add one that counts the rest.

    Problems with the same code are similar, because their hints may name different processes or GPUs.
    """
    counts = Counter((problem["level"], problem["code"]) for problem in problems)
    shown: dict[tuple[str, str], list[ShownProblem]] = {}
    for problem in problems:
        level = problem["level"]
        code = problem["code"]
        hint = problem["hint"]
        alike = shown.setdefault((level, code), [])
        if len(alike) < limit:
            alike.append(ShownProblem(level, code, problem["text"], hint))
        elif len(alike) == limit:
            more = counts[level, code] - limit
            text = f"and {more} more of the same kind (all: yunion-mps status -o json)"
            hint = hint if hint == alike[-1].hint else hint_of(code)
            alike.append(ShownProblem(level, code, text, hint, more))
    return list(chain.from_iterable(shown.values()))


def with_hints(problems: Sequence[ShownProblem]) -> Iterator[tuple[ShownProblem, str]]:
    """Yield each problem with its hint, or "" if the next problem has the same hint."""
    for problem, after in zip_longest(problems, problems[1:]):
        yield problem, "" if after and after.hint == problem.hint else problem.hint
