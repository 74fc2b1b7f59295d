"""The command line on a whole host: without a daemon, with it, and for what happens while jobs run.

The daemon and the control daemon are real; the jobs and their MPS server are stand-ins.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import PATIENCE_S, Daemon, eventually, is_running
from integration.lease_host import take
from simhost import SimHost
from simhost.mps import Client, StandIns


def output_of(host: SimHost, *arguments: str) -> str:
    done = host.run(["yunion-mps", *arguments])
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def failure_of(host: SimHost, *arguments: str) -> tuple[int, str]:
    done = host.run(["yunion-mps", *arguments])
    assert done.stdout == ""
    return done.returncode, done.stderr


def csv_rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_config_check_needs_no_daemon_and_changes_nothing(make_host: MakeHost) -> None:
    host = make_host()
    before = sorted(str(path) for path in host.root.rglob("*"))
    shown = output_of(host, "config", "show")
    assert "\ncuda_mps_replicas  " in shown
    assert output_of(host, "config", "check") == f"The configuration is valid:\n{shown}{PLAN}"
    assert host.gpus[0].compute_mode == "default"
    assert sorted(str(path) for path in host.root.rglob("*")) == before


PLAN = """\
The daemon would divide the GPUs as follows:
GPU      NAME       DEVICES    MEMORY  SM %  COMPUTE MODE                  DOMAIN
00:06.0  Tesla P40        4  5760 MiB    25  Default -> Exclusive_Process  host
00:06.0: budgets are not enforced: the GPU is older than Volta
Control daemon of domain host: 1 GPU, pipe directory /tmp/nvidia-mps/pipe
Users: only one user's jobs run at a time on GPU 00:06.0; others wait. \
This host cannot run all users' jobs at the same time: \
GPU 00:06.0 (Tesla P40) is older than Volta.
"""


DEVICE = "00:06.0-1"
STRANGER = 65534
PLANNED = """\
KIND    SUBJECT  BEFORE              AFTER                EFFECT
budget  00:06.0  4 x 5760 MiB, 25 %  2 x 11520 MiB, 50 %  {when}
"""


@pytest.fixture
def stand_ins(host: SimHost) -> Iterator[StandIns]:
    with StandIns(host) as found:
        yield found


@pytest.fixture
def ready(stand_ins: StandIns, make_daemon: MakeDaemon, host: SimHost) -> Daemon:
    return make_daemon(host).start().wait_ready()


@pytest.fixture
def job(stand_ins: StandIns, ready: Daemon) -> Client:
    ready.host.env["YUNION_MPS_DEVICE"] = DEVICE
    client = stand_ins.client(ready.pipe_directory)
    del ready.host.env["YUNION_MPS_DEVICE"]
    assert [client.says(), client.says()] == ["asking", "attached"]
    return client


def plan_text(effect: str) -> str:
    if effect == "at once":
        return PLANNED.format(when=effect)
    return f"{PLANNED.format(when='later')}budget 00:06.0: takes effect {effect}\n"


def memory_limits_mib(daemon: Daemon) -> list[int]:
    (domain,) = daemon.status()["domains"]
    return list(domain["memory_limits_mib"])


def test_a_plan_is_what_the_reload_then_does(ready: Daemon) -> None:
    assert output_of(ready.host, "plan") == "A reload would change nothing.\n"
    ready.host.divide(2)
    shown = plan_text("at once")
    assert output_of(ready.host, "plan") == f"A reload would make these changes:\n{shown}"
    assert memory_limits_mib(ready) == [5760]
    assert output_of(ready.host, "reload") == f"Reloaded with these changes:\n{shown}"
    assert memory_limits_mib(ready) == [11520]
    assert output_of(ready.host, "plan") == "A reload would change nothing.\n"


def test_while_a_job_runs_a_budget_is_pending_and_a_drain_waits_for_it(
    ready: Daemon, job: Client, stand_ins: StandIns
) -> None:
    (server,) = stand_ins.servers()
    ready.host.divide(2)
    waits = f"the MPS server (PID {server})"
    pending = f"Pending:  host: the change of limits waits for {waits} to end\n"
    out = output_of(ready.host, "reload")
    assert out.startswith(f"Reloaded with these changes:\n{plan_text(f'once {waits} has ended')}{pending}")
    assert pending in output_of(ready.host, "status")
    assert memory_limits_mib(ready) == [5760]
    command = ["yunion-mps", "reload", "--drain"]
    with ready.host.popen(command) as draining:
        assert draining.stderr is not None
        assert draining.stderr.readline() == f"yunion-mps: waiting: host: {pending.partition('host: ')[2]}"
        job.end()
        with contextlib.suppress(ProcessLookupError):  # told to end, it may be quicker
            os.kill(server, signal.SIGTERM)
        out, err = draining.communicate(timeout=PATIENCE_S)
    assert (draining.returncode, err) == (0, "yunion-mps: all changes are in effect\n")
    assert out == f"Reloaded with these changes:\n{plan_text('at once')}"
    assert memory_limits_mib(ready) == [11520]


@pytest.mark.gpus({"kind": "v100"})
def test_now_fails_with_the_leases_for_which_devices_are_still_pending(ready: Daemon) -> None:
    take(ready, "holder.name=job-17&holder.ttl_s=600")
    ready.host.divide(2)
    done = ready.host.run(["yunion-mps", "reload", "--now", "--yes", "--timeout", "1"])
    assert done.returncode == 1
    assert "the new division of the GPU waits for lease job-17 of root to end\n" in done.stdout
    assert re.search(
        r"^yunion-mps: still pending after 1s: GPU 00:06.0: .* lease job-17 of root",
        done.stderr,
        re.MULTILINE,
    )


def test_a_change_of_control_daemons_without_jobs_waits_for_none(ready: Daemon) -> None:
    ready.configure(cuda_mps_scope="gpu")
    out = output_of(ready.host, "reload")
    assert "List the jobs" not in out
    assert "once its MPS servers" not in out


def test_a_client_is_listed_with_its_device_and_ended_safely(
    ready: Daemon, job: Client, stand_ins: StandIns
) -> None:
    (server,) = stand_ins.servers()
    header, row = csv_rows(output_of(ready.host, "who", "--clients", "-o", "csv"))
    shown = dict(zip(header, row))
    assert (shown["pid"], shown["user"], shown["device"]) == (str(job.pid), "root", DEVICE)
    assert (shown["server"], shown["domain"]) == (str(server), "host")
    assert "mps_client.py" in shown["command"]
    out = output_of(ready.host, "terminate", str(job.pid), "--yes")
    assert out.endswith("its MPS server disconnected it; ended by SIGTERM\n")
    eventually(lambda: not is_running(job.pid), "its end")
    assert len(csv_rows(output_of(ready.host, "who", "--clients", "-o", "csv"))) == 1
    assert "requested by root" in output_of(ready.host, "events", "--kind", "client")


def test_neither_the_daemon_nor_its_control_daemon_is_ended_as_a_job(ready: Daemon) -> None:
    for pid, what in ((ready.pid, "this daemon"), (ready.control_pid(), "a control daemon")):
        ready.host.gpus[0].add_process(pid, 30, "C")
        code, err = failure_of(ready.host, "terminate", str(pid), "--yes")
        assert (code, err.splitlines()[0]) == (4, f"yunion-mps: PID {pid} is {what}, not a job [not_allowed]")
        assert is_running(pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_client_that_waits_for_another_users_server_is_listed(
    ready: Daemon, job: Client, stand_ins: StandIns
) -> None:
    (server,) = stand_ins.servers()
    assert listed_clients(ready)["waiting"] == []
    other = stand_ins.client(ready.pipe_directory, STRANGER)
    assert other.says() == "asking"
    eventually(lambda: len(listed_clients(ready)["waiting"]) == 1, "a client that waits")
    (waiting,) = listed_clients(ready)["waiting"]
    assert (waiting["pid"], waiting["uid"], waiting["server_user"]) == (other.pid, STRANGER, "root")
    assert (waiting["server"], waiting["domain"]) == (server, "host")
    assert "mps_client.py" in waiting["command"]
    started = ready.get("/v1/status")[1]["started"]
    assert waiting["since"][:19] >= started[:19], "its wait began while this daemon ran"
    said = output_of(ready.host, "who", "--clients")
    assert f"Waiting: PID {other.pid} of nobody (" in said
    assert f"for the MPS server of root (PID {server}, domain host) to exit\n" in said
    waits = f"is waiting for the MPS server of root (PID {server}, domain"
    assert waits in output_of(ready.host, "status")
    eventually(lambda: ready.polls() and waits in ready.log, "a line in the journal")
    third = stand_ins.client(ready.pipe_directory, STRANGER)
    assert third.says() == "asking"
    out = output_of(ready.host, "terminate", str(third.pid), "--yes")
    assert out.endswith(" of nobody: ended by SIGTERM\n")
    job.end()
    assert other.says() == "attached"
    assert listed_clients(ready)["waiting"] == []
    assert [one["pid"] for one in listed_clients(ready)["clients"]] == [other.pid]


def listed_clients(daemon: Daemon) -> dict[str, Any]:
    return dict(daemon.get("/v1/clients")[1])


def test_a_new_program_that_would_not_start_is_refused_in_its_own_words(ready: Daemon) -> None:
    ready.host.divide("many")
    code, words = failure_of(ready.host, "daemon-reexec")
    assert code == 1
    assert words.startswith("yunion-mps: the new program cannot start: ")
    assert "virtual_number" in words
    assert ready.running
    assert memory_limits_mib(ready) == [5760]
