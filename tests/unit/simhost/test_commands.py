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


T4 = {"kind": "t4"}


def test_generated_gpu_identities_are_unique_and_reproducible() -> None:
    many = [{"kind": kind, "count": 3} for kind in KINDS]
    host = parse_description(many)
    assert host == parse_description(many)
    for values in (
        {gpu.uuid for gpu in host.gpus},
        {gpu.address for gpu in host.gpus},
        {gpu.render for gpu in host.gpus},
        {gpu.minor for gpu in host.gpus},
    ):
        assert len(values) == 3 * len(KINDS)


WRONG: list[tuple[object, str]] = [
    (None, "the description: must be a mapping with the keys driver, gpus, others"),
    ({"gpu": []}, "gpu: unknown key; one of: driver, gpus, others"),
    ({"driver": {}}, "gpus: must be a list"),
    ([T4, {}], f"gpus[1].kind: must be one of: {', '.join(KINDS)}"),
    ([{**T4, "count": 40}] * 2, "gpus: must be at most 64 GPUs"),
    ([{**T4, "pci": "0000:00:08.0"}] * 2, "2 devices have the same "),
    ([{**T4, "pci": 6.0}], "gpus[0].pci: must be a text like '0000:00:06.0', in quotes, not 6.0"),
    ([{**T4, "mig": True}], "gpus[0].mig: a t4 has no MIG mode"),
    ({"gpus": [], "others": [{"kind": "t4"}]}, "others[0].kind: must be one of: aspeed, amd, intel"),
    (
        {"gpus": [{**T4, "render": 128}], "others": [{"kind": "amd", "render": 128}]},
        "2 devices have the same render, 128",
    ),
]


@pytest.mark.parametrize(("description", "words"), WRONG, ids=[words[:50] for _, words in WRONG])
def test_a_wrong_description_is_refused_with_its_place(description: object, words: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        parse_description(description)
    assert str(caught.value).startswith(words)
