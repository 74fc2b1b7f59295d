"""A changed configuration or program: `plan`, `reload` and `daemon-reexec`."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import click

from yunion_mps.cli.calls import blocking_transport, call_daemon
from yunion_mps.cli.options import Duration, confirm, refuse_unattended
from yunion_mps.cli.output import Column, hint_text, output_option, print_notice, show, table, wrapped
from yunion_mps.cli.who import clients_table
from yunion_mps.core.enums import NOTICE, PROBLEM
from yunion_mps.core.errors import NotFoundError, YunionError
from yunion_mps.core.reasons import (
    DRIVER_HUNG,
    GPU_NEEDS,
    LAYOUT_NEEDS,
    LAYOUT_WAITS,
    LEASES_PENDING,
    LIMITS_PENDING,
    MODE_NEEDS,
    NOT_CONFIRMED,
    SETTING_IN_USE,
    SETTING_PENDING,
    SETTING_REFUSED,
    SETTLING,
    hint_of,
)
from yunion_mps.core.units import duration_text
from yunion_mps.core.waits import AT_ONCE
from yunion_mps.http.operation import SLOW_S
from yunion_mps.http.operations import (
    GET_CLIENTS,
    GET_EVENTS,
    GET_GPUS,
    GET_PLAN,
    GET_STATUS,
    REEXEC,
    RELOAD,
    TERMINATE_CLIENT,
)
from yunion_mps.http.transport import Retrier, run_blocking
from yunion_mps.observe.holdings import ID_LENGTH
from yunion_mps.views.overview import REEXEC as REEXEC_HINT
from yunion_mps.views.overview import version_mismatch

if TYPE_CHECKING:
    from yunion_mps.answers import (
        ChangeJson,
        ChangeListJson,
        MpsClientJson,
        PendingJson,
        StatusJson,
        StatusProblemJson,
    )


#: What MIG layouts would remove.
_LOSSES = (
    Column("DEVICE", "subject"),
    Column("LEASE", lambda loss: (loss["lease"] or "")[:ID_LENGTH]),
    Column("HOLDER", "holder"),
)
_FIELDS = ("kind", "subject", "before", "after", "effect")
_COLUMNS = (
    Column("KIND", "kind", drop=1),
    Column("SUBJECT", "subject"),
    Column("BEFORE", "before", least=20),
    Column("AFTER", "after", least=20),
    Column("EFFECT", lambda change: "at once" if change["at_once"] else "later"),
)

_POLL_S = 0.5
_UNREACHABLE_TIMEOUT_S = 60.0
_REEXEC_TIMEOUT_S = 120.0
#: The default timeout of `--now`: servers end within moments.
_NOW_S = 60
_NOTHING_DONE = "nothing was changed, and no job was ended"
_RELOADED = "the configuration was reloaded, and the jobs that were listed before were ended, but no others"
#: How often `--now` lists what would be lost because there is more than before.
_MAX_LISTINGS = 5
#: What ends by itself, as leases and jobs do, is awaited, unlike what lasts until the operator acts.
_AWAITED = {LIMITS_PENDING, LEASES_PENDING, SETTING_PENDING, *LAYOUT_WAITS}
_NEEDS = {*LAYOUT_NEEDS, *SETTING_REFUSED, DRIVER_HUNG}
_REST = "everything else is in effect"
#: States in which a domain does not serve for a reason.
_NOT_SERVING = ("degraded", "failed", "backoff", "wedged")
_SEE_LOG = "see: journalctl -u yunion-mps-daemon"


@click.command("plan", short_help="Show what a reload would change.")
@output_option
def plan(output: str) -> None:
    """Show what a reload would change and when each change would take effect. Nothing is changed.

    If a configuration file has errors, all of them are printed with file and line, and plan exits with 6.

    \b
    Examples:
      yunion-mps plan
      yunion-mps plan --output json
    """
    answer = call_daemon(GET_PLAN)
    title = "A reload would change nothing."
    if answer["pending"]:
        title = "A reload would change nothing else; these changes are pending:"
    if answer["changes"]:
        title = "A reload would make these changes:"
        if answer["pending"]:
            title = "These changes are pending, or would be made by a reload:"
    show(
        answer, output, _FIELDS, answer["changes"], lambda: _text(title, answer) + _describe_drain(answer)
    )  # fmt: skip


def _describe_drain(answer: ChangeListJson) -> str:
    """Name all GPUs that would get no new jobs during a `reload --drain`: those of the control daemon, too.

    Clients of a control daemon with several GPUs share its servers, whichever GPU they use.
    """
    late = {change["subject"] for change in answer["changes"] if not change["at_once"]}
    late |= {entry["domain"] for entry in answer["pending"]}
    if not late:
        return ""
    addresses = {gpu["uuid"]: gpu["addr"] for gpu in call_daemon(GET_GPUS)["gpus"]}
    with_servers = {server["domain"] for server in call_daemon(GET_CLIENTS, seen=True)["servers"]}
    text = ""
    for domain in call_daemon(GET_STATUS)["domains"]:
        gpus = [addresses.get(uuid, uuid) for uuid in domain["gpus"]]
        is_late = not late.isdisjoint([domain["name"], *gpus])
        if is_late and len(gpus) > 1 and domain["name"] in with_servers:
            scope = f"no GPU of domain {domain['name']} ({', '.join(gpus)})"
            text += wrapped(f"With reload --drain, {scope} would get new jobs until the changes take effect.")
    return text


def _text(title: str, answer: ChangeListJson) -> str:
    """Format a table of the changes, when the later ones take effect, and what domains wait for now."""
    text = table(_COLUMNS, answer["changes"]) if answer["changes"] else ""
    for change in answer["changes"]:
        if not change["at_once"]:
            text += wrapped(f"{change['kind']} {change['subject']}: takes effect {change['effect']}")
    for entry in answer["pending"]:
        domain = f"{entry['domain']}: " if entry["domain"] else ""
        text += wrapped(f"Pending:  {domain}{entry['pending']}", 10)
    if answer["losses"]:
        text += f"A reload --now would also remove these:\n{table(_LOSSES, answer['losses'])}"
    return f"{title}\n{text}"


@click.command("reload", short_help="Reload the configuration.")
@click.option(
    "--drain", is_flag=True,
    help="Admit no new processes under the old limits, and wait for running jobs to end.",
)  # fmt: skip
@click.option(
    "--now",
    is_flag=True,
    help="List the jobs that will end and what MIG layouts will remove, ask for confirmation, then proceed.",
)
@click.option(
    "--timeout", type=Duration(), metavar="DURATION",
    help="With --drain or --now: wait at most this long (90, 90s, 10m, 2h, 1d).",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="With --now: do not ask for confirmation.")
@output_option
def reload(drain: bool, now: bool, timeout: int | None, yes: bool, output: str) -> None:
    """Read both configuration files again and apply the differences.

    New limits take effect when a new MPS server starts. While a server with the old limits still has jobs,
    the new limits are pending. With --drain, that server accepts no new clients on any of its GPUs, and
    reload waits for its jobs. With --now, its jobs are ended as by yunion-mps terminate, and then the server.
    With either, reload also waits for the leases that delay a change; jobs without MPS are not ended. A
    compute mode or time slice that waits only for processes without lease and MPS is shown as pending, and
    not waited for. If the driver refuses a setting, reload says so and, with either option, exits with 1. The
    changes are printed at the end.

    A new MIG layout waits until no lease and no process uses what it removes. With --drain, reload waits for
    that. With --now, the layout does not wait for leases, and it replaces unused instances of other programs;
    these leases and instances are listed first. Even then, it waits for processes outside MPS to end.

    If a configuration file has errors, all of them are printed with file and line, reload exits with 6, and
    nothing is changed.

    \b
    Examples:
      yunion-mps plan; yunion-mps reload
      yunion-mps reload --drain --timeout 1h
      yunion-mps reload --now
    """
    if drain and now:
        raise click.UsageError("--drain and --now are mutually exclusive: use one of them.")
    if timeout and not (drain or now):
        raise click.UsageError("--timeout requires --drain or --now.")
    if yes and not now:
        raise click.UsageError("--yes requires --now.")
    if now:
        refuse_unattended(yes)
        answer, status = _reload_now(yes)
    else:
        answer = call_daemon(RELOAD, mode="drain" if drain else None)
        status = call_daemon(GET_STATUS)
    waits = drain or now
    if now and not timeout:
        timeout = _NOW_S
    try:
        if waits:
            status = _wait(timeout or None)
            answer = _in_effect(answer, status)
    finally:
        show(
            answer, output, _FIELDS, answer["changes"], lambda: _describe_reload(answer, status, waits=waits)
        )
        sys.stdout.flush()
    if version_mismatch(status):
        print_notice(f"{version_mismatch(status)}: {REEXEC_HINT}")
    _refuse_if_not_serving(status)


def _with(answer: ChangeListJson | None, later: ChangeListJson) -> ChangeListJson:
    """Return a reload's answer with the further changes of a later reload, and what is pending after that."""
    if answer is None:
        return later
    listed = {(change["kind"], change["subject"]) for change in answer["changes"]}
    others = [change for change in later["changes"] if (change["kind"], change["subject"]) not in listed]
    return {**later, "changes": [*answer["changes"], *others]}


