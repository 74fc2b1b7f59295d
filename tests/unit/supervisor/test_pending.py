"""Another configuration while jobs run: it is pending, and none of them loses its budget."""

from __future__ import annotations

import os
import signal
import time

from yunion_mps.supervisor.changes import LeaseWait

from unit.supervised import PutToWork, budgets, configure, modes, pid

V100 = [{"kind": "v100"}]
TWO = [{"kind": "v100"}, {"kind": "a100"}]


def test_a_budget_is_pending_until_the_server_of_the_last_job_has_ended(
    put_to_work: PutToWork,
) -> None:
    host, jobs, made, client = put_to_work(V100, 2)
    (server,) = jobs.servers()
    host.divide(4)
    (change,) = made.reload()
    assert change.effect == f"once the MPS server (PID {server}) has ended"
    (domain,) = made.snapshot.domains
    assert domain.state == "ready"
    assert str(server) in domain.pending
    assert budgets(made) == [("00:06.0-0", 8192), ("00:06.0-1", 8192)], "what clients get is what is shown"
    assert made.available == 2
    client.end()
    made.supervisor.jobs.update({host.gpus[0].uuid: {server: 30}}, time.monotonic())
    made.until(lambda: not made.snapshot.domains[0].pending)
    assert [mib for _, mib in budgets(made)] == [4096] * 4
    assert jobs.servers() == [], "a server without jobs was asked to end"
    assert [event.what for event in made.events if event.kind == "limit"] == ["the new limits are in effect"]


def test_a_budget_that_waits_for_leases_as_well_says_so(put_to_work: PutToWork) -> None:
    host, jobs, made, _ = put_to_work(V100, 2)
    (server,) = jobs.servers()
    made.lease_waits[host.gpus[0].uuid] = LeaseWait(frozenset({"x"}), 4, ("id",), "lease old of root")
    host.divide(4)
    (change,) = made.reload()
    ended = f"once the MPS server (PID {server}) has ended"
    assert change.effect == f"{ended}; 1 of 4 devices after the end of lease old of root"


def test_a_pending_budget_is_still_pending_for_the_next_daemon(put_to_work: PutToWork) -> None:
    host, jobs, first, client = put_to_work(V100, 2)
    host.divide(4)
    first.reload()
    again = first.again()
    assert pid(again) == pid(first)
    assert again.snapshot.domains[0].state == "ready"
    assert again.snapshot.domains[0].pending
    assert [mib for _, mib in budgets(again)] == [8192] * 2
    client.end()
    for server in jobs.servers():
        again.supervisor.jobs.update({host.gpus[0].uuid: {server: 30}}, time.monotonic())
    again.until(lambda: not again.snapshot.domains[0].pending)
    assert [mib for _, mib in budgets(again)] == [4096] * 4


def test_a_configuration_that_changed_while_no_daemon_ran_is_pending_too(put_to_work: PutToWork) -> None:
    host, _, first, _ = put_to_work(V100, 2)
    host.divide(4)
    again = first.again()
    assert again.snapshot.domains[0].state == "ready"
    assert again.snapshot.domains[0].pending
    assert [mib for _, mib in budgets(again)] == [8192] * 2
    assert pid(again) == pid(first)


def test_a_change_that_is_taken_back_is_pending_no_more(put_to_work: PutToWork) -> None:
    host, _, made, _ = put_to_work(V100, 2)
    host.divide(4)
    made.reload()
    assert made.snapshot.domains[0].pending
    told = len(made.events)
    made.reload()
    assert len([event for event in made.events[told:] if event.kind == "configuration"]) == 0
    host.divide(2)
    made.reload()
    assert made.snapshot.domains[0].pending == ""
    assert [mib for _, mib in budgets(made)] == [8192] * 2
    assert "the pending change was withdrawn" in [event.what for event in made.events]


def test_a_change_that_is_taken_back_while_no_daemon_runs_is_no_change(put_to_work: PutToWork) -> None:
    host, _, first, _ = put_to_work(V100, 2)
    host.divide(4)
    first.reload()
    host.divide(2)
    again = first.again()
    assert (again.snapshot.domains[0].state, again.snapshot.domains[0].pending) == ("ready", "")
    assert [mib for _, mib in budgets(again)] == [8192] * 2


def test_other_control_daemons_wait_for_the_jobs_on_those_that_run(put_to_work: PutToWork) -> None:
    host, jobs, made, client = put_to_work(TWO)
    before = pid(made)
    configure(host, cuda_mps_scope="gpu")
    changes = made.accept()
    assert [change.kind for change in changes] == ["control daemon"] * 3
    assert changes[0].effect.startswith("once the MPS server")
    first, *others = made.snapshot.domains
    assert (first.pid, first.state, made.available) == (before, "ready", 8)
    assert (
        first.pending
        == "the configuration has changed: the control daemon stops once its MPS servers have ended"
    )
    why = "waiting for the control daemon that currently serves its GPUs to end"
    assert [(other.plan.name, other.reason) for other in others] == [("00:06.0", why), ("00:07.0", why)]
    client.end()
    uuids = [gpu.uuid for gpu in host.gpus]
    made.supervisor.jobs.update({uuid: dict.fromkeys(jobs.servers(), 30) for uuid in uuids}, time.monotonic())
    made.until(lambda: len(made.snapshot.domains) == 2 and made.supervisor.fleet.started)
    assert [domain.plan.gpu_uuids for domain in made.snapshot.domains] == [(uuid,) for uuid in uuids]
    assert made.available == 8


def test_a_mode_to_be_kept_is_restored_once_no_server_may_have_jobs(
    put_to_work: PutToWork,
) -> None:
    host, jobs, made, client = put_to_work(V100, 4)
    (server,) = jobs.servers()
    configure(host, cuda_mps_compute_mode="keep")
    (change,) = made.reload()
    assert change.effect == f"once the MPS server (PID {server}) has ended"
    assert modes(host) == ["exclusive_process"], "jobs may be at work under it"
    client.end()
    os.kill(server, signal.SIGKILL)
    made.until(lambda: not jobs.servers() and not made.supervisor.domains[0].server_pids())
    made.set_modes()
    assert modes(host) == ["default"]
    made.stop()
    assert modes(host) == ["default"]


def test_a_server_whose_jobs_have_ended_does_not_hold_a_mode_for_good(
    put_to_work: PutToWork,
) -> None:
    host, jobs, made, client = put_to_work(V100, 4)
    (server,) = jobs.servers()
    configure(host, cuda_mps_compute_mode="keep")
    made.reload()
    made.set_modes()
    (domain,) = made.snapshot.domains
    assert domain.pending == f"compute modes are restored once the MPS server (PID {server}) has ended"
    assert domain.waits_for == (server,)
    client.end()
    made.supervisor.jobs.update({host.gpus[0].uuid: {server: 30}}, time.monotonic())
    made.until(lambda: not jobs.servers() and not made.supervisor.domains[0].server_pids())
    made.set_modes()
    assert modes(host) == ["default"]
    assert made.snapshot.domains[0].pending == ""


def test_a_pending_mode_comes_at_once_if_the_servers_are_to_end_now(put_to_work: PutToWork) -> None:
    host, jobs, made, _ = put_to_work(V100, 4)
    configure(host, cuda_mps_compute_mode="keep")
    made.reload()
    made.set_modes()
    made.supervisor.fleet.drain(time.monotonic(), force=True)
    made.until(lambda: not jobs.servers() and not made.supervisor.domains[0].server_pids())
    made.set_modes()
    assert modes(host) == ["default"]
