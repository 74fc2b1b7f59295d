"""`yunion-mps run` where somebody looks closely: what the command inherits, and what it is told."""

from __future__ import annotations

import contextlib
import json
import signal

import pytest

from integration.daemon_host import Daemon
from integration.test_leases import _Connection, given, run


def test_what_python_changes_of_a_process_is_not_the_commands(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    closed = ["bash", "-c", "set -o pipefail; yunion-mps run yes 2>/dev/null | head -1; exit $?"]
    assert host.run(closed).returncode == 128 + signal.SIGPIPE
    look = ["grep", "SigIgn", "/proc/self/status"]
    assert run(host, *look).stdout == host.run(look).stdout
    bare = {name: value for name, value in host.env.items() if not name.startswith(("LC_", "LANG"))}
    assert "LC_CTYPE" not in host.run(["yunion-mps", "run", "env"], env=bare).stdout
    inner = {**host.env, "CUDA_MPS_CLIENT_PRIORITY": "1"}
    assert "PRIORITY" not in host.run(["yunion-mps", "run", "env"], env=inner).stdout


def test_a_gpu_that_enforces_no_budget_is_told_by_whoever_runs_on_it(ready_daemon: Daemon) -> None:
    said = "budgets are not enforced on GPU 00:06.0, older than Volta: it could use all of its memory"
    for option in ("--dry-run", "--"):
        assert run(ready_daemon.host, option, "true").stderr == f"yunion-mps: {said}\n"


def test_what_runs_without_limits_has_no_device(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    (ready_daemon.pipe_directory / "control").rename(ready_daemon.pipe_directory / "aside")
    done = run(host, "--allow-unlimited", "sh", "-c", "env; yunion-mps list --unused | tail -n 1")
    assert "without limits" in done.stderr
    assert "CUDA_MPS" not in done.stdout
    assert "Total: 4 " in done.stdout
    assert run(host, "true").returncode == 1


@pytest.mark.parametrize("wrong", [["--device", "", "true"], ["--gpu", "", "true"], [""], ["--", ""]])
def test_what_is_empty_is_wrong_usage(ready_daemon: Daemon, wrong: list[str]) -> None:
    done = run(ready_daemon.host, *wrong)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert given(ready_daemon) == []


def test_names_may_be_cut_as_elsewhere_and_a_name_has_one_lease(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    for words in (
        ["--device", "0000:00:06.0-2"],
        ["--gpu", "0000:00:06.0"],
        ["--gpu", host.gpus[0].uuid[:12]],
    ):
        assert run(host, *words, "true").returncode == 0, words
    first = host.run(["yunion-mps", "lease", "take", "job-1", "--ttl", "600", "-o", "json"])
    again = host.run(["yunion-mps", "lease", "take", "job-1", "--ttl", "600"])
    lease = json.loads(first.stdout)["id"]
    assert again.stderr.splitlines()[0] == f"yunion-mps: job-1 has a lease already: {lease}"
    assert host.run(["yunion-mps", "lease", "renew", lease[:8]]).returncode == 0
    assert host.run(["yunion-mps", "lease", "release", "job-1"]).returncode == 0
    missing = host.run(["yunion-mps", "lease", "release", "job-1"])
    assert (missing.returncode, missing.stderr.splitlines()[0]) == (1, "yunion-mps: there is no lease job-1")
    assert given(ready_daemon) == []


def test_a_body_is_not_passed_over(ready_daemon: Daemon) -> None:
    with contextlib.closing(_Connection(ready_daemon)) as connection:
        connection.request("POST", "/v1/leases", body='{"name": "a"}')
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["detail"]) == (400, "a body is not read here")
