"""Another configuration and another program while the daemon runs: no request is refused, and no job ends."""

from __future__ import annotations

import http.client
import os
import re
import signal
import sqlite3
import threading
from pathlib import Path

from integration.conftest import AtWork, MakeAtWork
from integration.daemon_host import Daemon, eventually, is_running


def device_count(daemon: Daemon) -> int:
    found: int = daemon.get("/v1/devices")[1]["total"]
    return found


def test_a_bad_file_is_refused_with_the_reason_and_changes_nothing(ready_daemon: Daemon) -> None:
    (ready_daemon.host.root / "etc/yunion/host.conf").write_text("enable_cuda_mps: perhaps\n")
    for method, target in (("GET", "/v1/plan"), ("POST", "/v1/reload")):
        status, answer = ready_daemon.ask(method, target)
        assert (status, "host.conf:1: enable_cuda_mps is" in answer["detail"]) == (422, True)
    ready_daemon.signal(signal.SIGHUP)
    told = "/v1/events?kind=configuration"
    eventually(lambda: len(ready_daemon.get(told)[1]["events"]) == 2, "both refusals")
    events = ready_daemon.get(told)[1]["events"]
    whose = [f"refused (requested by {who})" for who in ("a client", "SIGHUP")]
    assert [event["what"] for event in events] == whose
    assert events[0]["consequence"] == "nothing was changed: the previous configuration stays in effect"
    assert device_count(ready_daemon) == 4


def test_a_reload_reads_host_local_conf_and_names_it(ready_daemon: Daemon) -> None:
    local = ready_daemon.host.root / "etc/yunion/host_local.conf"
    local.write_text("enable_cuda_mps: perhaps\n")
    status, answer = ready_daemon.ask("POST", "/v1/reload")
    assert (status, "host_local.conf:1: enable_cuda_mps is" in answer["detail"]) == (422, True)
    local.write_text("enable_cuda_mps: false\n")
    assert ready_daemon.ask("POST", "/v1/reload")[0] == 200
    eventually(lambda: ready_daemon.status()["state"] == "disabled", "the end of the control daemon")
    assert ready_daemon.status()["notice"] == f"MPS is disabled: enable_cuda_mps is false in {local}"
    local.unlink()
    assert ready_daemon.ask("POST", "/v1/reload")[0] == 200
    assert device_count(ready_daemon) == 4


def test_a_reexec_keeps_the_control_daemon_and_the_socket(ready_daemon: Daemon) -> None:
    control, inode = ready_daemon.control_pid(), ready_daemon.socket_path.stat().st_ino
    started = ready_daemon.status()["started"]
    ready_daemon.messages.clear()
    status, answer = ready_daemon.ask("POST", "/v1/reexec")
    assert (status, answer) == (200, {"pid": ready_daemon.pid})
    ready_daemon.wait_message("READY=1")
    after = ready_daemon.status()
    assert (after["pid"], after["started"], after["state"]) == (ready_daemon.pid, started, "ready")
    assert ready_daemon.control_pid() == control
    assert ready_daemon.socket_path.stat().st_ino == inode
    assert any(message.startswith("RELOADING=1\nMONOTONIC_USEC=") for message in ready_daemon.messages)
    os.kill(control, signal.SIGKILL)
    eventually(lambda: ready_daemon.control_pid() != control, "another control daemon")
    assert not Path(f"/proc/{control}").exists(), "it is still our child, and no zombie is left"
    assert ready_daemon.stop() == 0
    assert not ready_daemon.socket_path.exists()


def test_no_request_is_refused_during_a_reexec(ready_daemon: Daemon) -> None:
    done = threading.Event()
    errors: list[str] = []
    answered: list[int] = []

    def ask() -> None:
        while not done.is_set():
            try:
                answered.append(ready_daemon.get("/v1/status")[0])
            except (OSError, http.client.HTTPException) as error:
                errors.append(repr(error))

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    try:
        for _ in range(3):
            ready_daemon.reexec()
    finally:
        done.set()
        for asker in askers:
            asker.join()
    assert errors == []
    assert set(answered) == {200}


