"""Clients of two users with one control daemon."""

from __future__ import annotations

import time
from contextlib import ExitStack

from gpu_check.clients import Attempt, Client, fates, outcome_of, start_beating, watch
from gpu_check.processes import Control, stat_of
from gpu_check.values import Report, Step, StepContext, StepError, StepSkipped

_OTHER = 65534
_WAIT_S = 5.0
_WORDS = ("user", "server", "client", "pending", "shut")


def two_users(context: StepContext, report: Report) -> None:
    """Start a client of root, then one of another user, then end root's client."""
    with ExitStack() as stack:
        control = stack.enter_context(Control(context).start())
        first = stack.enter_context(Client(context, "root's", pipe=control.pipe))
        start_beating([first], context)
        server = control.the_server()
        since_s = time.monotonic()
        other = stack.enter_context(Client(context, "other's", pipe=control.pipe, uid=_OTHER))
        met = outcome_of(other, _WAIT_S)
        watch([first], 0.5)
        found, words = fates([first], since_s)
        report.raw("beside", {"met": met.as_json(), "first": found})
        report.answer(
            "beside",
            f"While uid 0's server was running, a client of uid {_OTHER} {met.words()}; {words}.",
        )
        third = stack.enter_context(Client(context, "root's second", pipe=control.pipe))
        also = outcome_of(third, 3.0)
        report.raw("own", also.as_json())
        report.answer("own", f"After that client, another client of uid 0 {also.words()}.")
        third.close()
        left_s = time.monotonic()
        first.close()
        event = met.event or other.outcome(10)
        _tell_after(
            report, control, server, Attempt(event, (event["t"] if event else time.monotonic()) - left_s)
        )
        report.verbatim("Log lines about two users", "\n".join(control.log_lines(*_WORDS)[-60:]))


def _tell_after(report: Report, control: Control, server: int, met: Attempt) -> None:
    now = control.server_pids()
    uids = {pid: stat.uid for pid in now if (stat := stat_of(pid))}
    old = "is running" if stat_of(server) else "has exited"
    report.raw("after", {"met": met.as_json(), "servers": uids, "old": server})
    report.answer(
        "after",
        f"Counted from the end of uid 0's last client, the other client {met.words()}; the old server {old}; "
        f"uids of the servers: {', '.join(map(str, uids.values())) or 'none listed'}.",
    )


def multi_user(context: StepContext, report: Report) -> None:
    """Start clients of two users with -multiuser-server."""
    control = Control(context)
    with ExitStack() as stack:
        try:
            stack.enter_context(control)
            control.start("-multiuser-server")
        except StepError as error:
            report.answer("known", f"No: {error}.")
            raise StepSkipped("this control daemon does not support -multiuser-server") from None
        report.answer("known", "Yes.")
        first = stack.enter_context(Client(context, "root's", pipe=control.pipe))
        start_beating([first], context)
        since_s = time.monotonic()
        other = stack.enter_context(Client(context, "other's", pipe=control.pipe, uid=_OTHER))
        met = outcome_of(other, _WAIT_S)
        watch([first], 0.5)
        found, words = fates([first], since_s)
        uids = [str(stat.uid) for pid in control.server_pids() if (stat := stat_of(pid))]
        report.raw("multi", {"met": met.as_json(), "first": found, "servers": uids})
        report.answer(
            "served",
            f"A client of uid {_OTHER} {met.words()}; uids of the servers: "
            f"{', '.join(uids) or 'none listed'}; {words}.",
        )
        report.verbatim("Logs with -multiuser-server", "\n".join(control.log_lines(*_WORDS)[-40:]))


STEPS = (
    Step(
        "users",
        "Clients of two users",
        two_users,
        50,
        (
            ("beside", "Does a client of another user wait while a server runs?"),
            ("own", "Are further clients of the first user served while it waits?"),
            ("after", "When is it served?"),
        ),
        frozenset({"mps", "root"}),
    ),
    Step(
        "users_multi",
        "Clients of two users with -multiuser-server",
        multi_user,
        40,
        (
            ("known", "Does this release support -multiuser-server?"),
            ("served", "Does it serve clients of two users at the same time?"),
        ),
        frozenset({"mps", "root"}),
    ),
)
