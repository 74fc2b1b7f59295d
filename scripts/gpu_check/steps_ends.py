"""Ways in which a control daemon with running clients can end, one step each."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from gpu_check.clients import Attempt, Client, attempt, fates, outcome_of, start_beating, watch
from gpu_check.processes import Answer, Control, name_of, stat_of
from gpu_check.values import Report, Step, StepContext, StepError, seconds

_WATCH_S = 4.0

Act = Callable[[Control, int], "Answer | None"]


def _by_signal(number: int) -> Act:
    def act(control: Control, _server: int) -> None:
        control.signal(number)

    return act


def _by_command(command: str, timeout_s: float = 5.0) -> Act:
    def act(control: Control, server: int) -> Answer:
        return control.ask(command.format(server=server), timeout_s=timeout_s)

    return act


def _end(act: Act, context: StepContext, report: Report) -> None:
    """Start two clients, act on the control daemon, inspect all processes, then try a successor."""
    with ExitStack() as stack:
        control = stack.enter_context(Control(context).start())
        clients = [stack.enter_context(Client(context, name, pipe=control.pipe)) for name in "ab"]
        start_beating(clients, context)
        server = control.the_server()
        since_s = time.monotonic()
        answer = act(control, server)
        if answer:
            report.raw("command", answer._asdict())
            report.verbatim(f"> {answer.command}", f"{answer.words()}\n(after {seconds(answer.seconds)})")
        watch(clients, _WATCH_S)
        found, words = fates(clients, since_s)
        report.raw("clients", found)
        report.answer("clients", f"{words[0].upper()}{words[1:]}.")
        _look_at_server(report, control, server, since_s)
        stopped = _is_stopped(control)
        newcomer = stack.enter_context(Client(context, "new", pipe=control.pipe))
        met = outcome_of(newcomer, context.patience_s)
        _tell_newcomer(report, met)
        if stopped:
            _go_on(report, control, newcomer, clients)
        elif not control.alive:
            newcomer.close()
            _succeed(context, report, control, server, clients)
        else:
            _when_clients_end(report, control, server, clients, newcomer)
        report.verbatim("Logs", control.logs(60))


def _is_stopped(control: Control) -> bool:
    stat = stat_of(control.pid)
    return stat is not None and stat.state == "T"


def _look_at_server(report: Report, control: Control, server: int, since_s: float) -> None:
    stat = stat_of(server)
    values: dict[str, Any] = {
        "control_alive": control.alive,
        "server": stat,
        "after_s": time.monotonic() - since_s,
    }
    after = seconds(values["after_s"])
    daemon = "is running" if control.alive else "has exited"
    if stat:
        parent = (
            "still its child" if stat.parent == control.pid else f"now a child of {name_of(stat.parent)!r}"
        )
        sentence = f"{after} later, the control daemon {daemon}, and the server is running, {parent}"
        if control.alive and not _is_stopped(control):
            status = control.ask(f"get_server_status {server}", timeout_s=3)
            values["status"] = status._asdict()
            sentence += f"; get_server_status prints {status.words()!r}"
    else:
        sentence = f"{after} later, the control daemon {daemon}, and so has the server"
        if control.alive:
            sentence = f"{after} later, the control daemon {daemon}, and the server has exited"
    report.raw("server", values)
    report.answer("server", f"{sentence}.")


def _tell_newcomer(report: Report, met: Attempt) -> None:
    report.raw("new_client", met.as_json())
    report.answer("new_client", f"A new client {met.words()}.")


def _go_on(report: Report, control: Control, newcomer: Client, clients: list[Client]) -> None:
    """SIGCONT after SIGSTOP."""
    silent = control.ask("get_server_list", timeout_s=2)
    since_s = time.monotonic()
    control.signal(signal.SIGCONT)
    event = newcomer.outcome(10)
    watch(clients, 1.0)
    found, words = fates(clients, since_s)
    served = "was served" if event and event["event"] == "ready" else "was not served"
    after = seconds((event["t"] if event else time.monotonic()) - since_s)
    report.raw("continued", {"front_end": silent._asdict(), "new_client": event, "clients": found})
    report.answer(
        "successor",
        f"While it was stopped, the front-end printed {silent.words()!r}. The client that was "
        f"started meanwhile {served} {after} after SIGCONT; {words}.",
    )


def _when_clients_end(
    report: Report, control: Control, server: int, clients: list[Client], newcomer: Client
) -> None:
    """What happens after the old clients have ended, while the control daemon is still running."""
    since_s = time.monotonic()
    for client in clients:
        client.close()
    gone = _wait_gone(server, 5.0)
    event = newcomer.outcome(5.0)
    met = "was still waiting"
    if event:
        after = event["t"] - since_s
        served = "was served" if event["event"] == "ready" else "failed"
        met = f"{served} {seconds(after)} later" if after > 0 else f"{served} before that"
    daemon = "is running" if control.alive else "has exited"
    report.raw("clients_ended", {"server_gone": gone, "new_client": event, "control_alive": control.alive})
    report.answer(
        "successor",
        f"After the old clients had ended, the server {gone}; the new client {met}; the control daemon "
        f"{daemon}.",
    )


def _wait_gone(pid: int, timeout_s: float) -> str:
    """Whether a process ended in time, in words."""
    start_s = time.monotonic()
    while stat_of(pid) and time.monotonic() < start_s + timeout_s:
        time.sleep(0.01)  # a poll: it is not our child, and cannot be waited for
    took = seconds(time.monotonic() - start_s)
    return f"was still running {took} later" if stat_of(pid) else f"exited within {took}"


def _succeed(
    context: StepContext, report: Report, control: Control, server: int, clients: list[Client]
) -> None:
    """Start another control daemon with the directories of the one that has exited."""
    before = "was running" if stat_of(server) else "had exited"
    since_s = time.monotonic()
    try:
        with control.successor().start() as successor:
            listed = successor.server_pids()
            met = attempt(context, successor.pipe, 10)
            then = successor.server_pids()
            old = "was running" if stat_of(server) else "had exited"
            watch(clients, 0.5)
            found, words = fates(clients, since_s)
            for client in clients:
                client.close()
            gone = _wait_gone(server, 4.0)
            report.raw(
                "successor",
                {
                    "start_s": successor.start_seconds,
                    "listed": listed,
                    "then": then,
                    "clients": found,
                    "server": server,
                    "server_gone": gone,
                },
            )
            report.verbatim("Logs of the successor", successor.logs(40))
            takes = "listed the old server" if server in listed else "did not list the old server"
            started = seconds(successor.start_seconds)
            sentence = (
                f"A new control daemon started in {started}, when the old server {before}, and {takes}. A "
                f"new client {met.words()}; then the old server {old}, and the server list was "
                f"{then or 'empty'}. The old clients: {words}. After they had ended, the old "
                f"server {gone}."
            )
    except StepError as error:
        sentence = f"A new control daemon could not be started: {error}."
    report.answer("successor", sentence)


def _questions(what: str, successor: str) -> tuple[tuple[str, str], ...]:
    return (
        ("clients", f"How does {what} affect running clients?"),
        ("server", "What happens to the control daemon and the server?"),
        ("new_client", "What happens to a new client afterwards?"),
        ("successor", successor),
    )


_SUCCESSOR = "Does a new control daemon in the same directory work?"

_AFTER = "And after the old clients have ended?"


def _step(name: str, what: str, act: Act, successor: str = _SUCCESSOR) -> Step:
    questions = _questions(what, successor)
    run = functools.partial(_end, act)
    return Step(f"end_{name}", f"{what[0].upper()}{what[1:]}", run, 50, questions, frozenset({"mps"}))


STEPS = (
    _step("sigkill", "SIGKILL of the control daemon", _by_signal(signal.SIGKILL)),
    _step("sigterm", "SIGTERM of the control daemon", _by_signal(signal.SIGTERM)),
    _step(
        "sigstop",
        "SIGSTOP of the control daemon",
        _by_signal(signal.SIGSTOP),
        "And after SIGCONT?",
    ),
    _step("quit", "`quit`", _by_command("quit"), _AFTER),
    _step("quit_t", "`quit -t 3`", _by_command("quit -t 3", 9.0)),
    _step("shutdown", "`shutdown_server PID`", _by_command("shutdown_server {server}"), _AFTER),
    _step("shutdown_f", "`shutdown_server PID -f`", _by_command("shutdown_server {server} -f"), _AFTER),
)
