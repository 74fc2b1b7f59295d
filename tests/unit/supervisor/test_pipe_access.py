"""A pipe directory that users cannot reach is a condition: in status, in the log, in events and in doctor."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from yunion_mps.core.enums import READY
from yunion_mps.core.models import Event
from yunion_mps.doctor.checks import Host
from yunion_mps.service.queries import Queries

from unit.doctor.hosts import check_findings
from unit.http.fake_services import status_of
from unit.supervised import MakeHost, Supervise, Supervised

pytestmark = pytest.mark.processes  # whether a control daemon listens is seen by its socket

WHAT = "is not accessible to other users: their programs cannot reach the control daemon"


@pytest.fixture
def made(make_host: MakeHost, supervise: Supervise) -> Supervised:
    host = make_host([{"kind": "v100"}, {"kind": "v100"}], cuda_mps_scope="gpu")
    return supervise(host).start()


def test_a_closed_directory_above_the_pipe_directory_is_a_condition(
    made: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    closed = Path(made.paths.under("/tmp/nvidia-mps"))
    check = made.supervisor.check_pipe_directories
    check()
    assert not made.snapshot.conditions
    closed.chmod(0o700)
    for _ in range(2):
        check()
    (condition,) = made.snapshot.conditions  # for both domains
    assert condition.reason.startswith(f"{closed} {WHAT}")
    assert condition.hint == f"chmod a+x {closed}"
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        f"{condition.reason}; {condition.hint}"
    ]
    domain = made.supervisor.domains[0].in_effect.name
    assert made.events[-1] == Event("error", "domain", domain, condition.reason, code="pipe_directory")
    assert os.system(condition.hint) == 0
    check()
    assert not made.snapshot.conditions
    assert made.events[-1] == Event("info", "domain", domain, f"no longer: {condition.reason}")


def test_status_and_doctor_say_the_same_of_a_closed_directory(made: Supervised) -> None:
    Path(made.paths.under("/tmp/nvidia-mps")).chmod(0o700)
    made.supervisor.check_pipe_directories()
    status = status_of(Queries(lambda: made.snapshot, 0.0, 1))
    (problem,) = (one for one in status["problems"] if one["code"] == "pipe_directory")
    assert (status["state"], problem["level"]) == ("degraded", "problem")
    findings = {
        (finding.what, finding.hint) for finding in check_findings(Host(made.paths, 30), "pipe directory")
    }
    assert findings == {(problem["text"], problem["hint"])}


def test_no_directory_is_checked_before_its_control_daemon_serves(
    make_host: MakeHost, supervise: Supervise
) -> None:
    """NVIDIA's program creates its socket before it opens it to other users."""
    made = supervise(make_host([{"kind": "v100"}]))
    made.supervisor.start(time.monotonic())
    (domain,) = made.supervisor.domains
    assert domain.control.pid
    Path(made.paths.under("/tmp/nvidia-mps")).chmod(0o700)
    access = made.supervisor.pipe_access
    access.check()
    assert [condition.subject for condition in access.conditions] == []
    made.until(lambda: domain.state == READY)
    access.check()
    assert [condition.subject for condition in access.conditions] == [domain.in_effect.name]
