"""MPS servers that outlive their control daemon: they are told of, spared, and never forgotten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from yunion_mps.core.enums import BACKOFF, FAILED, READY, STOPPED, STOPPING
from yunion_mps.core.errors import ShortageError
from yunion_mps.core.models import DomainPlan, Event
from yunion_mps.core.reasons import SERVERS_ORPHANED
from yunion_mps.mps.processes import MpsProcess, orphaned_servers, running_servers
from yunion_mps.mps.rollover import IDLE_S, OrphanedServers

from integration.daemon_host import eventually
from simhost.mps import Client

from .domain_bench import Bench, DomainRun, Jobs
from .other_processes import PIDFD_SEND_SIGNAL, no_descriptor_left, refusing, silent_connection, stop_process


def orphan(run: DomainRun, jobs: Jobs) -> tuple[int, Client]:
    """A server that goes on with its job under a new control daemon; the server's PID."""
    job = jobs.attach()
    run.advance(1)
    (server,) = run.domain.server_pids()
    run.kill().until(READY)
    return server, job


def test_servers_of_a_control_daemon_that_died_are_events_and_shown(run: DomainRun, jobs: Jobs) -> None:
    first = run.pid
    server, _ = orphan(run, jobs)
    (event,) = [event for event in run.events if "still running" in event.what]
    assert event == Event(
        "warning",
        "domain",
        "host",
        f"the MPS server (PID {server}) is still running without its control daemon",
        f"the control daemon (PID {first}) was killed by signal 9",
        "its jobs continue with their limits; new jobs may have to wait until it ends",
        "servers_orphaned",
    )
    (condition,) = run.pending
    assert condition.reason == (
        f"the MPS server (PID {server}) of an earlier control daemon still runs jobs; new "
        "jobs may have to wait"
    )
    assert run.awaited_servers == (server,)
    assert run.domain.server_pids() == [server], "NVML's list of processes is read by this"
    assert run.domain.watched()


def test_an_orphan_that_ends_with_its_job_is_an_event(run: DomainRun, jobs: Jobs) -> None:
    server, job = orphan(run, jobs)
    jobs.end(job)
    run.until_true(lambda: run.domain.server_pids() == [])
    assert run.event_texts[-1] == f"the MPS server (PID {server}), which had no control daemon, has ended"
    assert run.pending == []


@pytest.mark.parametrize("in_use", [None, True])
def test_an_orphan_that_may_have_jobs_is_never_ended(
    run: DomainRun, bench: Bench, in_use: bool | None
) -> None:
    server, _ = orphan(run, bench.jobs)
    run.domain.note_use(in_use=in_use)
    run.advance_steps(30, 60)
    assert bench.jobs.servers() == [server]


def test_the_end_of_another_control_daemon_ends_no_orphan_with_jobs(run: DomainRun, bench: Bench) -> None:
    server, _ = orphan(run, bench.jobs)
    first = run.pid
    with silent_connection(bench.plan):
        run.advance(10).advance(5).advance(2).until(BACKOFF)
    run.advance(1).until(READY)
    assert run.pid != first
    assert run.advance(60).until_answered().state == READY
    assert bench.jobs.servers() == [server]


def test_an_orphan_without_jobs_is_ended(run: DomainRun, jobs: Jobs) -> None:
    """NVML says that no other process uses the GPU, so that this client is none."""
    server, _ = orphan(run, jobs)
    run.domain.note_use(in_use=False)
    run.advance(0).advance(IDLE_S - 0.1)
    assert jobs.servers() == [server]
    run.advance(0.1).until_true(lambda: run.domain.server_pids() == [])
    sent, ended = run.event_texts[-2:]
    assert sent == f"sent SIGTERM to the MPS server (PID {server}), which has no control daemon"
    assert ended.endswith(" has ended")
    assert run.events[-1].cause == "no job uses its GPUs"
    assert run.state == READY


def test_an_orphan_is_idle_only_if_no_job_was_seen_for_a_while(run: DomainRun, jobs: Jobs) -> None:
    server, _ = orphan(run, jobs)
    for in_use in (False, True, False, None, False):
        run.domain.note_use(in_use=in_use)
        run.advance(0).advance(IDLE_S - 1)
    assert jobs.servers() == [server]


def test_a_server_orphaned_between_two_ticks_is_found(run: DomainRun, jobs: Jobs) -> None:
    jobs.attach()
    run.kill().until(READY)
    assert run.pending == []
    run.advance(1)
    (server,) = jobs.servers()
    assert run.awaited_servers == (server,)


def test_a_daemon_that_starts_finds_the_orphans_of_one_before_it(run: DomainRun, bench: Bench) -> None:
    run.begin_job(bench.jobs)
    os.kill(run.pid, signal.SIGKILL)
    run.until_ended()
    after = bench.serving().advance(1)
    assert [event.code for event in after.events if event.severity != "info"] == [SERVERS_ORPHANED]
    after.stop().advance(10).until(STOPPED)
    assert bench.jobs.servers() == []


def test_the_servers_of_an_adopted_control_daemon_are_not_orphans(run: DomainRun, bench: Bench) -> None:
    bench.jobs.attach()
    after = bench.serving().advance(1)
    assert after.pid == run.pid
    assert (after.event_texts, after.pending) == ([], [])
    assert orphaned_servers(bench.plan.pipe_directory) == []


