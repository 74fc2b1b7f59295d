"""Memory limits: whether they are enforced, how exactly, and which notations work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gpu_check.clients import Client
from gpu_check.processes import Control
from gpu_check.values import Report, Step, StepContext, StepError

_DEFAULT = "default_device_pinned_mem_limit"
_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"

#: Two measurements that differ by at most this many MiB have the same limit: CUDA allocates 2 MiB at a time.
_NEAR_MIB = 48

Measured = dict[str, Any]


class Sizes:
    """A limit of whole GiB, one that is not, and the next of whole GiB, sized for this GPU."""

    def __init__(self, memory_mib: int) -> None:
        whole = 5 if memory_mib >= 12 * 1024 else 1
        self.whole, self.odd, self.up = f"{whole}G", f"{whole * 1024 + 640}M", f"{whole + 1}G"
        self.mib = {
            self.whole: whole * 1024,
            self.odd: whole * 1024 + 640,
            self.up: whole * 1024 + 1024,
        }


def measure(
    context: StepContext, pipe: str, limit_mib: int, environment: Mapping[str, str] | None = None
) -> Measured:
    """Measure what a new client can allocate if its limit should be `limit_mib`."""
    most = int(context.host.gpu["memory_mib"])
    with Client(context, "allocating", pipe=pipe, environment=environment) as client:
        facts = client.ready(30)
        sees = client.ask("memory")
        found = client.ask("fill", 60, cap_mib=min(limit_mib + 2048, most))
        below = client.ask("allocate", mib=max(2, min(found["mib"], limit_mib) - 64))
        above = client.ask("allocate", mib=limit_mib + 2)
    return {
        "limit_mib": limit_mib,
        "mps": facts["mps"],
        "sees_total_mib": sees["total_mib"],
        "sees_free_mib": sees["free_mib"],
        "device_total_mib": facts["memory_mib"],
        "taken_mib": found["mib"],
        "unlimited": found["capped"],
        "refusal": found["refusal"],
        "one_piece_below": below["ok"],
        "one_piece_above": above["ok"],
    }


def holds(found: Measured) -> bool:
    """Whether the limit was enforced: for one block below it, for one above it, and for many small ones."""
    within = found["taken_mib"] <= found["limit_mib"]
    return bool(found["one_piece_below"] and not found["one_piece_above"] and within)


def in_words(name: str, found: Measured) -> str:
    """Describe how one limit was enforced."""
    if found["unlimited"]:
        return f"{name}: NOT enforced: {found['taken_mib']} MiB were allocated, and more was available."
    refusal = found["refusal"] or {}
    kept = "enforced" if holds(found) else "NOT enforced exactly"
    return (
        f"{name}: {kept}: {found['taken_mib']} of {found['limit_mib']} MiB could be allocated before "
        f"{refusal.get('name')} ({refusal.get('code')}); one block of {found['limit_mib'] + 2} MiB "
        f"{_outcome(found['one_piece_above'])}, one of 64 MiB less than the total "
        f"{_outcome(found['one_piece_below'])}."
    )


def _outcome(allocation: object) -> str:
    return "succeeded" if allocation else "failed"


def enforced_as(sizes: Sizes, found: Mapping[str, Measured]) -> str:
    """With which value the fractional limit was enforced, judged by its neighbours."""
    if found[sizes.odd]["unlimited"]:
        return f"{sizes.odd} was not enforced at all."
    odd = found[sizes.odd]["taken_mib"]
    for name in (sizes.whole, sizes.up):
        if abs(odd - found[name]["taken_mib"]) <= _NEAR_MIB and not found[name]["unlimited"]:
            return f"{sizes.odd} is enforced as {name}: the same amount could be allocated with both."
    more = odd - found[sizes.whole]["taken_mib"]
    exact = sizes.mib[sizes.odd] - sizes.mib[sizes.whole]
    what = sizes.odd if abs(more - exact) <= _NEAR_MIB else "something else"
    return f"{sizes.odd} is enforced as {what}: {more} MiB more could be allocated than with {sizes.whole}."


def _rows(found: Mapping[str, Measured]) -> list[list[object]]:
    amounts = ("limit_mib", "sees_total_mib", "sees_free_mib", "taken_mib")
    blocks = ("one_piece_below", "one_piece_above")
    return [
        [name, *(each[column] for column in amounts), *(_outcome(each[column]) for column in blocks)]
        for name, each in found.items()
    ]


_HEADER = ("limit", "MiB", "total seen", "free seen", "allocated", "block below", "block above")


def defaults(context: StepContext, report: Report) -> None:
    """Limits that the control daemon sets for its next server, each with a new control daemon."""
    host = context.host
    sizes = Sizes(int(host.gpu["memory_mib"]))
    found: dict[str, Measured] = {}
    said = []
    for limit in (sizes.odd, sizes.whole, sizes.up):
        with Control(context).start() as control:
            answers = [control.ask(f"set_{_DEFAULT} 0 {limit}"), control.ask(f"get_{_DEFAULT} 0")]
            said += [f"> {answer.command}\n{answer.words()}" for answer in answers]
            found[limit] = measure(context, control.pipe, sizes.mib[limit])
        report.raw("by_number", found)
        if limit == sizes.odd:
            report.answer("number", in_words(f"{limit} for device 0", found[limit]))
            _tell_overhead(report, found[limit])
    report.answer("odd", enforced_as(sizes, found))
    with Control(context).start() as control:
        answers = [
            control.ask(f"set_{_DEFAULT} {host.gpu['uuid']} {sizes.odd}"),
            control.ask(f"get_{_DEFAULT} {host.gpu['uuid']}"),
            control.ask(f"get_{_DEFAULT} 0"),
        ]
        said += [f"> {answer.command}\n{answer.words()}" for answer in answers]
        by_uuid = measure(context, control.pipe, sizes.mib[sizes.odd])
        report.raw("by_uuid", by_uuid)
        report.answer("uuid", in_words(f"{sizes.odd} for the GPU's UUID", by_uuid))
    report.verbatim("Setting a default limit, and reading it back", "\n".join(said))
    report.table("Default limits", _HEADER, _rows({**found, f"{sizes.odd} by UUID": by_uuid}))
    _later(context, report, sizes)


def _tell_overhead(report: Report, found: Measured) -> None:
    own = found["limit_mib"] - found["taken_mib"]
    sentence = f"{own} of {found['limit_mib']} MiB could not be allocated."
    report.answer(
        "overhead", "Not known, because the limit was not enforced." if found["unlimited"] else sentence
    )
    report.answer(
        "seen",
        f"With a limit of {found['limit_mib']} MiB, cuMemGetInfo reports {found['sees_free_mib']:.0f} of "
        f"{found['sees_total_mib']:.0f} MiB free, and cuDeviceTotalMem {found['device_total_mib']} MiB.",
    )


def _later(context: StepContext, report: Report, sizes: Sizes) -> None:
    """A default that is set while a server runs."""
    with Control(context).start() as control:
        control.ask(f"set_{_DEFAULT} 0 {sizes.up}")
        with Client(context, "staying", pipe=control.pipe) as staying:
            staying.ready(30)
            control.ask(f"set_{_DEFAULT} 0 {sizes.whole}")
            running = measure(context, control.pipe, sizes.mib[sizes.whole])
        ended_s = _end_server(control)
        following = measure(context, control.pipe, sizes.mib[sizes.whole])
    report.raw("set_while_running", {"running": running, "next": following, "server_ended_s": ended_s})
    report.answer(
        "running",
        f"With {sizes.up} in effect and a client running, {sizes.whole} was set. The next client of the same "
        f"server could allocate {running['taken_mib']} MiB, a client of the next server "
        f"{following['taken_mib']} MiB. So a new default {'applies' if holds(running) else 'does not apply'} "
        f"to new clients of a running server, and {'applies' if holds(following) else 'does not apply'} to "
        "the next server.",
    )


def _end_server(control: Control) -> float:
    """Ask the server, which has no clients left, to end; returns how long it took. Raises StepError."""
    start_s = time.monotonic()
    for pid in control.server_pids():
        control.ask(f"shutdown_server {pid}")
    while control.server_pids():
        if time.monotonic() > start_s + 10:
            raise StepError(
                "the server did not exit within 10 s of shutdown_server, although it had no clients"
            )
        time.sleep(0.05)  # a poll: it is not our child, and cannot be waited for
    return round(time.monotonic() - start_s, 3)


def of_clients(context: StepContext, report: Report) -> None:
    """Limits in a client's environment, and limits of one server."""
    uuid = context.host.gpu["uuid"]
    sizes = Sizes(int(context.host.gpu["memory_mib"]))
    found: dict[str, Measured] = {}
    with Control(context).start() as control:

        def take(name: str, limit: str, value: str) -> Measured:
            found[name] = measure(
                context, control.pipe, sizes.mib[limit], {_VARIABLE: value} if value else None
            )
            report.raw("limits", found)
            return found[name]

        for limit in (sizes.odd, sizes.whole, sizes.up):
            take(limit, limit, f"0={limit}")
        report.answer("number", in_words(f'{_VARIABLE}="0={sizes.odd}"', found[sizes.odd]))
        report.answer("odd", enforced_as(sizes, found))
        value = f"{uuid}={sizes.odd}"
        report.answer("uuid", in_words(f'{_VARIABLE}="{value}"', take("by UUID", sizes.odd, value)))
        value = f"0={sizes.odd},9={sizes.odd}"
        report.answer("unseen", in_words(f'{_VARIABLE}="{value}"', take("with device 9", sizes.odd, value)))
        with Client(context, "staying", pipe=control.pipe) as staying:
            staying.ready(30)
            _of_server(context, report, control, sizes)
    _against_default(context, report, sizes, found)
    report.table("Limits of clients", _HEADER, _rows(found))