def _in_effect(answer: ChangeListJson, status: StatusJson) -> ChangeListJson:
    """Return a reload's answer as it is once all of its changes are in effect.

    GPUs that are missing, whose modes the operator has to change, or whose settings wait for processes
    without lease and MPS stay pending, but are no reason to fail.
    """
    changes: list[ChangeJson] = []
    for change in answer["changes"]:
        changes.append({**change, "effect": AT_ONCE, "at_once": True})
    pending: list[PendingJson] = []
    for problem in _pending(status, {*MODE_NEEDS, *GPU_NEEDS, SETTING_IN_USE}):
        text = f"{problem['text']}; {problem['hint']}"
        pending.append({"domain": "", "pending": text, "leases": []})
    return {**answer, "changes": changes, "pending": pending}


def _describe_reload(answer: ChangeListJson, status: StatusJson, *, waits: bool) -> str:
    title = "Reloaded with these changes:" if answer["changes"] else "Reloaded; nothing has changed."
    text = _text(title, answer)
    if any(domain["waits_for"] for domain in status["domains"]) and not waits:
        hint = (
            "List the jobs that delay the change: yunion-mps who --clients; wait for them: --drain; "
            "end them: --now"
        )
        hints = {problem["hint"] for problem in _pending(status, {LIMITS_PENDING})}
        of_idle_leases = hints - {hint_of(LIMITS_PENDING)}
        hint = min(of_idle_leases, default=hint)
        text += hint_text(hint[0].upper() + hint[1:], "")
    if any(entry["leases"] for entry in answer["pending"]):
        text += "See who holds the leases: yunion-mps who\n"
    return text


