"""The options of lease requests, for `run` and `lease take`, and how a lease is taken."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from yunion_mps.cli.common import Duration, Number, complete_device, complete_gpu, daemon
from yunion_mps.cli.output import print_notice
from yunion_mps.client.retry import RequestMembers, preview
from yunion_mps.client.retry import take as take_from
from yunion_mps.client.transport import BlockingTransport, run_blocking
from yunion_mps.errors import YunionError
from yunion_mps.http.operations import MAX_DEVICES_PER_LEASE, MAX_MIB, MAX_WAIT_S
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
