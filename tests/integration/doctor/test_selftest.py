"""`--selftest`: a small CUDA program on a device, and what it was given against the budget.

libcuda is the stand-in of tests/simhost; what a driver does on a GPU is not shown here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from yunion_mps.host.proc import command_of

from integration.daemon_host import control_daemons, eventually
from integration.doctor_host import STRANGER, Scene
from simhost.install import libcuda

GPU = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"


def with_libcuda(stack: ExitStack) -> Scene:
    """A host with its daemon, whose programs find the stand-in of libcuda."""
    scene = Scene(stack, {"kind": "t4", "uuid": GPU})
    (scene.host.root / "lib/libcuda.so.1").unlink()
    shutil.copy(libcuda(), scene.host.root / "lib/libcuda.so.1")
    return scene.start()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield with_libcuda(stack)


@pytest.fixture
def library(scene: Scene) -> Iterator[Path]:
    """The library, which is moved away, and after the test is back."""
    path = scene.host.root / "lib/libcuda.so.1"
    real = path.rename(path.with_name("real.so"))
    yield path
    real.replace(path)


def begin_with(library: Path, code: str) -> None:
    """Another library in its place, which does this at its start and goes on with the stand-in."""
    begin = "__attribute__((constructor)) static void begin(void)"
    source = library.with_name("other.c")
    source.write_text(f"#include <stdlib.h>\n#include <unistd.h>\n{begin} {{ {code} }}\n")
    flags = ["-shared", "-fPIC", "-Wl,--no-as-needed"]
    real = str(library.with_name("real.so"))
    subprocess.run(["cc", *flags, "-o", str(library), str(source), real], check=True, timeout=60)


def selftest_line(scene: Scene, level: str) -> dict[str, str]:
    return scene.look("--selftest").one("selftest", level)


def test_a_device_that_gives_its_budget_is_ok_and_no_client_is_left(scene: Scene) -> None:
    seen = scene.look("--selftest")
    assert seen.bad() == {}
    assert seen.one("selftest", "ok")["what"] == (
        "00:06.0-0 (Stand-in GPU 0): got 3840 MiB of a budget of 3840 MiB, and 4 of 16 SMs at 25 %"
    )
    clients = eventually(lambda: [scene.daemon.get("/v1/clients")[1]["clients"]], "the list")
    assert clients == [[]]


def test_a_device_that_gives_more_than_its_budget_is_a_problem(scene: Scene, library: Path) -> None:
    # A driver forgets the limits where their list names a GPU that the program does not see.
    names = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    begin_with(library, " ".join(f'unsetenv("{name}");' for name in names))
    told = selftest_line(scene, "problem")["what"]
    assert "got 16384 MiB of a budget of 3840 MiB" in told
    assert told.endswith("it got more than its budget")


def test_a_program_that_the_driver_does_not_compile_is_a_problem(scene: Scene, library: Path) -> None:
    library.write_bytes(library.with_name("real.so").read_bytes().replace(b".entry work", b".entry none"))
    assert "cuModuleLoadData: CUDA_ERROR_INVALID_VALUE" in selftest_line(scene, "problem")["what"]


def test_a_driver_that_hangs_is_found_in_time_and_leaves_no_process(scene: Scene, library: Path) -> None:
    begin_with(library, "for (;;) pause();")
    seen = scene.look("--selftest", "--timeout", "1")
    assert seen.one("selftest", "problem")["what"] == "00:06.0-0: a CUDA program was not served within 6 s"
    left = [pid for pid in control_daemons(scene.host.root) if "cuda_client" in command_of(pid)]
    assert left == []


def test_a_program_that_dies_is_a_problem(scene: Scene, library: Path) -> None:
    begin_with(library, "abort();")
    assert "exited without output" in selftest_line(scene, "problem")["what"]


def test_without_libcuda_it_is_skipped(scene: Scene, library: Path) -> None:
    assert not library.exists()
    assert "there is no CUDA driver library (dlopen: libcuda.so.1" in selftest_line(scene, "skipped")["what"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_it_does_not_get_in_the_way_of_another_users_jobs(stack: ExitStack) -> None:
    scene = with_libcuda(stack)  # of its own, because that user's server stays
    client = scene.stand_ins.client(scene.daemon.pipe_directory, STRANGER)
    assert [client.says(), client.says()] == ["asking", "attached"]
    told = selftest_line(scene, "skipped")
    assert told["what"] == "00:06.0-0 was not tested: a client of your user would block new jobs of nobody"
    servers = scene.stand_ins.servers()
    client.end()
    assert len(servers) == 1


def test_a_client_that_mps_does_not_serve_is_a_problem(stack: ExitStack) -> None:
    scene = with_libcuda(stack)
    scene.stand_ins.behave("failing")
    told = selftest_line(scene, "problem")
    assert told["what"] == (
        "00:06.0-0: the MPS server could not be reached (cuInit: CUDA_ERROR_MPS_CONNECTION_FAILED)"
    )
    assert "`control daemon`" in told["hint"]
