"""Two users of one host, with NVIDIA's control daemon, which serves one user at a time."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from yunion_mps.host.proc import user_name

from integration.conftest import AtWork, MakeAtWork, MakeDivided
from integration.daemon_host import Daemon, eventually
from integration.lease_host import (
    STRANGER,
    Connection,
    Requester,
    await_queue,
    leases_of,
    needs_root,
    stranger,
    take,
)
from unit.http.server_host import as_user

FIRST_GPU, SECOND_GPU = "00:06.0", "00:07.0"
OWN_NAME = user_name(os.geteuid())
#: The other user's connection is this process's, so its leases are bound to a name.
JOB = "holder.name=job&holder.ttl_s=600"

pytestmark = needs_root


@pytest.fixture
def idle_server(make_at_work: MakeAtWork) -> AtWork:
    """A daemon for two GPUs whose only job has ended, so that a server without clients is left."""
    work = make_at_work(2)
    work.job.end()
    return work


@pytest.fixture
def other_user(idle_server: AtWork) -> Iterator[Connection]:
    with stranger(idle_server.daemon) as connection:
        yield connection


def devices(daemon: Daemon) -> list[dict[str, Any]]:
    return list(daemon.get("/v1/devices?limit=0")[1]["isolated_devices"])


def ask_and_wait(daemon: Daemon, words: str) -> Requester:
    """Request devices as another user, and wait in the queue."""
    with as_user(STRANGER):
        asker = Requester(daemon, f"wait_s=600&{words}")
    await_queue(daemon, 1)
    return asker


def test_an_idle_server_keeps_no_other_user_out(idle_server: AtWork, other_user: Connection) -> None:
    assert idle_server.jobs.servers()
    assert take(other_user, f"{JOB}&gpu={SECOND_GPU}")["gpus"] == [SECOND_GPU]


def test_another_users_request_is_refused_by_name_and_granted_afterwards(
    idle_server: AtWork, other_user: Connection
) -> None:
    daemon = idle_server.daemon
    lease = take(daemon, f"gpu={FIRST_GPU}")
    status, problem = other_user.ask("POST", "/v1/leases", f"{JOB}&gpu={SECOND_GPU}")
    assert (status, problem["code"]) == (423, "other_user")
    why = f"its control daemon serves one user at a time, now {OWN_NAME} (lease {lease['id'][:8]} on "
    why += f"{lease['devices'][0]}, since "
    assert why in problem["detail"]
    assert {device["free_for"] for device in devices(daemon) if device["state"] == "free"} == {OWN_NAME}
    (domain,) = daemon.status()["domains"]
    assert (domain["serves"]["user"], domain["multiuser"]) == (OWN_NAME, False)
    status_text = daemon.host.run(["yunion-mps", "status"], check=True).stdout
    assert re.search(rf"^{SECOND_GPU} .* 4  {OWN_NAME} only  ", status_text, re.MULTILINE), status_text
    assert re.search(rf"^host +ready +{OWN_NAME} ", status_text, re.MULTILINE), status_text
    member = {"user": STRANGER, "extra_groups": [daemon.socket_path.stat().st_gid]}
    told = daemon.host.run(["yunion-mps", "env", f"{SECOND_GPU}-0"], check=True, **member).stderr
    assert f"device {SECOND_GPU}-0 is free for {OWN_NAME}, so your job may wait for others' jobs" in told

    with contextlib.closing(ask_and_wait(daemon, f"{JOB}&gpu={SECOND_GPU}")) as waiting:
        (request,) = daemon.get("/v1/leases")[1]["waiting"]
        assert (request["reason_code"], why in request["reason"]) == ("other_user", True)
        assert {device["free_for"] for device in devices(daemon) if device["state"] == "free"} == {""}
        (warning,) = daemon.status()["problems"]
        assert (warning["level"], warning["code"]) == ("warning", "other_user")
        daemon.ask("DELETE", f"/v1/leases/{lease['id']}")
        status, granted = waiting.answer()
    assert (status, granted["uid"]) == (201, STRANGER)
    assert {device["free_for"] for device in devices(daemon) if device["state"] == "free"} == {"nobody"}


def test_jobs_without_a_lease_keep_another_user_out_until_they_end(
    idle_server: AtWork, other_user: Connection
) -> None:
    """Even a job that neither NVML lists nor the daemon has polled: the control daemon is asked."""
    daemon, jobs = idle_server.daemon, idle_server.jobs
    job = jobs.attached(daemon.pipe_directory)
    (server,) = jobs.servers()
    status, problem = other_user.ask("POST", "/v1/leases", f"{JOB}&gpu={SECOND_GPU}")
    assert (status, problem["code"]) == (423, "other_user")
    assert f"now {OWN_NAME} (jobs on the MPS server (PID {server}), since " in problem["detail"]
    assert daemon.status()["domains"][0]["serves"]["user"] == OWN_NAME
    take(daemon, f"gpu={SECOND_GPU}&holder.name=own&holder.ttl_s=600")
    daemon.ask("DELETE", "/v1/leases/own")
    job.end()
    assert take(other_user, f"{JOB}&gpu={SECOND_GPU}")["uid"] == STRANGER


def test_jobs_that_nvml_lists_keep_another_user_out(idle_server: AtWork, other_user: Connection) -> None:
    """It goes on to list the server, and for a while a process that has ended."""
    daemon, jobs = idle_server.daemon, idle_server.jobs
    gpu, job = daemon.host.gpus[0], jobs.attached(daemon.pipe_directory)
    for pid in (job.pid, *jobs.servers()):
        gpu.add_process(pid, 100)
    words = f"{JOB}&gpu={SECOND_GPU}"
    assert other_user.ask("POST", "/v1/leases", words)[1]["code"] == "other_user"
    job.end()
    assert other_user.ask("POST", "/v1/leases", words)[0] == 201, "what NVML lists has ended"


def test_a_client_that_outlives_its_lease_keeps_another_user_out(
    idle_server: AtWork, other_user: Connection
) -> None:
    daemon, jobs = idle_server.daemon, idle_server.jobs
    take(daemon, f"gpu={FIRST_GPU}&holder.name=own&holder.ttl_s=600&holder.uid=0")
    job = jobs.attached(daemon.pipe_directory)
    with contextlib.closing(ask_and_wait(daemon, f"{JOB}&gpu={SECOND_GPU}")) as waiting:
        daemon.ask("DELETE", "/v1/leases/own")
        eventually(lambda: "jobs on the MPS server" in queued_reason(daemon), "the reason after the lease")
        job.end()
        assert waiting.answer()[0] == 201


def test_nothing_is_terminated_or_released_while_clients_are_unknown(idle_server: AtWork) -> None:
    """Once a job of another user waits, 535 says nothing about the clients of the running server."""
    daemon, jobs = idle_server.daemon, idle_server.jobs
    if jobs.asked:
        pytest.skip("550 goes on to list the clients")
    lease = take(daemon, f"gpu={FIRST_GPU}&holder.name=own&holder.ttl_s=600&holder.uid=0")
    job = jobs.attached(daemon.pipe_directory)
    waiting = jobs.client(daemon.pipe_directory, STRANGER)
    assert waiting.says() == "asking"
    eventually(lambda: daemon.get("/v1/clients")[1]["errors"], "the server that says nothing")
    device = lease["devices"][0]
    for method, target in (
        ("POST", f"/v1/devices/{device}/terminate"),
        ("POST", f"/v1/leases/{lease['id']}/terminate"),
        ("DELETE", f"/v1/leases/{lease['id']}?terminate=true"),
        ("POST", f"/v1/clients/{job.pid}/terminate"),
    ):
        status, problem = daemon.ask(method, target)
        assert (status, problem.get("code")) == (409, "processes_unknown"), (target, problem)
    assert [one["id"] for one in daemon.get("/v1/leases")[1]["leases"]] == [lease["id"]]
    os.kill(job.pid, 0)  # it runs


def test_a_server_that_ends_for_another_user_gets_no_more_jobs(idle_server: AtWork) -> None:
    """A job without a lease waits, so 535 lets the first user's next jobs wait as well, without a word."""
    daemon, jobs = idle_server.daemon, idle_server.jobs
    if jobs.asked:
        pytest.skip("550 goes on to serve the first user")
    job = jobs.attached(daemon.pipe_directory)
    waiting = jobs.client(daemon.pipe_directory, STRANGER)
    assert waiting.says() == "asking"
    eventually(lambda: daemon.get("/v1/clients")[1]["errors"], "the server that says nothing")
    status, problem = daemon.ask("POST", "/v1/leases", f"gpu={SECOND_GPU}")
    assert (status, problem["code"]) == (423, "other_user")
    assert f"next {user_name(STRANGER)}, for whose client the MPS server" in problem["detail"]
    waiting.end()
    assert daemon.ask("POST", "/v1/leases", f"gpu={SECOND_GPU}")[0] == 423, "it still ends"
    job.end()
    eventually(lambda: daemon.ask("POST", "/v1/leases", f"gpu={SECOND_GPU}")[0] == 201, "the server's end")