def test_jobs_live_through_a_reexec_and_a_pending_budget_stays_pending(at_work: AtWork) -> None:
    daemon, jobs, client = at_work
    daemon.host.divide(2)
    status, answer = daemon.ask("POST", "/v1/reload")
    assert status == 200
    assert [entry["domain"] for entry in answer["pending"]] == ["host"]
    daemon.reexec()
    (domain,) = daemon.status()["domains"]
    assert (domain["state"], bool(domain["pending"])) == ("ready", True)
    assert daemon.get("/v1/devices")[1]["isolated_devices"][0]["memory_mib"] == 4096
    clients = daemon.get("/v1/clients")[1]["clients"]
    assert [(one["pid"], one["server"]) for one in clients] == [(client.pid, jobs.servers()[0])]
    assert daemon.reload_now()[0] == 200
    assert client.says() == "server gone"
    eventually(lambda: not daemon.status()["domains"][0]["pending"], "the new limits in effect")
    assert daemon.get("/v1/devices")[1]["isolated_devices"][0]["memory_mib"] == 8192
    assert daemon.stop() == 0


def test_now_ends_no_job_that_began_after_the_list(at_work: AtWork) -> None:
    daemon, jobs, client = at_work
    daemon.host.divide(2)
    plan = daemon.get("/v1/plan")[1]
    assert [one["pid"] for one in plan["clients"]] == [client.pid]
    later = jobs.attached(daemon.pipe_directory)
    words = f"mode=now&confirmation={plan['confirmation']}"
    status, answer = daemon.ask("POST", "/v1/reload", words)
    assert (status, answer["code"]) == (409, "not_confirmed")
    assert (
        f"nothing was changed, because the reload would also end or remove: PID {later.pid} of "
        in answer["detail"]
    )
    assert str(client.pid) not in answer["detail"]
    assert (is_running(later.pid), is_running(client.pid), device_count(daemon)) == (True, True, 4)
    client.end()
    later.end()
    assert daemon.ask("POST", "/v1/reload", words)[0] == 200, "less is lost than was confirmed"
    eventually(lambda: device_count(daemon) == 2, "the new division")


def test_now_ends_the_job_of_an_orphaned_server_and_no_other(at_work: AtWork) -> None:
    daemon, jobs, late = at_work
    host = daemon.host
    host.gpus[0].add_process(late.pid, 100, "M+C")
    (orphan,) = jobs.servers()
    host.gpus[0].add_process(orphan, 30, "M+C")
    os.kill(daemon.control_pid() or 0, signal.SIGKILL)
    eventually(lambda: daemon.status()["domains"][0]["waits_for"] == [orphan], "that it waits for it")
    eventually(lambda: daemon.status()["domains"][0]["state"] == "ready", "the new one")
    current = jobs.attached(daemon.pipe_directory)
    host.gpus[0].add_process(current.pid, 100, "M+C")
    (server,) = set(jobs.servers()) - {orphan}
    found = {one["pid"]: one["server"] for one in daemon.get("/v1/clients")[1]["clients"]}
    assert found == {late.pid: orphan, current.pid: server}

    done = host.run(["yunion-mps", "reload", "--now", "--yes"])
    assert done.returncode == 0, done.stderr
    assert [
        pid for pid in (late.pid, current.pid) if re.search(rf"^ *{pid} ", done.stderr, re.MULTILINE)
    ] == [late.pid]
    assert (is_running(late.pid), is_running(current.pid)) == (False, True)
    assert jobs.servers() == [server]
    current.end()
    assert daemon.stop() == 0


def test_a_daemon_that_stops_neither_reloads_nor_reexecs(make_at_work: MakeAtWork) -> None:
    daemon, _, client = make_at_work(cuda_mps_stop_timeout_s=60)
    daemon.signal(signal.SIGTERM)
    daemon.wait_message("STOPPING=1")
    status, answer = daemon.ask("POST", f"/v1/clients/{client.pid}/terminate")
    assert (status, str(answer["detail"])[:22]) == (503, "the daemon is stopping")
    for target in ("/v1/reload", "/v1/reexec"):
        status, answer = daemon.ask("POST", target)
        assert (status, answer["detail"]) == (503, "the daemon is stopping")
    client.end()
    assert daemon.wait() == 0


def test_a_change_is_refused_if_it_cannot_be_recorded(ready_daemon: Daemon) -> None:
    """Otherwise a daemon that dies then would leave the next one without the budgets that jobs have."""
    file = ready_daemon.host.root / "var/lib/yunion-mps/state.db"
    ready_daemon.host.divide(2)
    with sqlite3.connect(file, isolation_level=None) as other:
        other.execute("ALTER TABLE limits_in_effect RENAME TO hidden")
        for target in ("/v1/reload", "/v1/reexec"):
            status, answer = ready_daemon.ask("POST", target)
            assert status == 409
            assert "cannot be written" in str(answer["detail"])
        assert device_count(ready_daemon) == 4
        other.execute("ALTER TABLE hidden RENAME TO limits_in_effect")
    other.close()
    assert ready_daemon.ask("POST", "/v1/reload")[0] == 200
    assert device_count(ready_daemon) == 2
