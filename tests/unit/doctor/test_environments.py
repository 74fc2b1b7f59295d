"""`--pid PID` and `-- COMMAND`: the environments of real processes, and of commands that are not run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unit.doctor.healthy import STRANGER, look
from unit.doctor.scene import SLEEP, Scene


def test_a_process_with_a_devices_environment_is_content(ready: Scene) -> None:
    process = ready.process(SLEEP, **ready.device(1))
    assert look(ready.host, "--pid", str(process.pid)).bad() == {}


def test_a_process_with_a_misspelt_variable_is_found_that_and_what_follows(ready: Scene) -> None:
    given = ready.device(1)
    given["CUDA_MPS_PIPE_DIR"] = given.pop("CUDA_MPS_PIPE_DIRECTORY")
    process = ready.process(SLEEP, **given)
    seen = look(ready.host, "--pid", str(process.pid))
    first, second = seen.checks["environment"]
    assert first["what"] == "no program reads CUDA_MPS_PIPE_DIR; CUDA_MPS_PIPE_DIRECTORY was likely meant"
    assert second["what"].startswith("CUDA_MPS_PIPE_DIRECTORY is not set: it looks in ")
    assert seen.code == 2


def told(scene: Scene, how: str, given: dict[str, str]) -> list[str]:
    """What the doctor says of a process that runs with these variables, or of a command that would."""
    if how == "process":
        words = ["--pid", str(scene.process(SLEEP, **given).pid)]
        seen = look(scene.host, *words)
    else:
        seen = look(
            scene.host, command=("env", *(f"{name}={value}" for name, value in given.items()), "true")
        )
    return [one["what"] for one in seen.checks["environment"] if one["level"] != "ok"]


@pytest.mark.parametrize("how", ["process", "command"])
def test_gpus_by_number_without_the_order_of_pci_addresses_are_found(ready: Scene, how: str) -> None:
    given = {**ready.device(1), "CUDA_VISIBLE_DEVICES": "0"}
    by_number = (
        "CUDA_VISIBLE_DEVICES is '0': with MPS, numbers count the control daemon's GPUs, not nvidia-smi's"
    )
    assert told(ready, how, given)[0] == by_number
    assert not any("fastest" in what for what in told(ready, how, given))
    for order in ("FASTEST_FIRST", None):
        given.pop("CUDA_DEVICE_ORDER")
        given.update({"CUDA_DEVICE_ORDER": order} if order else {})
        counts = "CUDA counts the fastest GPU first, nvidia-smi by PCI address"
        assert f"CUDA_DEVICE_ORDER is {order or 'not set'}: {counts}" in told(ready, how, given)


@pytest.mark.parametrize("how", ["process", "command"])
@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("CUDA_MPS_PIPE_DIR", "CUDA_MPS_PIPE_DIRECTORY"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_MPS_PINNED_DEVICE_MEMORY_LIMIT", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
    ],
)
def test_a_misspelt_variable_is_found_of_a_process_and_of_a_command(
    ready: Scene, how: str, wrong: str, meant: str
) -> None:
    given = ready.device(1)
    given[wrong] = given[meant]
    assert told(ready, how, given) == [f"no program reads {wrong}; {meant} was likely meant"]


def test_an_environment_of_another_device_than_it_says_is_found(ready: Scene) -> None:
    given = {**ready.device(1), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "5"}
    process = ready.process(SLEEP, **given)
    found = look(ready.host, "--pid", str(process.pid)).one("environment", "warning")
    assert found["hint"] == "that device needs CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")
def test_a_process_that_shares_no_memory_with_the_server_is_found(ready: Scene) -> None:
    # The host's root lies in /dev/shm, and is kept visible as a container's -v would.
    steps = (
        "mount -t tmpfs t /mnt && mkdir /mnt/kept && mount --bind $0 /mnt/kept && mount -t tmpfs t /dev/shm "
        "&& mkdir -p $0 && mount --bind /mnt/kept $0 && echo ready && exec sleep 600"
    )
    words = ["unshare", "--mount", "sh", "-c", steps, str(ready.host.root)]
    process = ready.process(words, **ready.device(1))
    found = look(ready.host, "--pid", str(process.pid)).one("environment", "problem")
    assert "has a /dev/shm of its own" in found["what"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")
def test_a_process_that_does_not_see_the_pipe_directory_is_found(ready: Scene) -> None:
    hide = f"mount -t tmpfs t {ready.host.root}/tmp && echo ready && exec sleep 600"
    process = ready.process(["unshare", "--mount", "sh", "-c", hide], **ready.device(1))
    found = look(ready.host, "--pid", str(process.pid)).one("environment", "problem")
    assert f"does not see the host's {ready.pipe}: a container, or PrivateTmp=yes" in found["what"]


def test_a_process_with_a_library_of_another_driver_is_found(ready: Scene) -> None:
    library = ready.host.root / "compat/libcuda.so.470.10.01"
    library.parent.mkdir()
    library.write_bytes(b"x")
    mapping = f"import mmap; f = open({str(library)!r}); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
    process = ready.process([*SLEEP[:-1], f"{mapping}; {SLEEP[-1]}"], **ready.device(1))
    found = look(ready.host, "--pid", str(process.pid)).one("environment", "warning")
    assert f"has loaded {library}, and the driver is" in found["what"]


def test_env_may_forget_and_unset_variables(ready: Scene) -> None:
    given = [f"{name}={value}" for name, value in ready.device(2).items()]
    wrong = {**ready.host.env, "CUDA_VISIBLE_DEVICE": "0", "CUDA_MPS_PIPE_DIR": "/x"}
    path = f"PATH={ready.host.env['PATH']}"
    for options in (("-i", path), ("-u", "CUDA_VISIBLE_DEVICE", "--unset", "CUDA_MPS_PIPE_DIR", "-C", "/")):
        assert look(ready.host, command=("env", *options, *given, "true"), env=wrong).bad() == {}
    assert len(look(ready.host, command=("env", *given, "true"), env=wrong).checks["environment"]) == 2
    (found,) = look(ready.host, command=("env", "A=1")).checks["environment"]
    assert found["what"] == "there is no command behind the variables"


def test_a_process_that_is_not_there_is_found(ready: Scene) -> None:
    assert "no process 4194304" in look(ready.host, "--pid", "4194304").one("environment", "problem")["what"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_process_of_another_user_is_roots_to_look_at(ready: Scene) -> None:
    seen = look(ready.host, "--pid", "1", user=STRANGER, group=STRANGER, extra_groups=[])
    assert "you may not look at PID 1" in seen.one("environment", "skipped")["what"]


def test_a_command_is_judged_with_the_variables_before_it_and_not_run(ready: Scene, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    given = [f"{name}={value}" for name, value in ready.device(2).items()]
    assert look(ready.host, command=("env", *given, "touch", str(mark))).bad() == {}
    assert look(ready.host, command=(*given, "touch", str(mark))).bad() == {}
    assert not mark.exists()
    wrong = ("env", "-u", "CUDA_VISIBLE_DEVICES", *given[:-1], "CUDA_VISIBLE_DEVICES=1", "true")
    (found, *_) = look(ready.host, command=wrong).checks["environment"]
    assert found["what"].startswith(
        "CUDA_VISIBLE_DEVICES is '1': with MPS, numbers count the control daemon's"
    )


def test_a_job_script_is_read_for_what_it_exports(ready: Scene, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/sh\nexport CUDA_MPS_PIPE_DIRECTROY="/mps"  # ours\npython3 train.py\n')
    script.chmod(0o755)
    for command in ((str(script),), ("bash", str(script))):
        seen = look(ready.host, command=command, env={**ready.host.env, **ready.device(0)})
        assert "no program reads CUDA_MPS_PIPE_DIRECTROY" in seen.one("environment", "problem")["what"]


def test_a_command_that_is_given_a_device_by_run_needs_no_variables(ready: Scene, tmp_path: Path) -> None:
    by_run = ("yunion-mps", "run", "--wait", "--", "bash")
    assert look(ready.host, command=(*by_run, "-c", "true")).bad() == {}
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nexport CUDA_VISIBLE_DEVICE=0\n")
    seen = look(ready.host, command=(*by_run, str(script)))
    assert "no program reads CUDA_VISIBLE_DEVICE" in seen.one("environment", "problem")["what"]


def test_what_is_no_file_among_a_command_s_words_is_not_waited_for(ready: Scene, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    given = {**ready.host.env, **ready.device(0)}
    assert look(ready.host, command=("cat", str(pipe), "/dev/zero"), env=given).bad() == {}


def test_a_command_that_is_not_there_is_found(ready: Scene) -> None:
    assert (
        look(ready.host, command=("pyhton3", "x")).one("environment", "problem")["what"]
        == "pyhton3 was not found"
    )


def test_a_container_is_looked_at_by_what_it_is_given(ready: Scene) -> None:
    docker = ready.host.root / "bin/docker"
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    given = [word for name, value in ready.device(0).items() for word in ("-e", f"{name}={value}")]
    place = f"{ready.pipe}:{ready.pipe}"
    good = ("docker", "run", "--ipc=host", "-v", place, *given, "image", "python3")
    assert look(ready.host, command=good).bad() == {}
    bad = look(ready.host, command=("docker", "run", "image", "python3"))
    assert [one["what"].split(":")[0] for one in bad.checks["environment"]] == [
        "the container has a /dev/shm of its own, so it cannot share memory with an MPS server",
        "CUDA_MPS_PIPE_DIRECTORY is not set",
    ]
