"""The kernel refuses processes and threads: the daemon goes on, says what is short, and recovers."""

from __future__ import annotations

import signal

import pytest

from integration.daemon_host import Daemon, control_daemons, eventually
from integration.process_limit import no_more_processes
from integration.test_daemon_gpus import LOST, available

LIMITS = (
    "check the limits on memory, files, processes and threads: "
    "systemctl show yunion-mps-daemon | grep -E 'Limit|Tasks|Memory'"
)


def warned(daemon: Daemon) -> bool:
    return any("the GPUs cannot be read" in words for words in daemon.warnings())


def test_polling_without_a_thread_is_reported_and_ends_nothing(ready_daemon: Daemon) -> None:
    (control,) = control_daemons(ready_daemon.host.root)  # a request would leave a thread for the next time
    with no_more_processes(ready_daemon.pid):
        eventually(lambda: ready_daemon.polls() and warned(ready_daemon), "the warning")
        status, answer = ready_daemon.get("/v1/plan")
        assert (status, answer["hint"]) == (503, LIMITS)
        assert answer["detail"].startswith("cannot start a thread: ")
        ready_daemon.signal(signal.SIGHUP)
        ready_daemon.wait_log("not reloaded: cannot start a thread")
        assert available(ready_daemon) == 4
    eventually(lambda: ready_daemon.polls() and not warned(ready_daemon), "a look")
    assert "Traceback" not in ready_daemon.log
    assert ready_daemon.control_pid() == control
    assert ready_daemon.stop() == 0


def test_a_reload_without_processes_is_refused_and_looks_go_on(ready_daemon: Daemon) -> None:
    assert ready_daemon.get("/v1/plan")[0] == 200  # which leaves the threads for the next time
    host = ready_daemon.host
    host.divide(2)
    with no_more_processes(ready_daemon.pid):
        assert ready_daemon.get("/v1/plan")[0] == 200
        for target in ("/v1/reload", "/v1/reexec"):
            status, answer = ready_daemon.ask("POST", target)
            assert (status, answer["hint"]) == (503, LIMITS)
            assert answer["detail"].endswith("Resource temporarily unavailable")
        assert available(ready_daemon) == 4
        host.gpus[0].lose()
        # A fault that only an Xid reported is kept: the poll has to see that the GPU is lost.
        eventually(lambda: ready_daemon.get("/v1/gpus")[1]["gpus"][0]["reason"] == LOST, "the loss")
        host.gpus[0].restore()
        eventually(lambda: available(ready_daemon) == 4, "the return")
    assert ready_daemon.ask("POST", "/v1/reload")[0] == 200
    assert available(ready_daemon) == 2
    assert ready_daemon.control("get_default_device_pinned_mem_limit 0") == ["11G"]
    assert "Traceback" not in ready_daemon.log


@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_a_stop_without_processes_restores_every_mode(daemon: Daemon) -> None:
    host = daemon.host
    daemon.configure(cuda_mps_stop_timeout_s=1)
    daemon.start().wait_ready()
    daemon.status()  # its loop runs
    with no_more_processes(daemon.pid):
        assert daemon.stop() == 0, daemon.log
    assert [gpu.compute_mode for gpu in host.gpus] == ["default", "default"]
    assert control_daemons(host.root) == []
    assert "Traceback" not in daemon.log