def queued_reason(daemon: Daemon) -> str:
    """Why the first queued request waits."""
    waiting = daemon.get("/v1/leases")[1]["waiting"]
    return str(waiting[0]["reason"]) if waiting else ""


def test_with_scope_gpu_users_exclude_each_other_on_single_gpus_only(
    make_divided: MakeDivided,
) -> None:
    daemon = make_divided([{"kind": "v100", "count": 2}], 4, 4, cuda_mps_scope="gpu").start().wait_ready()
    take(daemon, f"gpu={FIRST_GPU}")
    with stranger(daemon) as other_user:
        status, problem = other_user.ask("POST", "/v1/leases", f"{JOB}&gpu={FIRST_GPU}")
        assert (status, problem["code"]) == (423, "other_user")
        assert take(other_user, JOB)["gpus"] == [SECOND_GPU]


@pytest.mark.parametrize("user", [str(STRANGER), "nobody"])
def test_root_names_the_user_of_a_lease_that_it_takes(
    idle_server: AtWork, other_user: Connection, user: str
) -> None:
    daemon = idle_server.daemon
    command = ("yunion-mps", "lease", "take", "job-17", "--ttl", "600", "--gpu", FIRST_GPU, "--user", user)
    daemon.host.run(command, check=True)
    take(other_user, f"{JOB}&gpu={FIRST_GPU}")
    assert daemon.ask("POST", "/v1/leases", f"gpu={SECOND_GPU}")[1]["code"] == "other_user"
    words = "holder.name=mine&holder.ttl_s=600&holder.uid=0"
    status, problem = other_user.ask("POST", "/v1/leases", words)
    assert (status, problem["detail"]) == (403, "only root may take a lease for another user's processes")


