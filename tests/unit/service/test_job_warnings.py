"""Jobs over their budgets, and jobs that wait, are reported once, and again only after they were quiet."""

from __future__ import annotations

import asyncio

import pytest
from yunion_mps.core.conditions import Condition
from yunion_mps.service.job_warnings import QUIET_S, JobWarnings
from yunion_mps.service.publisher import CdiPublisher
from yunion_mps.service.reload import LoopControl
from yunion_mps.service.services import Services
from yunion_mps.service.status import StatusService
from yunion_mps.supervisor.event_log import EventRecord

from unit.cli.busy_host import OVER_BUDGET
from unit.http.fake_services import LEASE, WAITING_CLIENT, FakeClients, FakeLeases, clients
from unit.service.test_status import queries
from unit.supervised import MakeHost, Supervise, Supervised

OVER_MIB = "00:06.0-1 uses"


def problems(*, over: bool = False, waiting: bool = False) -> list[Condition]:
    found = clients(*([OVER_BUDGET] if over else []), waiting=(WAITING_CLIENT,) if waiting else ())
    held = FakeLeases()
    held.listed = {"leases": [LEASE], "waiting": []}
    asked = FakeClients()
    asked.listed = found
    conditions = asyncio.run(StatusService(queries(), held, asked).job_problems())
    assert conditions is not None
    return conditions


class Reported:
    """Job warnings of a host, and what they have logged and recorded."""

    def __init__(self, made: Supervised, caplog: pytest.LogCaptureFixture) -> None:
        supervisor, paths = made.supervisor, made.paths
        control = LoopControl((), None, lambda: None, lambda: None)  # type: ignore[arg-type]
        publisher = CdiPublisher(paths, supervisor)
        services = Services.of(paths, supervisor, publisher, control, started_s=0.0)
        self.warnings = JobWarnings(supervisor, services.status)
        self._log, self._caplog = supervisor.event_log, caplog

    @property
    def logged(self) -> list[str]:
        return [record.message for record in self._caplog.records if record.levelname == "WARNING"]

    @property
    def events(self) -> list[EventRecord]:
        return self._log.after(0, 100, "client")


@pytest.fixture
def reported(make_host: MakeHost, supervise: Supervise, caplog: pytest.LogCaptureFixture) -> Reported:
    return Reported(supervise(make_host([{"kind": "v100"}])), caplog)


def test_a_job_over_its_budget_is_a_warning_and_an_event_once(reported: Reported) -> None:
    for now_s in (0.0, 10.0, 20.0):
        reported.warnings.note(problems(over=True), now_s)
    (line,) = reported.logged
    assert line.startswith(OVER_MIB)
    assert line.endswith("; ask its owner, or terminate it: yunion-mps terminate 4260")
    (record,) = reported.events
    assert record.event.cause.startswith(OVER_MIB)
    assert (record.event.severity, record.event.code) == ("warning", "over_budget")
    assert record.event.subject == "00:06.0-1"


def test_a_job_that_waits_for_a_server_is_a_warning_once(reported: Reported) -> None:
    reported.warnings.note(problems(waiting=True), 0.0)
    reported.warnings.note(problems(waiting=True), 10.0)
    (line,) = reported.logged
    assert "is waiting for the MPS server of" in line
    assert reported.events == []


def test_a_job_around_its_budget_is_not_reported_again_and_again(reported: Reported) -> None:
    for now_s in range(0, 600, 10):
        reported.warnings.note(problems(over=now_s % 20 == 0), float(now_s))
    assert (len(reported.logged), len(reported.events)) == (1, 1)


def test_the_end_of_an_excess_is_an_event_and_the_next_is_new(reported: Reported) -> None:
    reported.warnings.note(problems(over=True), 0.0)
    reported.warnings.note([], QUIET_S - 1)
    assert len(reported.events) == 1
    reported.warnings.note([], QUIET_S)
    reported.warnings.note(problems(over=True), QUIET_S + 10)
    whats = [record.event.what for record in reported.events]
    assert whats[1] == "its jobs are within their budget again"
    assert whats[2] == whats[0]
