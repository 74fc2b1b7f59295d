"""`status`: whether all is well, on one screen."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from yunion_mps.cli.calls import call_daemon, listed_devices
from yunion_mps.cli.devices import pools
from yunion_mps.cli.output import (
    Column,
    age_of,
    hint_text,
    incomplete_note,
    output_option,
    show_pairs,
    table,
    terminal_size,
    wrapped,
)
from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.enums import MPS, NOT_SHARED
from yunion_mps.core.text import count
from yunion_mps.http.operations import GET_CLIENTS, GET_GPUS, GET_LEASES, GET_STATUS
from yunion_mps.observe.holdings import Holding, is_memory_unknown
from yunion_mps.views.overview import HostAnswers, HostOverview, fold_problems, way_of, with_hints

if TYPE_CHECKING:
    from yunion_mps.answers import DomainJson, GpuJson, StatusJson

_SERVES = Column("SERVES", lambda domain: domain["serves"] and domain["serves"]["user"], drop=6)
_DOMAIN_COLUMNS = (
    Column("DOMAIN", "name"),
    Column("STATE", "state"),
    _SERVES,
    Column("PID", "pid", numeric=True, drop=2),
    Column("RESTARTS", "restarts", numeric=True, drop=5),
    Column("GPUS", lambda domain: len(domain["gpus"]), numeric=True, drop=1),
    Column("DEFAULT LIMIT", lambda domain: _default_limit(domain), drop=4),
    Column("PIPE DIRECTORY", "pipe_directory", least=20, drop=3),
)
_SHARING = Column("SHARING", "sharing", least=12, drop=2)
_FREE_FOR = Column("FREE FOR", "free_for", least=8)
_GPU_COLUMNS = (
    Column("GPU", "gpu"),
    Column("NAME", "name", least=9, drop=3),
    _SHARING,
    Column("STATE", "state"),
    Column("DEVICES", "devices", numeric=True, drop=1),
    Column("IN USE", "in_use", numeric=True),
    Column("FREE", "free", numeric=True),
    _FREE_FOR,
    Column("MEMORY USED", lambda row: _memory_used(row["used_mib"], row["memory_mib"]), numeric=True),
)
#: The fields of a GPU's row that are added up.
_SUMMED = ("devices", "in_use", "free", "used_mib", "memory_mib")
_INDENT = 10
#: More rows are summarised, to fit on one screen.
_MAX_ROWS = 12


@click.command("status", short_help="Show the state of the service, problems first.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the state is degraded or failed.")
@output_option
def status(exit_code: bool, output: str) -> None:
    """Show the state of the daemon, the GPUs and the devices, with problems and hints first.

    The state is ready, degraded (there is a problem), failed (no control daemon is ready) or disabled
    (enable_cuda_mps is false). Warnings do not change it. Jobs over budget or outside MPS are problems.

    A device is available if its control daemon is ready; used if it is leased or a process uses it; free if
    it can be leased; reserved if it can be, but only by pods, as host_container_device.yml says; and pending
    if it waits for leases of a previous division of its GPU to end. Free devices of a GPU that does not
    enforce budgets are leased only with --allow-unlimited.

    \b
    Examples:
      yunion-mps status
      yunion-mps status --exit-code
      yunion-mps status --output json
    """
    answer = call_daemon(GET_STATUS)
    gpus = call_daemon(GET_GPUS)["gpus"]
    devices = listed_devices()
    leases = call_daemon(GET_LEASES)
    clients = call_daemon(GET_CLIENTS, seen=True)
    answers = HostAnswers(
        status=answer,
        gpus=gpus,
        devices=devices,
        leases=leases["leases"],
        waiting=leases["waiting"],
        clients=clients,
    )
    host = HostOverview.of(answers)
    answer = {**answer, "problems": host.problems}
    show_pairs(answer, output, lambda: _status_text(answer, host))
    if exit_code and answer["state"] in ("degraded", "failed"):
        raise click.exceptions.Exit(1)


def _status_text(status: StatusJson, host: HostOverview) -> str:
    gpus = host.answers.gpus
    text = wrapped(f"State:    {status['state']}")
    for problem, hint in with_hints(fold_problems(host.problems)):
        text += wrapped(f"{problem.title + ':':9} {problem.text}", _INDENT)
        text += hint_text(hint, "Hint:     ", _INDENT)
    lines = [
        f"Devices:  {_devices(status, host)}",
        f"Leases:   {_leases(status)}",
        f"GPUs:     {_gpus(status, gpus)}",
        f"Driver:   {_driver(status)}",
        f"Host:     {os.uname().nodename}, id {status['host_id']}",
        f"Daemon:   {status['version']}, PID {status['pid']}, up {age_of(status['started'])}",
    ]
    for line in lines:
        text += wrapped(line, _INDENT)
    if gpus:
        text += _gpu_table(host)
    end = pools(gpus) + incomplete_note(status["errors"])
    domains = _domain_table(status["domains"], _MAX_ROWS)
    if 0 < terminal_size()[1] <= (text + domains + end).count("\n"):
        domains = _domain_table(status["domains"], 0)  # problems must not scroll off the screen
    return text + domains + end


def _devices(status: StatusJson, host: HostOverview) -> str:
    devices = status["devices"]
    gpus = host.answers.gpus
    text = f"{devices['available']} of {devices['total']} available"
    if not devices["total"] and any(gpu["memory_free_mib"] is not None for gpu in gpus):
        text = "created on request"
    if devices["pending"]:
        text += f", {devices['pending']} pending"
    if devices["reserved"]:
        text += f", {devices['reserved']} reserved"
    if devices["total"] or devices["used"]:
        text += f", {devices['used']} used, {devices['free']} free"
    unenforced_gpus = {gpu["addr"] for gpu in gpus if not gpu["budget_enforced"]}
    unenforced = sum(holding.is_spare and holding.gpu in unenforced_gpus for holding in host.holdings)
    if unenforced:
        text += f" ({unenforced} without enforced budgets)"
    return text + _restrictions(host.holdings)


def _leases(status: StatusJson) -> str:
    leases = status["leases"]
    text = str(leases["total"])
    if leases["waiting"]:
        text += f", {count(leases['waiting'], 'request')} queued"
    outside_mps = status["outside_mps"]
    text += f"; {count(status['clients'] + outside_mps, 'process', 'processes')}"
    if outside_mps:
        text += f", {outside_mps} outside MPS"
    return text


def _gpus(status: StatusJson, gpus: Sequence[GpuJson]) -> str:
    text = f"{status['gpus']['total']}{_ways(gpus)}"
    if status["gpus"]["unavailable"]:
        text += f", {status['gpus']['unavailable']} unavailable"
    return text


def _driver(status: StatusJson) -> str:
    driver = status["driver"]
    text = driver["version"] or "not queried"
    if driver["cuda_version"]:
        text += f", CUDA {driver['cuda_version']}"
    return text


def _restrictions(held: Iterable[Holding]) -> str:
    """Return how many free devices not all users can lease now: ` (6 for alice only)`."""
    numbers = Counter(holding.restriction for holding in held if holding.is_spare and holding.restriction)
    words = ", ".join(f"{number} {restriction}" for restriction, number in sorted(numbers.items()))
    return f" ({words})" if words else ""


def _gpu_table(host: HostOverview) -> str:
    """Format a row for each GPU and MIG instance; if there are too many, for each GPU or similar GPUs."""
    gpus = host.answers.gpus
    shown = gpus
    if len(gpus) > _MAX_ROWS:
        shown = [gpu for gpu in gpus if not gpu["parent"]]
    counts = _device_counts(host.holdings)
    rows = []
    for gpu in shown:
        way = way_of(gpu) if shown is gpus else _way(gpu, gpus)
        rows.append(_gpu_row(gpu, way, counts[gpu["addr"]], host))
    if len(shown) > _MAX_ROWS:
        rows = _fold_alike(rows)
    columns = list(_GPU_COLUMNS)
    if not _ways(gpus):
        columns.remove(_SHARING)
    if not any(row["free_for"] for row in rows):
        columns.remove(_FREE_FOR)
    return table(columns, rows)


class _DeviceCounts(NamedTuple):
    """The devices of a GPU."""

    total: int
    in_use: int
    free: int
    #: The users to whom the free ones would be leased; empty for all users.
    restrictions: frozenset[str]


def _device_counts(held: Iterable[Holding]) -> dict[str, _DeviceCounts]:
    """Count the devices by GPU address; those of a MIG instance count for its GPU, too."""
    counts: dict[str, _DeviceCounts] = defaultdict(lambda: _DeviceCounts(0, 0, 0, frozenset()))
    for holding in held:
        size = len(holding.devices)
        in_use = size if holding.in_use else 0
        free = 0
        restrictions = set()
        if holding.is_spare:
            free = 1
            if holding.restriction:
                restrictions.add(holding.restriction.removeprefix("for "))
        for address in {holding.gpu, physical_gpu(holding.gpu)}:
            before = counts[address]
            counts[address] = _DeviceCounts(
                total=before.total + size,
                in_use=before.in_use + in_use,
                free=before.free + free,
                restrictions=before.restrictions | restrictions,
            )
    return counts


def _gpu_row(gpu: GpuJson, way: str | None, devices: _DeviceCounts, host: HostOverview) -> dict[str, Any]:
    """Return the row of a GPU; unknown memory is 0."""
    used_mib = 0
    memory_mib = 0
    if not is_memory_unknown(gpu):
        used_mib = host.memory_by_gpu.get(gpu["addr"], 0)
        memory_mib = gpu["memory_mib"] or 0
    return {
        "gpu": gpu["addr"],
        "name": gpu["name"],
        "sharing": way,
        "state": gpu["state"],
        "devices": devices.total,
        "in_use": devices.in_use,
        "free": devices.free,
        "free_for": "; ".join(sorted(devices.restrictions)),
        "used_mib": used_mib,
        "memory_mib": memory_mib,
    }


def _fold_alike(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for all rows that differ only in their numbers; it names their number, not the GPUs."""
    alike: dict[tuple[str | None, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        alike[row["name"], row["sharing"], row["state"], row["free_for"]].append(row)
    folded: list[dict[str, Any]] = []
    for group in alike.values():
        together = {**group[0], "gpu": count(len(group), "GPU")}
        for name in _SUMMED:
            together[name] = sum(row[name] for row in group)
        folded.append(together)
    return folded


def _memory_used(used_mib: int, total_mib: int) -> str | None:
    """Format `512 / 23040 MiB`; only what is used, if anything, if the GPU's memory is unknown (0)."""
    if total_mib:
        return f"{used_mib} / {total_mib} MiB"
    return f"{used_mib} MiB" if used_mib else None


def _ways(gpus: Sequence[GpuJson]) -> str:
    """Return how many GPUs are shared in each way; empty if all are shared through MPS."""
    ways = Counter(gpu["sharing"] for gpu in gpus if gpu["sharing"] and not gpu["parent"])
    words = ", ".join(f"{number} {way}" for way, number in sorted(ways.items()))
    return f" ({words})" if ways.keys() - {MPS} else ""


def _way(gpu: GpuJson, gpus: Sequence[GpuJson]) -> str | None:
    """Return how the GPU is shared, and with which instances: `mig with mps (2 x 3g.40gb)`."""
    parts = [part for part in gpus if part["parent"] and part["parent"] == gpu["uuid"]]
    if not parts:
        return way_of(gpu)
    words = ["mig"]
    ways = Counter(part["sharing"] for part in parts if part["sharing"])
    for way in sorted(ways.keys() - {NOT_SHARED}):
        words.append(f"with {way}")
    profiles = sorted(Counter(part["mig_profile"] for part in parts).items())
    instances = " + ".join(f"{number} x {profile}" for profile, number in profiles)
    return " ".join([*words, f"({instances})"])


def _default_limit(domain: DomainJson) -> str | None:
    """Format the default limits of clients, the range over all GPUs: `5760-20389 MiB, 25 %`."""
    limits = [limit for limit in domain["memory_limits_mib"] if limit is not None]
    if not limits:
        return None
    lowest = min(limits)
    highest = max(limits)
    memory = f"{lowest}-{highest}" if lowest < highest else str(highest)
    return f"{memory} MiB, {domain['thread_percentage']} %"


def _domain_table(domains: Sequence[DomainJson], limit: int) -> str:
    """Format the control daemons; if there are more than `limit`, only those that are not ready."""
    shown = list(domains)
    if len(domains) > limit:
        shown = [domain for domain in domains if domain["state"] != "ready"]
    shown = shown[:_MAX_ROWS]
    columns = list(_DOMAIN_COLUMNS)
    if not any(domain["serves"] for domain in shown):
        columns.remove(_SERVES)
    text = table(columns, shown) if shown else ""
    if len(shown) < len(domains):
        ready = sum(domain["state"] == "ready" for domain in domains)
        text += f"Domains:  {ready} of {len(domains)} ready (list all: -o json)\n"
    return text
