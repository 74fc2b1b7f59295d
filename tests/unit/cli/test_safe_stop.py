"""`yunion-mps run --safe-stop`: what it asks the daemon, which answers by hand."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from yunion_mps.cli.safe_stop import stop_job_unit
from yunion_mps.core.errors import ControlError

from unit.cli.conftest import Cli
from unit.http.fake_services import CLIENT, clients
from unit.http.server_host import PATIENCE_S


def test_a_client_that_cannot_be_disconnected_does_not_affect_the_others(
    own_cli: Cli, tmp_path: Path
) -> None:
    """MPS servers differ: one may be hung, while another can still disconnect its clients."""
    device = {"YUNION_MPS_DEVICE": "00:06.0-1", "CUDA_VISIBLE_DEVICES": "GPU-1"}
    limits = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5760M"}
    own_cli.env |= {**device, **limits, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    (tmp_path / "control").touch()
    script = "trap '' TERM; sleep 600 & echo $$ $!; exec sleep 600"
    with own_cli.start("run", "--inherit", "--safe-stop=0s", "--", "sh", "-c", script) as job:
        assert job.stdout
        pids = [int(word) for word in job.stdout.readline().split()]
        own_cli.host.clients.listed = clients(*({**CLIENT, "pid": pid} for pid in pids))
        own_cli.host.clients.refusal = ControlError("its MPS server refused")
        job.terminate()
        _, err = job.communicate(timeout=PATIENCE_S)
    ends = [
        f"PID {pid} was not disconnected from MPS before its signal: its MPS server refused" for pid in pids
    ]
    assert sorted(err.splitlines()) == sorted(f"yunion-mps: {end}" for end in ends)


@pytest.mark.parametrize("is_listed", [False, True], ids=["unknown", "refused"])
def test_what_cannot_be_disconnected_is_told_once_in_a_stop(
    own_cli: Cli, tmp_path: Path, *, is_listed: bool
) -> None:
    """A busy server is asked again when COMMAND has ended, and when the time is over."""
    own_cli.env |= {"YUNION_MPS_DEVICE": "00:06.0-1", "CUDA_VISIBLE_DEVICES": "GPU-1"}
    own_cli.env |= {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5760M"}
    own_cli.env |= {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    (tmp_path / "control").touch()
    script = "sh -c 'trap \"\" TERM; echo $$; exec sleep 600' & wait"
    with own_cli.start("run", "--inherit", "--safe-stop=1s", "--", "sh", "-c", script) as job:
        assert job.stdout
        pid = int(job.stdout.readline())
        found = [{**CLIENT, "pid": pid}] if is_listed else []
        own_cli.host.clients.listed = clients(*found, errors=("domain host: busy",))
        own_cli.host.clients.refusal = ControlError("its MPS server is busy")
        job.terminate()
        _, err = job.communicate(timeout=PATIENCE_S)
    assert err.count("was not disconnected from MPS before its signal") == 1, err


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        ({}, 0, ""),
        ({"EXIT_CODE": "exited", "EXIT_STATUS": "0"}, 0, ""),
        ({"EXIT_CODE": "killed", "EXIT_STATUS": "KILL"}, 137, "run was killed"),
    ],
    ids=["running", "ended", "killed"],
)
def test_a_job_unit_is_stopped_only_if_its_run_was_killed(
    own_cli: Cli, ended: dict[str, str], code: int, said: str
) -> None:
    """This process is in no job unit, so nothing is to be stopped."""
    own_cli.env |= ended
    done = own_cli.process("stop-job-unit")
    assert (done.code, said in done.err, bool(done.err)) == (code, True, bool(said))


def test_a_stop_does_not_fail_because_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread prints the notice; a job that has started too many processes must still be killed."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setenv("EXIT_STATUS", "KILL")
    assert stop_job_unit.main([], standalone_mode=False) == 137
