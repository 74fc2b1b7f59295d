"""`yunion-mps lease`, for jobs that are no process of this host, and the options of lease requests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from yunion_mps.cli.common import (
    Duration,
    Number,
    call,
    complete_device,
    complete_gpu,
    complete_lease,
    daemon,
)
from yunion_mps.cli.output import (
    date_and_time,
    fields,
    output_option,
    print_notice,
    show,
    show_pairs,
    wide_output_option,
    wrapped,
)
from yunion_mps.cli.root import SuggestingGroup
from yunion_mps.client.retry import RequestMembers, preview
from yunion_mps.client.retry import take as take_from
from yunion_mps.client.transport import BlockingTransport, run_blocking
from yunion_mps.errors import YunionError
from yunion_mps.http.operations import (
    END_LEASE,
    GET_LEASE,
    GET_LEASES,
    MAX_DEVICES_PER_LEASE,
    MAX_MIB,
    MAX_WAIT_S,
    NAME,
    RENEW_LEASE,
)
from yunion_mps.reasons import BUDGET_NOT_ENFORCED, NOTHING_FREE
from yunion_mps.units import mebibytes

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecord

F = TypeVar("F", bound=Callable[..., Any])

#: Variables that only a device's environment sets.
BUDGET_VARIABLES = (
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "YUNION_MPS_DEVICE",
    "YUNION_MPS_LEASE",
)
_REQUEST_OPTIONS = (
    "device", "gpu", "count", "across", "spread", "gpu_mem", "gpu_mem_units", "allow_unlimited"
)  # fmt: skip
#: Looks like a duration, not like a command's name.
_A_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?(e[0-9]+)?[a-z]?")
_WAIT_NEEDS_EQUALS = "--wait takes a duration only after =: write --wait={0}, or --wait -- {0} to run {0}."


class _WaitOption(click.Option):
    """`--wait[=DURATION]`: without a space before its value."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (record[0].replace(" [=", "[="), record[1])


def request_options(function: F) -> F:
    """Add the options of a lease request to a command, as the parameters `wanted` and `wait_s`."""

    @wraps(function)
    def with_request(*args: Any, **parameters: Any) -> Any:
        wanted = _request(**{name: parameters.pop(name) for name in _REQUEST_OPTIONS})
        return function(*args, wanted=wanted, **parameters)

    options = (
        click.option(
            "--device", metavar="DEVICE", shell_complete=complete_device,
            help="Use this device (id or address).",
        ),
        click.option(
            "--gpu", metavar="GPU", shell_complete=complete_gpu,
            help="Use a device of this GPU (UUID or PCI address).",
        ),
        click.option(
            "--count", type=Number(1, MAX_DEVICES_PER_LEASE), default=1, metavar="N",
            help="Use N devices, combined into one budget. Default: 1.",
        ),
        click.option(
            "--gpu-mem", metavar="SIZE",
            help="Use this much memory (512MiB, 2GiB) of a GPU divided by memory_unit or slices. "
            "With --count: for each device.",
        ),
        click.option(
            "--gpu-mem-units", type=Number(1, MAX_MIB), metavar="N",
            help="Like --gpu-mem, in units of gpu_memory_unit (1024 MiB by default).",
        ),
        click.option("--across", is_flag=True, help="With --count: use devices of different GPUs."),
        click.option(
            "--spread", is_flag=True,
            help="Prefer the GPU with the most free devices. Default: the one with the fewest.",
        ),
        click.option(
            "--allow-unlimited", is_flag=True,
            help="Also use a GPU that does not enforce budgets (older than Volta).",
        ),
        click.option(
            "--wait", "wait_s", cls=_WaitOption, type=Duration(1, MAX_WAIT_S), default=0,
            metavar="[=DURATION]",
            help="If no device is free, wait up to DURATION (90, 90s, 10m, 2h, 1d). "
            "Without DURATION: 30d.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        option(with_request)
    return with_request  # type: ignore[return-value]


class RequestCommand(click.Command):
    """A command whose `--wait` takes a value only after `=`, because COMMAND may follow it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give a bare `--wait` its default value; raises UsageError if a duration follows it."""
        options = [option for option in self.params if isinstance(option, click.Option)]
        valued = {name for option in options if not option.is_flag for name in option.opts}
        index = 0
        while index < len(args) and args[index] != "--":
            word, follower = args[index], args[index + 1 : index + 2]
            if word == "--wait":
                if follower and _A_NUMBER.fullmatch(follower[0]) and not ctx.resilient_parsing:
                    raise click.UsageError(_WAIT_NEEDS_EQUALS.format(follower[0]), ctx)
                args[index] = f"--wait={MAX_WAIT_S}"
            elif word in valued:
                index += 1
            elif not word.startswith("-") and not ctx.allow_interspersed_args:
                break
            index += 1
        return super().parse_args(ctx, args)


def _request(
    device: str | None, gpu: str | None, count: int, across: bool, spread: bool,
    gpu_mem: str | None, gpu_mem_units: int | None, allow_unlimited: bool,
) -> RequestMembers:  # fmt: skip
    """Return the lease request as members of the API's body; raises UsageError."""
    if device == "" or gpu == "":
        raise click.UsageError("--device and --gpu must not be empty.")
    if gpu_mem is not None and gpu_mem_units is not None:
        raise click.UsageError("--gpu-mem and --gpu-mem-units are mutually exclusive: use one of them.")
    if device and (count > 1 or gpu_mem is not None or gpu_mem_units is not None):
        raise click.UsageError(
            "--device already selects one device: omit --count, --gpu-mem and --gpu-mem-units."
        )
    if device and gpu:
        raise click.UsageError("--device already selects the GPU: omit --gpu.")
    if across and count < 2:
        raise click.UsageError("--across requires --count of at least 2.")
    if across and gpu:
        raise click.UsageError("--across requires several GPUs: omit --gpu.")
    return {
        "devices": [device] if device else None,
        "gpu": gpu,
        "count": count if count > 1 else None,
        "memory_mib": None if gpu_mem is None else _memory(gpu_mem),
        "memory_units": gpu_mem_units,
        "across": across or None,
        "placement": "spread" if spread else None,
        "allow_unlimited": allow_unlimited or None,
    }


def _memory(text: str) -> int:
    """Parse an amount of memory into MiB; accepts `2G`, too. Raises UsageError."""
    mib = mebibytes(text if text.endswith("iB") else f"{text}iB")
    if not mib:
        raise click.UsageError(f"--gpu-mem is {text!r}: use a whole number of MiB or GiB, such as 2GiB.")
    return mib


def take(wanted: RequestMembers, wait_s: int) -> LeaseRecord:
    """Take a lease; raises YunionError, for example NothingFreeError if there is none within `wait_s`."""
    with hints_of_options(wanted, wait_s):
        return run_blocking(take_from(BlockingTransport(daemon()), wanted, wait_s, print_notice))


@contextlib.contextmanager
def hints_of_options(wanted: RequestMembers, wait_s: int = 0) -> Iterator[None]:
    """Add options that would help to a refusal's hint, because the daemon does not know them."""
    try:
        yield
    except YunionError as error:
        if error.code == BUDGET_NOT_ENFORCED:
            error.hint = "use it anyway: --allow-unlimited"
        elif error.code == NOTHING_FREE:
            hints = [] if wait_s else ["wait for it: --wait"]
            hints.append(error.hint)
            if not wanted.get("allow_unlimited") and _is_free({**wanted, "allow_unlimited": True}):
                hints.append("use a GPU that does not enforce budgets: --allow-unlimited")
            error.hint = "; ".join(hints)
        raise


def _is_free(wanted: RequestMembers) -> bool:
    with contextlib.suppress(YunionError):
        return bool(run_blocking(preview(BlockingTransport(daemon()), wanted)))
    return False


def warn_of_limits(unenforced_gpus: Sequence[str]) -> None:
    """Print a notice if some of the GPUs do not enforce budgets."""
    if unenforced_gpus:
        gpus = ", ".join(unenforced_gpus)
        print_notice(
            f"budgets are not enforced on GPU {gpus}, which is older than Volta: a job can use all of its "
            "memory"
        )


@click.group("lease", cls=SuggestingGroup, short_help="Manage leases of jobs that run elsewhere.")
def lease_group() -> None:
    """Lease devices for a job that is not a process on this host, such as a batch job.

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
    "--ttl", type=Duration(), required=True, metavar="DURATION",
    help="End the lease if it is not renewed for this long (90, 90s, 10m, 2h, 1d).",
)  # fmt: skip
@output_option
def take_lease(name: str, wanted: RequestMembers, wait_s: int, ttl: int, output: str) -> None:
    """Lease devices under NAME, and print the lease with its id and the environment for its job.

    As with yunion-mps run, a GPU that does not enforce budgets is used only with --allow-unlimited.

    \b
    Examples:
      yunion-mps lease take job-17 --ttl 1h
      yunion-mps lease take job-18 --ttl 1h --count 2 --across
    """
    if not re.fullmatch(NAME.strip("^$"), name):
        raise click.UsageError(
            "NAME may contain letters, digits and ._:/@-, must begin with a letter or digit, and may be at "
            "most 100 characters long."
        )
    lease = take({**wanted, "holder": {"name": name, "ttl_s": ttl}}, wait_s)
    from yunion_mps.cli.leases import lease_text  # imported here and below because `run` does not need it

    show_pairs(lease, output, lambda: lease_text(lease))
    warn_of_limits(lease["unenforced_gpus"])


@lease_group.command("list", short_help="List the leases.")
@wide_output_option
def list_leases(output: str) -> None:
    """List the leases of all users, with their devices, budgets and holders, and the queued requests.

    A lease is in use, over budget, idle (no process uses its devices), unavailable (as its devices are) or
    pending (the new division of its GPU waits for it to end).

    \b
    Examples:
      yunion-mps lease list
      yunion-mps lease list --output wide
    """
    from yunion_mps.cli.leases import FIELDS, leases_text

    answer = call(GET_LEASES)
    rows = [fields(lease, FIELDS) for lease in answer["leases"]]
    show(answer, output, FIELDS, rows, lambda: leases_text(answer, wide=output == "wide"))


@lease_group.command("show", short_help="Show one lease in detail.")
@click.argument("lease", shell_complete=complete_lease)
@output_option
def show_lease(lease: str, output: str) -> None:
    """Show one lease and the environment of its job. LEASE is its name, its id, or a unique prefix of the id.

    A prefix needs at least 8 characters. A name finds only your own leases.

    \b
    Examples:
      yunion-mps lease show job-17
      yunion-mps lease show 7c1f0e7a
    """
    found = call(GET_LEASE, lease=_one_lease(lease))
    from yunion_mps.cli.leases import lease_text

    state = (found["state"] or "unknown") + (f" ({found['reason']})" if found["reason"] else "")
    show_pairs(found, output, lambda: lease_text(found, state))


@lease_group.command("renew", short_help="Renew a lease.")
@click.argument("lease", shell_complete=complete_lease)
@output_option
def renew_lease(lease: str, output: str) -> None:
    """Renew a lease: its time to live starts again. LEASE is its name, its id, or a unique prefix of the id.

    A prefix needs at least 8 characters. A name finds only your own leases. Root may renew any lease by its
    id.

    \b
    Examples:
      yunion-mps lease renew job-17
    """
    renewed = call(RENEW_LEASE, lease=_one_lease(lease))
    from yunion_mps.cli.leases import in_words

    until = f" until {date_and_time(renewed['expires'])}" if renewed["expires"] else ""
    show_pairs(renewed, output, lambda: wrapped(in_words(renewed, f"renewed{until}.")))


@lease_group.command("release", short_help="End a lease.")
@click.argument("lease", shell_complete=complete_lease)
@output_option
def release_lease(lease: str, output: str) -> None:
    """End a lease. LEASE is its name, its id, or a unique prefix of the id.

    A prefix needs at least 8 characters. A name finds only your own leases. Root may end any lease by its
    id. A process that still uses the devices keeps running.

    \b
    Examples:
      yunion-mps lease release job-17
      yunion-mps lease release 7c1f0e7a
    """
    ended = call(END_LEASE, lease=_one_lease(lease))
    from yunion_mps.cli.leases import in_words

    devices = ", ".join(ended["devices"])
    show_pairs(ended, output, lambda: wrapped(in_words(ended, f"released: {devices}.")))


def _one_lease(lease: str) -> str:
    if not lease:
        raise click.UsageError("LEASE must not be empty.")
    return lease
