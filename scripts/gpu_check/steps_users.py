"""Clients of two users at one control daemon."""

from __future__ import annotations

import time
from contextlib import ExitStack

from gpu_check.clients import Attempt, Client, fates, outcome_of, start_beating, watch
from gpu_check.processes import Control, stat_of
from gpu_check.values import Report, Skip, Step, Surroundings, Trouble

_OTHER = 65534
_WAIT_S = 5.0
_WORDS = ("user", "server", "client", "pending", "shut")


def two_users(around: Surroundings, report: Report) -> None:
    """Root's client has a server; then another user's client comes; then root's client leaves."""
    with ExitStack() as stack:
        control = stack.enter_context(Control(around).start())
        ours = stack.enter_context(Client(around, "root's", pipe=control.pipe))
        start_beating([ours], around)
        server = control.the_server()
        since_s = time.monotonic()
        theirs = stack.enter_context(Client(around, "other's", pipe=control.pipe, uid=_OTHER))
        met = outcome_of(theirs, _WAIT_S)
        watch([ours], 0.5)
        found, words = fates([ours], since_s)
        report.raw("beside", {"met": met.as_json(), "ours": found})
        report.answer(
            "beside",
            f"With a server of uid 0 there, a client of uid {_OTHER} {met.words()}; meanwhile {words}.",
        )
        third = stack.enter_context(Client(around, "root's second", pipe=control.pipe))
        also = outcome_of(third, 3.0)
        report.raw("own", also.as_json())
        report.answer("own", f"With that client there, another client of uid 0 {also.words()}.")
        third.close()
        left_s = time.monotonic()
        ours.close()
        event = met.event or theirs.outcome(10)
        _tell_after(
            report, control, server, Attempt(event, (event["t"] if event else time.monotonic()) - left_s)
        )
        report.verbatim("What the logs say of two users", "\n".join(control.log_lines(*_WORDS)[-60:]))


def _tell_after(report: Report, control: Control, server: int, met: Attempt) -> None:
    now = control.server_pids()
    uids = {pid: stat.uid for pid in now if (stat := stat_of(pid))}
    old = "lives" if stat_of(server) else "is gone"
    report.raw("after", {"met": met.as_json(), "servers": uids, "old": server})
    report.answer(
        "after",
        f"Counted from the end of uid 0's last client, the other one {met.words()}; the old server {old}, "
        f"and the servers are of uid {', '.join(map(str, uids.values())) or '(none listed)'}.",
    )


def multi_user(around: Surroundings, report: Report) -> None:
    """The same with -multiuser-server."""
    control = Control(around)
    with ExitStack() as stack:
        try:
            stack.enter_context(control)
            control.start("-multiuser-server")
        except Trouble as error:
            report.answer("known", f"The program does not run with -multiuser-server: {error}.")
            raise Skip("this control daemon does not know -multiuser-server") from None
        report.answer("known", "The program runs with -multiuser-server.")
        ours = stack.enter_context(Client(around, "root's", pipe=control.pipe))
        start_beating([ours], around)
        since_s = time.monotonic()
        theirs = stack.enter_context(Client(around, "other's", pipe=control.pipe, uid=_OTHER))
        met = outcome_of(theirs, _WAIT_S)
        watch([ours], 0.5)
        found, words = fates([ours], since_s)
        uids = [str(stat.uid) for pid in control.server_pids() if (stat := stat_of(pid))]
        report.raw("multi", {"met": met.as_json(), "ours": found, "servers": uids})
        report.answer(
            "served",
            f"A client of uid {_OTHER} {met.words()}; the servers are of uid "
            f"{', '.join(uids) or '(none listed)'}; meanwhile {words}.",
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
            ("own", "Are the first user's further clients served while it waits?"),
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
            ("known", "Does this release know -multiuser-server?"),
            ("served", "Are two users' clients served at once with it?"),
        ),
        frozenset({"mps", "root"}),
    ),
)
