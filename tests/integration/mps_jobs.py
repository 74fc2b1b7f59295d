"""Jobs that are clients of MPS: stand-ins, started by `yunion-mps run` or with a lease's environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from integration.daemon_host import PATIENCE_S, Daemon, is_running
from simhost import SimHost
from simhost.mps import CLIENT

#: A client of MPS, and one that ignores SIGTERM and a server that disconnects it.
JOB = (sys.executable, "-IS", str(CLIENT))
STUBBORN_JOB = (*JOB, "stubborn")


@contextmanager
def started_job(
    host: SimHost, *command: str, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A command with one client, which is attached; both are killed at the end."""
    env = {**host.env, **(variables or {})}
    job = host.popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert job.stdout
        said = [job.stdout.readline().strip() for _ in range(2)]
        assert said == ["asking", "attached"], (said, job.poll())
        yield job
    finally:
        job.kill()
        job.communicate(timeout=PATIENCE_S)


def end_of(job: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Wait for its end; return the exit status, the client's last output, and the command's stderr."""
    out, err = job.communicate(timeout=PATIENCE_S)
    assert not is_running(job.pid)
    return job.returncode, out.split("\n")[:-1], err


def terminations_of(daemon: Daemon) -> list[str]:
    """What was done to clients that were terminated, as the event log has it."""
    events = daemon.get("/v1/events?kind=client")[1]["events"]
    return [one["what"].rpartition(": ")[2] for one in events if one["code"] == "client_terminated"]
