"""Neighbours that fault, are terminated, or are killed."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

from gpu_check.clients import Attempt, Client, attempt, describe, fates, start_beating, watch
from gpu_check.processes import Answer, Control, stat_of
from gpu_check.values import Report, Step, Surroundings, seconds

_WORDS = ("fault", "fatal", "error", "exception", "terminat", "xid", "client", "exit", "status", "server")


def fault(around: Surroundings, report: Report) -> None:
    """One of three clients stores to a bad address."""
    with ExitStack() as stack:
        control = stack.enter_context(Control(around).start())
        others = [stack.enter_context(Client(around, name, pipe=control.pipe)) for name in "bc"]
        bad = stack.enter_context(Client(around, "a", pipe=control.pipe))
        bad.ready(30)
        start_beating(others, around)
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
        lives = "lives" if stat_of(server) else "is gone"
        said = " then ".join(dict.fromkeys(each.words() for each in statuses))
        report.answer(
            "server", f"The server {lives}; while its old clients are there, get_server_status says {said!r}."
        )
        during = attempt(around, control.pipe, 4.0)
        report.raw("during", during.as_json())
        report.answer("during", f"A new client {during.words()}.")
        for client in (bad, *others):
            client.close()
        _recover(around, report, control, server, since_s)
        lines = control.log_lines(*_WORDS)
        report.verbatim("What the logs say of a fault", "\n".join(lines[-60:]) or "(nothing)")


def _statuses(control: Control, server: int) -> list[Answer]:
    """The server's status twice, half a second apart: whether a fault is a state that passes by itself."""
    answers = [control.ask(f"get_server_status {server}", timeout_s=3)]
    time.sleep(0.5)
    return [*answers, control.ask(f"get_server_status {server}", timeout_s=3)]


def _recover(around: Surroundings, report: Report, control: Control, server: int, since_s: float) -> None:
    """New clients, one after the other, until one runs."""
    left_s = time.monotonic()
    tries: list[Attempt] = []
    while time.monotonic() < left_s + 15:
        tries.append(attempt(around, control.pipe, 6.0))
        if tries[-1].works:
            break
    ran_s = time.monotonic()
    report.raw("after", [each.as_json() for each in tries])
    status = control.ask(f"get_server_status {server}", timeout_s=3).words()
    same = "the same server" if server in control.server_pids() else "another server"
    if not tries[-1].works:
        report.answer(
            "recovery", f"No new client ran within {seconds(time.monotonic() - left_s)} of the old ones' end."
        )
        return
    report.answer(
        "recovery",
        f"A new client {tries[-1].words()}; it was number {len(tries)} of those tried, and had ended again "
        f"{seconds(ran_s - left_s)} after the old ones had ended and {seconds(ran_s - since_s)} after the "
        f"fault; it was on {same} (get_server_status: {status!r}).",
    )


def terminate(around: Surroundings, report: Report) -> None:
    """One of two clients is ended by `terminate_client`, then one of two by SIGKILL."""
    with ExitStack() as stack:
        control = stack.enter_context(Control(around).start())
        first, second, third = (
            stack.enter_context(Client(around, name, pipe=control.pipe)) for name in ("a", "b", "c")
        )
        start_beating([first, second, third], around)
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
            f"The terminated client's process {'lives' if stat_of(first.pid) else 'is gone'} and is "
            f"{'still' if str(first.pid) in listed else 'not'} in get_client_list.",
        )
        since_s = time.monotonic()
        second.process.send_signal(signal.SIGKILL)
        watch([third], 3.0)
        found, words = fates([third], since_s)
        met = attempt(around, control.pipe, 6.0)
        report.raw("sigkill", {"clients": found, "new": met.as_json()})
        report.answer(
            "sigkill", f"Client b was killed while it was working: {words}; a new client {met.words()}."
        )
        lines = control.log_lines(*_WORDS)
        report.verbatim(
            "What the logs say of terminate_client and SIGKILL", "\n".join(lines[-60:]) or "(nothing)"
        )


STEPS = (
    Step(
        "fault",
        "A neighbour that faults",
        fault,
        70,
        (
            ("itself", "Which error does the client get that writes to an illegal address?"),
            ("others", "What do the other clients of the server see?"),
            ("server", "What is the server's state afterwards?"),
            ("during", "What happens to a new client while the old ones are still there?"),
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
            ("terminate", "What do the client and its neighbours see on `terminate_client`?"),
            ("listed", "Is the client gone then?"),
            ("sigkill", "What do neighbours see when a client is killed while it is working?"),
        ),
        frozenset({"mps"}),
    ),
)
