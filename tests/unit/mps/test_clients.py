"""Who uses a domain, in the control daemon's own words, and what is known where it cannot be asked."""

from __future__ import annotations

import os
import signal

import pytest
from yunion_mps.errors import ControlError
from yunion_mps.models import DomainPlan
from yunion_mps.mps.clients import ClientRow, clients_of, rows_in, server_state, terminate
from yunion_mps.mps.conversation import OccupiedError
from yunion_mps.mps.states import READY

from .conftest import HoldFrontEnd, RunDomain
from .driving import DomainRun, Jobs, stop_process

OF_535 = """\
PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        
28353     1         28354          GPU-7374616e-642d-696e    4026531836     /usr/bin/python3
28777     2         28354          GPU-7374616e-642d-696e    4026531836     my job with words
""".splitlines()  # noqa: W291 - as it is printed
WITH_STATUS = """\
PID       ID        SERVER         DEVICE                    NAMESPACE      STATUS    PRIORITY  COMMAND
28353     1         28354          GPU-7374616e-642d-696e    4026531836     ACTIVE    NORMAL    /bin/python3
""".splitlines()


@pytest.fixture
def run(jobs: Jobs, run_domain: RunDomain) -> DomainRun:
    return run_domain(its_program=jobs.program).start().until(READY)


def test_the_lists_of_all_releases_are_read_by_their_headers() -> None:
    gpu = "GPU-7374616e-642d-696e"
    assert rows_in(OF_535) == [ClientRow(28353, 28354, gpu), ClientRow(28777, 28354, gpu)]
    assert rows_in(WITH_STATUS) == [ClientRow(28353, 28354, gpu)]


@pytest.mark.parametrize(
    "answer", [[], ["Server not found"], ["Server 1 not found", "Server 1 not found", ""]]
)
def test_an_answer_without_a_header_is_one_without_clients(answer: list[str]) -> None:
    assert rows_in(answer) == []


def test_a_header_that_nobody_knows_is_an_error_and_no_empty_list() -> None:
    with pytest.raises(ControlError, match="its list of clients cannot be read: 'PID WHO'"):
        rows_in(["PID  WHO", "1  2"])


def test_clients_are_listed_with_their_servers(run: DomainRun, jobs: Jobs, plan: DomainPlan) -> None:
    assert clients_of(jobs.program, plan, run.pid) == []
    clients = [jobs.begin(), jobs.begin()]
    (server,) = run.domain.server_pids()
    rows = clients_of(jobs.program, plan, run.pid)
    assert [(row.pid, row.server) for row in rows] == [(client.pid, server) for client in clients]
    jobs.end(*clients)
    while clients_of(jobs.program, plan, run.pid):
        pass


def test_a_client_is_terminated_by_its_server(run: DomainRun, jobs: Jobs, plan: DomainPlan) -> None:
    client = jobs.begin()
    (server,) = run.domain.server_pids()
    terminate(jobs.program, plan, server, client.pid)
    assert client.says() == "terminated"


def test_a_client_that_is_none_cannot_be_terminated(run: DomainRun, jobs: Jobs, plan: DomainPlan) -> None:
    jobs.begin()
    (server,) = run.domain.server_pids()
    with pytest.raises(ControlError, match=f"PID {server}.* refused to let go of it .*answer: 1"):
        terminate(jobs.program, plan, server, os.getpid())


def test_a_servers_state_is_known_where_the_release_tells_it(
    run: DomainRun, jobs: Jobs, plan: DomainPlan
) -> None:
    jobs.begin()
    (server,) = run.domain.server_pids()
    assert server_state(jobs.program, plan, server) == ("ACTIVE" if jobs.stand_ins.asked else None)


def test_a_stopped_server_is_not_asked_for_its_clients(run: DomainRun, jobs: Jobs, plan: DomainPlan) -> None:
    """It would keep the control daemon from everybody."""
    jobs.begin()
    (server,) = run.domain.server_pids()
    stop_process(server)
    with pytest.raises(ControlError) as caught:
        clients_of(jobs.program, plan, run.pid)
    assert (
        caught.value.message
        == f"its MPS server (PID {server}) was stopped, and asking for its clients would hang"
    )
    assert caught.value.hint == f"let it go on: kill -CONT {server}"
    os.kill(server, signal.SIGCONT)


def test_where_somebody_else_has_its_ear_nothing_is_known_rather_than_nobody_there(
    run: DomainRun, jobs: Jobs, plan: DomainPlan, hold_front_end: HoldFrontEnd
) -> None:
    client = jobs.begin()
    (server,) = run.domain.server_pids()
    hold_front_end(plan)
    for _ in range(5):
        with pytest.raises(OccupiedError, match=r"connected to it: PID \d+ \(nvidia-cuda-mps, root\)"):
            clients_of(jobs.program, plan, run.pid)
        with pytest.raises(OccupiedError):
            terminate(jobs.program, plan, server, client.pid)