def _reload_now(yes: bool) -> tuple[ChangeListJson, StatusJson]:
    """List what `--now` ends or removes, ask for confirmation, and do it; return the answer and the status.

    If more would be lost than was listed, it is listed and has to be confirmed again.
    """
    accepted: ChangeListJson | None = None
    for _ in range(_MAX_LISTINGS):
        plan = call_daemon(GET_PLAN)
        _confirm(plan, yes, _RELOADED if accepted else _NOTHING_DONE)
        try:
            # The reload must be accepted before any job is ended.
            if plan["clients"]:
                accepted = _with(accepted, call_daemon(RELOAD))
                _end(plan["clients"])
            answer = call_daemon(RELOAD, mode="now", confirmation=plan["confirmation"])
        except YunionError as error:
            if error.code != NOT_CONFIRMED:
                raise
            print_notice(error.message)
        else:
            for ended in answer["errors"]:
                print_notice(ended)
            return _with(accepted, answer), call_daemon(GET_STATUS)
    text = f"{_MAX_LISTINGS} times, more jobs or leases came after the list, so the reload was not completed"
    raise YunionError(text, "admit no new jobs, and wait for the running ones: yunion-mps reload --drain")


def _confirm(plan: ChangeListJson, yes: bool, consequence: str) -> None:
    """Print what `--now` ends or removes; raises YunionError, with the `consequence`, unless confirmed."""
    verb = "will" if yes else "would"
    if plan["clients"]:
        table_of_jobs = clients_table(plan["clients"])
        click.echo(f"These jobs {verb} be ended:\n{table_of_jobs}", nl=False, err=True)
    for error in plan["errors"]:
        print_notice(f"not all clients are known: {error}")
    if plan["losses"]:
        losses = table(_LOSSES, plan["losses"])
        click.echo(f"The MIG layouts {verb} remove these:\n{losses}", nl=False, err=True)
    if plan["confirmation"]:
        confirm("Continue?", yes, consequence)


def _end(jobs: Iterable[MpsClientJson]) -> None:
    """End the jobs like `terminate`: without its MPS server, a job gets an error but may not exit."""
    for job in jobs:
        try:
            termination = call_daemon(TERMINATE_CLIENT, pid=job["pid"], started=job["started"] or "")
        except NotFoundError:  # it has ended
            continue
        except YunionError as error:
            print_notice(f"PID {job['pid']}: {error.message}")
            continue
        if not termination["ended"]:
            print_notice(
                f"PID {job['pid']} is still running; end it: yunion-mps terminate {job['pid']} --force"
            )


