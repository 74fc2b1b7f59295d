"""GPUs that change while the daemon runs: noticed, told with a reason, and put right where they can be."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Callable

import pytest
from yunion_mps.core.reasons import GPU_GONE
from yunion_mps.host.proc import user_name
from yunion_mps.http.operation import MAX_CHANGE_WAIT_S

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import PATIENCE_S, Daemon, eventually, is_running
from integration.lease_host import take
from simhost.mps import StandIns

pytestmark = pytest.mark.gpus({"kind": "v100"}, {"kind": "a100"})

LOST = "the GPU has fallen off the bus or is otherwise inaccessible (GPU is lost)"


def available(daemon: Daemon) -> int:
    found: int = daemon.status()["devices"]["available"]
    return found


def reasons(daemon: Daemon) -> list[str]:
    return [device["reason"] for device in daemon.get("/v1/devices?limit=0")[1]["isolated_devices"]]


def changed_devices(daemon: Daemon, etag: str, change: Callable[[], object]) -> tuple[list[str], str]:
    """The answer of a long poll to the change: the states of the devices, and its ETag.

    It would wait for longer than this test does, so it is the change that ends it.
    """
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(connection):
        connection.sock.settimeout(PATIENCE_S)
        connection.sock.connect(str(daemon.socket_path))
        headers = {"If-None-Match": etag} if etag else {}
        connection.request("GET", f"/v1/devices?limit=0&wait_s={MAX_CHANGE_WAIT_S}", headers=headers)
        change()
        response = connection.getresponse()
        assert response.status == 200
        found = json.loads(response.read())["isolated_devices"]
        return [device["state"] for device in found], str(response.headers["ETag"])


def test_a_long_poll_hears_of_a_lost_gpu_and_of_its_recovery(ready_daemon: Daemon) -> None:
    gpu = ready_daemon.host.gpus[1]
    assert PATIENCE_S < MAX_CHANGE_WAIT_S
    states, etag = changed_devices(ready_daemon, "", lambda: None)
    assert states == ["free"] * 8
    # Without an Xid: after a fatal one it would not recover before a reload.
    states, etag = changed_devices(ready_daemon, etag, lambda: gpu.lose(xid=None))
    assert states == ["free"] * 4 + ["unavailable"] * 4
    change: Callable[[], object] = gpu.restore
    while "unavailable" in states:  # its reason may change first
        states, etag = changed_devices(ready_daemon, etag, change)
        change = bool
    assert states == ["free"] * 8


def test_the_next_daemon_lists_a_lost_gpu_and_serves_the_other(ready_daemon: Daemon) -> None:
    host, daemon = ready_daemon.host, ready_daemon
    before = {device["addr"]: device["id"] for device in devices(daemon)}
    for address in ("00:06.0-1", "00:07.0-1"):
        take(daemon, f"devices={address}&holder.name=job-{address}&holder.ttl_s=600")
    held = leases(daemon)
    host.gpus[1].remove()
    daemon.kill()
    daemon.start().wait_ready()
    assert {device["addr"]: device["id"] for device in devices(daemon)} == before
    codes = {device["addr"][:7]: device["reason_code"] for device in devices(daemon)}
    assert codes == {"00:06.0": "", "00:07.0": GPU_GONE}
    kept = leases(daemon)
    assert [one["state"] for one in kept] == ["idle", "unavailable"]
    assert [{**one, "state": "idle", "reason": "", "reason_code": ""} for one in kept] == held
    take(daemon, "devices=00:06.0-2&holder.name=next&holder.ttl_s=600")
    status, answer = daemon.ask("POST", "/v1/leases", "devices=00:07.0-2&holder.name=lost&holder.ttl_s=600")
    assert (status, answer["code"]) == (423, GPU_GONE)
    checked = host.run(["yunion-mps", "config", "check"])
    assert checked.returncode == 0, checked.stderr
    host.gpus[1].restore()
    daemon.kill()
    daemon.start().wait_ready()
    eventually(lambda: available(daemon) == 8, "eight devices")
    assert {device["addr"]: device["id"] for device in devices(daemon)} == before
    assert leases(daemon)[:2] == held


@pytest.mark.parametrize("scope", ["host", "gpu"])
def test_the_other_gpu_serves_devices_and_containers_while_one_is_lost(daemon: Daemon, scope: str) -> None:
    """The control daemon is a new one, as after a reboot: nothing serves the lost GPU, and nothing did."""
    host = daemon.host
    daemon.configure(
        container_device_config_file="/etc/yunion/host_container_device.yml",
        cuda_mps_scope=scope,
        cuda_mps_combine=2,
    )
    daemon.start().wait_ready()
    assert daemon.stop() == 0, daemon.log
    host.gpus[1].lose()
    daemon.start().wait_ready()
    status, answer = daemon.ask("POST", "/v1/leases", "count=2&holder.name=two&holder.ttl_s=600")
    assert (status, answer["devices"]) == (201, ["00:06.0-0", "00:06.0-1"])
    for request in (
        "count=2&gpu=00:07.0",
        *(["devices=all", "count=2&across=true"] if scope == "host" else []),
    ):
        status, answer = daemon.ask("POST", "/v1/leases", f"{request}&holder.name=more&holder.ttl_s=600")
        assert (status, LOST in answer["detail"]) == (423, True), answer
    eventually((host.root / "run/cdi/yunion-mps.json").exists, "the devices of containers")
    assert "Traceback" not in daemon.log


def leases(daemon: Daemon) -> list[dict[str, object]]:
    """The leases; when they end is told by two clocks, and never twice to the same microsecond."""
    return [{**lease, "expires": None} for lease in daemon.get("/v1/leases")[1]["leases"]]


def devices(daemon: Daemon) -> list[dict[str, str]]:
    found: list[dict[str, str]] = daemon.get("/v1/devices")[1]["isolated_devices"]
    return found


#: The control daemon of release 535 knows no states of servers: a front-end that does, as that of 550.
KNOWS_STATES = """#!/bin/sh
[ $# = 0 ] || exec {program} "$@"
commands=$(cat)
case $commands in
*get_server_status*) printf '25.0\\nFAULT\\n' ;;
*) echo "$commands" | {program} ;;
esac
"""


def test_a_server_in_fault_is_reported_with_the_process_the_kernel_names(
    make_host: MakeHost, make_daemon: MakeDaemon
) -> None:
    host = make_host([{"kind": "v100"}])
    with StandIns(host) as jobs:
        wrapper = jobs.folder / "front-end/nvidia-cuda-mps-control"
        wrapper.parent.mkdir()
        wrapper.write_text(KNOWS_STATES.format(program=jobs.folder / "nvidia-cuda-mps-control"))
        wrapper.chmod(0o755)
        host.env["PATH"] = f"{wrapper.parent}{os.pathsep}{host.env['PATH']}"
        daemon = make_daemon(host).start().wait_ready()
        client = jobs.attached(daemon.pipe_directory)
        line = f"4,1,1,-;NVRM: Xid (PCI:0000:00:06): 31, pid={client.pid}, name=job\n"
        (host.root / "dev/kmsg").write_text(line)

        def told() -> list[str]:
            daemon.polls()
            events = daemon.get("/v1/events?kind=client")[1]["events"]
            return [event["what"] for event in events if "FAULT" in event["what"]]

        eventually(told, "the report of the server")
        (server,) = jobs.servers()
        assert told()[0] == f"MPS server (PID {server}) of {user_name(os.geteuid())} is in state FAULT"
        events = daemon.get("/v1/events?kind=client")[1]["events"]
        fault = next(event for event in events if "FAULT" in event["what"])
        assert fault["cause"] == f"suspected: PID {client.pid}"
        assert "yunion-mps" not in fault["consequence"], "what to do is told by the reason code"
        assert daemon.get("/v1/clients")[1]["servers"][0]["state"] == "FAULT"
        found = [one for one in daemon.status()["problems"] if one["code"] == "server_failed"]
        assert [(one["level"], one["pid"]) for one in found] == [("problem", server)]
        status, answer = daemon.ask("POST", f"/v1/clients/{client.pid}/terminate")
        assert (status, answer["ended"]) == (200, True)
        assert "its MPS server disconnected it" in answer["how"]
        assert not is_running(client.pid)


def test_a_gpu_that_can_serve_only_now_gets_its_mode_too(daemon: Daemon) -> None:
    host = daemon.host
    host.gpus[1].mig = True
    daemon.configure(cuda_mps_scope="gpu")
    daemon.start().wait_ready()
    assert available(daemon) == 4
    host.gpus[1].mig = False
    eventually(lambda: daemon.polls() and available(daemon) == 8, "eight devices")
    assert host.gpus[1].compute_mode == "exclusive_process"
    assert daemon.stop() == 0
    assert [gpu.compute_mode for gpu in host.gpus] == ["default", "default"]


def test_status_and_leases_are_answered_while_the_driver_hangs(ready_daemon: Daemon) -> None:
    """With what was known before, and with a remark that it may be out of date."""
    daemon = ready_daemon
    take(daemon, "holder.name=job-17&holder.ttl_s=600")
    assert daemon.get("/v1/leases")[1]["leases"][0]["state"] == "idle"
    assert daemon.status()["errors"] == []
    daemon.host.fail("nvmlDeviceGetComputeRunningProcesses*", "success", delay_ms=600_000)
    late = ["the driver is slow to answer, so the list of clients is out of date"]
    status, listed = daemon.status(), daemon.get("/v1/leases")[1]
    assert (status["state"], status["errors"], listed["errors"]) == ("ready", late, late)
    assert listed["leases"][0]["state"] is None, "a job may use it by now"
    assert daemon.host.run(["yunion-mps", "status"], check=True).stdout.endswith(f"Incomplete: {late[0]}\n")
    daemon.kill()