def test_a_lease_by_name_of_an_unknown_user_keeps_nobody_out(
    idle_server: AtWork, other_user: Connection
) -> None:
    take(idle_server.daemon, f"holder.name=pod&holder.ttl_s=600&gpu={FIRST_GPU}")
    assert take(other_user, f"{JOB}&gpu={SECOND_GPU}")["gpus"] == [SECOND_GPU]


def test_no_later_request_overtakes_another_user_s_after_a_restart(idle_server: AtWork) -> None:
    """The job ends while the daemon is away, and its user asks again before the other one does."""
    daemon = idle_server.daemon
    with contextlib.ExitStack() as jobs:
        own = jobs.enter_context(daemon.host.popen(["yunion-mps", "run", "--gpu", FIRST_GPU, "sleep", "600"]))
        jobs.callback(own.kill)
        eventually(lambda: len(leases_of(daemon)) == 1, "the job's lease")
        member = {"user": STRANGER, "extra_groups": [daemon.socket_path.stat().st_gid]}
        command = ["yunion-mps", "run", "--wait=600", "--gpu", SECOND_GPU, "sleep", "600"]
        other = jobs.enter_context(daemon.host.popen(command, **member))
        jobs.callback(other.kill)
        await_queue(daemon, 1)
        daemon.kill()
        own.kill()
        own.wait()
        daemon.start().wait_ready()
        status, problem = daemon.ask("POST", "/v1/leases", f"gpu={FIRST_GPU}")
        assert (status, problem["code"]) == (423, "other_user")
        (lease,) = leases_of(daemon)
        assert (lease["uid"], lease["pid"]) == (STRANGER, other.pid)