def test_servers_of_our_renamed_control_daemon_are_not_orphans() -> None:
    control = MpsProcess(os.getppid(), 1, "/pipe", "/log", ("GPU-1",))  # with our parent's program
    server = MpsProcess(os.getpid(), 1, "/pipe", "/log", ("GPU-1",), is_server=True)
    assert orphaned_servers("/pipe", lambda: [control, server]) == []
    assert orphaned_servers("/pipe", lambda: [server]) == [server.pid]


def test_nothing_but_a_server_of_ours_on_the_directory_is_an_orphan(plan: DomainPlan, jobs: Jobs) -> None:
    """What is only named like one, and what another directory's control daemon has left."""
    named = jobs.stand_ins.folder / "real" / "nvidia-cuda-mps-server"
    named.parent.mkdir()
    named.symlink_to(sys.executable)
    env = {"CUDA_MPS_PIPE_DIRECTORY": plan.pipe_directory, "YUNION_MPS_DOMAIN": "host"}
    with subprocess.Popen([named, "-c", "input()"], env=env, stdin=-1) as other:
        assert running_servers([other.pid, os.getpid(), 1 << 22]) == ()
        assert orphaned_servers(plan.pipe_directory) == []
        other.terminate()


def test_a_stop_gives_orphans_the_clients_time_and_then_ends_them(run: DomainRun, jobs: Jobs) -> None:
    server, _ = orphan(run, jobs)
    run.stop()
    run.until_true(lambda: run.domain.status().pid is None)
    assert run.state == STOPPING
    run.advance(9.9)
    assert jobs.servers() == [server]
    run.advance(0.1).until(STOPPED)
    assert jobs.servers() == []
    assert f"sent SIGTERM to the MPS server (PID {server}), which has no control daemon" in run.event_texts
    assert run.events[-2].cause == "its jobs did not end in time"


def test_a_stop_need_not_wait_for_an_orphan_that_ends(run: DomainRun, jobs: Jobs) -> None:
    _, job = orphan(run, jobs)
    run.stop()
    jobs.end(job)
    run.until(STOPPED)


def test_a_stopped_orphan_is_continued_before_its_signal(run: DomainRun, jobs: Jobs) -> None:
    server, _ = orphan(run, jobs)
    run.stop().until_true(lambda: run.domain.status().pid is None)
    stop_process(server)
    run.advance(10).until(STOPPED)
    assert jobs.servers() == []


def test_orphans_are_ended_even_if_nothing_can_be_started(run: DomainRun, bench: Bench) -> None:
    run.begin_job(bench.jobs)
    bench.block_log_directory()
    run.kill().until(FAILED).stop()
    assert run.state == STOPPING
    run.advance(10).until(STOPPED)
    assert bench.jobs.servers() == []


def test_a_domain_that_retires_waits_for_its_orphans(run: DomainRun, jobs: Jobs) -> None:
    _, job = orphan(run, jobs)
    run.domain.retire()
    assert run.advance(60).state == READY
    jobs.end(job)
    run.until(STOPPED)


def test_a_domain_that_retires_starts_nothing_new_for_its_orphans(run: DomainRun, jobs: Jobs) -> None:
    run.kill().until(READY)  # so that the next start has to wait
    job = jobs.attach()
    run.advance(1)
    run.domain.retire()
    run.kill()
    before = list(run.states)
    assert run.advance(60).advance(60).states == before
    jobs.end(job)
    run.until(STOPPED)


def test_orphans_can_be_ended_by_force_at_once(run: DomainRun, jobs: Jobs) -> None:
    orphan(run, jobs)
    run.domain.drain(run.now_s)  # there is no control daemon to ask
    run.end_all_servers()
    run.until_true(lambda: jobs.servers() == [])


def test_an_orphan_that_was_not_confirmed_does_not_end(run: DomainRun, jobs: Jobs) -> None:
    server, _ = orphan(run, jobs)
    run.domain.end_servers(run.now_s, lambda _: True, with_all_clients=())
    run.advance(10).advance(10)
    assert jobs.servers() == [server]


def test_a_daemon_that_fails_itself_leaves_orphans_alone_and_says_so(
    run: DomainRun, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = orphan(run, bench.jobs)
    run.domain.stop(run.now_s, spare_adopted=True)
    run.until(STOPPED)
    assert bench.jobs.servers() == [server]
    assert f"domain host: leaving the MPS server (PID {server}) running" in caplog.messages


def test_a_server_that_cannot_be_ended_is_an_event_once_a_minute(jobs: Jobs, run: DomainRun) -> None:
    """As one that hangs in the driver; there is none here, so the kernel keeps signals from it."""
    server, _ = orphan(run, jobs)
    told: list[str] = []
    orphans = OrphanedServers("host", lambda event: told.append(event.what))
    orphans.add([server], "")
    orphans.end(0.0, "")

    def tick_for_200_s() -> None:
        now_s = 0.0
        while now_s < 200:
            due_s = orphans.tick(now_s, in_use=None)
            assert due_s is not None
            now_s = max(due_s, now_s + 0.01)

    refusing(PIDFD_SEND_SIGNAL, 0, tick_for_200_s)
    assert [what.split()[1] for what in told[1:]] == ["SIGTERM", *["SIGKILL"] * 4]
    assert orphans.pids == (server,)


def test_without_descriptors_no_server_counts_as_ended(run: DomainRun, jobs: Jobs) -> None:
    """Its limits would be taken for those of the next one."""
    run.begin_job(jobs)
    (server,) = jobs.servers()
    with no_descriptor_left():
        assert run.domain.server_pids() == [server]
        assert running_servers([server]) == (server,)
        with pytest.raises(ShortageError):
            orphaned_servers("/nowhere")
    eventually(lambda: run.domain.server_pids() == [server])
