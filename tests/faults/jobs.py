"""Faults that jobs, their servers and other people's hands bring about."""

from __future__ import annotations

import os
import signal
from typing import Any

from faults.fault_table import JOBS, fault
from faults.scene import FORMER_MODE, Scene, shown_s, until
from unit.mps.other_processes import stop_process

OTHER_USER = 65534


@fault(JOBS, "the control daemon is killed while a job runs")
def killed_with_a_job(scene: Scene) -> None:
    scene.serve().job()
    scene.kill_control_daemon()
    scene.record_report("ready -> backoff")  # its orphaned server's event may come before or after
    scene.job()


@fault(JOBS, "the MPS server of a job is killed", loses="a job", takes_s=12)
def server_killed(scene: Scene) -> None:
    job = scene.serve().job()
    (server,) = scene.stand_ins.servers()
    scene.inject(lambda: os.kill(server, signal.SIGKILL))
    assert job.says() == "server gone"
    (told,) = until(lambda: _about(scene, server), "an event", scene.trouble)
    assert told["severity"] == "error", told
    scene.expect_report(str(told["what"]))
    assert scene.daemon.status()["devices"]["available"] == 4
    new = scene.job()
    assert scene.stand_ins.servers() != [server]
    scene.end(new)


def _about(scene: Scene, server: int) -> list[dict[str, Any]]:
    named = [event for event in scene.events() if f"(PID {server})" in event["what"]]
    return [event for event in named if "started" not in event["what"]]


@fault(JOBS, "the MPS server of a job is stopped (SIGSTOP)")
def server_stopped(scene: Scene) -> None:
    scene.serve().job()
    (server,) = scene.stand_ins.servers()
    scene.inject(lambda: stop_process(server))
    (trouble,) = scene.daemon.get("/v1/clients")[1]["errors"]
    scene.words = trouble.replace(str(server), "N")
    scene.note_recovery()
    os.kill(server, signal.SIGCONT)


@fault(JOBS, "every MPS server fails when it starts", takes_s=25)
def server_fails(scene: Scene) -> None:
    scene.serve()
    scene.stand_ins.behave("failing")
    scene.inject(lambda: None)
    job = scene.waiting_job()
    scene.forget(job)
    assert job.says() == "refused"
    scene.expect_report("ready -> degraded")
    scene.unavailable()
    scene.repair(scene.stand_ins.behave, "that is fixed")
    scene.serves_again()
    until(lambda: not scene.stand_ins.servers(), "the end of the server that was tried", scene.trouble)
    scene.job()


@fault(JOBS, "a job of another user waits for the server", takes_s=21)
def another_user_waits(scene: Scene) -> None:
    scene.serve().job()
    scene.inject(lambda: None)
    waiting = scene.waiting_job(OTHER_USER)
    scene.expect_report(" waits")
    scene.end(waiting)


@fault(JOBS, "another program changes the limits", takes_s=60)
def limits_changed(scene: Scene) -> None:
    scene.serve().job()
    ask = "get_default_active_thread_percentage"
    changes = ["set_default_active_thread_percentage 90", "set_default_device_pinned_mem_limit 0 9G"]
    scene.inject(lambda: scene.ask(*changes))
    assert scene.ask(ask) == ["90.0"]
    # Not by asking the control daemon again and again: only one front-end at a time is served.
    scene.serves_again(lambda: scene.find("another program changed its limits"))
    assert scene.ask(ask) == ["25.0"]
    scene.record_report("another program changed its limits")


@fault(JOBS, "another program changes the compute mode", takes_s=11)
def mode_changed(scene: Scene) -> None:
    scene.serve().job()
    gpu = scene.host.gpus[0]
    change = ["nvidia-smi", "-i", gpu.uuid, "-c", "DEFAULT"]
    scene.inject(lambda: scene.host.run(change, check=True))
    assert gpu.compute_mode == "default"
    scene.serves_again(lambda: gpu.compute_mode == "exclusive_process")
    scene.record_report("another program changed it")


@fault(JOBS, "an operator's front-end stays open during a reload")
def front_end_open_in_a_reload(scene: Scene) -> None:
    scene.serve()
    with scene.daemon.open_front_end():
        scene.host.divide(2)
        scene.inject(lambda: scene.daemon.signal(signal.SIGHUP))
        scene.expect_report("another nvidia-cuda-mps-control is connected")
    scene.repair(lambda: None, "its end")
    scene.serves_again(lambda: scene.domain["memory_limits_mib"] == [8192])
    scene.budgets = ["8G", "50.0"]


@fault(JOBS, "an operator's front-end stays open during a stop, and a job runs", loses="a job", takes_s=13)
def front_end_open_in_a_stop(scene: Scene) -> None:
    """The job gets the time that a stop leaves it (10 s), then it ends; and the modes are restored."""
    job = scene.serve().job()
    with scene.daemon.open_front_end():
        scene.inject(lambda: scene.daemon.signal(signal.SIGTERM))
        assert scene.daemon.wait() == 0
        assert job.says() == "server gone"
        scene.note_recovery(f"stopped after {shown_s(scene.elapsed_s)}")
    assert scene.host.gpus[0].compute_mode == FORMER_MODE
    scene.record_report("sending SIGTERM to the control daemon")
    scene.serve()
