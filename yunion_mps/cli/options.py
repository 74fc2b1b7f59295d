"""Options and arguments that commands share: their types, completion, confirmation, and lease requests."""

from __future__ import annotations

import os
import pwd
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from yunion_mps.cli.calls import call_daemon
from yunion_mps.core.enums import NOT_USED, RESERVATIONS
from yunion_mps.core.errors import YunionError
from yunion_mps.core.units import duration_s, duration_text, mebibytes
from yunion_mps.http.operations import (
    GET_CLIENTS,
    GET_DEVICES,
    GET_GPUS,
    GET_LEASES,
    MAX_DEVICES_PER_LEASE,
    MAX_MIB,
    MAX_PID,
    MAX_WAIT_S,
)
from yunion_mps.observe.holdings import ID_LENGTH

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from yunion_mps.http.transport import RequestMembers

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

#: A shell that waits longer for completions seems to hang.
_COMPLETION_S = 2.0

_NO_DURATION = "is not a duration: use 90, 90s, 10m, 2h or 1d"


class Duration(click.ParamType):
    """A duration such as `90`, `90s` or `10m`, within bounds; its value is in s."""

    name = "duration"

    def __init__(self, min_s: int = 1, max_s: int | None = None) -> None:
        self._min_s = min_s
        self._max_s = max_s

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        seconds = duration_s(str(value))
        if seconds is None:
            self.fail(f"{value!r} {_NO_DURATION}.", param, ctx)
        if seconds < self._min_s:
            self.fail(f"{value} is too short: use at least {duration_text(self._min_s)}.", param, ctx)
        if self._max_s is not None and seconds > self._max_s:
            self.fail(f"{value} is too long: use at most {duration_text(self._max_s)}.", param, ctx)
        return seconds


class TimeToLive(Duration):
    """Like Duration, but also accepts `infinity`, as systemd's settings do; the API's value for it is 0."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return 0 if value == "infinity" else super().convert(value, param, ctx)


class Number(click.ParamType):
    """A whole number within bounds, which the help omits, unlike those of IntRange."""

    name = "integer"

    def __init__(self, lowest: int, highest: int) -> None:
        self._lowest = lowest
        self._highest = highest

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = int(str(value)) if re.fullmatch("-?[0-9]{1,20}", str(value)) else None
        if number is None or not self._lowest <= number <= self._highest:
            bounds = f"from {self._lowest} to {self._highest}"
            self.fail(f"{value} is not a whole number {bounds}.", param, ctx)
        return number


PID = Number(1, MAX_PID)


class User(click.ParamType):
    """A user's name or numeric id; its value is the id."""

    name = "user"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return pwd.getpwnam(str(value)).pw_uid
        except KeyError:
            if re.fullmatch("[0-9]{1,9}", str(value)):
                return int(str(value))
            self.fail(f"there is no user {value!r}.", param, ctx)