def _of_server(context: StepContext, report: Report, control: Control, sizes: Sizes) -> None:
    """The limit that is set on a running server."""
    pid = control.the_server()
    answers = [
        control.ask(f"set_device_pinned_mem_limit {pid} 0 {sizes.odd}"),
        control.ask(f"get_device_pinned_mem_limit {pid} 0"),
    ]
    said = "\n".join(f"> {answer.command}\n{answer.words()}" for answer in answers)
    report.verbatim("A limit of one server, and reading it back", said)
    found = measure(context, control.pipe, sizes.mib[sizes.odd])
    report.raw("of_server", found)
    report.answer(
        "server", in_words(f"set_device_pinned_mem_limit PID 0 {sizes.odd}, for new clients", found)
    )


def _against_default(context: StepContext, report: Report, sizes: Sizes, found: dict[str, Measured]) -> None:
    """A client's own limit below and above the control daemon's default."""
    with Control(context).start() as control:
        control.ask(f"set_{_DEFAULT} 0 {sizes.odd}")
        tight = measure(context, control.pipe, sizes.mib[sizes.whole], {_VARIABLE: f"0={sizes.whole}"})
        loose = measure(context, control.pipe, sizes.mib[sizes.odd], {_VARIABLE: f"0={sizes.up}"})
    found.update({f"{sizes.whole}, default {sizes.odd}": tight, f"{sizes.up}, default {sizes.odd}": loose})
    report.raw("against_default", {"tight": tight, "loose": loose})
    verb = "tightens" if holds(tight) else "does NOT tighten"
    report.answer("tighten", in_words(f"Client's {sizes.whole} {verb} the default of {sizes.odd}", tight))
    verb = "does not loosen" if holds(loose) else "LOOSENS"
    report.answer("loosen", in_words(f"Client's {sizes.up} {verb} the default of {sizes.odd}", loose))


