"""The options of `docker run`: which variables, mounts and devices they give, and how a mount is written."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.containers.command import device_in, mount_words, set_variables, variables_in, words_after_run


@pytest.mark.parametrize(
    "words",
    [
        ["-e", "A=1", "IMAGE"],
        ["-eA=1", "IMAGE"],
        ["-e=A=1", "IMAGE"],
        ["--env", "A=1", "IMAGE"],
        ["--env=A=1", "IMAGE"],
        ["--env", "A", "IMAGE"],  # from docker's own environment, or removed if it is not there
        ["-ite", "A=1", "IMAGE"],
        ["-dteA=1", "IMAGE"],
        ["--rm", "-v", "/a:/b", "--name", "-x", "--gpus=all", "-e", "A=", "IMAGE", "-e", "B=1"],
        ["-h", "trainer", "--rm=false", "-p80:80", "-e", "A=1", "--", "IMAGE", "-e", "B=1"],
    ],
)
def test_a_variable_is_found_however_it_is_written(words: list[str]) -> None:
    assert "A" in set_variables(words)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["IMAGE", "-e", "A=1"],
        ["--", "IMAGE", "-e", "A=1"],
        ["--rm", "IMAGE", "env", "--env=A=1"],
        ["--name", "-e", "IMAGE", "-e", "A=1"],
        ["-v", "-eA=1", "IMAGE"],
        ["-ve", "A=1", "IMAGE"],
        ["--env-file", "A", "--envelope=A", "IMAGE"],
        ["--entrypoint", "--env", "IMAGE", "A=1"],
        ["--env"],
        ["-", "-e", "A=1"],
    ],
)
def test_words_that_resemble_an_option_are_not_overrides(words: list[str]) -> None:
    assert "A" not in set_variables(words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/bin/docker run --rm x", ["--rm", "x"]),
        ("podman --log-level info run x", ["x"]),
        ("docker ps", None),
        ("run", None),
    ],
)
def test_commands_that_start_a_container_are_recognised(command: str, words: list[str] | None) -> None:
    assert words_after_run(command.split()) == words


def test_a_container_gets_only_the_variables_that_are_given_to_it() -> None:
    command = "-e A=1 --env B=2 --env=C=3 -eD=4 -e E -e NOT image"
    expected = {"A": "1", "B": "2", "C": "3", "D": "4", "E": "5"}
    assert variables_in(command.split(), {"E": "5", "F": "6"}) == expected


@pytest.mark.parametrize(
    "mount", ["-v /host:/mps", "--volume=/host/:/mps/:ro", "--mount type=bind,source=/host,target=/mps"]
)
def test_its_pipe_directory_is_the_one_of_the_host_that_is_mounted_there(mount: str) -> None:
    command = f"--ipc=host {mount} -e CUDA_MPS_PIPE_DIRECTORY=/mps/pipe image".split()
    assert variables_in(command, {})["CUDA_MPS_PIPE_DIRECTORY"] == "/host/pipe"


@pytest.mark.parametrize("option", ["--device yunion.io/mps=00:06.0-1", "--device=yunion.io/mps=00:06.0-1"])
def test_the_cdi_device_of_a_container_command_is_recognised(option: str) -> None:
    assert device_in(f"--device /dev/null {option} image".split()) == "00:06.0-1"
    assert device_in(["--device", "/dev/null", "--device", "nvidia.com/gpu=0", "i"]) == ""


def test_a_directory_of_ordinary_characters_is_written_as_people_do() -> None:
    assert mount_words("/run/mps:1") == ["--mount", "type=bind,source=/run/mps:1,target=/run/mps:1"]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1))
def test_a_directory_of_any_characters_is_two_fields_of_csv(name: str) -> None:
    option, value = mount_words(f"/{name}")
    assert option == "--mount"
    (fields,) = csv.reader([value], strict=True)
    assert fields == ["type=bind", f"source=/{name}", f"target=/{name}"]
