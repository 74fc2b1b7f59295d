"""MPS servers that fail to start, on a whole host: no job is sent there until one starts."""

from __future__ import annotations

import contextlib
from pathlib import Path

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon, eventually
from integration.lease_host import STRANGER, needs_root, queued, run_job, stranger
from simhost.mps import StandIns

JOB = "holder.name=job&holder.ttl_s=600"


def domain_states(daemon: Daemon) -> list[str]:
    return [domain["state"] for domain in daemon.status()["domains"]]


def test_a_gpu_whose_servers_fail_gets_no_jobs_until_one_starts(
    make_host: MakeHost, make_daemon: MakeDaemon
) -> None:
    host = make_host([{"kind": "v100", "count": 2}])
    with StandIns(host) as jobs:
        daemon = make_daemon(host)
        daemon.configure(cuda_mps_scope="gpu")
        daemon.start().wait_ready()
        jobs.behave("failing")
        first = daemon.status()["domains"][0]
        assert jobs.client(Path(first["pipe_directory"])).says() == "asking"
        eventually(lambda: domain_states(daemon) == ["degraded", "ready"], "the failing domain")

        status = daemon.status()
        assert status["state"] == "degraded"
        (found,) = [entry for entry in status["problems"] if entry["code"] == "server_start_failed"]
        assert found["level"] == "problem"
        assert found["text"].startswith(f"domain {first['name']} is degraded: MPS servers fail to start: ")
        assert f"{first['log_directory']}/server.log" in found["hint"]
        devices = daemon.get("/v1/devices")[1]["isolated_devices"]
        assert [device["state"] for device in devices] == ["unavailable"] * 4 + ["free"] * 4
        assert devices[0]["reason"].startswith("its domain is degraded: MPS servers fail to start: ")

        refused = run_job(host, "--gpu", "00:06.0", "true")
        assert refused.returncode == 5, "as whenever no device is free"
        assert "MPS servers fail to start" in refused.stderr
        assert "[server_start_failed]" in refused.stderr
        assert f"see the end of {first['log_directory']}/server.log" in refused.stderr
        with contextlib.closing(queued(daemon, "gpu=00:06.0")) as waiting:
            jobs.behave()
            assert waiting.answer()[0] == 201
        assert domain_states(daemon) == ["ready", "ready"]
        eventually(lambda: not jobs.servers(), "the end of the server that was tried")


@needs_root
def test_servers_that_fail_for_one_user_keep_only_him_out(
    make_host: MakeHost, make_daemon: MakeDaemon
) -> None:
    host = make_host([{"kind": "v100", "count": 2}])
    with StandIns(host) as jobs:
        daemon = make_daemon(host)
        daemon.start().wait_ready()
        jobs.behave(f"refusing:{STRANGER}")
        directory = Path(daemon.status()["domains"][0]["pipe_directory"])
        assert jobs.client(directory, STRANGER).says() == "asking"
        with stranger(daemon) as other:
            eventually(lambda: other.ask("GET", "/v1/status")[1]["problems"], "the failing user")
            (found,) = daemon.status()["problems"]
            assert (daemon.status()["state"], found["level"]) == ("ready", "warning")
            assert found["code"] == "server_start_failed"
            assert "MPS servers of nobody fail to start: the server exited with status 1" in found["text"]
            assert host.run(["yunion-mps", "list"]).stdout.count("free, not for nobody") == 8, "for both GPUs"
            assert run_job(host, "true").returncode == 0
            status, problem = other.ask("POST", "/v1/leases", JOB)
            assert (status, problem["code"]) == (423, "server_start_failed")
            assert f"{directory.parent}/log/server.log" in problem["hint"]
            jobs.behave()
            eventually(lambda: other.ask("POST", "/v1/leases", JOB)[0] == 201, "a server of this user")
            assert daemon.status()["problems"] == []
