"""`lease`, for jobs that `run` does not start: the commands, and leases as tables."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import click

from yunion_mps.cli.calls import call_daemon, obtain_lease, print_warnings
from yunion_mps.cli.devices import environment_text, format_fields
from yunion_mps.cli.options import (
    RequestCommand,
    TimeToLive,
    User,
    complete_lease,
    for_option,
    request_options,
)
from yunion_mps.cli.output import (
    Column,
    age,
    age_of,
    cell,
    date_and_time,
    incomplete_note,
    mib_text,
    output_option,
    show,
    show_pairs,
    table,
    wide_output_option,
    wrapped,
)
from yunion_mps.cli.reconcile import reconcile_leases
from yunion_mps.cli.root import SuggestingGroup
from yunion_mps.cli.who import waiting_text
from yunion_mps.core.enums import WHY_UNENFORCED
from yunion_mps.core.text import gpus_that_are
from yunion_mps.core.units import seconds, total_mib
from yunion_mps.http.operations import (
    END_LEASE,
    GET_LEASE,
    GET_LEASES,
    MAX_TTL_S,
    NAME,
    NAME_LENGTH,
    RENEW_LEASE,
)
from yunion_mps.http.transport import HolderMembers, RequestMembers
from yunion_mps.observe.holdings import ID_LENGTH, abbreviate_addresses, holder_label, in_container

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseListJson, LeaseRecordJson

#: Fields of a lease in CSV.
_FIELDS = (
    "id", "name", "state", "reason", "binding", "devices", "gpus", "memory_mib", "thread_percentage", "user",
    "pid", "command", "container", "since", "expires", "budget_enforced", "sharing", "cdi", "memory_peak_mib",
    "sm_utilization",
)  # fmt: skip
_COLUMNS = (
    Column("LEASE", lambda record: record["id"][:ID_LENGTH]),
    Column("DEVICES", "devices", short=lambda record: abbreviate_addresses(record["devices"])),
    Column("MEMORY", lambda record: mib_text(_memory_mib(record)), numeric=True, drop=1),
    Column("SM %", "thread_percentage", numeric=True, wide=True, drop=3),
    Column("ENFORCED", "budget_enforced", wide=True, drop=7),
    Column("HOLDER", lambda record: holder_label(record), least=16),
    Column("STATE", "state"),
    Column("AGE", lambda record: age_of(record["since"]), drop=2),
    Column("EXPIRES", lambda record: _expires(record["expires"]), drop=4),
    Column("ENDS WITH", "binding", wide=True, drop=6),
    Column("LEASE ID", "id", wide=True, drop=5),
    Column("CDI DEVICE", "cdi", wide=True, drop=8),
    Column("PEAK", lambda record: mib_text(_peak_mib(record)), numeric=True, wide=True, drop=9),
    Column("UTIL %", lambda record: _utilization(record), numeric=True, wide=True, drop=10),
    Column(
        "COMMAND",
        lambda record: in_container(record["container"], record["command"] or ""),
        least=8,
        wide=True,
    ),
)


@click.group("lease", cls=SuggestingGroup, short_help="Manage named leases.")
def lease_group() -> None:
    """Manage leases that are not tied to a process on this host, for example for a batch job.

    Such a lease has a name and a time to live: it ends if it is not renewed in time. For a command on this
    host, yunion-mps run is simpler: its lease ends with the command.

    \b
    Examples:
      yunion-mps lease take job-17 --ttl 1h --output json
      yunion-mps lease list
      yunion-mps lease renew job-17
      yunion-mps lease release job-17
    """


@lease_group.command("take", cls=RequestCommand, short_help="Lease devices under a name.")
@click.argument("name")
@request_options
@click.option(
    "--ttl", type=TimeToLive(1, MAX_TTL_S), required=True, metavar="DURATION",
    help="End the lease unless it is renewed within this time (90, 90s, 10m, 2h, 1d). "
    "For root: infinity, to keep it until it is released.",
)  # fmt: skip
@for_option("Also use devices that are reserved for ENGINE")
@click.option(
    "--user", type=User(), metavar="USER",
    help="Use devices that serve USER (name or numeric id), as whom the job will run. Without "
    "cuda_mps_multiuser, MPS serves one user at a time. Only for root.",
)  # fmt: skip
@output_option
def take_lease(
    name: str,
    request: RequestMembers,
    wait_s: int,
    ttl: int,
    engine: str | None,
    user: int | None,
    output: str,
) -> None:
    """Lease devices under NAME, and print the lease with its id and the environment for its job.

    As with yunion-mps run, a GPU that does not enforce budgets is used only with --allow-unlimited.

    \b
    Examples:
      yunion-mps lease take job-17 --ttl 1h
      yunion-mps lease take job-18 --ttl 1h --count 2 --across
      yunion-mps lease take a --ttl 1h --device 00:06.0-0 --device 00:06.0-1
      yunion-mps lease take slurm:20 --ttl infinity --for slurm --user alice
    """
    if not re.fullmatch(NAME.strip("^$"), name):
        raise click.UsageError(
            "NAME may contain letters, digits and ._:/@-, must begin with a letter or digit, and may be at "
            f"most {NAME_LENGTH} characters long."
        )
    holder: HolderMembers = {"name": name, "ttl_s": ttl}
    if user is not None:
        holder["uid"] = user
    lease = obtain_lease({**request, "reserved_for": engine, "holder": holder}, wait_s)
    show_pairs(lease, output, lambda: _lease_text(lease))
    print_warnings(lease)


@lease_group.command("list", short_help="List the leases.")
@wide_output_option
def list_leases(output: str) -> None:
    """List the leases of all users, with their devices, budgets and holders, and the queued requests.

    A lease is in use, over budget, idle (no process uses its devices), unavailable (its devices are) or
    pending (a new division of its GPU takes effect once the lease ends).

    \b
    Examples:
      yunion-mps lease list
      yunion-mps lease list --output wide
    """
    answer = call_daemon(GET_LEASES)
    rows = [_with_totals(lease) for lease in answer["leases"]]
    show(answer, output, _FIELDS, rows, lambda: _leases_text(answer, wide=output == "wide"))


@lease_group.command("show", short_help="Show one lease in detail.")
@click.argument("lease", shell_complete=complete_lease)
@output_option
def show_lease(lease: str, output: str) -> None:
    """Show one lease and the environment of its job. LEASE is its name, its id, or a unique prefix of the id.

    A prefix must have at least 8 characters. A name refers only to your own leases.

    \b
    Examples:
      yunion-mps lease show job-17
      yunion-mps lease show 7c1f0e7a
    """
    details = call_daemon(GET_LEASE, lease=_one_lease(lease))
    state = details["state"] or "unknown"
    if details["reason"]:
        state += f" ({details['reason']})"
    show_pairs(details, output, lambda: _lease_text(details, state))


@lease_group.command("renew", short_help="Renew a lease.")
@click.argument("lease", shell_complete=complete_lease)
@output_option
def renew_lease(lease: str, output: str) -> None:
    """Renew a lease: its time to live starts again. LEASE is its name, its id, or a unique prefix of the id.

    A prefix must have at least 8 characters. A name refers only to your own leases. Root may renew any lease
    by its id.

    \b
    Examples:
      yunion-mps lease renew job-17
    """
    renewed = call_daemon(RENEW_LEASE, lease=_one_lease(lease))
    until = f" until {date_and_time(renewed['expires'])}" if renewed["expires"] else ""
    show_pairs(renewed, output, lambda: wrapped(_in_words(renewed, f"renewed{until}.")))


@lease_group.command("release", short_help="End a lease.")
@click.argument("lease", shell_complete=complete_lease)
@click.option(
    "--terminate", is_flag=True, help="Terminate its processes first, as yunion-mps terminate --force does."
)
@output_option
def release_lease(lease: str, terminate: bool, output: str) -> None:
    """End a lease. LEASE is its name, its id, or a unique prefix of the id.

    A prefix must have at least 8 characters. A name refers only to your own leases. Root may end any lease by
    its id. A process that still uses the devices keeps running, unless --terminate is given.

    \b
    Examples:
      yunion-mps lease release job-17
      yunion-mps lease release 7c1f0e7a --terminate
    """
    ended = call_daemon(END_LEASE, lease=_one_lease(lease), terminate=terminate)
    devices = ", ".join(ended["devices"])
    show_pairs(ended, output, lambda: wrapped(_in_words(ended, f"released: {devices}.")))


lease_group.add_command(reconcile_leases)


def _one_lease(lease: str) -> str:
    if not lease:
        raise click.UsageError("LEASE must not be empty.")
    return lease


def _leases_text(answer: LeaseListJson, *, wide: bool) -> str:
    """Format a table of leases, why some are unavailable or pending, queued requests, and errors."""
    text = table(_COLUMNS, answer["leases"], none="No leases.", wide=wide)
    reasons = dict.fromkeys(record["reason"] for record in answer["leases"] if record["reason"])
    text += "".join(map(wrapped, reasons))
    return text + waiting_text(answer["waiting"]) + incomplete_note(answer["errors"])


def _lease_text(lease: LeaseRecordJson, state: str = "") -> str:
    unenforced = ""
    if lease["unenforced_gpus"]:
        gpus = gpus_that_are(WHY_UNENFORCED[lease["sharing"]], lease["unenforced_gpus"])
        unenforced = f" (not enforced on {gpus})"
    ends = {
        "process": f"with its process (PID {lease['pid']})",
        "connection": f"with its connection (PID {lease['pid']})",
        "container": f"with its container ({lease['container'] or lease['pid']})",
        "name": "when it is released",
    }
    end = ends.get(lease["binding"])
    if lease["expires"]:
        end = f"at {date_and_time(lease['expires'])} ({_expires(lease['expires'])}), unless renewed"
    memory = mib_text(_process_memory_mib(lease)) or "unknown memory"
    peak_mib = _peak_mib(lease)
    command = in_container(lease["container"], lease["command"] or "")
    lines: dict[str, object] = {"Lease": lease["id"], "Holder": holder_label(lease)}
    if command:
        lines["Command"] = command
    lines["Devices"] = ", ".join(lease["devices"])
    if state:
        lines["State"] = state
    lines["Budget"] = f"{memory}, {cell(lease['thread_percentage'])} % of the SM threads{unenforced}"
    if peak_mib:
        lines["Peak memory"] = mib_text(peak_mib)
    lines["Since"] = f"{date_and_time(lease['since'])} ({age_of(lease['since'])} ago)"
    lines["Ends"] = end
    lines["CDI device"] = lease["cdi"]
    return format_fields(lines) + environment_text(lease["environment"])


def _in_words(lease: LeaseRecordJson, result: str) -> str:
    """Begin a sentence about a lease: `Lease 7c1f0e7a (job-17) renewed`."""
    name = f" ({lease['name']})" if lease["name"] else ""
    return f"Lease {lease['id'][:ID_LENGTH]}{name} {result}"


def _with_totals(lease: LeaseRecordJson) -> dict[str, object]:
    """Return the fields of a lease, and those of its devices together."""
    return {
        **lease,
        "memory_mib": _memory_mib(lease),
        "memory_peak_mib": _peak_mib(lease),
        "sm_utilization": _utilization(lease),
    }


def _memory_mib(lease: LeaseRecordJson) -> int | None:
    return total_mib(budget["memory_mib"] for budget in lease["budgets"])


def _process_memory_mib(lease: LeaseRecordJson) -> int | None:
    """Return what a process may allocate: less than the sum of the devices if MPS combines only some."""
    limits = re.findall(r"=(\d+)M", lease["environment"].get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", ""))
    return sum(map(int, limits)) if limits else _memory_mib(lease)


def _peak_mib(lease: LeaseRecordJson) -> int | None:
    """Return the sum of the peaks that are known; None if none is."""
    sum_mib: int | None = None
    for budget in lease["budgets"]:
        peak_mib = budget["memory_peak_mib"]
        if peak_mib is not None:
            sum_mib = (sum_mib or 0) + peak_mib
    return sum_mib


def _utilization(lease: LeaseRecordJson) -> int | None:
    """Return the highest among its devices, in percent; None if it is unknown."""
    highest: int | None = None
    for budget in lease["budgets"]:
        sm = budget["sm_utilization"]
        if sm is not None:
            highest = max(sm, highest or 0)
    return highest


def _expires(expires: str | None) -> str | None:
    """Return for example `in 50m` until the lease expires; None if it does not expire."""
    return None if expires is None else in_time(seconds(expires) - time.time())


def in_time(left_s: float) -> str:
    """Format `in 50m`, rounded to minutes, so that a new lease of an hour expires in 1h, not in 59m."""
    rounded_s = left_s + 30 if left_s >= 60 else left_s
    return f"in {age(rounded_s)}"
