"""Who waits for another user's server, by what the control daemon's log says."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.models import DomainPlan
from yunion_mps.mps.clients import WaitingClient, pending_in, waiting_clients
from yunion_mps.mps.log_file import LARGEST_BYTES, LOG_NAME, bound_logs, timestamp_parser
from yunion_mps.mps.states import READY

from .conftest import RunDomain
from .driving import Jobs, wait_for

STAMP = b"[2026-11-20 17:27:51.516 Control   305] "
PUT_OFF = b"NEW CLIENT %d from user %d: Server is not ready, push client to pending list"
START, IS_READY = b"Starting new server 558 for user 1234", b"NEW SERVER 558: Ready"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


def pending(log: bytes) -> dict[int, tuple[int, float]]:
    return pending_in(log, timestamp_parser(2e9))


def log_of(*lines: bytes) -> bytes:
    return b"".join(STAMP + line + b"\n" for line in lines)


@pytest.fixture
def _in_another_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With a TZ that control daemons are not given."""
    monkeypatch.setenv("TZ", "HERE-5:45")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@as_root
@pytest.mark.usefixtures("_in_another_zone")
def test_it_is_told_of_until_it_has_its_server(jobs: Jobs, run_domain: RunDomain, plan: DomainPlan) -> None:
    run = run_domain(its_program=jobs.program).start().until(READY)
    now_s = time.time()
    first = jobs.begin()
    (server,) = run.domain.server_pids()
    assert waiting_clients(plan, [server]) == []
    other = jobs.wait(uid=1234)
    wait_for(lambda: len(waiting_clients(plan, [server])) == 1)
    (waiter,) = waiting_clients(plan, [server])
    assert waiter == WaitingClient(other.pid, 1234, waiter.since_s, server)
    assert now_s - 2 < waiter.since_s <= time.time()
    assert waiting_clients(plan._replace(multiuser=True), [server]) == []
    jobs.end(first)
    assert other.says() == "attached"
    assert waiting_clients(plan, run.domain.server_pids()) == []


@as_root
def test_who_has_ended_waits_no_more(jobs: Jobs, run_domain: RunDomain, plan: DomainPlan) -> None:
    run = run_domain(its_program=jobs.program).start().until(READY)
    jobs.begin()
    other = jobs.wait(uid=1234)
    wait_for(lambda: len(waiting_clients(plan, run.domain.server_pids())) == 1)
    jobs.end(other)
    assert waiting_clients(plan, run.domain.server_pids()) == []


@pytest.mark.parametrize("served", [START, IS_READY])
def test_a_users_clients_wait_no_more_once_a_server_of_theirs_has_started(served: bytes) -> None:
    before = () if served is START else (START,)
    log = log_of(*before, PUT_OFF % (7, 1234), PUT_OFF % (8, 0))
    assert list(pending(log)) == [7, 8]
    assert list(pending(log + log_of(served))) == [8]


def test_a_control_daemon_that_begins_has_nobody_waiting() -> None:
    log = log_of(PUT_OFF % (7, 1234), b"Starting control daemon using socket /tmp/p/control")
    assert pending(log) == {}


def test_a_line_with_a_time_that_there_is_not_is_passed_over() -> None:
    line = log_of(PUT_OFF % (4, 1234))
    assert set(pending(line.replace(b"2026-11-20", b"2026-13-20") + log_of(PUT_OFF % (5, 1234)))) == {5}


def test_a_log_that_was_emptied_forgets_nobody(plan: DomainPlan) -> None:
    folder = Path(plan.log_directory)
    folder.mkdir(exist_ok=True)
    log = folder / LOG_NAME
    log.write_bytes(b"x\n" * LARGEST_BYTES + log_of(PUT_OFF % (os.getpid(), os.getuid())))
    bound_logs(plan)
    assert log.read_bytes() == b""
    assert [one.pid for one in waiting_clients(plan, [os.getpid()])] == [os.getpid()]
