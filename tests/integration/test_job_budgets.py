"""over_budget on a whole host; the jobs and their MPS server are stand-ins."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from yunion_mps.host.proc import children_of

from integration.conftest import AtWork, MakeAtWork
from integration.daemon_host import Daemon, eventually, is_running
from integration.lease_host import take
from integration.mps_jobs import JOB, started_job
from integration.test_metrics import value

DEVICE = "00:06.0-1"


@contextlib.contextmanager
def process_of(work: AtWork, lease: Any, used_mib: int) -> Iterator[subprocess.Popen[str]]:
    """A client that was started with the lease, at work, and uses so much memory."""
    with started_job(work.daemon.host, *JOB, variables=lease["environment"]) as client:
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
            end = f"; if this lasts, PID {newest.pid}, the newest process, will be terminated"
            assert problem["text"].endswith(end)
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


@contextlib.contextmanager
def child_of_holder(
    work: AtWork, device: str, variables: Mapping[str, str], used_mib: int
) -> Iterator[tuple[Any, int]]:
    """A lease whose holder, with these variables, has a client as its child; both, the client by its PID."""
    with started_job(work.daemon.host, "sh", "-c", f"{shlex.join(JOB)}; true", variables=variables) as holder:
        lease = take(work.daemon, f"devices={device}&holder.pid={holder.pid}")
        (child,) = children_of(holder.pid)
        work.daemon.host.gpus[0].add_process(child, used_mib, "M+C")
        try:
            yield lease, child
        finally:
            with contextlib.suppress(ProcessLookupError):  # it was terminated
                os.kill(child, signal.SIGKILL)


def test_a_job_that_inherited_another_lease_s_variable_counts_for_its_own(work: AtWork) -> None:
    daemon = work.daemon
    outer = take(daemon, f"devices={DEVICE}&holder.name=outer&holder.ttl_s=600")
    budget_mib = outer["budgets"][0]["memory_mib"]
    inherited = child_of_holder(work, "00:06.0-2", outer["environment"], 512)
    with process_of(work, outer, budget_mib), inherited as (inner, child):
        uses = {one["pid"]: one["lease"] for one in daemon.get("/v1/clients")[1]["clients"]}
        assert uses[child] == inner["id"]
        assert [one for one in daemon.status()["problems"] if one["code"] == "over_budget"] == []
        for _ in range(3):
            daemon.polls()
        assert is_running(child)


def test_a_process_that_removes_the_variable_still_counts(work: AtWork) -> None:
    free = take(work.daemon, f"devices={DEVICE}&holder.name=job&holder.ttl_s=600")
    assert work.daemon.ask("DELETE", "/v1/leases/job")[0] == 200
    variables = {name: value for name, value in free["environment"].items() if not name.startswith("YUNION")}
    budget_mib = free["budgets"][0]["memory_mib"]
    with child_of_holder(work, DEVICE, variables, budget_mib + 1) as (lease, child):
        eventually(lambda: work.daemon.polls() and not is_running(child), "its end")
        work.daemon.host.gpus[0].remove_process(child)
        event = termination(work.daemon, work.daemon.host.gpus[0].uuid)
        assert f"lease {lease['id'][:8]} together use {budget_mib + 1} of" in event["cause"]


def test_a_reload_applies_the_key_of_an_entry_without_a_new_control_daemon(make_at_work: MakeAtWork) -> None:
    work = make_at_work(over_budget="terminate", over_budget_grace_s=1)
    daemon, host = work.daemon, work.daemon.host
    control_pid, (server,) = daemon.control_pid(), work.jobs.servers()
    entries = host.root / "etc/yunion/host_container_device.yml"
    entries.write_text(entries.read_text().rstrip("\n") + "\n  over_budget: report\n")
    status, answer = daemon.ask("POST", "/v1/reload")
    assert status == 200
    assert answer["changes"] == [
        {
            "kind": "setting",
            "subject": "over_budget of GPU 00:06.0",
            "before": "terminate",
            "after": "report",
            "effect": "at once",
            "at_once": True,
        }
    ]
    assert (answer["pending"], answer["clients"]) == ([], [])
    assert (daemon.control_pid(), work.jobs.servers()) == (control_pid, [server])
    lease = take(daemon, f"devices={DEVICE}&holder.name=job&holder.ttl_s=600")
    with process_of(work, lease, 16_000) as client:
        (problem,) = (one for one in daemon.status()["problems"] if one["code"] == "over_budget")
        assert "terminated" not in problem["text"]
        eventually(lambda: daemon.polls() and f"<4>{problem['text']}" in daemon.log, "a line in the journal")
        events = daemon.get("/v1/events?kind=client")[1]["events"]
        assert [one["cause"] for one in events if one["code"] == "over_budget"] == [problem["text"]]
        assert is_running(client.pid)