def _wait(timeout_s: int | None) -> StatusJson:
    """Return the status once nothing is pending and the devices of changed GPUs can be leased.

    Raises YunionError if that takes too long.
    """
    begin_s = time.monotonic()
    retrier = Retrier(blocking_transport(), _UNREACHABLE_TIMEOUT_S, print_notice)
    announced = ""
    before = ""
    while True:
        status = run_blocking(retrier.call(GET_STATUS))
        waits = [*_pending(status, _AWAITED), *_settling(status)]
        pending = _texts(waits)
        if not pending:
            _refuse_if_still_pending(status)
            if announced:
                is_in_effect = not _pending(status, {SETTING_IN_USE})
                print_notice("all changes are in effect" if is_in_effect else _REST)
            return status
        is_lasting = pending == before or any(wait["code"] in _AWAITED for wait in waits)
        if pending != announced and is_lasting:  # a start of a control daemon is over in a moment
            print_notice(f"waiting: {pending}")
            announced = pending
        before = pending
        if timeout_s is not None and time.monotonic() > begin_s + timeout_s:
            hint = "it takes effect automatically; see: yunion-mps status"
            everything = _texts([*_pending(status, _AWAITED | _NEEDS), *_settling(status)])
            message = f"still pending after {duration_text(timeout_s)}: {everything}; {_REST}"
            raise YunionError(message, hint, waits[0]["code"])
        time.sleep(_POLL_S)


def _pending(status: StatusJson, codes: Collection[str]) -> list[StatusProblemJson]:
    pending: list[StatusProblemJson] = []
    for problem in status["problems"]:
        if problem["code"] in codes and problem["level"] != NOTICE:
            pending.append(problem)
    return pending


def _settling(status: StatusJson) -> list[StatusProblemJson]:
    """Return the problems of GPUs whose change has begun; their devices cannot be leased until it is done."""
    settling: list[StatusProblemJson] = []
    for problem in status["problems"]:
        if problem["code"] in SETTLING and problem["level"] == PROBLEM:
            settling.append(problem)
    return settling


def _texts(problems: Iterable[StatusProblemJson]) -> str:
    return "; ".join(problem["text"] for problem in problems)


def _refuse_if_still_pending(status: StatusJson) -> None:
    """Raise YunionError if the operator may have to act before all is in effect."""
    lasting = _pending(status, _NEEDS)
    if lasting:
        message = f"still pending: {_texts(lasting)}; {_REST}"
        raise YunionError(message, lasting[0]["hint"], lasting[0]["code"])


def _refuse_if_not_serving(status: StatusJson) -> None:
    """Raise YunionError if the configuration was applied, but a control daemon does not serve."""
    errors: list[str] = []
    codes: set[str] = set()
    for domain in status["domains"]:
        if domain["state"] in _NOT_SERVING:
            errors.append(f"domain {domain['name']} is {domain['state']}: {domain['reason']}")
            codes.add(domain["reason_code"])
    if errors:
        hint = "the configuration was reloaded; see: yunion-mps status"
        code = codes.pop() if len(codes) == 1 else ""
        raise YunionError("\n".join(errors), hint, code)


@click.command("daemon-reexec", hidden=True)
def reexec_daemon() -> None:
    """Replace the running daemon with the installed version without ending jobs.

    The packages run this command after an upgrade. The process, its control daemons, the jobs, their limits
    and the socket are kept; requests are delayed briefly. The new program is checked first; if it cannot
    start, the running one continues.

    \b
    Examples:
      yunion-mps daemon-reexec
    """
    before = call_daemon(GET_STATUS)
    last = call_daemon(GET_EVENTS, limit=1)["last"]
    call_daemon(REEXEC, until_closed=True)
    gone_s = time.monotonic()
    retrier = Retrier(blocking_transport(), _REEXEC_TIMEOUT_S, print_notice)
    after = run_blocking(retrier.call(GET_STATUS, SLOW_S))
    away_s = time.monotonic() - gone_s
    for event in call_daemon(GET_EVENTS, after=last, kind="daemon")["events"]:
        if event["severity"] == "error":
            raise YunionError(event["what"], f"{event['consequence']}; {_SEE_LOG}", event["code"])
    if after["pid"] != before["pid"]:
        message = f"the daemon was restarted: its PID changed from {before['pid']} to {after['pid']}"
        raise YunionError(message, _SEE_LOG)
    version = before["version"]
    if after["version"] != version:
        version += f" -> {after['version']}"
    click.echo(
        f"The daemon ({version}) was re-executed as PID {after['pid']}; it did not answer for {away_s:.2f} s"
    )
