"""What `docker run` and its kin give a container."""

from __future__ import annotations

import pytest
from yunion_mps.doctor.variables import device_in, shared, starts_container, variables_in

PIPE = "CUDA_MPS_PIPE_DIRECTORY"


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize(
    ("command", "starts"),
    [
        ("docker run x", True),
        ("/usr/bin/podman --log-level info run x", True),
        ("docker ps", False),
        ("run", False),
    ],
)
def test_what_starts_a_container_is_known(command: str, starts: bool) -> None:
    assert starts_container(words(command)) is starts


def test_a_container_gets_only_the_variables_that_are_given_to_it() -> None:
    command = words("docker run -e A=1 --env B=2 --env=C=3 -eD=4 -e E -e NOT image")
    assert variables_in(command, {"E": "5", "F": "6"}) == {"A": "1", "B": "2", "C": "3", "D": "4", "E": "5"}


@pytest.mark.parametrize(
    "mount", ["-v /host:/mps", "--volume=/host/:/mps/:ro", "--mount type=bind,source=/host,target=/mps"]
)
def test_its_pipe_directory_is_the_one_of_the_host_that_is_mounted_there(mount: str) -> None:
    command = words(f"docker run --ipc=host {mount} -e {PIPE}=/mps/pipe image")
    assert variables_in(command, {})[PIPE] == "/host/pipe"
    assert shared(command) == []


def test_a_pipe_directory_that_is_not_mounted_is_found() -> None:
    (found,) = shared(words(f"docker run --ipc host -v /data:/data -e {PIPE}=/mps image"))
    assert (found.what, found.hint) == ("the container does not see /mps", "add -v /mps:/mps")


@pytest.mark.parametrize("sharing", ["--ipc=host", "--ipc host", "-v /dev/shm:/dev/shm"])
def test_a_container_must_share_the_hosts_memory(sharing: str) -> None:
    (found,) = shared(words("docker run image"))
    assert "/dev/shm of its own" in found.what
    assert shared(words(f"docker run {sharing} image")) == []


@pytest.mark.parametrize("option", ["--device yunion.io/mps=00:06.0-1", "--device=yunion.io/mps=00:06.0-1"])
def test_a_device_by_cdi_is_known_for_it_brings_all_that_is_needed(option: str) -> None:
    assert device_in(words(f"podman run --device /dev/null {option} image")) == "00:06.0-1"
    assert device_in(words("podman run --device /dev/null --device nvidia.com/gpu=0 image")) == ""
