"""`plan`, `reload` and `daemon-reexec`: what changes, when, and what it waits for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from yunion_mps import __version__
from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_TIME_SLICE, REFUSED
from yunion_mps.core.errors import ConfigError, Problem
from yunion_mps.core.models import Event, Snapshot
from yunion_mps.core.reasons import (
    CONTROL_DAEMON_ERROR,
    DOMAIN_APPLYING,
    DRIVER_HUNG,
    LAYOUT_NEEDS,
    MIG_IN_USE,
    SETTING_IN_USE,
    SETTING_PENDING,
    SETTING_REFUSED,
    Reason,
)
from yunion_mps.core.waits import Users, wait_reason
from yunion_mps.supervisor.host_conditions import PendingSetting

from integration.daemon_host import eventually
from unit.cli.conftest import Cli, Done
from unit.http import fake_services, snapshots
from unit.http.fake_services import CHANGE_AT_ONCE, LATE_CHANGE, PENDING_REASON, PLANNED, RELOADED
from unit.http.server_host import PATIENCE_S
from unit.http.test_hand_over import go_on, hand_over

#: A change that waits for the server of a job.
ENDING: fake_services.Json = {**PLANNED, "clients": [fake_services.CLIENT], "confirmation": "70be"}
TABLE = """\
KIND     SUBJECT                  BEFORE              AFTER                EFFECT
setting  cuda_mps_stop_timeout_s  10                  20                   at once
budget   00:06.0                  4 x 5760 MiB, 25 %  2 x 11520 MiB, 50 %  later
budget 00:06.0: takes effect once the MPS server (PID 4250) has ended
"""
IN_EFFECT = f"Reloaded with these changes:\n{TABLE.partition('later')[0]}at once\n"
PENDING = f"Pending:  host: {PENDING_REASON}\n"
HINT = (
    "List the jobs that delay the change: yunion-mps who --clients; wait for them: --drain; end them: --now\n"
)
SAME = "Reloaded; nothing has changed.\n"
BAD = ConfigError([Problem("a.conf", 3, "x is 0", "write 1"), Problem("b.yml", None, "y", "z")])
TOLD = """\
yunion-mps: a.conf:3: x is 0: write 1
yunion-mps: b.yml: y: z [invalid_configuration]
yunion-mps: fix these lines, then run: yunion-mps config check
"""
CLIENTS = r"""These jobs will be ended:
 PID  USER   DEVICE      MEMORY  SERVER  AGE +COMMAND
