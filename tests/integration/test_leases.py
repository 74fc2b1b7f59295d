"""Devices in use, on a whole host: `yunion-mps run`, and leases over every end of process and daemon."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from yunion_mps.core.reasons import NOT_ALLOWED, NOTHING_FREE
from yunion_mps.host.proc import user_name

from integration.daemon_host import Daemon, eventually
from integration.lease_host import (
    ADDRESSES,
    Connection,
    await_queue,
    end_job,
    leased_addresses,
    leases_of,
    needs_root,
    queued_requests,
    reason_code,
    run_job,
    start_job,
    stranger,
    take,
)

pytestmark = pytest.mark.gpus({"kind": "v100"})


def test_a_command_has_a_device_for_as_long_as_it_runs(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    job = start_job(host)
    (lease,) = leases_of(ready_daemon)
    assert (lease["devices"], lease["pid"], lease["binding"]) == ([ADDRESSES[0]], job.pid, "process")
    assert ready_daemon.get("/v1/devices")[1]["isolated_devices"][0]["lease"] == lease["id"]
    assert ready_daemon.get("/v1/devices?unused=true")[1]["total"] == 3
    job.communicate()
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")
    assert ready_daemon.get("/v1/devices?unused=true")[1]["total"] == 4
    told = [event["what"] for event in ready_daemon.get("/v1/events?kind=lease")[1]["events"]]
    assert [what.partition(" ")[0] for what in told] == ["granted", "ended,"]


def test_a_command_that_cannot_be_started_keeps_no_device(ready_daemon: Daemon) -> None:
    for command, status, why in (
        ("/nosuch/program", 127, "/nosuch/program cannot be started: No such file or directory"),
        ("/etc", 126, "/etc cannot be started: Permission denied"),
    ):
        done = run_job(ready_daemon.host, command)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (status, f"yunion-mps: {why}")
        eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")


def test_a_script_without_a_shebang_gets_a_hint(ready_daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "job"
    script.write_text("echo ran\n")
    script.chmod(0o755)
    done = run_job(ready_daemon.host, str(script))
    what, hint = done.stderr.splitlines()
    assert (done.returncode, what) == (126, f"yunion-mps: {script} cannot be started: Exec format error")
    assert hint.startswith("yunion-mps: begin the script with #!")


def test_if_nothing_is_free_a_request_fails_or_queues(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    jobs = [start_job(host) for _ in ADDRESSES]
    assert leased_addresses(ready_daemon) == ADDRESSES
    done = run_job(host, "true")
    what, hint = done.stderr.splitlines()
    assert (done.returncode, reason_code(what), "--wait" in hint) == (5, NOTHING_FREE, True)
    late = run_job(host, "--wait=1", "true")
    *_, what, hint = late.stderr.splitlines()
    assert (late.returncode, reason_code(what), "--wait" in hint) == (5, NOTHING_FREE, False)
    waiting = host.popen(["yunion-mps", "run", "--wait", "--", "printenv", "YUNION_MPS_DEVICE"], stdout=-1)
    eventually(lambda: queued_requests(ready_daemon), "that it waits")
    jobs[2].communicate()
    assert waiting.communicate()[0].strip() == ADDRESSES[2]
    for job in jobs:
        end_job(job)


def test_a_holder_is_named_by_the_command_that_it_becomes(ready_daemon: Daemon) -> None:
    host, device = ready_daemon.host, ["--device", ADDRESSES[0]]
    job = start_job(host, *device)
    waiting = host.popen(
        ["yunion-mps", "run", *device, "--wait", "sh", "-c", "exit\n" + "x" * 200], stderr=-1
    )
    eventually(lambda: queued_requests(ready_daemon), "that it waits")
    assert queued_requests(ready_daemon)[0]["command"] == "sh -c exit\\n" + "x" * 88
    assert leases_of(ready_daemon)[0]["command"] == "sh -c 'echo begun; exec cat'"
    end_job(job)
    waiting.communicate()
    eventually(lambda: leased_addresses(ready_daemon) == [], "that all is free")
    user = user_name(os.geteuid())
    first, last = f"sh -c 'echo begun; exec cat' (PID {job.pid}, {user})", f"(PID {waiting.pid}, {user})"
    assert [event["what"] for event in ready_daemon.get("/v1/events?kind=lease")[1]["events"]] == [
        f"granted to {first}",
        f"ended, held by {first}",
        f"granted to sh -c exit\\n{'x' * 88} {last}",
        f"ended, held by sh -c exit\\n{'x' * 88} {last}",
    ]


def test_without_a_control_daemon_nothing_is_started_unasked(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    ready_daemon.kill()
    done = run_job(host, "echo", "ran")
    assert (done.returncode, done.stdout) == (3, "")
    done = run_job(host, "--allow-unlimited", "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    what, hint = done.stderr.splitlines()
    assert what.startswith("yunion-mps: warning: echo runs without limits: the daemon is not running")
    assert hint.startswith("yunion-mps: start it: systemctl start yunion-mps-daemon")


def test_leases_survive_the_daemon_and_end_with_what_had_them_meanwhile(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    stays, goes = start_job(host), start_job(host)
    take(ready_daemon, "holder.name=job-17&holder.ttl_s=600")
    before = {one["id"]: one["devices"] for one in leases_of(ready_daemon)}
    ready_daemon.kill()
    end_job(goes)
    ready_daemon.start().wait_ready()
    found = leases_of(ready_daemon)
    assert [(one["devices"], one["pid"], one["name"]) for one in found] == [
        ([ADDRESSES[0]], stays.pid, None),
        ([ADDRESSES[2]], None, "job-17"),
    ]
    assert all(before[one["id"]] == one["devices"] for one in found)
    assert leased_addresses(ready_daemon.reexec()) == [ADDRESSES[0], ADDRESSES[2]]
    end_job(stays)
    eventually(lambda: leased_addresses(ready_daemon) == [ADDRESSES[2]], "the end of the lease")


def test_a_connection_ends_its_lease_and_a_name_lives_while_renewed(ready_daemon: Daemon) -> None:
    connection = Connection(ready_daemon)
    status, lease = connection.ask("POST", "/v1/leases", "holder.kind=connection")
    assert (status, lease["binding"], lease["pid"]) == (201, "connection", os.getpid())
    assert connection.ask("GET", "/v1/leases")[1]["total"] == 1
    connection.close()
    eventually(lambda: leased_addresses(ready_daemon) == [], "its end")
    named = take(ready_daemon, "holder.name=a&holder.ttl_s=1")
    for _ in range(3):
        status, renewed = ready_daemon.ask("POST", f"/v1/leases/{named['id']}/renew")
        assert status == 200
        assert renewed["expires"] > named["expires"]
    eventually(lambda: leased_addresses(ready_daemon) == [], "its end")
    assert ready_daemon.ask("POST", f"/v1/leases/{named['id']}/renew")[0] == 404


@needs_root
def test_only_the_owner_and_root_end_a_lease(ready_daemon: Daemon) -> None:
    lease = take(ready_daemon, "holder.name=a&holder.ttl_s=600")
    with stranger(ready_daemon) as other:
        status, answer = other.ask("DELETE", f"/v1/leases/{lease['id']}")
        assert (status, answer["code"]) == (403, NOT_ALLOWED)
        status, answer = other.ask("POST", "/v1/leases", f"holder.pid={os.getpid()}")
        assert (status, answer["hint"]) == (403, "only root can take a lease for it")
        _, theirs = other.ask("POST", "/v1/leases", "holder.name=b&holder.ttl_s=600")
        assert other.ask("DELETE", f"/v1/leases/{theirs['id']}")[0] == 200
    assert ready_daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    assert leased_addresses(ready_daemon) == []


@pytest.mark.gpus({"kind": "v100", "memory_mib": 23040})
def test_memory_in_units_as_ack_hands_it_out(daemon: Daemon) -> None:
    """16 units of 128 MiB are 2 GiB; of a GPU of 23040 MiB there are 180, and the 181st is refused."""
    host = daemon.host
    host.divide("virtual_number: 0\n  memory_unit: 128MiB\ngpu_memory_unit: 128MiB")
    daemon.start().wait_ready()
    all_of_it = "23040 of 23040 MiB can be leased; to lease some: yunion-mps run --gpu-mem SIZE COMMAND"
    assert host.run(["yunion-mps", "list"]).stdout == f"No devices.\n00:06.0: {all_of_it}\n"
    assert "Devices:  created on request\n" in host.run(["yunion-mps", "status"]).stdout
    done = run_job(host, "--gpu-mem-units", "16", "--print-env", "-o", "json")
    environment = json.loads(done.stdout)
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "8.8"
    assert environment["YUNION_MPS_DEVICE"] == "00:06.0-m0"
    sizes = [16] * 11 + [4]
    for number, units in enumerate(sizes):
        status, lease = daemon.ask(
            "POST", "/v1/leases", f"memory_units={units}&holder.name=job-{number}&holder.ttl_s=600"
        )
        assert (status, lease["budgets"][0]["memory_mib"]) == (201, units * 128)
    shown = daemon.get("/v1/devices?limit=0")[1]["isolated_devices"]
    assert [one["addr"] for one in shown] == [f"00:06.0-m{slot}" for slot in range(12)]
    assert sum(one["memory_mib"] for one in shown) == 23040
    counts = daemon.get("/v1/gpus")[1]["gpus"][0]["devices"], daemon.status()["devices"]["total"]
    assert counts == (12, 12)
    left = "00:06.0: 0 of 23040 MiB can be leased; to lease some: yunion-mps run --gpu-mem SIZE COMMAND"
    for screen in ("gpus", "status", "list"):
        assert left in host.run(["yunion-mps", screen]).stdout
    refused = run_job(host, "--gpu-mem-units", "1", "true")
    assert refused.returncode == 5
    assert refused.stderr.startswith(
        "yunion-mps: 128 MiB cannot be allocated now: 0 MiB free on GPU 00:06.0 [nothing_free]\n"
    )
    refused = run_job(host, "--gpu-mem", "30GiB", "true")
    why = "30720 MiB can never be allocated: the host has at most 23040 MiB of GPU 00:06.0 [infeasible]"
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (1, f"yunion-mps: {why}")
    status, answer = daemon.ask("POST", "/v1/leases", "memory_units=1000")
    assert (status, answer["code"]) == (410, "infeasible")
    assert daemon.ask("POST", "/v1/leases", "memory_units=1")[1]["code"] == "nothing_free"


@pytest.mark.gpus({"kind": "v100"})
def test_the_threads_of_a_pool_are_leased_and_waited_for(daemon: Daemon) -> None:
    host = daemon.host
    host.divide("memory_unit: 1GiB\n  thread_percentage: 40")
    told = host.run(["yunion-mps", "config", "show"]).stdout
    assert "units of 1024 MiB, 40 % of the threads each" in told
    daemon.start().wait_ready()
    assert daemon.control("get_default_active_thread_percentage") == ["100.0"]
    first = take(daemon, "memory_mib=1024&holder.name=first&holder.ttl_s=600")
    assert first["environment"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    memory = ("--gpu-mem", "1GiB", "--thread-percentage")
    assert run_job(host, *memory, "60", "printenv", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").stdout == "60\n"
    (pool,) = daemon.get("/v1/pools")[1]["pools"]
    counted = {name: value for name, value in pool.items() if name.startswith("thread_percentage")}
    assert [*counted.values()] == [40, 100, 60]
    refused = run_job(host, *memory, "61", "true")
    left = "15360 MiB and 60 % of the threads free on GPU 00:06.0 [nothing_free]"
    assert refused.returncode == 5
    assert refused.stderr.startswith(
        f"yunion-mps: 1024 MiB with 61 % of the threads cannot be allocated now: {left}\n"
    )
    second = take(daemon, "memory_mib=1024&thread_percentage=60&holder.name=second&holder.ttl_s=600")
    assert "0 of 16384 MiB can be leased" in host.run(["yunion-mps", "gpus"]).stdout
    assert daemon.ask("DELETE", f"/v1/leases/{second['id']}")[0] == 200
    with host.popen(["yunion-mps", "run", *memory, "61", "--wait=1h", "true"]) as waiting:
        await_queue(daemon, 1)
        assert daemon.ask("DELETE", f"/v1/leases/{first['id']}")[0] == 200
    assert waiting.returncode == 0
