"""over_budget on a whole host; the jobs and their MPS server are stand-ins."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from integration.conftest import AtWork, MakeAtWork
from integration.daemon_host import Daemon, eventually, is_running
from integration.lease_host import take
from integration.mps_jobs import JOB, started
from integration.test_metrics import value

DEVICE = "00:06.0-1"


@contextlib.contextmanager
def process_of(work: AtWork, lease: Any, used_mib: int) -> Iterator[subprocess.Popen[str]]:
    """A client that was started with the lease, at work, and uses so much memory."""
    with started(work.daemon.host, *JOB, variables=lease["environment"]) as client:
        work.daemon.host.gpus[0].add_process(client.pid, used_mib, "M+C")
        yield client


def termination(daemon: Daemon, gpu_uuid: str) -> dict[str, Any]:
    """The one event of a termination, which is counted once the daemon, too, has seen that it ended."""
    labels = {"gpu": "00:06.0", "gpu_uuid": gpu_uuid}
    eventually(lambda: value(daemon, "yunion_mps_over_budget_terminations_total", **labels) == 1, "its count")
    events = daemon.get("/v1/events?kind=client")[1]["events"]
    (event,) = (one for one in events if one["code"] == "over_budget_terminated")
    return dict(event)


@pytest.fixture
def work(make_at_work: MakeAtWork) -> AtWork:
    return make_at_work(over_budget="terminate", over_budget_grace_s=1)


def test_a_job_over_its_budget_loses_its_newest_process_only(work: AtWork) -> None:
    daemon, gpu = work.daemon, work.daemon.host.gpus[0]
    lease, other = (
        take(daemon, f"devices={name}&holder.name=job-{name}&holder.ttl_s=600")
        for name in (DEVICE, "00:06.0-2")
    )
    budget_mib = lease["budgets"][0]["memory_mib"]
    with process_of(work, lease, budget_mib) as old, process_of(work, other, budget_mib) as neighbour:
        with process_of(work, lease, 512) as newest:
            gpu.add_process(work.job.pid, 4 * budget_mib, "M+C")  # it has no lease
            (problem,) = (one for one in daemon.status()["problems"] if one["code"] == "over_budget")
            used = f"{DEVICE} uses {budget_mib + 512} of {budget_mib} MiB"
            assert problem["text"].startswith(used)
            assert problem["text"].endswith("; if this lasts, the newest process will be terminated")
            eventually(lambda: daemon.polls() and not is_running(newest.pid), "its end")
            assert newest.stderr
            line = newest.stderr.read()
        cause = (
            f"the processes of lease {lease['id'][:8]} together use {budget_mib + 512} of {budget_mib} MiB"
        )
        assert line.startswith(f"yunion-mps: terminating PID {newest.pid} because {cause} ({DEVICE})")
        assert line.endswith("[over_budget_terminated]\n")
        gpu.remove_process(newest.pid)
        event = termination(daemon, gpu.uuid)
        assert f"(PID {newest.pid})" in event["what"]
        assert event["what"].endswith(": its MPS server disconnected it; ended by SIGTERM")
        assert event["cause"].startswith(cause)
        for _ in range(3):
            daemon.polls()
        assert all(map(is_running, (old.pid, neighbour.pid, work.job.pid)))
        assert [one for one in daemon.status()["problems"] if one["code"] == "over_budget"] == []


def test_a_reload_applies_the_key_of_an_entry_without_a_new_control_daemon(make_at_work: MakeAtWork) -> None:
    work = make_at_work(over_budget="terminate", over_budget_grace_s=1)
    daemon, host = work.daemon, work.daemon.host
    control_pid, (server,) = daemon.control_pid(), work.jobs.servers()
    entries = host.root / "etc/yunion/host_container_device.yml"
    entries.write_text(entries.read_text().rstrip("\n") + "\n  over_budget: report\n")
    status, answer = daemon.ask("POST", "/v1/reload")
    assert status == 200
    assert answer == {
        "changes": [
            {
                "kind": "setting",
                "subject": "over_budget of GPU 00:06.0",
                "before": "terminate",
                "after": "report",
                "effect": "at once",
                "at_once": True,
            }
        ],
        "pending": [],
        "losses": [],
    }
    assert (daemon.control_pid(), work.jobs.servers()) == (control_pid, [server])
    lease = take(daemon, f"devices={DEVICE}&holder.name=job&holder.ttl_s=600")
    with process_of(work, lease, 16_000) as client:
        (problem,) = (one for one in daemon.status()["problems"] if one["code"] == "over_budget")
        assert "terminated" not in problem["text"]
        eventually(lambda: daemon.polls() and f"<4>{problem['text']}" in daemon.log, "a line in the journal")
        events = daemon.get("/v1/events?kind=client")[1]["events"]
        assert [one["cause"] for one in events if one["code"] == "over_budget"] == [problem["text"]]
        assert is_running(client.pid)