STEPS = (
    Step(
        "memory_default",
        "Memory limits that the control daemon sets by default",
        defaults,
        75,
        (
            ("number", "Is a default limit for the GPU's number enforced, even if it is not in whole GiB?"),
            ("uuid", "Is a default limit for the GPU's UUID enforced?"),
            ("odd", "With which value is a default limit enforced that is not in whole GiB?"),
            ("overhead", "How much of its limit can a client not allocate?"),
            ("seen", "How much memory does a client see?"),
            ("running", "Does a new default apply to a running server, or to the next one?"),
        ),
        frozenset({"mps"}),
    ),
    Step(
        "memory_client",
        "Memory limits of one client or one server",
        of_clients,
        75,
        (
            ("number", "Is a client's own limit for the GPU's number enforced?"),
            ("uuid", "Is a client's own limit for the GPU's UUID enforced?"),
            ("odd", "With which value is a client's limit enforced that is not in whole GiB?"),
            ("unseen", "Is a limit enforced if its list also names a GPU that does not exist?"),
            ("server", "Does a limit that is set on a running server apply to new clients?"),
            ("tighten", "Does a client's own limit tighten the default?"),
            ("loosen", "Can a client's own limit loosen the default?"),
        ),
        frozenset({"mps"}),
    ),
)
