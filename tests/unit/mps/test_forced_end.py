"""Servers that are ended by force: only if each of their clients may be ended, whenever it attached."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from yunion_mps.core.enums import READY
from yunion_mps.core.models import DomainPlan
from yunion_mps.mps.control_daemon import MULTIUSER
from yunion_mps.mps.forced_end import LOG_WITHIN_S, LateClient, UnconfirmedClients
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.log_file import LOG_NAME
from yunion_mps.mps.log_lines import served_clients

from simhost.mps import Client

from .domain_bench import Bench, DomainRun

HEADER = "[2026-11-29 08:52:44.510 Control  2984]"
#: In the place of the front-end: it stops after the lists of clients, until a file is there.
STOPS_AFTER_THE_LISTS = """\
cat >{place}/commands
if grep -q '^get_client_list' {place}/commands; then
    sed '/^shutdown_server/,$d' {place}/commands | {program}
    touch {place}/listed
    until [ -e {place}/go ]; do sleep 0.01; done
    sed -n '/^shutdown_server/,$p' {place}/commands | {program}
else
    {program} <{place}/commands
fi"""
#: It is rejected once with the command that ends a server by force, as if another one were connected.
IS_REJECTED_ONCE = """\
cat >{place}/commands
if grep -q ' -f$' {place}/commands && ! [ -e {place}/rejected ]; then
    touch {place}/rejected
else
    {program} <{place}/commands
fi"""
#: It stops with the command that ends servers by force, until a file is there.
STOPS_BEFORE_THE_END = """\
cat >{place}/commands
if grep -q ' -f$' {place}/commands; then
    touch {place}/chosen
    until [ -e {place}/go ]; do sleep 0.01; done
fi
{program} <{place}/commands"""
#: In the place of the control program: it starts the control daemon without this option.
WITHOUT_THE_OPTION = """\
case "$1" in -f)
    for word; do
        shift
        [ "$word" = {option} ] || set -- "$@" "$word"
    done
    exec {program} "$@" ;;
esac
"""
WRITES_LINES_BEFORE_THE_END = """\
cat >{place}/commands
grep -q ' -f$' {place}/commands && cat {place}/lines >>{log}
{program} <{place}/commands"""
#: Its last list, whose line in the log shows that the log has all before, is never asked for.
LEAVES_OUT_THE_MARK = "grep -Ev '^get_client_list [0-9]{{10}}$' | {program}"


def wrap(run: DomainRun, bench: Bench, script: str) -> None:
    run.domain.configure(bench.script(script.format(place=bench.place, program=bench.jobs.program)), 10)


def force(run: DomainRun, *clients: Client) -> None:
    """Order the end of the servers, and of no clients but these."""
    pids = [client.pid for client in clients]
    run.domain.end_servers(run.now_s, may_end=lambda pid: pid in pids, with_all_clients=())


def force_with_a_gap(run: DomainRun, bench: Bench, job: Client, in_between: Callable[[], None]) -> None:
    """Order the end of the job's server, and do something after its clients were listed."""
    wrap(run, bench, STOPS_AFTER_THE_LISTS)
    force(run, job)
    run.until_true(lambda: (bench.place / "listed").exists())
    in_between()
    (bench.place / "go").touch()
    run.until_true(lambda: not run.domain.is_forcing(run.now_s))


