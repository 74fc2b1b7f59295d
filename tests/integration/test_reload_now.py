"""`reload --now` ends no job that it has not listed, or that may be one of those that nothing lists."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.conftest import AtWork, MakeDaemon, MakeHost
from integration.daemon_host import Daemon, eventually, is_running
from simhost.mps import CONTROL, StandIns

NOBODY = 65534
#: In the place of the front-end: it stops with the command that ends servers by force until a file is there.
STOPS_BEFORE_THE_END = """\
#!/bin/sh
case "$1" in -*) exec {program} "$@" ;; esac
commands=$(cat)
case $commands in *' -f'*)
    touch {place}/stopped
    until [ -e {place}/go ]; do sleep 0.01; done
esac
echo "$commands" | {program}
"""


def confirmation(daemon: Daemon) -> str:
    """The parameters of a reload that confirms what is listed now."""
    return f"mode=now&confirmation={daemon.get('/v1/plan')[1]['confirmation']}"


@pytest.fixture
def two_domains(make_host: MakeHost, make_daemon: MakeDaemon) -> Iterator[tuple[Daemon, StandIns]]:
    """Two GPUs, each with a control daemon of its own."""
    host = make_host([{"kind": "v100", "count": 2}])
    with StandIns(host) as jobs:
        daemon = make_daemon(host)
        daemon.configure(cuda_mps_scope="gpu")
        daemon.start().wait_ready()
        yield daemon, jobs


def pipe_directories(daemon: Daemon) -> list[Path]:
    return [Path(domain["pipe_directory"]) for domain in daemon.status()["domains"]]


def test_the_clients_of_an_orphaned_server_are_not_known(at_work: AtWork) -> None:
    """Only the driver lists them, and it does not list all: a client without a context, or before Volta."""
    daemon, jobs, job = at_work
    (orphan,) = jobs.servers()
    daemon.host.gpus[0].add_process(orphan, 30, "C")
    os.kill(daemon.control_pid() or 0, signal.SIGKILL)
    eventually(lambda: daemon.status()["domains"][0]["waits_for"] == [orphan], "that it waits for it")
    eventually(lambda: daemon.status()["domains"][0]["state"] == "ready", "the new control daemon")
    status, answer = daemon.ask("POST", "/v1/reload", "mode=now")
    assert (status, answer["code"]) == (409, "not_confirmed")
    assert f"clients of the MPS server (PID {orphan}) that are not known" in answer["detail"]
    assert (jobs.servers(), is_running(job.pid)) == ([orphan], True)
    assert daemon.ask("POST", "/v1/reload", confirmation(daemon))[0] == 200
    assert job.says() == "server gone"


def test_jobs_of_an_orphaned_server_are_listed_without_control_daemon(at_work: AtWork) -> None:
    """Such as between a crash and a start that fails again and again."""
    daemon, jobs, job = at_work
    (orphan,) = jobs.servers()
    daemon.host.gpus[0].add_process(job.pid, 100, "M+C")
    daemon.host.gpus[0].add_process(orphan, 30, "M+C")
    (jobs.folder / CONTROL).write_text("#!/bin/sh\nexit 1\n")
    os.kill(daemon.control_pid() or 0, signal.SIGKILL)
    eventually(lambda: daemon.status()["domains"][0]["state"] == "backoff", "that it does not start")
    assert [client["pid"] for client in daemon.get("/v1/clients")[1]["clients"]] == [job.pid]
    assert [client["pid"] for client in daemon.get("/v1/plan")[1]["clients"]] == [job.pid]
    status, answer = daemon.ask("POST", "/v1/reload", "mode=now")
    assert (status, f"PID {job.pid} of " in answer["detail"]) == (409, True)
    assert (jobs.servers(), is_running(job.pid)) == ([orphan], True)


def test_unknown_clients_are_confirmed_for_each_server(two_domains: tuple[Daemon, StandIns]) -> None:
    daemon, jobs = two_domains
    first, second = pipe_directories(daemon)
    jobs.attached(first)
    with stopped(*jobs.servers()):
        daemon.host.divide(2, 2)
        parameters = confirmation(daemon)
        later = jobs.attached(second)
        with stopped(*jobs.servers()):
            status, answer = daemon.ask("POST", "/v1/reload", parameters)
            assert (status, answer["code"]) == (409, "not_confirmed")
            assert "that are not known (domain 00:07.0: " in answer["detail"]
            assert is_running(later.pid)


def test_unknown_clients_of_one_server_do_not_confirm_those_of_another(
    two_domains: tuple[Daemon, StandIns], tmp_path: Path
) -> None:
    """Its last clients are listed before it ends: one that attaches after that waits, or is reported."""
    daemon, jobs = two_domains
    first, second = pipe_directories(daemon)
    jobs.attached(first)
    with stopped(*jobs.servers()):
        jobs.attached(second)
        daemon.host.divide(2, 2)
        parameters = confirmation(daemon)
        program = jobs.folder / CONTROL
        real = program.rename(f"{program}.real")
        program.write_text(STOPS_BEFORE_THE_END.format(program=real, place=tmp_path))
        program.chmod(0o755)
        with ThreadPoolExecutor() as pool:
            reload = pool.submit(daemon.ask, "POST", "/v1/reload", parameters)
            eventually(lambda: (tmp_path / "stopped").exists(), "the order to end the server")
            later = jobs.client(second)
            assert later.says() == "asking"
            (tmp_path / "go").touch()
        _, answer = reload.result()
    if jobs.asked:  # from 550 on, it attaches to the server that is about to end
        assert f"PID {later.pid} of " in str(answer["errors"])
    else:
        assert later.says() == "attached"


@contextmanager
def stopped(*servers: int) -> Iterator[None]:
    """Stop these servers, so that their control daemons are not asked which clients they have."""
    for pid in servers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in servers:
            os.kill(pid, signal.SIGCONT)
