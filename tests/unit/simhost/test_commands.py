"""`simhost` and `simhost-ctl`, run as programs, and the descriptions that they take."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import simhost
from simhost import DescriptionError
from simhost.catalog import KINDS
from simhost.description import parse_description

PROGRAM = [sys.executable, "-I", str(Path(simhost.__file__).with_name("__main__.py"))]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=60)


def test_command_runs_on_the_reference_case_and_nothing_is_left() -> None:
    done = run("--", "sh", "-c", 'echo "$YUNION_MPS_ROOT"; nvidia-smi -L')
    root, line = done.stdout.splitlines()
    assert line == "GPU 0: Tesla P40 (UUID: GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400)"
    assert not Path(root).exists()
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["sh", "-c", "exit 42"], 42),
        (["sh", "-c", "kill -TERM $$"], -signal.SIGTERM),
        (["no-such-command"], 127),
        (["/etc"], 126),
    ],
)
def test_exit_status_is_the_commands(words: list[str], status: int) -> None:
    assert run("--", *words).returncode == status


def test_signals_are_passed_on() -> None:
    script = "trap 'echo got it; exit 5' TERM; echo ready; while :; do sleep 0.01; done"
    with subprocess.Popen([*PROGRAM, "--", "sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.communicate(timeout=60)[0] == "got it\n"
    assert process.returncode == 5


def test_daemons_end_with_the_host() -> None:
    steps = (
        "cd $YUNION_MPS_ROOT; mkfifo pid; setsid sh -c 'sleep 60 & echo $! >pid; wait' & cat pid; echo $PWD"
    )
    done = run("--", "sh", "-c", steps)
    pid, root = done.stdout.split()
    deadline = time.monotonic() + 60
    while Path("/proc", pid).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path("/proc", pid).exists()
    assert not Path(root).exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("gpus: [{kind: h1000}]", "gpus[0].kind: must be one of: tesla-k80, "),
        ("gpus: [\n", "line 2: not YAML: "),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_bad_file_is_one_clear_line(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "gpus.yml"
    if content is not None:
        file.write_text(content)
    done = run("--gpus", str(file), "--", "true")
    assert done.returncode == 2
    assert done.stderr.startswith(f"simhost: {file}: {words}")
    assert done.stderr.count("\n") == 1


def test_named_root_is_kept_and_used_again(tmp_path: Path) -> None:
    file = tmp_path / "gpus.yml"
    file.write_text("gpus:\n- {kind: t4}\n")
    root = str(tmp_path / "h")
    prohibit = ("simhost-ctl", "compute-mode", "0", "prohibited")
    assert run("--gpus", str(file), "--root", root, "--", *prohibit).returncode == 0
    query = ["nvidia-smi", "--query-gpu=name,compute_mode", "--format=csv,noheader"]
    assert run("--root", root, "--", *query).stdout == "Tesla T4, Prohibited\n"


def test_ctl_does_each_of_its_commands() -> None:
    script = """
    set -e
    simhost-ctl compute-mode 0 exclusive_process
    simhost-ctl process 0 add 77 10
    simhost-ctl process 0 add 78 20 --type M+C
    simhost-ctl process 0 remove 77
    simhost-ctl xid 0 31
    simhost-ctl fail nvmlDeviceGetUUID gpu_is_lost --gpu 0 --times 2 --delay-ms 5
    simhost-ctl lose 0
    simhost-ctl show
    """
    shown = json.loads(run("--", "sh", "-c", script).stdout)
    (gpu,) = shown["gpus"]
    assert (gpu["compute_mode"], gpu["lost"], gpu["present"]) == ("exclusive_process", True, True)
    assert gpu["processes"] == [{"pid": 78, "used_mib": 20, "type": "M+C"}]
    assert shown["failures"] == [
        {"call": "nvmlDeviceGetUUID", "error": "gpu_is_lost", "gpu": 0, "times": 2, "delay_ms": 5}
    ]


def test_ctl_undoes_every_change(tmp_path: Path) -> None:
    file = tmp_path / "gpus.yml"
    file.write_text("gpus: [{kind: a100, mig: true}, {kind: t4, lost: true}]\n")
    steps = ["mig 0 off", "remove 0", "restore 0", "restore 1", "load 0 97", "fail '*' unknown", "clear"]
    script = " && ".join([*(f"simhost-ctl {step}" for step in steps), "nvidia-smi -L | wc -l"])
    assert run("--gpus", str(file), "--", "sh", "-c", script).stdout == "2\n"


def test_ctl_refuses_what_cannot_be() -> None:
    script = "simhost-ctl lose 1; simhost-ctl process 0 remove 5; simhost-ctl mig 0 on"
    done = run("--", "sh", "-c", script)
    wrong = ("GPU 1: the host has GPUs 0 to 0", "no process 5 on GPU 0", "a Tesla P40 has no MIG mode")
    assert (done.returncode, done.stderr) == (2, "".join(f"simhost-ctl: {words}\n" for words in wrong))


def test_signal_at_any_moment_leaves_no_root() -> None:
    """Ends simhost while it makes its host, too: from the first moment to well into the command."""
    wait = "echo $YUNION_MPS_ROOT; exec sleep 60"
    for delay_s in (0.03, 0.035, 0.04, 0.05, 0.08):
        with subprocess.Popen(
            [*PROGRAM, "--", "sh", "-c", wait], stdout=subprocess.PIPE, text=True
        ) as process:
            time.sleep(delay_s)
            process.terminate()
            root = process.communicate(timeout=60)[0].strip()
        assert process.returncode == -signal.SIGTERM
        assert not root or not Path(root).exists()


def test_command_has_the_signals_of_a_shells_child() -> None:
    shown = run("--", "grep", "-E", "SigBlk|SigIgn", "/proc/self/status").stdout.split()
    blocked, ignored = int(shown[1], 16), int(shown[3], 16)
    assert blocked == 0
    assert not ignored & 1 << signal.SIGPIPE - 1


T4 = {"kind": "t4"}


def test_generated_gpu_identities_are_unique_and_reproducible() -> None:
    many = [{"kind": kind, "count": 4} for kind in KINDS]
    host = parse_description(many)
    assert host == parse_description(many)
    for values in (
        {gpu.uuid for gpu in host.gpus},
        {gpu.address for gpu in host.gpus},
        {gpu.render for gpu in host.gpus},
        {gpu.minor for gpu in host.gpus},
    ):
        assert len(values) == 64


def test_generated_nodes_skip_those_that_later_entries_name() -> None:
    host = parse_description([T4, {**T4, "pci": "0000:00:06.0", "render": 128}])
    assert [(gpu.address, gpu.render) for gpu in host.gpus] == [("0000:00:06.0", 128), ("0000:00:07.0", 129)]


WRONG: list[tuple[object, str]] = [
    (None, "the description: must be a mapping with the keys driver, gpus"),
    ({"gpu": []}, "gpu: unknown key; one of: driver, gpus"),
    ({"gpus": []}, "gpus: must be 1 to 64 GPUs, e.g. [{kind: tesla-p40}]"),
    ([T4, {}], f"gpus[1].kind: must be one of: {', '.join(KINDS)}"),
    ([T4, "t4"], "gpus[1]: must be a mapping with the keys kind, count, "),
    ([{**T4, "count": 40}] * 2, "gpus: must be 1 to 64 GPUs"),
    ([{**T4, "pci": "0000:00:08.0"}] * 2, "gpus: 2 GPUs have the same "),
    ([{**T4, "count": True}], "gpus[0].count: must be a whole number from 1 to 64, not True"),
    ([{**T4, "pci": 6.0}], "gpus[0].pci: must be a text like '0000:00:06.0', in quotes, not 6.0"),
    ([{**T4, "mig": True}], "gpus[0].mig: a t4 has no MIG mode"),
    ([{**T4, "lost": "yes"}], "gpus[0].lost: must be true or false, not 'yes'"),
    ([{**T4, "name": ""}], "gpus[0].name: must be a text of 1 to 90 ASCII characters, not ''"),
]


@pytest.mark.parametrize(("description", "words"), WRONG, ids=[words[:50] for _, words in WRONG])
def test_a_wrong_description_is_refused_with_its_place(description: object, words: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        parse_description(description)
    assert str(caught.value).startswith(words)
