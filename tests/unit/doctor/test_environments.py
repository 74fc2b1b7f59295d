"""`--pid PID` and `-- COMMAND`: the environments of real processes, and of commands that are not run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from yunion_mps.doctor.checks import Finding, Host, Lazy
from yunion_mps.doctor.environment import of_command, of_process
from yunion_mps.planning.environment import client_environment

from unit.doctor.hosts import finding_of, host_of, only_finding
from unit.http.server_host import ServerHost
from unit.http.snapshots import P40, reference

pytestmark = pytest.mark.processes

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")

#: A process that says that it runs, and then waits.
SLEEP = [sys.executable, "-IS", "-c", "import time; print('ready', flush=True); time.sleep(600)"]


class Scene(NamedTuple):
    """A host whose daemon serves the reference case, and the environment of the device in slot 1."""

    host: Host
    given: dict[str, str]
    pipe: Path

    def of_command(self, *words: str, own: Mapping[str, str] | None = None) -> list[Finding]:
        path = {"PATH": os.environ["PATH"]}
        return list(of_command(self.host, {**path, **(self.given if own is None else own)}, words))

    def bad_command(self, *words: str, own: Mapping[str, str] | None = None) -> list[str]:
        return [finding.what for finding in self.of_command(*words, own=own) if finding.level != "ok"]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ServerHost(reference()) as server:
        (domain,), plan = server.snapshot.domains, server.snapshot.plan
        pipe = Path(server.paths.under("/mps/pipe"))
        pipe.mkdir(parents=True)
        there = domain.plan._replace(pipe_directory=str(pipe))
        server.snapshot = server.snapshot._replace(
            domains=(domain._replace(plan=there),), plan=plan._replace(domains=(there,))
        )
        host = host_of(Path(server.paths.root), P40, snapshot=server.snapshot)
        yield Scene(host, client_environment([plan.devices[1]], there), pipe)


@contextmanager
def job(environment: Mapping[str, str], words: Sequence[str] = SLEEP) -> Iterator[int]:
    """The PID of a process with this environment that has printed its first line."""
    env = {"PATH": os.environ["PATH"], **environment}
    with subprocess.Popen(
        words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def of_job(scene: Scene, words: Sequence[str] = SLEEP) -> list[Finding]:
    """What is found of a process with the environment that the scene gives."""
    with job(scene.given, words) as pid:
        return list(of_process(scene.host, pid))


# -- processes


def test_a_process_with_a_devices_environment_is_ok(scene: Scene) -> None:
    assert only_finding(of_job(scene), "ok").what.endswith(" has everything that an MPS client needs")


def test_a_misspelt_variable_is_found_with_what_follows_from_it(scene: Scene) -> None:
    scene.given["CUDA_MPS_PIPE_DIR"] = scene.given.pop("CUDA_MPS_PIPE_DIRECTORY")
    first, second = of_job(scene)
    assert first.what == "CUDA_MPS_PIPE_DIR has no effect (did you mean CUDA_MPS_PIPE_DIRECTORY?)"
    assert second.what.startswith("CUDA_MPS_PIPE_DIRECTORY is not set, so CUDA looks in ")
    assert (first.level, second.level) == ("problem", "problem")


def test_an_environment_of_another_device_than_it_says_is_found(scene: Scene) -> None:
    scene.given["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "5"
    assert only_finding(of_job(scene), "warning").hint == (
        "set that device's variables: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"
    )


@needs_root
def test_a_process_that_shares_no_memory_with_the_server_is_found(scene: Scene) -> None:
    steps = "mount -t tmpfs t /dev/shm && echo ready && read _"
    found = of_job(scene, ["unshare", "--mount", "sh", "-c", steps])
    assert "has a private /dev/shm" in only_finding(found, "problem").what


@needs_root
def test_a_process_that_does_not_see_the_pipe_directory_is_found(scene: Scene) -> None:
    hide = f"mount -t tmpfs t {scene.pipe.parent} && echo ready && read _"
    found = of_job(scene, ["unshare", "--mount", "sh", "-c", hide])
    what = f"does not see the host's {scene.pipe}: it runs in a container, or with PrivateTmp=yes"
    assert what in only_finding(found, "problem").what


def test_a_process_with_a_library_of_another_driver_is_found(scene: Scene, tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.470.10.01"
    library.write_bytes(b"x")
    mapping = f"import mmap; f = open({str(library)!r}); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
    found = of_job(scene, [*SLEEP[:-1], f"{mapping}; {SLEEP[-1]}"])
    assert (
        f"has loaded {library}, but the driver is version 535.261.03" in only_finding(found, "warning").what
    )


def test_doctor_reports_a_missing_process(scene: Scene) -> None:
    assert "no process with PID 4194304" in only_finding(of_process(scene.host, 4194304), "problem").what


def test_a_program_that_uses_a_gpu_outside_mps_is_named(scene: Scene) -> None:
    read = ["sh", "-c", "echo ready; read _"]
    outside = {**scene.given, "CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}
    with job(scene.given) as inside, job(outside, read) as wild:
        scene.host.users = Lazy(lambda: {str(P40.uuid): {inside: 100, wild: 100}})
        found = finding_of(scene.host, "outside MPS", "warning")
    assert found.what.startswith(f"PID {wild} (sh")
    assert (
        "uses GPU 00:06.0 outside yunion-mps (its pipe directory is /nowhere): it has no limits"
    ) in found.what
    start = "yunion-mps run sh -c 'echo ready; read _'"
    assert found.hint == f"start it with: {start}; see why: yunion-mps doctor --pid {wild}"
    scene.host.users = Lazy(lambda: {str(P40.uuid): {}})
    assert finding_of(scene.host, "outside MPS", "ok").what == "no program uses a GPU outside MPS"
    scene.host.users = Lazy(dict)
    why = "the driver does not report the processes on 00:06.0"
    assert finding_of(scene.host, "outside MPS", "skipped").what == why


# -- commands


def test_the_hint_names_the_command_and_a_free_device(scene: Scene) -> None:
    found = only_finding(scene.of_command("python3", "-c", "print(1)", own={}), "problem")
    start = "start it with: yunion-mps run python3 -c 'print(1)'"
    device = 'eval "$(yunion-mps env 00:06.0-0)"'
    assert found.hint == f"{start}; or set the variables of a device: {device}"
    long = only_finding(scene.of_command("python3", "-c", "1" * 100, own={}), "problem")
    assert long.hint.startswith("start it with: yunion-mps run COMMAND; ")


def test_a_command_has_the_variables_before_it_and_is_not_run(scene: Scene, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    given = [f"{name}={value}" for name, value in scene.given.items()]
    assert scene.bad_command("env", *given, "touch", str(mark), own={}) == []
    assert scene.bad_command(*given, "touch", str(mark), own={}) == []
    assert not mark.exists()
    wrong = scene.bad_command("env", "-u", "CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES=1", "true")
    assert wrong[0].startswith("CUDA_VISIBLE_DEVICES is '1': its control daemon has no GPU '1'")


@pytest.mark.parametrize(
    "options",
    [
        ["-i", f"PATH={os.environ['PATH']}"],
        ["-u", "CUDA_VISIBLE_DEVICE", "--unset", "CUDA_MPS_PIPE_DIR", "-C", "/"],
    ],
    ids=lambda options: options[0],
)
def test_env_may_forget_and_unset_variables(scene: Scene, options: list[str]) -> None:
    wrong = {"CUDA_VISIBLE_DEVICE": "0", "CUDA_MPS_PIPE_DIR": "/x"}
    given = [f"{name}={value}" for name, value in scene.given.items()]
    assert len(scene.bad_command("true", own={**wrong, **scene.given})) == 2
    assert scene.bad_command("env", *options, *given, "true", own=wrong) == []


def test_doctor_reports_a_missing_command(scene: Scene) -> None:
    assert scene.bad_command("pyhton3", "x") == ["pyhton3 was not found"]
    assert scene.bad_command("env", "A=1") == ["there is no command after the variables"]


def test_exports_of_a_job_script_are_checked(scene: Scene, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/sh\nexport CUDA_MPS_PIPE_DIRECTROY="/mps"  # ours\npython3 train.py\n')
    script.chmod(0o755)
    for command in ([str(script)], ["bash", str(script)]):
        (what,) = scene.bad_command(*command)
        assert what.startswith(
            "CUDA_MPS_PIPE_DIRECTROY has no effect (did you mean CUDA_MPS_PIPE_DIRECTORY?)"
        )


def test_a_command_that_is_given_a_device_by_run_needs_no_variables(scene: Scene, tmp_path: Path) -> None:
    program = tmp_path / "yunion-mps"
    program.touch(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    by_run = ("yunion-mps", "run", "--wait", "--", "bash")
    assert scene.bad_command(*by_run, "-c", "true", own=own) == []
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nexport CUDA_VISIBLE_DEVICE=0\n")
    (what,) = scene.bad_command(*by_run, str(script), own=own)
    assert what.startswith("CUDA_VISIBLE_DEVICE has no effect")


def test_arguments_that_are_not_files_do_not_block(scene: Scene, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert scene.bad_command("cat", str(tmp_path / "pipe"), "/dev/zero") == []


def test_a_container_command_is_checked_by_its_options(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "docker").touch(0o755)
    own = {"PATH": str(tmp_path)}
    given = [word for name, value in scene.given.items() for word in ("-e", f"{name}={value}")]
    good = ["docker", "run", "--ipc=host", "-v", f"{scene.pipe}:{scene.pipe}", *given, "image", "python3"]
    assert scene.bad_command(*good, own=own) == []
    device = scene.of_command("docker", "run", "--device", "yunion.io/mps=00:06.0-1", "image", own=own)
    assert only_finding(device, "ok").what == (
        "docker gives the container the environment of 00:06.0-1, or refuses to start it"
    )
    assert [
        what.partition(", so CUDA")[0] for what in scene.bad_command("docker", "run", "image", own=own)
    ] == [
        "the container has a private /dev/shm, so it cannot share memory with an MPS server",
        "CUDA_MPS_PIPE_DIRECTORY is not set",
    ]
