"""Memory limits: whether they hold, to which edge, and which way of naming them counts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gpu_check.clients import Client
from gpu_check.processes import Control
from gpu_check.values import Report, Step, Surroundings, Trouble

_DEFAULT = "default_device_pinned_mem_limit"
_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"

#: Two measurements so near to each other, in MiB, are of the same limit: memory is had by 2 MiB.
_NEAR_MIB = 48

Measured = dict[str, Any]


class Sizes:
    """A whole limit, an odd one above it, and the next whole one, fit for this GPU."""

    def __init__(self, memory_mib: int) -> None:
        whole = 5 if memory_mib >= 12 * 1024 else 1
        self.whole, self.odd, self.up = f"{whole}G", f"{whole * 1024 + 640}M", f"{whole + 1}G"
        self.mib = {
            self.whole: whole * 1024,
            self.odd: whole * 1024 + 640,
            self.up: whole * 1024 + 1024,
        }


def measure(
    around: Surroundings, pipe: str, limit_mib: int, environment: Mapping[str, str] | None = None
) -> Measured:
    """What a client of its own can take if `limit_mib` should be the limit."""
    most = int(around.host.gpu["memory_mib"])
    with Client(around, "taking", pipe=pipe, environment=environment) as client:
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
    """Whether the limit was kept: one piece below it was had, one above was not, and neither were many."""
    within = found["taken_mib"] <= found["limit_mib"]
    return bool(found["one_piece_below"] and not found["one_piece_above"] and within)


def in_words(name: str, found: Measured) -> str:
    """A sentence on one limit."""
    if found["unlimited"]:
        return f"{name}: NOT limited, {found['taken_mib']} MiB were had and more was to be had."
    refusal = found["refusal"] or {}
    kept = "held" if holds(found) else "was NOT kept exactly"
    return (
        f"{name}: {kept}; {found['taken_mib']} of {found['limit_mib']} MiB could be taken, then came "
        f"{refusal.get('name')} ({refusal.get('code')}); one piece of "
        f"{found['limit_mib'] + 2} MiB was {'had' if found['one_piece_above'] else 'refused'}, one 64 MiB "
        f"below what could be taken was {'had' if found['one_piece_below'] else 'refused'}."
    )


def enforced_as(sizes: Sizes, found: Mapping[str, Measured]) -> str:
    """As what the odd limit was enforced, by what could be taken under it and its neighbours."""
    if found[sizes.odd]["unlimited"]:
        return f"{sizes.odd} was not enforced at all."
    odd = found[sizes.odd]["taken_mib"]
    for name in (sizes.whole, sizes.up):
        if abs(odd - found[name]["taken_mib"]) <= _NEAR_MIB and not found[name]["unlimited"]:
            return f"{sizes.odd} is enforced as {name}: as much could be taken under the one as the other."
    more = odd - found[sizes.whole]["taken_mib"]
    exact = sizes.mib[sizes.odd] - sizes.mib[sizes.whole]
    what = sizes.odd if abs(more - exact) <= _NEAR_MIB else "something else"
    return f"{sizes.odd} is enforced as {what}: {more} MiB more could be taken than under {sizes.whole}."


def _rows(found: Mapping[str, Measured]) -> list[list[object]]:
    columns = (
        "limit_mib",
        "sees_total_mib",
        "sees_free_mib",
        "taken_mib",
        "one_piece_below",
        "one_piece_above",
    )
    return [[name, *(each[column] for column in columns)] for name, each in found.items()]


_HEADER = ("limit", "MiB", "sees total", "sees free", "could take", "piece below had", "piece above had")


def defaults(around: Surroundings, report: Report) -> None:
    """Limits that the control daemon sets for its next server, each on a control daemon of its own."""
    host = around.host
    sizes = Sizes(int(host.gpu["memory_mib"]))
    found: dict[str, Measured] = {}
    said = []
    for limit in (sizes.odd, sizes.whole, sizes.up):
        with Control(around).start() as control:
            answers = [control.ask(f"set_{_DEFAULT} 0 {limit}"), control.ask(f"get_{_DEFAULT} 0")]
            said += [f"> {answer.command}\n{answer.words()}" for answer in answers]
            found[limit] = measure(around, control.pipe, sizes.mib[limit])
        report.raw("by_number", found)
        if limit == sizes.odd:
            report.answer("number", in_words(f"{limit} for device 0", found[limit]))
            _tell_overhead(report, found[limit])
    report.answer("odd", enforced_as(sizes, found))
    with Control(around).start() as control:
        answers = [
            control.ask(f"set_{_DEFAULT} {host.gpu['uuid']} {sizes.odd}"),
            control.ask(f"get_{_DEFAULT} {host.gpu['uuid']}"),
            control.ask(f"get_{_DEFAULT} 0"),
        ]
        said += [f"> {answer.command}\n{answer.words()}" for answer in answers]
        by_uuid = measure(around, control.pipe, sizes.mib[sizes.odd])
        report.raw("by_uuid", by_uuid)
        report.answer("uuid", in_words(f"{sizes.odd} for the GPU's UUID", by_uuid))
    report.verbatim("Setting a default limit, and reading it back", "\n".join(said))
    report.table("Default limits", _HEADER, _rows({**found, f"{sizes.odd} by UUID": by_uuid}))
    _later(around, report, sizes)


def _tell_overhead(report: Report, found: Measured) -> None:
    own = found["limit_mib"] - found["taken_mib"]
    sentence = f"Of a limit of {found['limit_mib']} MiB a client could not take {own} MiB."
    report.answer("overhead", "There was no limit to tell by." if found["unlimited"] else sentence)
    report.answer(
        "seen",
        f"Under a limit of {found['limit_mib']} MiB, cuMemGetInfo says {found['sees_free_mib']:.0f} of "
        f"{found['sees_total_mib']:.0f} MiB free, and cuDeviceTotalMem {found['device_total_mib']} MiB.",
    )


def _later(around: Surroundings, report: Report, sizes: Sizes) -> None:
    """A default that is set while a server runs."""
    with Control(around).start() as control:
        control.ask(f"set_{_DEFAULT} 0 {sizes.up}")
        with Client(around, "staying", pipe=control.pipe) as staying:
            staying.ready(30)
            control.ask(f"set_{_DEFAULT} 0 {sizes.whole}")
            running = measure(around, control.pipe, sizes.mib[sizes.whole])
        ended_s = _end_server(control)
        following = measure(around, control.pipe, sizes.mib[sizes.whole])
    report.raw("set_while_running", {"running": running, "next": following, "server_ended_s": ended_s})
    report.answer(
        "running",
        f"{sizes.up} was in effect and {sizes.whole} was set with a client there: the next client of the "
        f"same server could take {running['taken_mib']} MiB, one of the next server "
        f"{following['taken_mib']} MiB; so it {'applies' if holds(running) else 'does not apply'} to a "
        f"running server's new clients, and {'applies' if holds(following) else 'does not apply'} to the "
        "next server.",
    )


def _end_server(control: Control) -> float:
    """Ask the server to end, now that no client is left; how long it took. Raises Trouble."""
    start_s = time.monotonic()
    for pid in control.server_pids():
        control.ask(f"shutdown_server {pid}")
    while control.server_pids():
        if time.monotonic() > start_s + 10:
            raise Trouble("the server did not end within 10 s of shutdown_server, with no client left")
        time.sleep(0.05)
    return round(time.monotonic() - start_s, 3)


def of_clients(around: Surroundings, report: Report) -> None:
    """Limits in a client's own environment, and those of one server."""
    uuid = around.host.gpu["uuid"]
    sizes = Sizes(int(around.host.gpu["memory_mib"]))
    found: dict[str, Measured] = {}
    with Control(around).start() as control:

        def take(name: str, limit: str, value: str) -> Measured:
            found[name] = measure(
                around, control.pipe, sizes.mib[limit], {_VARIABLE: value} if value else None
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
        report.answer("unseen", in_words(f'{_VARIABLE}="{value}"', take("and device 9", sizes.odd, value)))
        with Client(around, "staying", pipe=control.pipe) as staying:
            staying.ready(30)
            _of_server(around, report, control, sizes)
    _against_default(around, report, sizes, found)
    report.table("Limits of clients", _HEADER, _rows(found))


def _of_server(around: Surroundings, report: Report, control: Control, sizes: Sizes) -> None:
    """The limit that is set on a running server."""
    pid = control.the_server()
    answers = [
        control.ask(f"set_device_pinned_mem_limit {pid} 0 {sizes.odd}"),
        control.ask(f"get_device_pinned_mem_limit {pid} 0"),
    ]
    said = "\n".join(f"> {answer.command}\n{answer.words()}" for answer in answers)
    report.verbatim("A limit of one server, and reading it back", said)
    found = measure(around, control.pipe, sizes.mib[sizes.odd])
    report.raw("of_server", found)
    report.answer(
        "server", in_words(f"set_device_pinned_mem_limit PID 0 {sizes.odd}, for new clients", found)
    )


def _against_default(around: Surroundings, report: Report, sizes: Sizes, found: dict[str, Measured]) -> None:
    """A client's own limit below and above the control daemon's default."""
    with Control(around).start() as control:
        control.ask(f"set_{_DEFAULT} 0 {sizes.odd}")
        tight = measure(around, control.pipe, sizes.mib[sizes.whole], {_VARIABLE: f"0={sizes.whole}"})
        loose = measure(around, control.pipe, sizes.mib[sizes.odd], {_VARIABLE: f"0={sizes.up}"})
    found.update({f"{sizes.whole}, default {sizes.odd}": tight, f"{sizes.up}, default {sizes.odd}": loose})
    report.raw("against_default", {"tight": tight, "loose": loose})
    verb = "tightens" if holds(tight) else "does NOT tighten"
    report.answer(
        "tighten", in_words(f"Default {sizes.odd}, client {sizes.whole}: it {verb} the default", tight)
    )
    verb = "does not loosen" if holds(loose) else "LOOSENS"
    report.answer("loosen", in_words(f"Default {sizes.odd}, client {sizes.up}: it {verb} the default", loose))


STEPS = (
    Step(
        "memory_default",
        "Memory limits that the control daemon sets by default",
        defaults,
        75,
        (
            ("number", "Is a default limit for the GPU's number enforced, even an odd one?"),
            ("uuid", "Is one for the GPU's UUID enforced?"),
            ("odd", "With which value is an odd default limit enforced?"),
            ("overhead", "How much of its limit can a client not allocate itself?"),
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
            ("uuid", "Is one for the GPU's UUID enforced?"),
            ("odd", "With which value is an odd limit of a client enforced?"),
            ("unseen", "Is a limit enforced if its list also names a GPU that does not exist?"),
            ("server", "Does a limit that is set on a running server apply to new clients?"),
            ("tighten", "Does a client's own limit tighten the default?"),
            ("loosen", "Can it loosen the default?"),
        ),
        frozenset({"mps"}),
    ),
)
