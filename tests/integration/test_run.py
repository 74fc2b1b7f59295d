"""`yunion-mps run`, looked at closely: what the command inherits, what it is told, what it becomes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from yunion_mps.core.reasons import NOTHING_FREE

from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, leased_addresses, reason_code, run_job, start_job
from integration.tmux import Tmux

pytestmark = pytest.mark.gpus({"kind": "v100"})


def test_a_command_does_not_inherit_what_python_changes(shared_daemon: Daemon) -> None:
    host = shared_daemon.host
    closed = ["bash", "-c", "set -o pipefail; yunion-mps run yes 2>/dev/null | head -1; exit $?"]
    assert host.run(closed).returncode == 128 + signal.SIGPIPE
    look = ["grep", "SigIgn", "/proc/self/status"]
    assert run_job(host, *look).stdout == host.run(look).stdout
    bare = {name: value for name, value in host.env.items() if not name.startswith(("LC_", "LANG"))}
    assert "LC_CTYPE" not in host.run(["yunion-mps", "run", "env"], env=bare).stdout
    inner = {**host.env, "CUDA_MPS_CLIENT_PRIORITY": "1"}
    assert "PRIORITY" not in host.run(["yunion-mps", "run", "env"], env=inner).stdout


@pytest.mark.gpus({"kind": "tesla-p40"})
def test_a_gpu_that_enforces_no_budget_is_leased_only_on_request(ready_daemon: Daemon) -> None:
    daemon = ready_daemon
    why = "no budget is enforced on GPU 00:06.0 (Tesla P40), which is older than Volta"
    refusal = f"{why}: a command could use all of the memory"
    take = ["yunion-mps", "lease", "take", "job-17", "--ttl", "600"]
    commands = [
        *(["yunion-mps", "run", option, "echo", "ran"] for option in ("--dry-run", "--print-env", "--wait")),
        *(["yunion-mps", "run", "--device", ADDRESSES[0], "echo", "ran"], take, [*take, "--wait"]),
        *([*take, "--device", ADDRESSES[0]], [*take, "--gpu", "00:06.0"]),
    ]
    for command in commands:
        done = daemon.host.run(command)
        assert (done.returncode, done.stdout) == (1, "false\n" if "--print-env" in command else ""), command
        assert done.stderr.splitlines() == [
            f"yunion-mps: {refusal} [budget_not_enforced]",
            "yunion-mps: use it anyway: --allow-unlimited",
        ], command
    for request in ("dry_run=true", f"devices={ADDRESSES[0]}", "devices=all", "gpu=00:06.0", "wait_s=60"):
        status, problem = daemon.ask("POST", "/v1/leases", request)
        assert (status, problem["code"], problem["detail"]) == (409, "budget_not_enforced", refusal), request
        assert problem["hint"] == "to use it anyway, set allow_unlimited"
    assert daemon.get("/v1/events?kind=lease")[1]["events"] == [], "no lease was taken for it"
    said = (
        "budgets are not enforced on GPU 00:06.0, which is older than Volta or of unknown compute "
        "capability: a job can use all of its memory"
    )
    done = run_job(daemon.host, "--allow-unlimited", "printenv", "YUNION_MPS_DEVICE")
    assert (done.stdout, done.stderr) == ("00:06.0-0\n", f"yunion-mps: {said}\n")
    done = daemon.host.run([*take, "--allow-unlimited"])
    assert (done.returncode, done.stderr) == (0, f"yunion-mps: {said}\n")
    status, lease = daemon.ask("POST", "/v1/leases", "allow_unlimited=true")
    assert (status, lease["budget_enforced"]) == (201, False)


@pytest.mark.gpus({"kind": "h100", "count": 2}, {"kind": "tesla-p40"})
def test_the_warning_names_only_gpus_that_enforce_no_budget(ready_daemon: Daemon) -> None:
    request = ["lease", "take", "job", "--ttl", "600", "--count", "3", "--across", "--allow-unlimited"]
    done = ready_daemon.host.run(["yunion-mps", *request])
    said = (
        "budgets are not enforced on GPU 00:08.0, which is older than Volta or of unknown compute "
        "capability: a job can use all of its memory"
    )
    assert (done.returncode, done.stderr) == (0, f"yunion-mps: {said}\n")


@pytest.mark.gpus({"kind": "tesla-p40"}, {"kind": "v100"}, {"kind": "tesla-p40"})
def test_of_unlike_gpus_a_command_gets_one_that_enforces_its_budget(ready_daemon: Daemon) -> None:
    host, daemon = ready_daemon.host, ready_daemon
    any_gpu = ["--allow-unlimited", "printenv", "YUNION_MPS_DEVICE"]
    assert run_job(host, *any_gpu).stdout == "00:07.0-0\n"
    jobs = [start_job(host) for _ in range(4)]
    assert leased_addresses(daemon) == [f"00:07.0-{slot}" for slot in range(4)]
    done = run_job(host, "true")
    assert (done.returncode, reason_code(done.stderr.splitlines()[0])) == (5, NOTHING_FREE)
    assert done.stderr.endswith("; use a GPU that does not enforce budgets: --allow-unlimited\n")
    assert run_job(host, *any_gpu).stdout == "00:06.0-0\n"
    assert "GPU 00:08.0 (Tesla P40)" in run_job(host, "--gpu", "00:08.0", "true").stderr
    for job in jobs:
        job.communicate()


def test_options_after_the_command_belong_to_the_command(shared_daemon: Daemon) -> None:
    for before in ([], ["--"], ["--wait"], ["--wait", "--"], ["--count", "1", "--wait=5s"]):
        assert run_job(shared_daemon.host, *before, "echo", "--wait", "5").stdout == "--wait 5\n", before


def test_a_command_without_limits_takes_no_device(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    (ready_daemon.pipe_directory / "control").rename(ready_daemon.pipe_directory / "aside")
    done = run_job(host, "--allow-unlimited", "sh", "-c", "env; yunion-mps list --free")
    assert "without limits" in done.stderr
    assert "CUDA_MPS" not in done.stdout
    assert "\n00:06.0-3  " in done.stdout
    assert run_job(host, "true").returncode == 1


def test_an_unknown_device_does_not_run_without_limits(shared_daemon: Daemon) -> None:
    for option, name in (("--device", "00:06.0-9"), ("--gpu", "00:09.0")):
        done = run_job(shared_daemon.host, "--allow-unlimited", option, name, "echo", "ran")
        assert (done.returncode, done.stdout) == (1, "")
        assert name in done.stderr


@pytest.mark.gpus({"kind": "v100"}, {"kind": "tesla-p40"})
def test_an_infeasible_request_does_not_run_without_limits(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    jobs = [start_job(host) for _ in range(4)]
    for exit_status, options in (
        (5, ["--device", "00:06.0-0"]),
        (5, ["--gpu", "00:06.0"]),
        (1, ["--count", "20"]),
        (1, ["--gpu-mem", "2GiB"]),
        (1, ["--count", "2", "--gpu", "00:07.0"]),
    ):
        done = run_job(host, "--allow-unlimited", *options, "echo", "ran")
        assert (done.returncode, done.stdout) == (exit_status, ""), options
    for job in jobs:
        job.communicate()


def test_with_mps_disabled_a_command_may_run_without_a_device(daemon: Daemon) -> None:
    daemon.configure(enable_cuda_mps=False)
    daemon.start().wait_ready()
    done = run_job(daemon.host, "true")
    assert (done.returncode, "MPS is disabled" in done.stderr) == (1, True)
    assert daemon.ask("POST", "/v1/leases", "")[1]["code"] == "disabled"
    done = run_job(daemon.host, "--allow-unlimited", "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "echo runs without limits: MPS is disabled" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("run --gpu '' true", "--device and --gpu must not be empty"),
        ("run --gpu-mem 2GiB --gpu-mem-units 2 true", "--gpu-mem and --gpu-mem-units are mutually exclusive"),
        *(
            (f"run --device 00:06.0-1 {option} true", "--device already selects the devices: omit --count,")
            for option in ("--count 2", "--gpu-mem 2GiB", "--gpu-mem-units 2")
        ),
        ("run --thread-percentage 10 true", "--thread-percentage requires --gpu-mem or --gpu-mem-units"),
        (
            "run --podman --rm IMAGE true",
            "run has no option --rm; write podman's options after --: yunion-mps",
        ),
        ("run --podman --docker IMAGE", "--podman and --docker are mutually exclusive: use one of them"),
        ("run -- ''", "COMMAND is missing: yunion-mps run [OPTIONS] COMMAND [ARG]..."),
        ("run --gpu-mem-units 9999999999 true", "invalid value for '--gpu-mem-units': 9999999999 is not a"),
        ("env ''", "DEVICE must not be empty"),
        ("lease renew ''", "LEASE must not be empty"),
        ("lease take 'a b' --ttl 5", "NAME may contain letters, digits and ._:/@-, must begin with a letter"),
    ],
)
def test_empty_and_surplus_arguments_are_usage_errors(shared_daemon: Daemon, wrong: str, why: str) -> None:
    done = shared_daemon.host.run(["yunion-mps", *shlex.split(wrong)])
    assert (done.returncode, done.stderr.startswith(f"yunion-mps: {why}")) == (2, True), done.stderr
    subcommand = " ".join(wrong.split()[: 1 + wrong.startswith("lease")])
    assert done.stderr.splitlines()[1:] == [f"yunion-mps: see: yunion-mps {subcommand} --help"]
    assert leased_addresses(shared_daemon) == []


@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_a_job_with_several_devices_is_asked_which_one_it_means(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    for word, printed in (("show", ""), ("env", "false\n")):
        done = run_job(host, "--count", "2", "--across", "yunion-mps", word)
        assert (done.returncode, done.stdout) == (2, printed)
        assert done.stderr.startswith(
            "yunion-mps: DEVICE is 00:06.0-0,00:07.0-0: name one of these devices\n"
        )


def test_a_command_without_standard_output_is_run_as_any_other(shared_daemon: Daemon, tmp_path: Path) -> None:
    def done(*words: str) -> tuple[int, str]:
        ended = shared_daemon.host.run(["sh", "-c", shlex.join(words) + " >&-"])
        return ended.returncode, ended.stderr

    look = ["sh", "-c", f"[ ! -e /proc/self/fd/1 ] && printenv YUNION_MPS_DEVICE >{tmp_path / 'got'}; exit 7"]
    assert done("yunion-mps", "run", *look) == (7, "")
    assert (tmp_path / "got").read_text() == "00:06.0-0\n"
    for words in (["run", "--print-env"], ["run", "--dry-run"], ["list"]):
        status, said = done("yunion-mps", *words)
        assert (status, said.splitlines()[0]) == (
            1,
            "yunion-mps: the output cannot be written: standard output is closed",
        )


def test_without_standard_error_messages_do_not_go_to_the_output(daemon: Daemon) -> None:
    done = daemon.host.run(["sh", "-c", "yunion-mps run --allow-unlimited echo ran 2>&-"])
    assert (done.returncode, done.stdout) == (0, "ran\n")


def test_names_may_be_cut_as_elsewhere_and_a_name_has_one_lease(shared_daemon: Daemon) -> None:
    host = shared_daemon.host
    for words in (
        ["--device", "0000:00:06.0-2"],
        ["--gpu", "0000:00:06.0"],
        ["--gpu", host.gpus[0].uuid[:12]],
    ):
        assert run_job(host, *words, "true").returncode == 0, words
    first = host.run(["yunion-mps", "lease", "take", "job-1", "--ttl", "600", "-o", "json"])
    again = host.run(["yunion-mps", "lease", "take", "job-1", "--ttl", "600", "-o", "json"])
    other = host.run(["yunion-mps", "lease", "take", "job-1", "--ttl", "601"])
    lease = json.loads(first.stdout)["id"]
    assert json.loads(again.stdout)["id"] == lease
    what = f"job-1: a lease with this name already exists, from a different request: {lease} [lease_exists]"
    assert other.stderr.splitlines()[0] == f"yunion-mps: {what}"
    assert host.run(["yunion-mps", "lease", "renew", lease[:8]]).returncode == 0
    assert host.run(["yunion-mps", "lease", "release", "job-1"]).returncode == 0
    missing = host.run(["yunion-mps", "lease", "release", "job-1"])
    what = "there is no lease job-1 [not_found]"
    assert (missing.returncode, missing.stderr.splitlines()[0]) == (1, f"yunion-mps: {what}")
    assert leased_addresses(shared_daemon) == []


def test_a_lease_of_any_valid_name_is_renewed_and_released_by_it(shared_daemon: Daemon) -> None:
    def lease(*words: str) -> int:
        return shared_daemon.host.run(["yunion-mps", "lease", *words]).returncode

    for name in ("slurm/17", "a@b:c._-d", "UP/low/er"):
        done = [lease("take", name, "--ttl", "600"), lease("renew", name)]
        done += [lease("show", name), lease("release", name)]
        assert done == [0, 0, 0, 0], name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_is_sent_to_it_is_the_command_s(shared_daemon: Daemon, number: signal.Signals) -> None:
    caught = f"trap 'echo caught; exit 9' {number.name[3:]}; echo begun; while :; do read -rt 0.1 line; done"
    for script, expected in ((caught, (9, "caught\n")), ("echo begun; exec cat", (-number, ""))):
        job = shared_daemon.host.popen(
            ["yunion-mps", "run", "--", "bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert job.stdout
        assert job.stdout.readline() == "begun\n"
        job.send_signal(number)
        said = job.stdout.read()
        job.communicate()
        assert (job.returncode, said) == expected
    eventually(lambda: leased_addresses(shared_daemon) == [], "the end of the leases")


def test_the_command_is_the_same_process_in_the_same_group_and_session(shared_daemon: Daemon) -> None:
    for is_new in (False, True):
        job = shared_daemon.host.popen(
            ["yunion-mps", "run", "cat", "/proc/self/stat"], stdout=subprocess.PIPE, start_new_session=is_new
        )
        pid, command, _, parent, group, session, *_ = job.communicate()[0].split()
        assert (int(pid), command, int(parent)) == (job.pid, "(cat)", os.getpid())
        expected = (job.pid, job.pid) if is_new else (os.getpgrp(), os.getsid(0))
        assert (int(group), int(session)) == expected


def test_on_a_terminal_it_is_in_the_foreground_and_keys_are_its_own(shared_daemon: Daemon) -> None:
    host = shared_daemon.host
    with Tmux({**host.env, "LC_ALL": "C.UTF-8"}, 100, 20) as screen:
        screen.type("tty; yunion-mps run -- sh -c 'tty; test -t 0 -a -t 1 && echo a terminal'", "Enter")
        lines = screen.wait("^a terminal")
        assert len({line for line in lines if line.startswith("/dev/")}) == 1
        screen.type("clear; yunion-mps run -- sh -c 'echo begun; exec cat'", "Enter")
        screen.wait("^begun")
        screen.type("typed", "Enter")
        eventually(lambda: screen.lines().count("typed") == 2, "what is typed, and what cat makes of it")
        screen.type("C-c")
        screen.wait_prompt()
        screen.type("echo ended with $?", "Enter")
        screen.wait(rf"ended with {128 + signal.SIGINT}$")
        screen.type("clear; set -m; yunion-mps run -- sh -c 'echo second; exec cat'", "Enter")
        screen.wait("^second")  # another word, for what was said before may not be cleared away yet
        screen.type("C-z")
        screen.wait("Stopped")
        assert leased_addresses(shared_daemon) == ["00:06.0-0"], "who is stopped still has its device"
        screen.type("fg", "Enter")
        screen.type("again", "Enter")
        eventually(lambda: screen.lines().count("again") == 2, "that it goes on")
        screen.type("C-d")
        eventually(lambda: leased_addresses(shared_daemon) == [], "the end of the lease")


def test_a_pipeline_ends_as_its_commands_do(shared_daemon: Daemon) -> None:
    pipeline = "set -o pipefail; seq 5 | yunion-mps run -- sh -c 'cat; exit 3' | yunion-mps run tail -n 1"
    done = shared_daemon.host.run(["bash", "-c", pipeline])
    assert (done.returncode, done.stdout) == (3, "5\n")


@pytest.mark.parametrize("command", [["list"], ["status"], ["run", "true"], ["lease", "list"]], ids=" ".join)
def test_no_command_waits_for_modules_that_it_does_not_need(
    shared_daemon: Daemon, command: list[str]
) -> None:
    start = "from yunion_mps.cli import main; main()"
    result = shared_daemon.host.run([sys.executable, "-X", "importtime", "-c", start, *command])
    assert result.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "click" in imported
    unneeded = {"google.protobuf", "grpclib", "prometheus_client", "psutil", "sdnotify"}
    unneeded.add("yunion_mps.client.values")  # which takes 8 ms to define its types
    assert imported & unneeded == set()
