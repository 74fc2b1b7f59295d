"""The kernel refuses descriptors, memory, processes or threads: the daemon says so, goes on and recovers."""

from __future__ import annotations

import resource
import signal
import socket
from pathlib import Path

import pytest
from yunion_mps.core.reasons import SHORTAGE, hint_of

from integration.conftest import MakeAtWork, MakeDaemon
from integration.daemon_host import Daemon, control_daemons, eventually, no_more_processes
from integration.test_daemon_gpus import LOST, available


def limit_descriptors(daemon: Daemon, descriptors: int) -> None:
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (descriptors, 4096))


def test_a_stop_without_descriptors_gives_jobs_their_time(make_at_work: MakeAtWork) -> None:
    daemon, _, client = make_at_work(cuda_mps_stop_timeout_s=60)
    daemon.status()  # its loop runs
    limit_descriptors(daemon, 3)
    daemon.signal(signal.SIGTERM)
    daemon.wait_log("waiting up to 60 s for its clients to end")
    assert daemon.running
    limit_descriptors(daemon, 1024)
    client.end()
    assert daemon.wait() == 0, daemon.log
    assert "MPS server (PID" not in daemon.log, "none was ended by a signal"
    assert control_daemons(daemon.host.root) == []
    assert daemon.host.gpus[0].compute_mode == "default"


@pytest.mark.gpus({"kind": "v100"}, {"kind": "a100"})
def test_a_stop_without_memory_to_spare_restores_every_compute_mode(daemon: Daemon) -> None:
    daemon.configure(cuda_mps_stop_timeout_s=0)
    for name in [
        name for name in daemon.env if name.startswith("COV")
    ]:  # which needs more memory than the daemon
        del daemon.env[name]
    daemon.start().wait_ready()
    for _ in range(50):
        daemon.get("/v1/devices")
    sizes = Path(f"/proc/{daemon.pid}/statm").read_text().split()
    most = int(sizes[0]) * resource.getpagesize()
    daemon.signal(signal.SIGSTOP)  # without memory, it may end before it handles SIGTERM
    resource.prlimit(daemon.pid, resource.RLIMIT_AS, (most, most))
    daemon.signal(signal.SIGTERM)
    daemon.signal(signal.SIGCONT)
    assert daemon.wait() == 0, daemon.log
    assert [gpu.compute_mode for gpu in daemon.host.gpus] == ["default", "default"], daemon.log


def test_refused_connections_are_logged_in_a_few_lines(ready_daemon: Daemon) -> None:
    eventually(lambda: ready_daemon.get("/v1/status")[0] == 200)
    limit_descriptors(ready_daemon, 3)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(ready_daemon.socket_path))
        ready_daemon.wait_log("socket.accept() out of system resource")
        limit_descriptors(ready_daemon, 1024)
        eventually(lambda: ready_daemon.get("/v1/status")[0] == 200, timeout_s=60)
    assert "Traceback" not in ready_daemon.log
    assert ready_daemon.log.count("socket.accept()") <= 32
    assert ready_daemon.stop() == 0


def test_a_start_with_too_few_descriptors_fails_and_leaves_nothing(make_daemon: MakeDaemon) -> None:
    """Each limit on a host of its own, all at the same time: most of them take until they are ended."""
    started = {}
    for most in (6, 9, 11, 12, 13, 14, 15, 17):
        daemon = make_daemon()
        daemon.configure(cuda_mps_stop_timeout_s=1)  # which a stop waits for where it cannot ask for clients
        end = "" if most < 11 else "timeout -s TERM 2 "  # the fewest are never enough
        command = ["sh", "-c", f"ulimit -n {most}; exec {end}yunion-mps-daemon"]
        started[most] = daemon.host, daemon.host.popen(command, env=daemon.env)
    for most, (host, process) in started.items():
        _, said = process.communicate(timeout=60)
        assert control_daemons(host.root) == [], most
        assert host.gpus[0].compute_mode == "default", (most, said)
    assert 1 in {process.returncode for _, process in started.values()}, "the fewest are too few"


def warns_of_polls(daemon: Daemon) -> bool:
    return any("cannot poll the GPUs" in words for words in daemon.warnings())


@pytest.fixture
def without_idle_threads(daemon: Daemon, tmp_path: Path) -> Daemon:
    """A daemon that keeps no thread for later work; otherwise it depends on the load how many are idle."""
    hook = tmp_path / "sitecustomize.py"  # which Python imports first
    hook.write_text("from yunion_mps.host import threads\nthreads.MOST_IDLE = 0\n")
    return daemon.start(PYTHONPATH=str(tmp_path)).wait_ready()


def test_polling_without_a_thread_is_reported_and_ends_nothing(without_idle_threads: Daemon) -> None:
    daemon = without_idle_threads
    control = daemon.control_pid()
    with no_more_processes(daemon.pid):
        eventually(lambda: daemon.polls() and warns_of_polls(daemon), "the warning")
        status, answer = daemon.get("/v1/plan")
        assert (status, answer["hint"]) == (503, hint_of(SHORTAGE))
        assert answer["detail"].startswith("cannot start a thread: ")
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("not reloaded: cannot start a thread")
        assert available(daemon) == 4
    eventually(lambda: daemon.polls() and not warns_of_polls(daemon), "a look")
    assert "Traceback" not in daemon.log
    assert daemon.control_pid() == control
    assert daemon.stop() == 0


def test_a_reload_at_the_process_limit_is_refused_and_polls_continue(ready_daemon: Daemon) -> None:
    assert ready_daemon.get("/v1/plan")[0] == 200  # which leaves the threads for the next time
    host = ready_daemon.host
    host.divide(2)
    with no_more_processes(ready_daemon.pid):
        assert ready_daemon.get("/v1/plan")[0] == 200
        for target in ("/v1/reload", "/v1/reexec"):
            status, answer = ready_daemon.ask("POST", target)
            assert (status, answer["hint"]) == (503, hint_of(SHORTAGE))
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
