"""`--selftest`: a small CUDA program on a device, and what it was given against the budget.

libcuda is the stand-in of tests/simhost; what a driver does on a GPU is not shown here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack

import pytest
from yunion_mps.host.proc import command_of

from integration.daemon_host import eventually
from integration.doctor_host import STRANGER, Scene
from simhost.compiled import libcuda

BEGIN = "__attribute__((constructor)) static void begin(void)"
GPU = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"


def replaced(scene: Scene, text: str) -> None:
    """Another library in libcuda's place, which goes on with the stand-in."""
    library = scene.host.root / "lib/libcuda.so.1"
    real = library.rename(library.with_name("real.so"))
    source = scene.host.root / "lib/other.c"
    source.write_text(text)
    flags = ["-shared", "-fPIC", "-Wl,--no-as-needed"]
    subprocess.run(["cc", *flags, "-o", str(library), str(source), str(real)], check=True, timeout=60)


@pytest.fixture
def scene(stack: ExitStack) -> Scene:
    """A host with its daemon, whose programs find the stand-in of libcuda."""
    scene = Scene(stack, {"kind": "t4", "uuid": GPU})
    (scene.host.root / "lib/libcuda.so.1").unlink()
    shutil.copy(libcuda(), scene.host.root / "lib/libcuda.so.1")
    return scene.start()


def selftest_of(scene: Scene, level: str) -> dict[str, str]:
    return scene.look("--selftest").one("selftest", level)


def test_a_device_that_gives_its_budget_is_ok(scene: Scene) -> None:
    told = selftest_of(scene, "ok")["what"]
    assert told == (
        "00:06.0-0 (Stand-in GPU 0): 3840 MiB of memory for a budget of 3840, 4 of 16 SMs for 25 %"
    )
    assert scene.look("--selftest").bad() == {}


def test_a_device_that_gives_more_than_its_budget_is_a_problem(scene: Scene) -> None:
    # A driver forgets the limits where their list names a GPU that the program does not see.
    names = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    forget = " ".join(f'unsetenv("{name}");' for name in names)
    replaced(scene, f"#include <stdlib.h>\n{BEGIN} {{ {forget} }}\n")
    told = selftest_of(scene, "problem")["what"]
    assert "16384 MiB of memory for a budget of 3840" in told
    assert told.endswith("more than the budget was given")


def test_a_client_that_mps_does_not_serve_is_a_problem(scene: Scene) -> None:
    scene.stand_ins.behave("failing")
    told = selftest_of(scene, "problem")
    assert told["what"] == (
        "00:06.0-0: its MPS server was not reached (cuInit: CUDA_ERROR_MPS_CONNECTION_FAILED)"
    )
    assert "`control daemon`" in told["hint"]


def test_a_program_that_the_driver_does_not_compile_is_a_problem(scene: Scene) -> None:
    library = scene.host.root / "lib/libcuda.so.1"
    text = library.read_bytes()
    library.unlink()  # a process may have it mapped
    library.write_bytes(text.replace(b".entry work", b".entry none"))
    assert "cuModuleLoadData: CUDA_ERROR_INVALID_VALUE" in selftest_of(scene, "problem")["what"]


def test_a_driver_that_hangs_is_found_in_time_and_leaves_no_process(scene: Scene) -> None:
    replaced(scene, f"#include <unistd.h>\n{BEGIN} {{ for (;;) pause(); }}\n")
    seen = scene.look("--selftest", "--timeout", "1")
    assert seen.one("selftest", "problem")["what"] == "00:06.0-0: a CUDA program was not served within 6 s"
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and "cuda_client" in command_of(int(pid))]
    assert left == []


def test_a_program_that_dies_is_a_problem(scene: Scene) -> None:
    replaced(scene, f"#include <stdlib.h>\n{BEGIN} {{ abort(); }}\n")
    assert "it ended without output" in selftest_of(scene, "problem")["what"]


def test_without_libcuda_or_a_gpu_it_is_skipped(scene: Scene) -> None:
    library = scene.host.root / "lib/libcuda.so.1"
    library.unlink()
    assert "there is no CUDA driver library (dlopen: libcuda.so.1" in selftest_of(scene, "skipped")["what"]


def test_without_the_daemon_it_is_skipped(scene: Scene) -> None:
    scene.daemon.stop()
    assert "the daemon is not running" in selftest_of(scene, "skipped")["what"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_it_does_not_get_in_the_way_of_another_users_jobs(scene: Scene) -> None:
    client = scene.stand_ins.client(scene.daemon.pipe_directory, STRANGER)
    assert [client.says(), client.says()] == ["asking", "attached"]
    told = selftest_of(scene, "skipped")
    assert told["what"] == "00:06.0-0 was not tried: a client of yours would make new jobs of nobody wait"
    servers = scene.stand_ins.servers()
    client.end()
    assert len(servers) == 1


def test_no_client_is_left(scene: Scene) -> None:
    selftest_of(scene, "ok")
    clients = eventually(lambda: [scene.daemon.get("/v1/clients")[1]["clients"]], "the list")
    assert clients == [[]]
