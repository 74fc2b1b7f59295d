"""One domain with NVIDIA's real control daemon: its start, its limits, its deaths and its end."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable

import pytest
from yunion_mps.core.enums import BACKOFF, FAILED, READY, STARTING, STOPPED, STOPPING
from yunion_mps.host.proc import environment_of
from yunion_mps.mps.conversation import peer_of
from yunion_mps.mps.health import PROBE_S

from descriptors import open_descriptors

from .domain_bench import Bench
from .other_processes import silent_connection, stop_process


def test_it_is_due_only_when_something_has_happened(bench: Bench) -> None:
    run = bench.domain().start().until(READY)
    domain = run.advance_steps(2, PROBE_S).domain
    assert not domain.is_due(run.now_s, [])
    assert domain.is_due(run.now_s + PROBE_S, [])
    assert domain.is_due(run.now_s, domain.watched())
    changes: list[Callable[[], None]] = [
        lambda: domain.note_use(in_use=False),
        lambda: domain.drain(run.now_s),
        lambda: domain.await_restoration(is_awaited=True),
        lambda: domain.await_restoration(is_awaited=False),
        lambda: domain.change(domain.desired, run.now_s),
    ]
    for change in changes:
        change()
        assert domain.is_due(run.now_s, [])
        run.until_answered()
        assert not domain.is_due(run.now_s, [])
    domain.note_use(in_use=False, polled_s=run.now_s)
    assert not domain.is_due(run.now_s, []), "the same answer again"


def test_the_control_daemons_environment_is_built_from_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NOTIFY_SOCKET", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD_X", "CUDA_MPS_PIPE_DIRECTORY"):
        monkeypatch.setenv(name, "ours")
    plan = bench.planned((5760, 1024))
    run = bench.domain(plan).start().until(READY)
    assert environment_of(run.pid) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_LOG_DIRECTORY": plan.log_directory,
        "CUDA_MPS_PIPE_DIRECTORY": plan.pipe_directory,
        "CUDA_VISIBLE_DEVICES": ",".join(plan.gpu_uuids),
        "LC_ALL": "C",
        "PATH": f"{os.path.dirname(bench.program)}:/usr/sbin:/usr/bin:/sbin:/bin",
        "YUNION_MPS_DOMAIN": "host",
        "YUNION_MPS_ROOT": os.environ["YUNION_MPS_ROOT"],
    }


def test_a_program_that_exits_at_once_is_reported_with_its_output(bench: Bench) -> None:
    run = bench.domain(program=bench.script("echo no CUDA here; exit 3")).start()
    first = run.pid
    run.until(BACKOFF)
    log = f"{bench.plan.log_directory}/control.log"
    assert run.reasons[1] == f"the control daemon (PID {first}) exited with status 3"
    assert run.error.hint == f"see its log: {log}\n  no CUDA here\n  no CUDA here"
    assert READY not in run.states


def test_a_control_daemon_that_never_answers_is_ended_after_ten_seconds(bench: Bench) -> None:
    run = bench.domain(program=bench.script("exec sleep 1000")).start()
    pid = run.pid
    assert run.advance(9.9).state == STARTING
    run.advance(0.1)
    assert run.reasons[1] == (
        f"the control daemon (PID {pid}) does not serve: "
        "the control daemon did not answer within 10 s after its start"
    )
    run.advance(2).until(BACKOFF, STARTING)
    assert not os.path.exists(f"/proc/{pid}")


def test_it_asks_less_and_less_often_whether_it_answers(bench: Bench) -> None:
    run = bench.domain(program=bench.script("exec sleep 1000")).start()
    waits = [run.tick() or 0.0 for _ in range(20)]
    assert waits == sorted(waits)
    assert waits[0] < 0.001
    assert waits[-1] == pytest.approx(0.05)


def test_it_is_started_again_at_once_then_later_and_later(bench: Bench) -> None:
    run = bench.domain(program=bench.script("exit 3")).start()
    run.until(BACKOFF)
    assert run.states[1:4] == [STARTING, BACKOFF, STARTING], "the first new start is immediate"
    for wait_s in (1, 2, 4, 8, 16, 32):
        assert run.advance(0.5).state == BACKOFF
        assert run.advance(wait_s - 1.0).tick() == pytest.approx(0.5)
        assert run.state == BACKOFF
        before = len(run.states)
        run.advance(0.5).until(BACKOFF, FAILED)
        assert run.states[before] == STARTING
    assert run.domain.restarts == 8


def test_a_control_daemon_that_keeps_dying_is_retried_every_minute(bench: Bench) -> None:
    run = bench.domain(program=bench.script("echo no CUDA here; exit 3")).start()
    while run.state != FAILED:
        run.until(BACKOFF, FAILED).advance(60)
    events = len(run.events)
    for _ in range(3):
        assert run.advance(59.5).state == FAILED
        run.advance(0.5).until(FAILED)
    assert len(run.events) == events + 3 * len([STARTING, FAILED])
    bench.script(f"exec {bench.program} $1")
    run.advance(59.5)
    assert run.advance(0.5).until(READY).domain.error is None


def test_earlier_deaths_count_no_more_after_a_minute_of_service(bench: Bench) -> None:
    run = bench.domain().start().until(READY)
    run.kill().until(READY)
    run.now_s += 59
    assert run.kill().tick() == pytest.approx(1)
    run.advance(1).until(READY)
    run.now_s += 60
    assert run.kill().state != BACKOFF


def test_a_stop_ends_the_control_daemon_without_any_time_passing(bench: Bench) -> None:
    run = bench.domain().start().until(READY)
    pid = run.pid
    run.stop()
    assert (run.state, run.domain.reason) == (STOPPING, "waiting up to 10 s for its clients to end")
    assert run.stop().states[-2:] == [READY, STOPPING], "a second stop changes nothing"
    run.until(STOPPED)
    assert not os.path.exists(f"/proc/{pid}")
    assert peer_of(bench.plan.pipe_directory) is None
    assert run.domain.watched() == []
    assert run.stop().states[-2:] == [STOPPING, STOPPED]


def test_a_hanging_control_daemon_is_ended_by_sigterm_and_then_sigkill(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "yunion_mps.mps")
    run = bench.domain().start().until(READY)
    pid = run.pid
    with silent_connection(bench.plan):
        run.stop()
        stop_process(pid)
        assert run.tick() == pytest.approx(1), "all processes are searched once, a second after each start"
        assert run.advance(1).tick() == pytest.approx(11)
        run.advance(10.9)
        assert caplog.messages == []
        run.advance(0.1)
        assert caplog.messages == [
            "domain host: its control daemon did not end in time",
            f"domain host: sending SIGTERM to the control daemon (PID {pid})",
        ]
        run.advance(2)
    assert caplog.messages[-1] == f"domain host: sending SIGKILL to the control daemon (PID {pid})"
    run.until(STOPPED)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_stopped_control_daemon_is_continued_to_quit(bench: Bench) -> None:
    run = bench.domain().start().until(READY)
    stop_process(run.pid)
    run.stop().until(STOPPED)


def test_a_control_daemon_that_cannot_quit_gets_sigterm(bench: Bench) -> None:
    """A stop while it starts: nothing listens yet, so there is nothing to wait for."""
    script = '[ "$1" = -f ] && exec sleep 1000; echo Cannot find MPS control daemon process; exit 1'
    run = bench.domain(program=bench.script(script)).start()
    run.stop().until(STOPPED)


def test_a_control_daemon_without_its_program_gets_sigterm(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    program = bench.script(f"exec {bench.program} $1")
    run = bench.domain(program=program).start().until(READY)
    os.unlink(program)
    run.stop().until(STOPPED)
    assert any("cannot ask its control daemon to quit: " in message for message in caplog.messages)


def test_a_front_end_that_hangs_does_not_keep_a_stop_from_ending(bench: Bench) -> None:
    run = bench.domain(program=bench.script(f"exec {bench.program} $1")).start().until(READY)
    bench.script("exec sleep 1000")
    run.stop().advance(12).until(STOPPED)


def test_a_control_daemon_that_dies_while_it_is_stopped_has_stopped(bench: Bench) -> None:
    run = bench.domain().start().until(READY)
    run.stop()
    os.kill(run.pid, signal.SIGKILL)
    assert run.until(STOPPED).domain.restarts == 0


def test_a_full_run_leaks_no_descriptor(bench: Bench) -> None:
    bench.domain().start().until(READY).stop().until(STOPPED)
    before = open_descriptors()
    for _ in range(3):
        run = bench.domain().start().until(READY)
        run.kill().until(READY).stop().until(STOPPED)
    assert len(open_descriptors()) == len(before)