def test_a_server_ends_at_once_if_all_its_clients_may_end(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    job = bench.jobs.attach()
    run.change(other)
    force(run, job)
    run.until_true(lambda: run.domain.limits_in_effect == LimitsInEffect(other))
    assert job.says() == "server gone"
    assert run.domain.take_unconfirmed() == []


def test_a_server_with_another_client_ends_only_after_its_clients(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    job = bench.jobs.attach()
    later = bench.jobs.attach()
    run.change(other)
    (server,) = bench.jobs.servers()
    force(run, job)
    run.until_true(lambda: not run.domain.is_forcing(run.now_s))
    assert run.domain.take_unconfirmed() == [UnconfirmedClients((server,), (LateClient(later.pid),))]
    assert run.domain.take_unconfirmed() == []
    assert bench.jobs.servers() == [server]
    bench.jobs.end(job, later)
    run.domain.note_use(in_use=False)
    run.advance(10).until_true(lambda: run.domain.limits_in_effect == LimitsInEffect(other))


def test_a_client_that_attaches_after_the_list_does_not_end(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    job = bench.jobs.attach()
    run.change(other)
    (server,) = bench.jobs.servers()
    later: list[Client] = []
    force_with_a_gap(run, bench, job, lambda: later.append(bench.jobs.attach()))
    assert run.domain.take_unconfirmed() == [UnconfirmedClients((server,), (LateClient(later[0].pid),))]
    assert bench.jobs.servers() == [server]


def test_a_client_that_attaches_after_the_list_may_end_if_confirmed(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    """As when it is one that has attached again."""
    job = bench.jobs.attach()
    run.change(other)
    wrap(run, bench, STOPS_AFTER_THE_LISTS)
    run.domain.end_servers(run.now_s, may_end=lambda _: True, with_all_clients=())
    run.until_true(lambda: (bench.place / "listed").exists())
    later = bench.jobs.attach()
    (bench.place / "go").touch()
    run.until_true(lambda: run.domain.limits_in_effect == LimitsInEffect(other))
    assert (job.says(), later.says()) == ("server gone", "server gone")


def test_a_client_that_attaches_right_before_the_end_is_reported(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    """From 550 on, a server admits clients until it ends, and nothing can keep this one; before, it waits."""
    job = bench.jobs.attach()
    run.change(other)
    (server,) = bench.jobs.servers()
    wrap(run, bench, STOPS_BEFORE_THE_END)
    force(run, job)
    run.until_true(lambda: (bench.place / "chosen").exists())
    later = bench.jobs.start_waiting()
    (bench.place / "go").touch()
    run.until_true(lambda: not run.domain.is_forcing(run.now_s))
    assert job.says() == "server gone"
    if bench.jobs.stand_ins.asked:
        assert later.says() == "attached"
        ended = UnconfirmedClients((server,), (LateClient(later.pid, os.getuid()),), has_ended=True)
        assert run.domain.take_unconfirmed() == [ended]
    else:
        assert run.domain.take_unconfirmed() == []


def test_a_line_that_a_user_wrote_into_the_log_ends_no_job(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    job = bench.jobs.attach()
    run.change(other)
    (server,) = bench.jobs.servers()
    line = f"\n{HEADER} NEW CLIENT 1 from user 0: Server already exists\n"

    def forge() -> None:
        with Path(bench.plan.log_directory, LOG_NAME).open("a") as log:
            log.write(line)

    force_with_a_gap(run, bench, job, forge)
    assert run.domain.take_unconfirmed() == [UnconfirmedClients((server,), (LateClient(1),))]
    assert bench.jobs.servers() == [server]


def test_no_server_ends_by_force_if_the_log_does_not_show_all(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    """As on a full disk."""
    job = bench.jobs.attach()
    run.change(other)
    (server,) = bench.jobs.servers()
    wrap(run, bench, LEAVES_OUT_THE_MARK)
    force(run, job)
    run.until_answered()
    run.advance(LOG_WITHIN_S).until_true(lambda: not run.domain.is_forcing(run.now_s))
    assert run.domain.take_unconfirmed() == [UnconfirmedClients((server,), ())]
    assert bench.jobs.servers() == [server]


def test_an_order_that_was_not_received_is_repeated_with_a_list(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    """Before 550, that list is empty; from 550 on, it has what has attached meanwhile."""
    job = bench.jobs.attach()
    run.change(other)
    (server,) = bench.jobs.servers()
    wrap(run, bench, IS_REJECTED_ONCE)
    force(run, job)
    run.until_true(lambda: (bench.place / "rejected").exists()).until_answered()
    assert bench.jobs.servers() == [server]
    later = bench.jobs.start_waiting()
    if bench.jobs.stand_ins.asked:
        assert later.says() == "attached"
    run.advance(1).until_true(lambda: not run.domain.is_forcing(run.now_s))
    if bench.jobs.stand_ins.asked:
        assert run.domain.take_unconfirmed() == [UnconfirmedClients((server,), (LateClient(later.pid),))]
        assert bench.jobs.servers() == [server]
    else:
        assert (job.says(), later.says()) == ("server gone", "attached")
        assert run.domain.take_unconfirmed() == []


def test_a_server_without_clients_is_not_forced(run: DomainRun, bench: Bench, other: DomainPlan) -> None:
    bench.jobs.end(bench.jobs.attach())
    run.change(other)
    force(run)
    run.until_true(lambda: run.domain.limits_in_effect == LimitsInEffect(other))
    log = Path(bench.plan.log_directory, LOG_NAME).read_text()
    assert " -f\n" not in log
    assert run.domain.take_unconfirmed() == []


def test_an_order_with_a_condition_is_given_up_after_some_seconds(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    job = bench.jobs.attach()
    run.change(other)
    (server,) = bench.jobs.servers()
    leave = bench.hold_front_end()
    force(run, job)
    run.advance_steps(9, 1)
    assert not run.domain.is_forcing(run.now_s)
    leave()
    run.advance_steps(3, 10)
    assert (bench.jobs.servers(), run.domain.take_unconfirmed()) == ([server], [])


def test_a_domain_without_servers_keeps_nobody_waiting(run: DomainRun) -> None:
    force(run)
    assert not run.domain.is_forcing(run.now_s)


def test_only_new_jobs_of_the_users_whose_servers_ended_are_reported(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    job = bench.jobs.attach()
    run.change(other)
    (server,) = bench.jobs.servers()
    lines = [(1_000_000_000, os.getuid()), (1_000_000_001, os.getuid() + 1), (job.pid, os.getuid())]
    log = Path(bench.plan.log_directory, LOG_NAME)
    text = "".join(
        [f"{HEADER} NEW CLIENT {pid} from user {uid}: Server already exists\n" for pid, uid in lines]
    )
    (bench.place / "lines").write_text(text)
    wrap(run, bench, WRITES_LINES_BEFORE_THE_END.replace("{log}", str(log)))
    force(run, job)
    run.until_true(lambda: not run.domain.is_forcing(run.now_s))
    assert job.says() == "server gone"
    ended = UnconfirmedClients((server,), (LateClient(1_000_000_000, os.getuid()),), has_ended=True)
    assert run.domain.take_unconfirmed() == [ended]


def test_with_one_server_for_all_users_new_jobs_of_each_are_reported(bench: Bench, other: DomainPlan) -> None:
    """The real control daemon does not know the option, which releases from 570 on have."""
    log = Path(bench.plan.log_directory, LOG_NAME)
    script = WITHOUT_THE_OPTION + WRITES_LINES_BEFORE_THE_END.replace("{log}", str(log))
    values = {"option": MULTIUSER, "program": bench.jobs.program, "place": bench.place}
    run = bench.domain(bench.plan._replace(multiuser=True), bench.script(script.format(**values)))
    run.start().until(READY)
    job = bench.jobs.attach()
    run.change(other._replace(multiuser=True))
    (server,) = bench.jobs.servers()
    line = f"{HEADER} NEW CLIENT 1000000000 from user {os.getuid() + 1}: Server already exists\n"
    (bench.place / "lines").write_text(line)
    force(run, job)
    run.until_true(lambda: not run.domain.is_forcing(run.now_s))
    ended = UnconfirmedClients((server,), (LateClient(1_000_000_000),), has_ended=True)
    assert run.domain.take_unconfirmed() == [ended]


def test_a_domain_that_retires_reports_what_ended_before_it_stops(run: DomainRun, bench: Bench) -> None:
    job = bench.jobs.attach()
    (server,) = bench.jobs.servers()
    line = f"{HEADER} NEW CLIENT 1000000000 from user {os.getuid()}: Server already exists\n"
    (bench.place / "lines").write_text(line)
    log = Path(bench.plan.log_directory, LOG_NAME)
    wrap(run, bench, WRITES_LINES_BEFORE_THE_END.replace("{log}", str(log)))
    run.domain.retire()
    force(run, job)
    run.until_true(lambda: not run.domain.is_forcing(run.now_s))
    ended = UnconfirmedClients((server,), (LateClient(1_000_000_000, os.getuid()),), has_ended=True)
    assert run.domain.take_unconfirmed() == [ended]


def test_clients_count_once_the_log_has_the_command() -> None:
    first = f"{HEADER} NEW CLIENT 7 from user 0: Server already exists\n"
    waiting = f"{HEADER} NEW CLIENT 8 from user 0: Server is not ready, push client to pending list\n"
    command = f"{HEADER} Cmd:get_client_list 1000000001\n"
    log = f"{first}{waiting}{command}{first.replace('7', '9')}".encode()
    lines = served_clients(log, "get_client_list 1000000001") or []
    assert [line.pid for line in lines] == [7, 9]
    assert served_clients(log, "get_client_list 100000000") is None
    assert served_clients(b"", "get_client_list 1000000001") is None
