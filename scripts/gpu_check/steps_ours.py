"""The daemon of this checkout on this GPU: its budgets, its recovery, what it takes over and what not."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from contextlib import ExitStack

from gpu_check.asking import Client, pump
from gpu_check.control import Control, listener
from gpu_check.fates import attempt, fates, start_beating, watch
from gpu_check.ours import SHARES, Ours
from gpu_check.processes import stat_of
from gpu_check.steps_memory import in_words, measure
from gpu_check.values import Report, Step, Surroundings, Trouble, seconds

#: Our daemon gives live clients some time to end when it is stopped.
_STOP_S = 14.0


def recovery(around: Surroundings, report: Report) -> None:
    """The daemon starts, its budgets are tried, and its control daemon is killed without and with clients."""
    with Ours(around) as ours:
        try:
            ready_s = ours.start()
            report.answer("ready", f"It was READY after {seconds(ready_s)}.")
            limit = _memory_total_mib(around) // SHARES
            found = measure(around, ours.pipe, limit)
            report.raw("budget", found)
            report.answer("budget", in_words(f"A client of one of {SHARES} devices", found))
            report.answer("alone", _kill_control(around, report, ours, "alone", []))
            with ExitStack() as stack:
                clients = [stack.enter_context(Client(around, name, pipe=ours.pipe)) for name in "ab"]
                start_beating(clients, around)
                report.answer("clients", _kill_control(around, report, ours, "clients", clients))
        finally:
            report.verbatim("What our daemon logged", "\n".join(ours.words().splitlines()[-60:]))


def _memory_total_mib(around: Surroundings) -> int:
    """NVML's total, of which budgets are shares: more than CUDA's. From nvidia-smi, e.g. `143771 MiB`."""
    words = around.host.settings.get("memory_total", "").split()
    return int(words[0]) if words and words[0].isdigit() else int(around.host.gpu["memory_mib"])


def _kill_control(around: Surroundings, report: Report, ours: Ours, name: str, clients: list[Client]) -> str:
    """SIGKILL of the daemon's control daemon: how long until another listens, and until a new client runs."""
    old = listener(ours.pipe)
    if not old:
        raise Trouble("no control daemon listens where our daemon should have one")
    since_s = time.monotonic()
    os.kill(old, signal.SIGKILL)
    listening_s = None
    while time.monotonic() < since_s + 10:
        if listener(ours.pipe) not in (0, old):
            listening_s = time.monotonic() - since_s
            break
        time.sleep(0.002)
    met = attempt(around, ours.pipe, 10)
    all_s = time.monotonic() - since_s
    watch(clients, 1.0)
    found, words = fates(clients, since_s)
    report.raw(
        f"kill_{name}", {"listening_s": listening_s, "new": met.as_json(), "clients": found, "all_s": all_s}
    )
    began = f"after {seconds(listening_s)}" if listening_s is not None else "not within 10 s"
    return (
        f"Another control daemon listened {began}; a new client, started then, {met.words()} "
        f"({seconds(all_s)} after the SIGKILL, its end included)" + (f"; {words}." if clients else ".")
    )


def adoption(around: Surroundings, report: Report) -> None:
    """The daemon is killed under live clients and started again; then stopped under them."""
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(around))
        stack.callback(
            lambda: report.verbatim("What our daemon logged", "\n".join(ours.words().splitlines()[-60:]))
        )
        ours.start()
        clients = [stack.enter_context(Client(around, name, pipe=ours.pipe)) for name in "ab"]
        start_beating(clients, around)
        old = listener(ours.pipe)
        since_s = time.monotonic()
        ours.signal(signal.SIGKILL)
        ours.wait(5)
        time.sleep(0.5)  # a control daemon that would end with our daemon has had its time
        lives = "lived on" if listener(ours.pipe) == old and stat_of(old) else "did not live on"
        try:
            again = f"was READY again after {seconds(ours.start(20))}"
        except Trouble as error:
            again = f"was not READY again ({error})"
        same = "the same control daemon" if listener(ours.pipe) == old else "another control daemon"
        watch(clients, 0.5)
        found, words = fates(clients, since_s)
        met = attempt(around, ours.pipe, 8)
        report.raw("adoption", {"again": again, "same": same, "clients": found, "new": met.as_json()})
        report.answer(
            "adopted",
            f"After the daemon's SIGKILL the control daemon {lives}; a new daemon {again}, with {same}; "
            f"{words}; a new client {met.words()}.",
        )
        _stop(report, ours, clients)


def _stop(report: Report, ours: Ours, clients: list[Client]) -> None:
    since_s = time.monotonic()
    ours.signal(signal.SIGTERM)
    pump(clients, since_s + _STOP_S, lambda: ours.wait(0) is not None)
    status = ours.wait(0)
    watch(clients, 0.5)
    found, words = fates(clients, since_s)
    took = seconds(time.monotonic() - since_s)
    ended = (
        f"had not ended {took} after it" if status is None else f"ended with status {status} within {took}"
    )
    report.raw("stop", {"status": status, "clients": found})
    report.answer("stop", f"Told to stop with live clients, it {ended}; {words}.")


def foreign(around: Surroundings, report: Report) -> None:
    """The daemon meets a control daemon that somebody else started, with live clients."""
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(around))
        control = stack.enter_context(Control(around, pipe=ours.pipe, log=ours.log).start())
        os.chmod(ours.log, 0o755)
        client = stack.enter_context(Client(around, "a", pipe=control.pipe))
        start_beating([client], around)
        since_s = time.monotonic()
        try:
            said = f"was READY after {seconds(ours.start(15))}"
        except Trouble as error:
            said = f"did not start: {error}"
        watch([client], 1.0)
        found, words = fates([client], since_s)
        kept = (
            "still listens"
            if control.alive and listener(control.pipe) == control.pid
            else "does NOT listen any more"
        )
        report.raw("foreign", {"said": said, "client": found, "kept": kept})
        with contextlib.suppress(OSError):
            report.verbatim("What our daemon logged", "\n".join(ours.words().splitlines()[-30:]))
        report.answer("foreign", f"Our daemon {said}; the other control daemon {kept}; {words}.")


STEPS = (
    Step(
        "ours_recovery",
        "Our daemon: budgets and recovery",
        recovery,
        60,
        (
            ("ready", "How long until our daemon is READY?"),
            ("budget", "Does the budget of one of its devices hold?"),
            ("alone", "How long until it has recovered from its control daemon's SIGKILL with no client?"),
            ("clients", "And with live clients?"),
        ),
        frozenset({"mps"}),
    ),
    Step(
        "ours_adoption",
        "Our daemon: taking over, and stopping",
        adoption,
        60,
        (
            (
                "adopted",
                "What do live clients notice when our daemon is killed and takes its control daemon over?",
            ),
            ("stop", "What do they see when it is stopped?"),
        ),
        frozenset({"mps"}),
    ),
    Step(
        "ours_foreign",
        "Our daemon: a control daemon of somebody else",
        foreign,
        40,
        (("foreign", "What does our daemon do with it, and what do its clients notice?"),),
        frozenset({"mps"}),
    ),
)
