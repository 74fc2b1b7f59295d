"""SM percentages, and many small clients with and without MPS."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from gpu_check.clients import Client, Event
from gpu_check.processes import Control
from gpu_check.values import Report, Step, StepContext, StepError

_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_SPAN_S = 1.0
_ROUND_S = 1.2
_WARM_S = 0.4  # an idle GPU's clocks are low, and take a while to rise
_COUNTS = (1, 2, 4, 8, 16)

Measured = dict[str, Any]


def _large(client: Client, context: StepContext) -> Measured:
    """Measure the throughput of a client whose kernels fill the GPU, and how many SMs they use."""
    gpu = context.host.gpu
    facts = client.ready(30)
    sizes = {"blocks": context.host.large_blocks, "iterations": gpu["iterations_large"]}
    client.ask("work", 30, start=0.0, seconds=_WARM_S, **sizes)
    used = client.ask("multiprocessors", 30, **sizes)
    work = client.ask("work", 30, start=0.0, seconds=_SPAN_S, **sizes)
    if not (used["ok"] and work["ok"]):
        raise StepError(f"client {client.name} could not compute: {used.get('error') or work.get('error')}")
    return {
        "mps": facts["mps"],
        "says_multiprocessors": facts["multiprocessors"],
        "used_multiprocessors": used["used"],
        "per_s": work["per_s"],
    }


def percentages(context: StepContext, report: Report) -> None:
    """Clients of one server with different percentages, one after the other."""
    found: dict[str, Measured] = {}
    if context.host.default_mode:
        with Client(context, "outside") as client:
            found["outside MPS"] = _large(client, context)
    with Control(context).start() as control:
        for percentage in ("100", "50", "25", "12.5", "10"):
            environment = {_PERCENTAGE: percentage}
            with Client(context, percentage, pipe=control.pipe, environment=environment) as client:
                found[percentage] = _large(client, context)
            report.raw("alone", found)
        _tell_percentages(context, report, found)
        _together(context, report, control, found)
        _tighten(context, report, control)


def _tell_percentages(context: StepContext, report: Report, found: dict[str, Measured]) -> None:
    whole = found["100"]["per_s"]
    total = int(context.host.gpu["multiprocessors"])
    rows = [
        [
            name,
            each["says_multiprocessors"],
            each["used_multiprocessors"],
            f"{each['used_multiprocessors'] / total:.1%}",
            f"{each['per_s']:.0f}",
            f"{each['per_s'] / whole:.1%}",
        ]
        for name, each in found.items()
    ]
    header = ("percentage", "SMs reported", "SMs used", "of all SMs", "launches/s", "relative to 100 %")
    report.table("One client whose kernels fill the GPU", header, rows)
    parts = [f"{found[name]['per_s'] / whole:.1%} at {name} %" for name in found if name[0].isdigit()]
    over = [
        name for name in ("50", "25", "12.5", "10") if found[name]["per_s"] / whole > float(name) / 100 * 1.1
    ]
    verdict = (
        f"NOT at {', '.join(over)} %"
        if over
        else "Yes, no client exceeds its percentage by more than a tenth"
    )
    report.answer("hold", f"{verdict}; throughput: {', '.join(parts)}.")
    used = [f"{name} %: {found[name]['used_multiprocessors']}" for name in found if name[0].isdigit()]
    told = [f"{name} %: {found[name]['says_multiprocessors']}" for name in found if name[0].isdigit()]
    report.answer(
        "sms",
        f"SMs used, of {total}: {', '.join(used)}; SMs reported to the client: {', '.join(told)}.",
    )
    if "outside MPS" in found:
        ratio = whole / found["outside MPS"]["per_s"]
        report.answer("cost", f"A single client at 100 % had {ratio:.3f} times its throughput outside MPS.")


def _together(context: StepContext, report: Report, control: Control, found: dict[str, Measured]) -> None:
    """Measure four clients at 25 % at the same time."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(
                Client(context, f"quarter {i}", pipe=control.pipe, environment={_PERCENTAGE: "25"})
            )
            for i in range(4)
        ]
        for client in clients:
            client.ready(30)
        gpu = context.host.gpu
        replies = run_together(clients, _SPAN_S, context.host.large_blocks, gpu["iterations_large"])
    rates = [reply["per_s"] for reply in replies]
    report.raw("four_quarters", rates)
    share = sum(rates) / found["100"]["per_s"]
    alone = [rate / found["25"]["per_s"] for rate in rates]
    report.answer(
        "together",
        f"Four clients at 25 % together had {share:.1%} of the throughput of one at 100 %; each had "
        f"{min(alone):.1%} to {max(alone):.1%} of the throughput of a single client at 25 %.",
    )


def _tighten(context: StepContext, report: Report, control: Control) -> None:
    """Set a running server's percentage, and start a client that requests more."""
    with Client(context, "staying", pipe=control.pipe) as staying:
        staying.ready(30)
        pid = control.the_server()
        answers = [
            control.ask(f"set_active_thread_percentage {pid} 25"),
            control.ask(f"get_active_thread_percentage {pid}"),
        ]
        said = "\n".join(f"> {answer.command}\n{answer.words()}" for answer in answers)
        report.verbatim("The percentage of one server", said)
        with Client(context, "server's 25", pipe=control.pipe) as client:
            plain = _large(client, context)
        environment = {_PERCENTAGE: "50"}
        with Client(context, "own 50", pipe=control.pipe, environment=environment) as client:
            loose = _large(client, context)
    report.raw("of_server", {"plain": plain, "own 50": loose})
    report.answer(
        "loosen",
        f"With the server set to 25 %, a new client used {plain['used_multiprocessors']} SMs, and one with "
        f"50 % in its environment used {loose['used_multiprocessors']} SMs.",
    )