def _completing(words: Callable[[], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    """Return a completion function for words from the daemon; offers none if the daemon is unreachable."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del ctx, param
        from click.shell_completion import CompletionItem  # not needed to run a command

        try:
            offered = dict.fromkeys(words())
        except YunionError:
            return []
        # Without a description: zsh would look for it after the address's first colon.
        return [CompletionItem(word) for word in offered if word.startswith(incomplete)]

    return complete


def _leases() -> Iterator[str]:
    """Yield the names of the caller's own leases, and short ids of all others: names find only one's own."""
    from yunion_mps.host.proc import user_name  # 1 ms, which a plain `run` need not pay

    user = user_name(os.geteuid())
    for lease in call_daemon(GET_LEASES, _COMPLETION_S)["leases"]:
        yield lease["name"] if lease["name"] and lease["user"] == user else lease["id"][:ID_LENGTH]


def _devices() -> Iterator[str]:
    for device in call_daemon(GET_DEVICES, _COMPLETION_S, limit=0)["isolated_devices"]:
        yield device["addr"]


def _gpus() -> Iterator[str]:
    """Yield the GPUs and MIG instances that can have devices."""
    for gpu in call_daemon(GET_GPUS, _COMPLETION_S)["gpus"]:
        if gpu["state"] != NOT_USED:
            yield gpu["addr"]


def _pids() -> Iterator[str]:
    clients = call_daemon(GET_CLIENTS, _COMPLETION_S, seen=True)
    for process in (*clients["clients"], *clients["waiting"]):
        yield str(process["pid"])


complete_device = _completing(_devices)
complete_gpu = _completing(_gpus)
complete_lease = _completing(_leases)
complete_pid = _completing(_pids)
#: The leases, devices and processes that can be terminated.
complete_target = _completing(lambda: (*_pids(), *_leases(), *_devices()))


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer file names, completed by the shell itself."""
    del ctx, param
    from click.shell_completion import CompletionItem  # as above

    return [CompletionItem(incomplete, type="file")]


device_argument = click.argument("device", envvar="YUNION_MPS_DEVICE", shell_complete=complete_device)


def one_device(device: str) -> str:
    """Return the device; raises UsageError if it is empty or a list, as YUNION_MPS_DEVICE may be in a job."""
    if not device:
        raise click.UsageError("DEVICE must not be empty.")
    if "," in device:
        raise click.UsageError(f"DEVICE is {device}: name one of these devices.")
    return device


def refuse_unattended(yes: bool) -> None:
    """Raise UsageError if there is no terminal for a confirmation, and `--yes` was not given."""
    if not yes and not (sys.stdin and sys.stdin.isatty()):
        raise click.UsageError("This ends jobs, and there is no terminal to ask for confirmation: add --yes.")


def confirm(question: str, yes: bool, consequence: str = "nothing was changed, and no job was ended") -> None:
    """Ask for confirmation unless `yes`; raises YunionError, with the `consequence`, if it is denied."""
    if not yes and not click.confirm(question, err=True):
        raise YunionError(f"cancelled: {consequence}")


#: Formats of an environment.
STYLES = ("shell", "dotenv", "json", "docker", "systemd")
_REQUEST_OPTIONS = (
    "devices", "gpu", "count", "across", "spread", "gpu_mem", "gpu_mem_units", "thread_percentage",
    "allow_unlimited",
)  # fmt: skip
#: Looks like a duration, not like a command's name.
_A_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?(e[0-9]+)?[a-z]?")
_NEEDS_EQUALS = "{0} takes a duration only after =: write {0}={1}, or {0} -- {1} to run {1}."


class DurationOption(click.Option):
    """An option such as `--wait[=DURATION]`; without `=DURATION`, its value is `bare_s`."""

    def __init__(self, *args: Any, bare_s: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.bare_s = bare_s

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None:
            return None
        usage, help_text = record
        return usage.replace(" [=", "[="), help_text


def style_option(function: F) -> F:
    """Add the option `--output` for environments to a command."""
    option = click.option(
        "-o", "--output", type=click.Choice(STYLES), default="shell", metavar="FORMAT",
        help=f"Format of the environment: {', '.join(STYLES)}. Default: shell.",
    )  # fmt: skip
    return option(function)


def request_options(function: F) -> F:
    """Add the options of a lease request to a command, as the parameters `request` and `wait_s`."""

    @wraps(function)
    def with_request(*args: Any, **parameters: Any) -> Any:
        request = _request(**{name: parameters.pop(name) for name in _REQUEST_OPTIONS})
        return function(*args, request=request, **parameters)

    options = (
        click.option(
            "--device", "devices", metavar="DEVICE", multiple=True, shell_complete=complete_device,
            help="Use this device (id or address). Repeat it for several, combined into one budget.",
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
        click.option(
            "--thread-percentage", type=Number(1, 100), metavar="N",
            help="With --gpu-mem: use N percent of the SM threads, "
            "on a GPU whose entry has thread_percentage.",
        ),
        click.option("--across", is_flag=True, help="With --count: use devices of different GPUs."),
        click.option(
            "--spread", is_flag=True,
            help="Prefer the GPU with the least memory leased. Default: the one with the most.",
        ),
        click.option(
            "--allow-unlimited", is_flag=True,
            help="Also use a GPU without enforced budgets (before Volta, or time-sliced).",
        ),
        click.option(
            "--wait", "wait_s", cls=DurationOption, bare_s=MAX_WAIT_S, type=Duration(1, MAX_WAIT_S),
            default=0, metavar="[=DURATION]",
            help="If no device is free, wait up to DURATION (90, 90s, 10m, 2h, 1d). "
            "Without DURATION: 30d.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        option(with_request)
    return with_request  # type: ignore[return-value]


def for_option(
    text: str, engines: Sequence[str] = RESERVATIONS, *, required: bool = False
) -> Callable[[F], F]:
    """Return an option `--for ENGINE`, as the parameter `engine`."""
    return click.option(
        "--for", "engine", type=click.Choice(engines), required=required, metavar="ENGINE",
        help=f"{text}: {' or '.join(engines)}. Only for root.",
    )  # fmt: skip


class RequestCommand(click.Command):
    """A command whose DurationOptions take a value only after `=`, because COMMAND may follow them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give a bare DurationOption its value; raises UsageError if a duration follows it."""
        bare_s: dict[str, int] = {}
        valued: set[str] = set()
        for option in self.params:
            if isinstance(option, DurationOption):
                bare_s[option.opts[0]] = option.bare_s
            if isinstance(option, click.Option) and not option.is_flag:
                valued.update(option.opts)
        index = 0
        while index < len(args) and args[index] != "--":
            word = args[index]
            follower = args[index + 1] if index + 1 < len(args) else ""
            if word in bare_s:
                if _A_NUMBER.fullmatch(follower) and not ctx.resilient_parsing:
                    raise click.UsageError(_NEEDS_EQUALS.format(word, follower), ctx)
                args[index] = f"{word}={bare_s[word]}"
            elif word in valued:
                index += 1
            elif not word.startswith("-") and not ctx.allow_interspersed_args:
                break
            index += 1
        return super().parse_args(ctx, args)


def _request(
    devices: tuple[str, ...], gpu: str | None, count: int, across: bool, spread: bool,
    gpu_mem: str | None, gpu_mem_units: int | None, thread_percentage: int | None, allow_unlimited: bool,
) -> RequestMembers:  # fmt: skip
    """Return the lease request as members of the API's body; raises UsageError."""
    if "" in devices or gpu == "":
        raise click.UsageError("--device and --gpu must not be empty.")
    if gpu_mem is not None and gpu_mem_units is not None:
        raise click.UsageError("--gpu-mem and --gpu-mem-units are mutually exclusive: use one of them.")
    if devices and (count > 1 or gpu_mem is not None or gpu_mem_units is not None):
        raise click.UsageError(
            "--device already selects the devices: omit --count, --gpu-mem and --gpu-mem-units."
        )
    if thread_percentage is not None and gpu_mem is None and gpu_mem_units is None:
        raise click.UsageError("--thread-percentage requires --gpu-mem or --gpu-mem-units.")
    if devices and gpu:
        raise click.UsageError("--device already selects the GPU: omit --gpu.")
    if across and count < 2:
        raise click.UsageError("--across requires --count of at least 2.")
    if across and gpu:
        raise click.UsageError("--across requires several GPUs: omit --gpu.")
    return {
        "devices": list(devices) or None,
        "gpu": gpu,
        "count": count if count > 1 else None,
        "memory_mib": None if gpu_mem is None else _memory(gpu_mem),
        "memory_units": gpu_mem_units,
        "thread_percentage": thread_percentage,
        "across": across or None,
        "placement": "spread" if spread else None,
        "allow_unlimited": allow_unlimited or None,
    }


def _memory(text: str) -> int:
    """Parse an amount of memory into MiB; accepts `2G`, too. Raises UsageError."""
    mib = mebibytes(text if text.endswith("iB") else f"{text}iB")
    if not mib:
        message = f"{text!r} is not an amount of memory: use a whole number of MiB or GiB, such as 2GiB."
        raise click.BadParameter(message, param_hint="'--gpu-mem'")
    return mib
