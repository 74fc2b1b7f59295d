"""The clients of a domain: those served, by the control daemon's answer, and those that wait, by its log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from yunion_mps.core.errors import ControlError
from yunion_mps.core.models import DomainPlan
from yunion_mps.mps.clients import (
    BusyServerError,
    ClientRow,
    WaitingClient,
    clients_of,
    parse_clients,
    parse_waiting,
    server_state,
    terminate,
    waiting_clients,
)
from yunion_mps.mps.conversation import OccupiedError
from yunion_mps.mps.log_file import LOG_NAME, MAX_BYTES, bound_logs
from yunion_mps.mps.log_lines import timestamp_parser

from integration.daemon_host import eventually

from .domain_bench import Bench, DomainRun, Jobs
from .other_processes import STRANGER, as_root, stop_process

OF_535 = """\
PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        
28353     1         28354          GPU-7374616e-642d-696e    4026531836     /usr/bin/python3
28777     2         28354          GPU-7374616e-642d-696e    4026531836     my job with words
""".splitlines()  # noqa: W291 - as it is printed
WITH_STATUS = """\
PID       ID        SERVER         DEVICE                    NAMESPACE      STATUS    PRIORITY  COMMAND
28353     1         28354          GPU-7374616e-642d-696e    4026531836     ACTIVE    NORMAL    /bin/python3
""".splitlines()


def is_refused(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except BusyServerError:
        return True
    return False


def test_the_lists_of_all_releases_are_read_by_their_headers() -> None:
    gpu = "GPU-7374616e-642d-696e"
    assert parse_clients(OF_535) == [ClientRow(28353, 28354, gpu), ClientRow(28777, 28354, gpu)]
    assert parse_clients(WITH_STATUS) == [ClientRow(28353, 28354, gpu)]


@pytest.mark.parametrize(
    "answer", [[], ["Server not found"], ["Server 1 not found", "Server 1 not found", ""]]
)
def test_an_answer_without_a_header_is_one_without_clients(answer: list[str]) -> None:
    assert parse_clients(answer) == []


def test_an_unknown_header_is_an_error_and_no_empty_list() -> None:
    with pytest.raises(ControlError, match="its list of clients cannot be read: 'PID WHO'"):
        parse_clients(["PID  WHO", "1  2"])


def test_a_process_that_is_not_a_client_cannot_be_terminated(
    run: DomainRun, jobs: Jobs, plan: DomainPlan
) -> None:
    server = run.begin_job(jobs)
    with pytest.raises(ControlError, match=f"PID {server}.* refused to disconnect it .*answered: 1"):
        terminate(jobs.program, plan, server, os.getpid())


def test_a_servers_state_is_known_if_the_release_tells_it(run: DomainRun, bench: Bench) -> None:
    server = run.begin_job(bench.jobs)
    assert server_state(bench.jobs.program, bench.plan, server) == (
        "ACTIVE" if bench.jobs.stand_ins.asked else None
    )


def test_a_stopped_server_is_not_queried_for_its_clients(
    run: DomainRun, jobs: Jobs, plan: DomainPlan
) -> None:
    """It would keep the control daemon from all others."""
    server = run.begin_job(jobs)
    stop_process(server)
    with pytest.raises(ControlError) as caught:
        clients_of(jobs.program, plan, run.pid)
    assert (
        caught.value.message == f"the MPS server (PID {server}) is stopped, so its clients cannot be listed"
    )
    assert caught.value.hint == f"resume it: kill -CONT {server}"
    os.kill(server, signal.SIGCONT)


@as_root
def test_while_another_user_waits_the_clients_are_unknown(run: DomainRun, bench: Bench) -> None:
    """535 answers that there is no such server; 550 still lists its clients."""
    client = bench.jobs.attach()
    (server,) = run.domain.server_pids()
    waiting = bench.jobs.start_waiting(STRANGER)
    program, plan = bench.jobs.program, bench.plan

    def listed() -> list[int]:
        return [row.pid for row in clients_of(program, plan, run.pid)]

    if bench.jobs.stand_ins.asked:
        assert listed() == [client.pid]
        return
    eventually(lambda: is_refused(listed), "the request of the other user")
    bench.jobs.end(waiting)
    for ask in (listed, lambda: terminate(program, plan, server, client.pid)):
        with pytest.raises(BusyServerError, match=f"the MPS server .PID {server}. accepts no commands"):
            ask()
    bench.jobs.end(client)
    eventually(lambda: server not in bench.jobs.servers(), "the end of the server")
    assert not terminate(program, plan, server, client.pid), "a server that has ended has no clients"


def test_with_another_front_end_connected_clients_are_unknown(run: DomainRun, bench: Bench) -> None:
    client = bench.jobs.attach()
    (server,) = run.domain.server_pids()
    bench.hold_front_end()
    for _ in range(5):
        with pytest.raises(OccupiedError, match=r"connected to it: PID \d+ \(nvidia-cuda-mps, root\)"):
            clients_of(bench.jobs.program, bench.plan, run.pid)
        with pytest.raises(OccupiedError):
            terminate(bench.jobs.program, bench.plan, server, client.pid)


STAMP = b"[2026-11-20 17:27:51.516 Control   305] "
PUT_OFF = b"NEW CLIENT %d from user %d: Server is not ready, push client to pending list"
START, IS_READY = b"Starting new server 558 for user 1234", b"NEW SERVER 558: Ready"


def pending(log: bytes) -> dict[int, tuple[int, float]]:
    return parse_waiting(log, timestamp_parser(2e9))


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
def test_a_waiting_client_is_listed_until_it_ends_or_has_its_server(bench: Bench) -> None:
    run = bench.serving()
    first = bench.jobs.attach()
    (server,) = run.domain.server_pids()
    assert waiting_clients(bench.plan, [server]) == []
    begun_s = time.time() - 1  # the log rounds
    other, gone = bench.jobs.start_waiting(uid=1234), bench.jobs.start_waiting(uid=1234)
    eventually(lambda: len(waiting_clients(bench.plan, [server])) == 2)
    bench.jobs.end(gone)
    (waiter,) = waiting_clients(bench.plan, [server])
    assert waiter == WaitingClient(other.pid, 1234, waiter.since_s, server)
    assert begun_s <= waiter.since_s <= time.time(), "read in the control daemon's time zone"
    assert waiting_clients(bench.plan._replace(multiuser=True), [server]) == []
    bench.jobs.end(first)
    assert other.says() == "attached"
    assert waiting_clients(bench.plan, run.domain.server_pids()) == []


@pytest.mark.parametrize("served", [START, IS_READY])
def test_clients_wait_no_more_once_their_users_server_has_started(served: bytes) -> None:
    before = () if served is START else (START,)
    log = log_of(*before, PUT_OFF % (7, 1234), PUT_OFF % (8, 0))
    assert list(pending(log)) == [7, 8]
    assert list(pending(log + log_of(served))) == [8]


def test_a_control_daemon_that_begins_has_no_waiting_clients() -> None:
    log = log_of(PUT_OFF % (7, 1234), b"Starting control daemon using socket /tmp/p/control")
    assert pending(log) == {}


def test_a_line_with_an_impossible_time_is_skipped() -> None:
    line = log_of(PUT_OFF % (4, 1234))
    assert set(pending(line.replace(b"2026-11-20", b"2026-13-20") + log_of(PUT_OFF % (5, 1234)))) == {5}


def test_a_log_that_was_emptied_forgets_no_client(plan: DomainPlan) -> None:
    folder = Path(plan.log_directory)
    folder.mkdir(exist_ok=True)
    log = folder / LOG_NAME
    log.write_bytes((b"x" * 1023 + b"\n") * (MAX_BYTES >> 10) + log_of(PUT_OFF % (os.getpid(), os.getuid())))
    bound_logs(plan)
    assert log.read_bytes() == b""
    assert [one.pid for one in waiting_clients(plan, [os.getpid()])] == [os.getpid()]