def run_together(clients: Sequence[Client], span_s: float, blocks: int, iterations: int) -> list[Event]:
    """Let all clients work at the same time; raises StepError if one cannot."""
    start_s = time.monotonic() + 0.15
    for client in clients:
        client.tell("work", start=start_s, seconds=span_s, blocks=blocks, iterations=iterations, batch=8)
    replies = [client.reply("work", span_s + 30) for client in clients]
    for client, reply in zip(clients, replies):
        if not reply["ok"]:
            raise StepError(f"client {client.name} could not work: {reply['error']}")
    return replies


def fairness(rates: Sequence[float]) -> float:
    """Return Jain's index: 1 if all rates are equal, 1/n if only one is not 0."""
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if squares else 0.0


def throughput(context: StepContext, report: Report) -> None:
    """Keep both kinds of clients running, and measure them alternately: MPS, without, without, MPS."""
    host = context.host
    groups: dict[str, list[Client]] = {}
    rounds: dict[str, dict[int, list[list[float]]]] = {}
    with ExitStack() as stack:
        pipes = {"without MPS": ""} if host.default_mode else {}
        if host.control and host.server:
            pipes["MPS"] = stack.enter_context(Control(context).start()).pipe
        for kind, pipe in pipes.items():
            try:
                groups[kind] = _ready_group(context, stack, kind, pipe)
            except StepError as error:
                report.raw(f"no clients, {kind}", str(error))
        if not groups:
            raise StepError("no clients could be started")
        for count in _COUNTS:
            for kind in [*reversed(groups), *groups]:
                replies = run_together(
                    groups[kind][:count], _ROUND_S, host.small_blocks, host.gpu["iterations"]
                )
                rates = [reply["per_s"] for reply in replies]
                rounds.setdefault(kind, {}).setdefault(count, []).append(rates)
            report.raw("rounds", rounds)
        _tell_throughput(context, report, rounds)


def _ready_group(context: StepContext, stack: ExitStack, kind: str, pipe: str) -> list[Client]:
    """Start the largest number of clients of one kind, all ready; raises StepError."""
    clients = [stack.enter_context(Client(context, f"{kind} {i}", pipe=pipe)) for i in range(max(_COUNTS))]
    for client in clients:
        client.ready(25)
    return clients


def _tell_throughput(
    context: StepContext, report: Report, rounds: dict[str, dict[int, list[list[float]]]]
) -> None:
    sums = {
        kind: {count: sum(map(sum, each)) / len(each) for count, each in counts.items()}
        for kind, counts in rounds.items()
    }
    even = {
        kind: {count: min(map(fairness, each)) for count, each in counts.items()}
        for kind, counts in rounds.items()
    }
    spread = {
        kind: {count: min(min(rates) / max(rates) for rates in each) for count, each in counts.items()}
        for kind, counts in rounds.items()
    }
    header = ["clients"]
    for kind in sums:
        header += [f"{kind}, launches/s", "relative to one client", "slowest/fastest", "Jain's index"]
    rows: list[list[object]] = []
    for count in _COUNTS:
        row: list[object] = [count]
        for kind, by_count in sums.items():
            row += [f"{by_count[count]:.0f}", f"{by_count[count] / by_count[1]:.2f} x"]
            row += [f"{spread[kind][count]:.2f}", f"{even[kind][count]:.3f}"]
        rows.append([*row, *([_ratio(sums, count)] if len(sums) > 1 else [])])
    report.table(
        f"Clients with kernels of about 1 ms and {context.host.small_blocks} block(s)",
        [*header, *(["MPS / without"] if len(sums) > 1 else [])],
        rows,
    )
    report.raw("sums", sums)
    if len(sums) > 1:
        parts = [f"{count}: {_ratio(sums, count)}" for count in _COUNTS]
        report.answer(
            "ratio",
            f"Total throughput relative to that without MPS, by number of clients: {', '.join(parts)}.",
        )
    else:
        report.answer("ratio", f"Not measured: clients could run in only one way, {next(iter(sums))}.")
    for kind, name in (("MPS", "fair_mps"), ("without MPS", "fair_without")):
        if kind in spread:
            parts = [f"{count}: {spread[kind][count]:.2f}" for count in _COUNTS[1:]]
            report.answer(
                name, f"Slowest client relative to the fastest, by number of clients: {', '.join(parts)}."
            )


def _ratio(sums: dict[str, dict[int, float]], count: int) -> str:
    return f"{sums['MPS'][count] / sums['without MPS'][count]:.2f} x"


STEPS = (
    Step(
        "percentages",
        "Percentages of the SM threads",
        percentages,
        75,
        (
            ("hold", "Is a client's percentage enforced?"),
            ("sms", "On how many SMs does such a client run, and how many does CUDA report to it?"),
            ("together", "Do four clients with 25 % each add up, without disturbing each other?"),
            ("loosen", "Is a running server's percentage enforced, even for a client that requests more?"),
            ("cost", "What does MPS cost a client that has the GPU to itself?"),
        ),
        frozenset({"mps"}),
    ),
    Step(
        "throughput",
        "Many small clients, with MPS and without",
        throughput,
        120,
        (
            ("ratio", "How much higher is the throughput of 1 to 16 small clients with MPS than without?"),
            ("fair_mps", "How evenly is it shared under MPS?"),
            ("fair_without", "How evenly is it shared without MPS?"),
        ),
    ),
)
