"""`yunion-mps terminate` for leases and devices, and leases that end before their processes do."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from control_groups import ControlGroup, unique_name
from integration.conftest import AtWork, MakeDaemon, MakeHost
from integration.daemon_host import Daemon, eventually, is_running
from integration.lease_host import STRANGER, leased_addresses, needs_root, stranger, take
from integration.mps_jobs import JOB, STUBBORN_JOB, end_of, started_job, terminations_of
from packages.machine import systemd_hierarchies
from simhost import SimHost
from simhost.mps import StandIns

DISCONNECTED = "its MPS server disconnected it"
BY_TERM, BY_KILL = f"{DISCONNECTED}; ended by SIGTERM", f"{DISCONNECTED}; ended by SIGKILL"

Job = subprocess.Popen[str]


class Jobs:
    """Jobs of leases on the host of an AtWork, whose own job has no lease; all are killed at the end."""

    def __init__(self, at_work: AtWork, stack: ExitStack) -> None:
        self.daemon = at_work.daemon
        self.host: SimHost = at_work.daemon.host
        self.bystander = at_work.job
        self._stack = stack

    def lease(self, name: str, words: str = "holder.ttl_s=600") -> dict[str, Any]:
        return take(self.daemon, f"holder.name={name}&{words}")

    def begin(self, lease: dict[str, Any], *command: str) -> Job:
        entered = started_job(self.host, *(command or JOB), variables=lease["environment"])
        return self._stack.enter_context(entered)

    def terminate(self, target: str, *words: str) -> tuple[int, list[tuple[int, str]], str]:
        """The exit status, what was done to each PID, and standard error."""
        done = self.host.run(["yunion-mps", "terminate", target, "--yes", "-o", "json", *words])
        found = json.loads(done.stdout or '{"terminations": []}')["terminations"]
        return done.returncode, sorted((one["pid"], one["how"]) for one in found), done.stderr


@pytest.fixture
def jobs(at_work: AtWork) -> Iterator[Jobs]:
    with ExitStack() as stack:
        yield Jobs(at_work, stack)


@pytest.mark.parametrize("kind", ["name", "device"])
def test_only_the_processes_of_the_lease_or_device_are_terminated(jobs: Jobs, kind: str) -> None:
    lease, other = jobs.lease("job-17"), jobs.lease("job-18")
    ours, theirs = [jobs.begin(lease), jobs.begin(lease)], jobs.begin(other)
    target = {"name": "job-17", "device": lease["devices"][0]}[kind]
    status, done, _ = jobs.terminate(target)
    assert (status, done) == (0, sorted((job.pid, BY_TERM) for job in ours))
    for job in ours:
        end_of(job)
    assert is_running(theirs.pid)
    assert is_running(jobs.bystander.pid)
    assert len(leased_addresses(jobs.daemon)) == 2, "a named lease continues"
    assert jobs.terminate(target) == (0, [], f"yunion-mps: {target_name(kind, lease)} has no processes\n")


def test_no_client_of_a_large_job_is_missed(jobs: Jobs) -> None:
    """50 are nearly as many as a server has."""
    lease = jobs.lease("job-17")
    large = [jobs.begin(lease) for _ in range(50)]
    status, done, _ = jobs.terminate("job-17")
    assert (status, done) == (0, sorted((job.pid, BY_TERM) for job in large))
    assert is_running(jobs.bystander.pid)


def target_name(kind: str, lease: dict[str, Any]) -> str:
    return f"device {lease['devices'][0]}" if kind == "device" else f"lease {lease['id']}"


def test_the_output_names_each_terminated_process(jobs: Jobs) -> None:
    job = jobs.begin(jobs.lease("job-17"))
    done = jobs.host.run(["yunion-mps", "terminate", "job-17", "--yes"], check=True)
    assert done.stdout.startswith(f"PID {job.pid} (")
    assert done.stdout.endswith(f") of root: {BY_TERM}\n")


def test_a_client_that_ignores_sigterm_is_killed_only_with_force(jobs: Jobs) -> None:
    job = jobs.begin(jobs.lease("job-17"), *STUBBORN_JOB)
    status, done, err = jobs.terminate("job-17")
    assert (status, done) == (1, [(job.pid, f"{DISCONNECTED}; it is still running after 5 s")])
    assert json.loads(err.splitlines()[-1])["hint"] == "kill it: yunion-mps terminate job-17 --force"
    assert is_running(job.pid)


def test_a_released_lease_leaves_nothing_behind_if_requested(jobs: Jobs) -> None:
    job = jobs.begin(jobs.lease("job-17"), *STUBBORN_JOB)
    jobs.host.run(["yunion-mps", "lease", "release", "job-17", "--terminate"], check=True)
    assert end_of(job)[:2] == (-signal.SIGKILL, ["terminated"])
    assert leased_addresses(jobs.daemon) == []
    (event,) = jobs.daemon.get("/v1/events?kind=client")[1]["events"]
    assert event["what"].endswith(BY_KILL)
    assert event["cause"] == "its lease job-17 was released"


def test_the_end_of_a_lease_is_not_that_of_a_neighbour_without_one(jobs: Jobs) -> None:
    """A process that was started with `yunion-mps env` names the device, but belongs to no lease."""
    lease = jobs.lease("job-17")
    without = {name: value for name, value in lease["environment"].items() if name != "YUNION_MPS_LEASE"}
    ours, neighbour = jobs.begin(lease), jobs.begin({"environment": without})
    jobs.host.run(["yunion-mps", "lease", "release", "job-17", "--terminate"], check=True)
    end_of(ours)
    assert terminations_of(jobs.daemon) == [BY_TERM]
    assert is_running(neighbour.pid)
    assert jobs.terminate(lease["devices"][0])[:2] == (0, [(neighbour.pid, BY_TERM)])


def test_an_expired_lease_leaves_its_processes_alone(jobs: Jobs) -> None:
    job = jobs.begin(jobs.lease("job-17", "holder.ttl_s=1"))
    eventually(lambda: leased_addresses(jobs.daemon) == [], "the end of the lease")
    assert terminations_of(jobs.daemon) == []
    assert jobs.terminate(str(job.pid))[0] == 0
    end_of(job)


@needs_root
def test_the_name_of_a_control_group_gives_no_right_over_a_container(
    make_host: MakeHost, make_daemon: MakeDaemon
) -> None:
    """A user may call a group like the one of root's container, and take a lease for a process in it."""
    name = f"docker-{'c' * 64}.scope"
    with ExitStack() as stack:
        host = make_host([{"kind": "v100"}])
        stack.enter_context(StandIns(host))
        daemon = make_daemon(host).start().wait_ready()
        top = stack.enter_context(ControlGroup(unique_name(), systemd_hierarchies()).make())
        sleeper = stack.enter_context(subprocess.Popen(["sleep", "300"], user=STRANGER))
        stack.callback(sleeper.kill)
        top.below("user.slice").below(f"user@{STRANGER}.service").below(name).add(sleeper.pid)
        other = stack.enter_context(stranger(daemon))
        lease = take(other, f"holder.kind=container&holder.pid={sleeper.pid}")
        variables = dict(lease["environment"])
        del variables["YUNION_MPS_LEASE"]
        victim = stack.enter_context(started_job(host, *JOB, variables=variables))
        top.below("system.slice").below(name).add(victim.pid)
        status, answer = other.ask("POST", f"/v1/leases/{lease['id']}/terminate")
        assert (status, answer["terminations"]) == (200, [])
        host.run(["yunion-mps", "terminate", lease["id"], "--yes"], check=True)
        assert is_running(victim.pid), "root, who ends the lease's processes, does not mean it"


@needs_root
def test_processes_of_another_user_are_not_terminated(jobs: Jobs) -> None:
    lease = jobs.lease("job-17")
    job = jobs.begin(lease)
    with stranger(jobs.daemon) as other:
        status, problem = other.ask("POST", f"/v1/leases/{lease['id']}/terminate")
        assert (status, problem["code"]) == (403, "not_allowed")
        status, answer = other.ask("POST", f"/v1/devices/{lease['devices'][0]}/terminate")
        (one,) = answer["terminations"]
        assert (status, one["ended"], one["reason_code"]) == (200, False, "not_allowed")
        assert one["how"] == f"PID {job.pid} is a job of root"
        assert other.ask("DELETE", f"/v1/leases/{lease['id']}?terminate=true")[0] == 403
    assert is_running(job.pid)


def test_an_unknown_target_is_an_error(ready_daemon: Daemon) -> None:
    done = ready_daemon.host.run(["yunion-mps", "terminate", "job-17", "--yes"])
    said = "yunion-mps: there is no lease job-17, and there is no device job-17 [not_found]\n"
    hint = "yunion-mps: list leases and devices: yunion-mps who; list processes: yunion-mps who --clients\n"
    assert (done.returncode, done.stderr) == (1, said + hint)
