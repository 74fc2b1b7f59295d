"""What commands share: calls to the daemon, types of option values, completion, and confirmation."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import click

from yunion_mps.errors import YunionError
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import GET_CLIENTS, GET_DEVICES, GET_GPUS, GET_LEASES
from yunion_mps.http.parameters import LATEST_S, Value
from yunion_mps.paths import Paths
from yunion_mps.service.holdings import ID_LENGTH
from yunion_mps.units import seconds

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from yunion_mps.answers import Device
    from yunion_mps.http.client import DaemonClient

T = TypeVar("T")

#: A shell that waits longer for completions seems to hang.
_COMPLETION_S = 2.0

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_FORMS = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S")
_NO_DURATION = "is not a duration: use 90, 90s, 10m, 2h or 1d"
_MOMENT_HINT = (
    "use an age (10m, 2h, 3d), today, yesterday, a date (2026-11-20), a local time "
    "('2026-11-20 13:45'), or 2026-11-20T13:45:00Z"
)


def daemon() -> DaemonClient:
    """Return a client of this host's daemon; imported here because `--help` does not need it."""
    from yunion_mps.http.client import DaemonClient

    return DaemonClient(Paths.from_environment())


def call(
    operation: Operation[T],
    timeout_s: float | None = None,
    *,
    until_closed: bool = False,
    **arguments: Value,
) -> T:
    """Call the daemon and return its answer; raises YunionError.

    With `until_closed`, it returns once the answering program has been replaced by the next.
    """
    return daemon().call(operation, timeout_s, until_closed=until_closed, **arguments)


def listed_devices() -> list[Device]:
    return call(GET_DEVICES, limit=0)["isolated_devices"]


def duration_s(text: str) -> int | None:
    """Parse a duration into s; None if it is not a duration. Without a unit it is in seconds."""
    found = re.fullmatch(r"([0-9]{1,9})([smhdw]?)", text)
    return int(found[1]) * _UNITS_S[found[2] or "s"] if found else None


def moment(text: str, now_s: float) -> int:
    """Parse a time, in the local time zone, into s since 1970; raises ValueError."""
    if re.fullmatch(r"[0-9]{9,11}", text):  # fewer digits are no plausible time
        return int(text)
    with contextlib.suppress(ValueError):
        return min(max(0, int(seconds(text))), LATEST_S)
    ago_s = duration_s(text)
    if ago_s is not None:
        return max(0, int(now_s) - ago_s)
    if text in ("today", "yesterday"):
        now = time.localtime(now_s)
        day = now.tm_mday - (text == "yesterday")
        return int(time.mktime((now.tm_year, now.tm_mon, day, 0, 0, 0, 0, 0, -1)))
    for form in _FORMS:
        try:
            date = time.strptime(text.replace("T", " ", 1), form)
            # -1: mktime(3) determines from the date whether daylight saving time applies.
            return min(max(0, int(time.mktime((*date[:8], -1)))), LATEST_S)
        except (ValueError, OverflowError):
            continue
    raise ValueError(text)


class Duration(click.ParamType):
    name = "duration"

    def __init__(self, min_s: int = 1, max_s: int | None = None) -> None:
        self._min_s = min_s
        self._max_s = max_s

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = duration_s(str(value))
        if found is None:
            self.fail(f"{value!r} {_NO_DURATION}.", param, ctx)
        if found < self._min_s:
            self.fail(f"{value} is too short: use at least {_format_duration(self._min_s)}.", param, ctx)
        if self._max_s is not None and found > self._max_s:
            self.fail(f"{value} is too long: use at most {_format_duration(self._max_s)}.", param, ctx)
        return found


def _format_duration(duration: int) -> str:
    """Format a duration in s in the largest unit that divides it."""
    unit = max((name for name in _UNITS_S if duration % _UNITS_S[name] == 0), key=_UNITS_S.__getitem__)
    return f"{duration // _UNITS_S[unit]}{unit}"


class Number(click.ParamType):
    """A whole number within bounds, which the help omits, unlike those of IntRange."""

    name = "integer"

    def __init__(self, lowest: int, highest: int) -> None:
        self._lowest = lowest
        self._highest = highest

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = int(str(value)) if re.fullmatch("-?[0-9]{1,20}", str(value)) else None
        if found is None or not self._lowest <= found <= self._highest:
            bounds = f"from {self._lowest} to {self._highest}"
            self.fail(f"{value} is not a whole number {bounds}.", param, ctx)
        return found


#: PID_MAX_LIMIT of the kernel (include/linux/threads.h).
PID = Number(1, 4_194_304)


class PointInTime(click.ParamType):
    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return moment(str(value), time.time())
        except ValueError:
            self.fail(f"{value!r} is not a time: {_MOMENT_HINT}.", param, ctx)


def _completing(words: Callable[[], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    """Return a completion function for words from the daemon; offers none if the daemon is unreachable."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del ctx, param
        from click.shell_completion import CompletionItem

        try:
            found = dict.fromkeys(words())
        except YunionError:
            return []
        # Without a description: zsh would look for it after the address's first colon.
        return [CompletionItem(word) for word in found if word.startswith(incomplete)]

    return complete


def _leases() -> Iterator[str]:
    """Yield the names of the caller's own leases, and short ids of all others: names find only one's own."""
    from yunion_mps.host.proc import user_name

    user = user_name(os.geteuid())
    for lease in call(GET_LEASES, _COMPLETION_S)["leases"]:
        yield lease["name"] if lease["name"] and lease["user"] == user else lease["id"][:ID_LENGTH]


def _devices() -> Iterator[str]:
    return (device["addr"] for device in call(GET_DEVICES, _COMPLETION_S, limit=0)["isolated_devices"])


def _gpus() -> Iterator[str]:
    return (gpu["addr"] for gpu in call(GET_GPUS, _COMPLETION_S)["gpus"])


def _pids() -> Iterator[str]:
    found = call(GET_CLIENTS, _COMPLETION_S, seen=True)
    return (str(client["pid"]) for client in (*found["clients"], *found["waiting"]))


complete_device, complete_gpu = _completing(_devices), _completing(_gpus)
complete_lease, complete_pid = _completing(_leases), _completing(_pids)


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer file names, completed by the shell itself."""
    del ctx, param
    from click.shell_completion import CompletionItem

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


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation unless `yes`; raises YunionError if it is denied."""
    if not yes and not click.confirm(question, err=True):
        raise YunionError("cancelled: nothing was changed, and no job was ended")