4260  alice  00:06.0-1  512 MiB    4250  \d+d +python train.py
"""


REST = "everything else is in effect"
LOSSES = """\
DEVICE      LEASE     HOLDER
00:06.0-g2  7c1f0e7a  python (PID 4260, alice)
00:06.0-g5  -         another program (3g.40gb)
"""


def pending(text: str = PENDING_REASON, state: str = "ready", reason: str = "") -> Snapshot:
    """The reference case, with something pending; a new version with each call."""
    shown = snapshots.reference()
    domain = shown.domains[0]._replace(
        pending=text,
        state=state,
        reason=Reason(reason, CONTROL_DAEMON_ERROR),
        waits_for=(4250,) if text else (),
    )
    return snapshots.with_conditions(shown._replace(version=id(domain), domains=(domain,)))


def test_a_plan_that_changes_nothing_says_so_and_what_is_pending_already(own_cli: Cli) -> None:
    assert own_cli.good("plan") == "A reload would change nothing.\n"
    own_cli.host.reloader.planned = {**fake_services.NO_CHANGES, "pending": RELOADED["pending"]}
    title = "A reload would change nothing else; these changes are pending:\n"
    assert own_cli.good("plan") == title + PENDING
    own_cli.host.reloader.planned = RELOADED
    title = "These changes are pending, or would be made by a reload:\n"
    assert own_cli.good("plan") == title + TABLE + PENDING


@pytest.mark.parametrize(("scope", "servers"), [("host", 1), ("gpu", 1), ("host", 0)])
def test_a_plan_names_every_gpu_that_a_drain_would_close(own_cli: Cli, scope: str, servers: int) -> None:
    own_cli.host.snapshot = snapshots.snapshot(snapshots.P40, snapshots.H100, replicas=4, scope=scope)
    own_cli.host.clients.listed = fake_services.clients(servers=(fake_services.SERVER,) * servers)
    own_cli.host.reloader.planned = {**fake_services.NO_CHANGES, "changes": [LATE_CHANGE]}
    gpus = "00:06.0, 0001:e1:00.0"
    told = f"With reload --drain, no GPU of domain host ({gpus}) would get new jobs until the changes take"
    assert (told in own_cli.good("plan")) is (scope == "host" and servers == 1)


def test_a_missing_value_before_or_after_is_a_dash(own_cli: Cli) -> None:
    change = {
        **CHANGE_AT_ONCE,
        "kind": "control daemon",
        "subject": "host",
        "before": "",
        "after": "1 GPU in /p",
    }
    own_cli.host.reloader.planned = {**fake_services.NO_CHANGES, "changes": [change]}
    assert "control daemon  host     -       1 GPU in /p  at once\n" in own_cli.good("plan")


@pytest.mark.parametrize("command", ["plan", "reload"])
def test_changes_are_printed_for_programs_too(own_cli: Cli, command: str) -> None:
    own_cli.host.reloader.planned = own_cli.host.reloader.reloaded = RELOADED
    header = ["kind", "subject", "before", "after", "effect"]
    assert own_cli.read(command) == (
        RELOADED,
        [header, list(CHANGE_AT_ONCE.values())[:-1], list(LATE_CHANGE.values())[:-1]],
    )


def test_pending_changes_are_wrapped_on_a_narrow_terminal(own_cli: Cli) -> None:
    why = "the new division of the GPU waits for lease 7c1f0e7a of alice (PID 4260) to end"
    waits = f"GPU 00:06.0: 1 device pending: {why}"
    own_cli.host.reloader.planned = {
        "changes": [],
        "pending": [{"domain": "host", "pending": waits, "leases": []}],
        "losses": [],
    }
    lines = own_cli.on_terminal(80, "plan")
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).endswith(f"Pending: host: {waits}")


@pytest.mark.parametrize(
    "command", [["plan"], ["reload"], ["reload", "--drain"], ["reload", "--now", "--yes"]]
)
def test_bad_files_are_reported_and_change_nothing(own_cli: Cli, command: list[str]) -> None:
    own_cli.host.reloader.error = BAD
    assert own_cli(*command) == (6, "", TOLD)
    assert own_cli.host.reloader.done == []


def test_a_reload_shows_what_it_changed_and_what_is_pending(own_cli: Cli) -> None:
    own_cli.host.reloader.reloaded = RELOADED
    own_cli.host.snapshot = pending()
    assert own_cli.good("reload") == "Reloaded with these changes:\n" + TABLE + PENDING + HINT
    assert own_cli.host.reloader.done == ["reload"]


def test_a_reload_that_waits_for_an_idle_server_says_what_ends_it(own_cli: Cli) -> None:
    own_cli.host.reloader.reloaded = RELOADED
    own_cli.host.snapshot, own_cli.host.clients.listed = pending(), fake_services.clients()
    hint = "Wait a moment, or run: yunion-mps reload --drain; "
    hint += "the driver lists no job of the MPS server (PID 4250)\n"
    assert own_cli.good("reload").endswith(PENDING + hint)


@pytest.mark.parametrize("state", ["degraded", "failed", "backoff", "wedged"])
def test_a_reload_after_which_something_does_not_serve_says_so_and_fails(own_cli: Cli, state: str) -> None:
    own_cli.host.snapshot = pending("", state, "it does not start")
    told = f"yunion-mps: domain host is {state}: it does not start [control_daemon_error]\n"
    told += "yunion-mps: the configuration was reloaded; see: yunion-mps status\n"
    assert own_cli("reload") == (1, SAME, told)


def test_a_drain_waits_until_nothing_is_pending(own_cli: Cli) -> None:
    own_cli.host.reloader.reloaded = RELOADED
    own_cli.host.snapshot = pending()
    with own_cli.start("reload", "--drain") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"yunion-mps: waiting: host: {PENDING_REASON}\n"
        own_cli.host.snapshot = pending("and then for this")
        assert process.stderr.readline() == "yunion-mps: waiting: host: and then for this\n"
        assert process.poll() is None
        own_cli.host.snapshot = pending("")
        told = (IN_EFFECT, "yunion-mps: all changes are in effect\n")
        assert (process.communicate(timeout=PATIENCE_S), process.returncode) == (told, 0)
    assert own_cli.host.reloader.done == ["reload drain"]


def test_a_drain_waits_until_the_devices_can_be_leased(own_cli: Cli) -> None:
    shown = pending("", "applying")
    reason = Reason("its limits are being set", DOMAIN_APPLYING)
    applying = shown._replace(domains=(shown.domains[0]._replace(reason=reason),))
    own_cli.host.snapshot = snapshots.with_conditions(applying)
    with own_cli.start("reload", "--drain") as process:
        assert process.stderr is not None
        waiting = "yunion-mps: waiting: domain host is applying: its limits are being set\n"
        assert process.stderr.readline() == waiting
        assert process.poll() is None
        own_cli.host.snapshot = pending("")
        assert process.communicate(timeout=PATIENCE_S) == (SAME, "yunion-mps: all changes are in effect\n")
    assert process.returncode == 0


@pytest.mark.parametrize("options", [[], ["--drain"]])
def test_a_reload_without_changes_says_so_and_waits_for_nothing(own_cli: Cli, options: list[str]) -> None:
    assert own_cli.good("reload", *options) == SAME


def test_a_drain_that_takes_too_long_fails_and_says_what_it_waited_for(own_cli: Cli) -> None:
    own_cli.host.snapshot = pending()
    told = f"yunion-mps: waiting: host: {PENDING_REASON}\n"
    told += f"yunion-mps: still pending after 1s: host: {PENDING_REASON}; {REST} [limits_pending]\n"
    told += "yunion-mps: it takes effect automatically; see: yunion-mps status\n"
    assert own_cli("reload", "--drain", "--timeout", "1") == (1, SAME, told)


def test_now_says_whom_it_ends_and_with_yes_does_not_ask(own_cli: Cli) -> None:
    own_cli.host.reloader.planned, own_cli.host.reloader.reloaded = ENDING, fake_services.NO_CHANGES
    done = own_cli("reload", "--now", "--yes")
    assert (done.code, done.out) == (0, SAME)
    assert re.fullmatch(CLIENTS, done.err)
    assert own_cli.host.reloader.done == ["plan", "reload", "reload now"]
    started = fake_services.CLIENT["started"]  # so that no other process which gets its PID is terminated
    assert f"terminate 4260 since {started} for {os.geteuid()}" in own_cli.host.clients.done


def test_now_shows_what_is_in_effect_when_it_ends(own_cli: Cli) -> None:
    own_cli.host.reloader.reloaded, own_cli.host.clients.listed = RELOADED, fake_services.clients()
    assert own_cli.good("reload", "--now", "--yes") == IN_EFFECT


def test_now_says_which_job_it_could_not_end(own_cli: Cli) -> None:
    own_cli.host.reloader.planned, own_cli.host.clients.ended = ENDING, False
    done = own_cli("reload", "--now", "--yes")
    assert done.err.endswith("PID 4260 is still running; end it: yunion-mps terminate 4260 --force\n")


def test_reload_now_waits_for_the_jobs_up_to_its_timeout(own_cli: Cli) -> None:
    own_cli.host.reloader.reloaded, own_cli.host.snapshot = RELOADED, pending()
    own_cli.host.clients.listed = fake_services.clients()
    done = own_cli("reload", "--now", "--yes", "--timeout", "1")
    assert done.out == "Reloaded with these changes:\n" + TABLE + PENDING
    assert (done.code, own_cli.host.reloader.done) == (1, ["plan", "reload now"])
    assert f"still pending after 1s: host: {PENDING_REASON}; {REST} [limits_pending]\n" in done.err


def test_now_asks_also_if_not_all_clients_are_known(own_cli: Cli) -> None:
    unknown = {"errors": ["domain host: it does not answer"], "confirmation": "4b1d"}
    own_cli.host.reloader.planned = {**PLANNED, **unknown}
    code, text = own_cli.answered(b"n\n", "reload", "--now")
    assert (code, own_cli.host.reloader.done) == (1, ["plan"])
    assert "yunion-mps: not all clients are known: domain host: it does not answer" in text


NOT_DONE = "yunion-mps: cancelled: nothing was changed, and no job was ended\n"


@pytest.mark.parametrize(
    ("answer", "code", "end"),
    [
        (b"y\n", 0, f"Continue? [y/N]: y\n{SAME}"),
        (b"n\n", 1, f"Continue? [y/N]: n\n{NOT_DONE}"),
        (b"\n", 1, f"Continue? [y/N]: \n{NOT_DONE}"),
        (b"\x04", 130, ""),
    ],
)
def test_reload_now_asks_for_confirmation(own_cli: Cli, answer: bytes, code: int, end: str) -> None:
    own_cli.host.reloader.planned = ENDING
    status, text = own_cli.answered(answer, "reload", "--now")
    assert status == code
    assert text.startswith("These jobs would be ended:\n")
    assert text.endswith(end)
    assert own_cli.host.reloader.done == (["plan"] if code else ["plan", "reload", "reload now"])


def test_nothing_is_asked_if_no_job_would_be_ended(own_cli: Cli) -> None:
    own_cli.host.clients.listed = fake_services.clients()
    own_cli.host.reloader.planned = PLANNED
    with own_cli.start("reload", "--now", "--yes", stdin=subprocess.DEVNULL) as process:
        assert process.communicate(timeout=PATIENCE_S) == (SAME, "")
    code, text = own_cli.answered(b"n\n", "reload", "--now")
    assert (code, "Continue?" in text) == (0, False)
    assert text.endswith(SAME)


FOREIGN = {"subject": "00:06.0-g5", "lease": None, "holder": "another program (3g.40gb)"}
LOSING: fake_services.Json = {
    **fake_services.NO_CHANGES,
    "losses": [fake_services.EXAMPLES["Loss"], FOREIGN],
    "confirmation": "10ss",
}


def test_a_plan_names_the_leases_and_instances_that_now_would_take_away(own_cli: Cli) -> None:
    own_cli.host.reloader.planned = LOSING
    title = "A reload would change nothing.\nA reload --now would also remove these:\n"
    assert own_cli.good("plan") == title + LOSSES


def test_reload_now_asks_before_it_takes_leased_instances_away(own_cli: Cli) -> None:
    own_cli.host.reloader.planned = LOSING
    code, text = own_cli.answered(b"n\n", "reload", "--now")
    assert (code, own_cli.host.reloader.done) == (1, ["plan"])
    assert text == f"The MIG layouts would remove these:\n{LOSSES}Continue? [y/N]: n\n{NOT_DONE}"
    done = own_cli("reload", "--now", "--yes")
    assert (done.code, own_cli.host.reloader.done) == (0, ["plan", "plan", "reload now"])
    assert done.err == f"The MIG layouts will remove these:\n{LOSSES}"


def test_now_lists_again_what_began_after_the_list(own_cli: Cli) -> None:
    """The daemon refuses the first confirmation, because it would lose more than was listed."""
    later = {**ENDING, "confirmation": "70be2", "clients": [{**fake_services.CLIENT, "pid": 4270}]}
    own_cli.host.reloader.plans = [ENDING, later]
    code, text = own_cli.answered(b"y\nn\n", "reload", "--now")
    assert (code, own_cli.host.reloader.done) == (1, ["plan", "reload", "reload now", "plan"])
    first, told, second = text.partition(f"yunion-mps: {fake_services.MORE_LOST}")
    assert (told, "\n4260  " in first, "\n4270  " in second) == (
        f"yunion-mps: {fake_services.MORE_LOST}",
        True,
        True,
    )
    assert "the jobs that were listed before were ended, but no others" in second
    assert [one for one in own_cli.host.clients.done if "terminate" in one] == [
        f"terminate 4260 since {fake_services.CLIENT['started']} for {os.geteuid()}"
    ]


def test_now_gives_up_if_new_jobs_begin_each_time(own_cli: Cli) -> None:
    own_cli.host.reloader.plans = [{**ENDING, "confirmation": f"old{number}"} for number in range(5)]
    own_cli.host.reloader.planned = {**ENDING, "confirmation": "new"}
    done = own_cli("reload", "--now", "--yes")
    assert (done.code, own_cli.host.reloader.done.count("reload now")) == (1, 5)
    assert "5 times, more jobs or leases came after the list" in done.err
    assert "yunion-mps reload --drain" in done.err


def without_its_layout(reason: Reason) -> Snapshot:
    """A GPU whose MIG instances serve although its MIG layout is not in effect."""
    shown = snapshots.mig()
    return snapshots.with_conditions(
        shown._replace(version=id(shown)), layouts={snapshots.IN_MIG_MODE.uuid: reason}
    )


@pytest.mark.parametrize("option", ["--drain", "--now"])
def test_a_reload_waits_for_layouts_too(own_cli: Cli, option: str) -> None:
    why = "GPU 81:00.0: it waits for leases"
    own_cli.host.snapshot = without_its_layout(Reason("it waits for leases", MIG_IN_USE))
    done = own_cli("reload", option, *(["--yes"] if option == "--now" else []), "--timeout", "1")
    assert done.code == 1
    assert done.err.startswith(
        f"yunion-mps: waiting: {why}\nyunion-mps: still pending after 1s: {why}; {REST} [mig_in_use]\n"
    )


def with_time_slice_that_waits(users: Users, code: str) -> Snapshot:
    shown = snapshots.reference()
    why = wait_reason("the restoration of its time slice", users, code)
    setting = PendingSetting(ABOUT_TIME_SLICE, str(snapshots.P40.uuid), why)
    return snapshots.with_conditions(shown._replace(version=id(shown)), settings=[setting])


@pytest.mark.parametrize("option", ["--drain", "--now"])
def test_a_reload_waits_for_settings_that_wait_for_leases(own_cli: Cli, option: str) -> None:
    users = Users(leases=("lease job of root",))
    own_cli.host.snapshot = with_time_slice_that_waits(users, SETTING_PENDING)
    done = own_cli("reload", option, *(["--yes"] if option == "--now" else []), "--timeout", "1")
    why = "GPU 00:06.0: the restoration of its time slice waits for lease job of root to end"
    assert (done.code, f"still pending after 1s: {why}; {REST} [setting_pending]" in done.err) == (1, True)


def test_a_drain_does_not_wait_for_other_processes_but_shows_them(own_cli: Cli) -> None:
    own_cli.host.snapshot = with_time_slice_that_waits(Users(processes=(7,)), SETTING_IN_USE)
    text = "GPU 00:06.0: the restoration of its time slice waits for the process (PID 7) to end"
    hint = "wait for the processes that it names to end, or end them"
    (row,) = json.loads(own_cli.good("reload", "--drain", "-o", "json"))["pending"]
    assert row["pending"] == f"{text}; {hint}"


@pytest.mark.parametrize("code", [*sorted(LAYOUT_NEEDS), DRIVER_HUNG])
def test_a_reload_does_not_wait_for_what_needs_the_operator(own_cli: Cli, code: str) -> None:
    own_cli.host.snapshot = without_its_layout(Reason("it needs a reset", code))
    done = own_cli("reload", "--drain")
    why = "GPU 81:00.0: it needs a reset"
    assert done.code == 1
    assert done.err.startswith(f"yunion-mps: still pending: {why}; {REST} [{code}]\n")


@pytest.mark.parametrize("options", [["--drain"], ["--now", "--yes"]])
@pytest.mark.parametrize("code", sorted(SETTING_REFUSED))
def test_a_reload_that_waits_fails_if_the_driver_refuses_a_setting(
    own_cli: Cli, options: list[str], code: str
) -> None:
    why = Reason("the driver refuses its time slice", code)
    refused = Condition(ABOUT_TIME_SLICE, "00:06.0", REFUSED, why, advice="see why", name="GPU 00:06.0")
    own_cli.host.snapshot = snapshots.with_conditions(snapshots.reference(), reported=[refused])
    told = f"yunion-mps: still pending: {refused.text}; {REST} [{code}]\nyunion-mps: see why\n"
    assert own_cli("reload", *options) == (1, SAME, told)


LOOK = "see: journalctl -u yunion-mps-daemon"


def reexec(cli: Cli, between: Callable[[], Any] = lambda: None) -> Done:
    """The command, while the server gives way to the next once it was told to."""

    def give_way() -> None:
        eventually(lambda: cli.host.reloader.done == ["reexec"], "the request")
        hand_over(cli.host).result(PATIENCE_S)
        between()
        go_on(cli.host)

    daemon = threading.Thread(target=give_way)
    daemon.start()
    done = cli("daemon-reexec")
    daemon.join()
    return done


def test_it_tells_how_long_it_took_once_the_next_program_answers(own_cli: Cli) -> None:
    code, out, err = reexec(own_cli)
    assert (code, err) == (0, "")
    how = rf"as PID {os.getpid()}; it did not answer for \d+\.\d\d s\n"
    told = rf"The daemon \({__version__}\) was re-executed {how}"
    assert re.fullmatch(told, out)


def test_a_failed_re_exec_is_reported(own_cli: Cli) -> None:
    event = Event(
        "error",
        "daemon",
        "yunion-mps-daemon",
        "it cannot be executed: no",
        "",
        "the running daemon continues",
    )
    own_cli.host.record(event._replace(what="long ago"))
    done = reexec(own_cli, lambda: own_cli.host.record(event))
    told = f"yunion-mps: it cannot be executed: no\nyunion-mps: the running daemon continues; {LOOK}\n"
    assert done == (1, "", told)


def test_a_restart_is_distinguished_from_a_re_exec(own_cli: Cli) -> None:
    def restart() -> None:
        own_cli.host.become(pid=1, started_s=time.time())
        own_cli.host.snapshot = own_cli.host.snapshot._replace(version=2)

    wrong = f"the daemon was restarted: its PID changed from {os.getpid()} to 1"
    assert reexec(own_cli, restart) == (1, "", f"yunion-mps: {wrong}\nyunion-mps: {LOOK}\n")
