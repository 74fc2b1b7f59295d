"""A control daemon that serves already: our own survivor is adopted, another program's is left alone."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest
from yunion_mps.core.enums import APPLYING, BACKOFF, FAILED, READY, STARTING, STOPPED, WEDGED
from yunion_mps.core.models import DomainPlan, PlannedGpu
from yunion_mps.host.processes import spawn
from yunion_mps.mps.control_daemon import directories_in_use, start_error
from yunion_mps.mps.processes import MARK, PROGRAM, control_environment

from .domain_bench import Bench
from .other_processes import running_here, stop_process, wait_until_it_answers

OTHER_GPU = "GPU-11111111-0000-0000-0000-000000000000"


def test_our_own_survivor_is_adopted_and_its_limits_are_set_again(bench: Bench) -> None:
    survivor = bench.control()
    run = bench.domain().start()
    assert run.reasons == [f"adopted the running control daemon (PID {survivor.pid}); waiting for its answer"]
    run.until(READY)
    assert run.pid == survivor.pid
    assert bench.ask("get_default_device_pinned_mem_limit 0") == ["5G"]
    run.stop().until(STOPPED)
    assert survivor.status() is not None, "a stop ends it like one that we started"


def test_a_survivor_is_adopted_even_if_no_other_could_be_started(bench: Bench) -> None:
    survivor = bench.control()
    bench.block_log_directory()
    run = bench.domain()
    assert start_error(bench.plan) is None
    assert run.start().until(READY).pid == survivor.pid


@pytest.mark.parametrize("gone", ["control", "everything"])
def test_a_survivor_without_its_sockets_is_found_and_replaced(bench: Bench, gone: str) -> None:
    """As age-based cleaning of /tmp leaves it; a second one would start beside it: its lock is gone too."""
    survivor = bench.control()
    for name in os.listdir(bench.plan.pipe_directory) if gone == "everything" else ["control"]:
        os.unlink(f"{bench.plan.pipe_directory}/{name}")
    assert running_here(bench.plan) == [(survivor.pid, bench.plan.gpu_uuids)]
    run = bench.domain().start()
    assert run.pid == survivor.pid
    run.advance(10).advance(2).until(READY)
    assert survivor.status() is not None
    assert run.states == [STOPPED, STARTING, WEDGED, BACKOFF, STARTING, APPLYING, READY]


def test_a_survivor_that_ends_while_found_does_not_fail_the_start(bench: Bench) -> None:
    survivor = bench.control()
    stop_process(survivor.pid)
    run = bench.domain().start()
    survivor.signal(signal.SIGKILL)
    run.until_ended().tick()
    assert run.state in (STARTING, APPLYING, READY), "another was started at once"
    assert run.until(READY).pid != survivor.pid
    assert run.states == [STOPPED, STARTING, BACKOFF, STARTING, APPLYING, READY]


def test_a_directory_serves_only_through_its_own_control_daemon(bench: Bench) -> None:
    pipe = bench.plan.pipe_directory
    assert directories_in_use(pipe) == ()
    bench.control()
    assert directories_in_use(pipe) == (pipe, bench.plan.log_directory)
    elsewhere = bench.place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "control").symlink_to(f"{pipe}/control")
    assert directories_in_use(str(elsewhere)) == (), "any user can make such a link"


def test_a_stopped_survivor_is_continued_and_adopted(bench: Bench) -> None:
    survivor = bench.control()
    stop_process(survivor.pid)
    run = bench.domain().start().until(APPLYING).advance(5).until(READY)
    assert run.states == [STOPPED, STARTING, APPLYING, WEDGED, APPLYING, READY]
    assert run.reasons[2].endswith("does not serve: it was stopped by a signal (SIGSTOP) or a debugger")
    assert run.pid == survivor.pid


def test_a_survivor_is_spared_when_the_daemon_fails(bench: Bench) -> None:
    survivor = bench.control()
    run = bench.domain().start().until(READY)
    run.domain.stop(run.now_s, spare_adopted=True)
    assert run.state == STOPPED
    assert survivor.status() is None


def test_a_control_daemon_that_we_started_is_not_spared(bench: Bench) -> None:
    run = bench.domain().start().until(READY)
    pid = run.pid
    run.domain.stop(run.now_s, spare_adopted=True)
    run.until(STOPPED)
    assert not os.path.exists(f"/proc/{pid}")


def without_mark(plan: DomainPlan) -> dict[str, str]:
    return {name: value for name, value in control_environment(plan).items() if name != MARK}


@pytest.mark.parametrize("is_ours", [False, True])
def test_another_programs_control_daemon_is_refused_and_left_alone(bench: Bench, is_ours: bool) -> None:
    """Also one of ours that serves other GPUs."""
    for_other_gpus = {**control_environment(bench.plan), "CUDA_VISIBLE_DEVICES": OTHER_GPU}
    stranger = bench.control(environment=for_other_gpus if is_ours else without_mark(bench.plan))
    pid, pipe = stranger.pid, bench.plan.pipe_directory
    bench.ask("set_default_active_thread_percentage 77")
    run = bench.domain().start()
    assert run.states == [STOPPED, FAILED]
    hint = f"once its jobs have ended: echo quit | CUDA_MPS_PIPE_DIRECTORY={pipe} {PROGRAM}"
    if is_ours:
        it = f"the control daemon (PID {pid}) that an earlier yunion-mps-daemon left in {pipe}"
        assert (run.error.message, run.error.hint) == (f"{it} serves none of the configured GPUs", hint)
    else:
        it = f"a control daemon (PID {pid}, uid {os.getuid()}) not started by yunion-mps"
        assert run.error.message == f"{it} serves {pipe}"
        assert run.error.hint == f"{hint}; or adopt it with its jobs: yunion-mps-daemon --adopt {pid}"
    assert run.advance(60).states == [STOPPED, FAILED], "it is no event that it fails again as before"
    assert run.domain.since_s == run.now_s
    run.stop()
    assert stranger.status() is None
    assert bench.ask("get_default_active_thread_percentage") == ["77.0"]


def test_the_domain_starts_once_the_other_program_has_ended(bench: Bench) -> None:
    stranger = bench.control(environment=without_mark(bench.plan))
    run = bench.domain().start()
    bench.ask("quit")
    while stranger.status() is None:
        os.sched_yield()
    assert run.advance(59.9).state == FAILED
    assert run.advance(0.1).until(READY).states == [STOPPED, FAILED, STARTING, APPLYING, READY]


def test_another_program_on_the_socket_is_refused_even_with_our_mark(bench: Bench) -> None:
    os.makedirs(bench.plan.pipe_directory)
    listen = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        "s.bind(sys.argv[1]); s.listen(); time.sleep(1000)"
    )
    with open(os.devnull, "r+b") as null:
        argv = [os.path.realpath(sys.executable), "-I", "-c", listen, f"{bench.plan.pipe_directory}/control"]
        other = spawn(
            argv, control_environment(bench.plan), stdin=None, stdout=null.fileno(), stderr=null.fileno()
        )
    try:
        wait_until_it_answers(bench.plan, other.pid)
        run = bench.domain().start()
        assert run.state == FAILED
        assert f"(PID {other.pid}, uid {os.getuid()})" in run.domain.reason
        assert other.status() is None
    finally:
        other.kill()


def test_a_stale_socket_does_not_hinder_the_start(bench: Bench) -> None:
    os.makedirs(bench.plan.pipe_directory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(f"{bench.plan.pipe_directory}/control")
    assert bench.domain().start().until(READY).states == [STOPPED, STARTING, APPLYING, READY]


def test_a_survivor_that_serves_a_lost_gpu_too_is_adopted(bench: Bench) -> None:
    """Limits are named by the survivor's own order; that of the GPU which is not planned stays as it is."""
    both = bench.plan._replace(gpus=(PlannedGpu(OTHER_GPU, 1024), *bench.plan.gpus))
    survivor = bench.control(both)
    bench.ask("set_default_device_pinned_mem_limit 0 1024M")
    run = bench.domain(bench.plan).start().until(READY)
    assert run.pid == survivor.pid
    assert run.domain.in_effect.gpu_uuids == both.gpu_uuids
    assert run.domain.in_effect.memory_limits_mib == (None, 5760)
    asked = [f"get_default_device_pinned_mem_limit {device}" for device in (0, 1)]
    assert bench.ask(*asked) == ["1G", "5G"]


def test_a_survivor_that_lacks_a_gpu_is_adopted_for_the_others(bench: Bench) -> None:
    survivor = bench.control()
    both = bench.plan._replace(gpus=(PlannedGpu(OTHER_GPU, 1024), *bench.plan.gpus))
    run = bench.domain(both).start().until(READY)
    assert run.pid == survivor.pid
    assert run.domain.in_effect.gpu_uuids == bench.plan.gpu_uuids
    assert bench.ask("get_default_device_pinned_mem_limit 0") == ["5G"]
    assert running_here(bench.plan) == [(survivor.pid, bench.plan.gpu_uuids)]
