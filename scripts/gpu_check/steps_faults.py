"""Clients that fault, are terminated or are killed, and their neighbours."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

from gpu_check.clients import Attempt, Client, attempt, describe, fates, start_beating, watch
from gpu_check.processes import Answer, Control, stat_of
from gpu_check.values import Report, Step, StepContext, seconds

_WORDS = ("fault", "fatal", "error", "exception", "terminat", "xid", "client", "exit", "status", "server")


def fault(context: StepContext, report: Report) -> None:
    """Let one of three clients write to an invalid address."""
    with ExitStack() as stack:
        control = stack.enter_context(Control(context).start())
        others = [stack.enter_context(Client(context, name, pipe=control.pipe)) for name in "bc"]
        bad = stack.enter_context(Client(context, "a", pipe=control.pipe))
        bad.ready(30)
        start_beating(others, context)
        server = control.the_server()
        since_s = time.monotonic()
        reply = bad.ask("fault", 20)
        watch(others, 5.0)
        report.raw("fault", reply)
        error = "no error" if reply["ok"] else describe(reply["error"])
        report.answer("itself", f"The client that faulted got {error}.")
        found, words = fates(others, since_s)
        report.raw("others", found)
        report.answer("others", f"{words[0].upper()}{words[1:]}.")
        statuses = _statuses(control, server)
        report.raw(
            "server", {"alive": bool(stat_of(server)), "statuses": [each._asdict() for each in statuses]}
        )
        lives = "is running" if stat_of(server) else "has exited"
        said = ", then ".join(dict.fromkeys(each.words() for each in statuses))
        report.answer(
            "server",
            f"The server {lives}; with the old clients connected, get_server_status prints {said!r}.",
        )
        during = attempt(context, control.pipe, 4.0)
        report.raw("during", during.as_json())
        report.answer("during", f"A new client {during.words()}.")
        for client in (bad, *others):
            client.close()
        _recover(context, report, control, server, since_s)
        lines = control.log_lines(*_WORDS)
        report.verbatim("Log lines about the fault", "\n".join(lines[-60:]) or "(nothing)")


def _statuses(control: Control, server: int) -> list[Answer]:
    """Return the server's status twice, half a second apart, to see whether a fault passes by itself."""
    answers = [control.ask(f"get_server_status {server}", timeout_s=3)]
    time.sleep(0.5)  # the time in which a fault may pass
    return [*answers, control.ask(f"get_server_status {server}", timeout_s=3)]


def _recover(context: StepContext, report: Report, control: Control, server: int, since_s: float) -> None:
    """Start new clients, one after another, until one runs."""
    left_s = time.monotonic()
    tries: list[Attempt] = []
    while time.monotonic() < left_s + 15:
        tries.append(attempt(context, control.pipe, 6.0))
        if tries[-1].works:
            break
    ran_s = time.monotonic()
    report.raw("after", [each.as_json() for each in tries])
    status = control.ask(f"get_server_status {server}", timeout_s=3).words()
    same = "the same server" if server in control.server_pids() else "another server"
    if not tries[-1].works:
        report.answer(
            "recovery",
            f"No new client could run within {seconds(time.monotonic() - left_s)} of the old ones' end.",
        )
        return
    report.answer(
        "recovery",
        f"A new client {tries[-1].words()}. It was attempt {len(tries)} and had ended "
        f"{seconds(ran_s - left_s)} after the old clients and {seconds(ran_s - since_s)} after the fault; "
        f"it used {same} (get_server_status: {status!r}).",
    )


def terminate(context: StepContext, report: Report) -> None:
    """End one of three clients by `terminate_client`, then another by SIGKILL."""
    with ExitStack() as stack:
        control = stack.enter_context(Control(context).start())
        first, second, third = (
            stack.enter_context(Client(context, name, pipe=control.pipe)) for name in ("a", "b", "c")
        )
        start_beating([first, second, third], context)
        server = control.the_server()
        since_s = time.monotonic()
        answer = control.ask(f"terminate_client {server} {first.pid}")
        watch([first, second, third], 3.0)
        found, words = fates([first, second, third], since_s)
        report.raw("terminate", {"answer": answer._asdict(), "clients": found})
        report.verbatim(f"> {answer.command}", f"{answer.words()}\n(after {seconds(answer.seconds)})")
        report.answer("terminate", f"Client a was terminated: {words}.")
        listed = control.ask(f"get_client_list {server}", timeout_s=3).text.split()
        report.answer(
            "listed",
            f"The terminated client's process {'is running' if stat_of(first.pid) else 'has exited'} and is "
            f"{'still' if str(first.pid) in listed else 'not'} in get_client_list.",
        )
        since_s = time.monotonic()
        second.process.send_signal(signal.SIGKILL)
        watch([third], 3.0)
        found, words = fates([third], since_s)
        met = attempt(context, control.pipe, 6.0)
        report.raw("sigkill", {"clients": found, "new": met.as_json()})
        report.answer(
            "sigkill",
            f"Client b was killed while its kernels were running: {words}; a new client {met.words()}.",
        )
        lines = control.log_lines(*_WORDS)
        report.verbatim("Log lines about terminate_client and SIGKILL", "\n".join(lines[-60:]) or "(nothing)")


STEPS = (
    Step(
        "fault",
        "A client that faults",
        fault,
        70,
        (
            ("itself", "Which error does a client get that writes to an invalid address?"),
            ("others", "How does the fault affect the other clients of the server?"),
            ("server", "What is the server's state afterwards?"),
            ("during", "What happens to a new client while the old ones are still connected?"),
            ("recovery", "How long until a new client runs?"),
        ),
        frozenset({"mps"}),
    ),
    Step(
        "terminate",
        "A client that is terminated or killed",
        terminate,
        50,
        (
            ("terminate", "How does `terminate_client` affect the client and its neighbours?"),
            ("listed", "Has the terminated client exited?"),
            (
                "sigkill",
                "How does it affect its neighbours if a client is killed while its kernels are running?",
            ),
        ),
        frozenset({"mps"}),
    ),
)
