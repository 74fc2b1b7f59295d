"""What the variables of a program's environment mean for MPS, and what `docker run` gives a container."""

from __future__ import annotations

import pytest
from yunion_mps.core.models import DomainPlan, PlannedGpu
from yunion_mps.doctor.variables import check_values, misspelt, not_served, sharing_problems, start_hint

FIRST, SECOND = "GPU-9d6bc93d-9a42-5da4-88b7-18e41339b01f", "GPU-814e0011-bb75-5e86-b480-bf6d776eb621"
ONE = DomainPlan("one", "/run/mps", "/var/log/mps", (PlannedGpu(FIRST, 5760),), 25.0)
TWO = ONE._replace(gpus=(*ONE.gpus, PlannedGpu(SECOND, 5760)))

HINT = start_hint("python3 train.py", "00:06.0-1")

#: What `yunion-mps show` tells of a device.
RIGHT = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5760M",
    "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
    "CUDA_VISIBLE_DEVICES": SECOND,
}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CUDA_MPS_PIPE_DIR", "CUDA_MPS_PIPE_DIRECTORY"),
        ("CUDA_MPS_PIPE_DIRECTROY", "CUDA_MPS_PIPE_DIRECTORY"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        ("cuda_visible_devices", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_DEVICES_ORDER", "CUDA_DEVICE_ORDER"),
        ("CUDA_MPS_PINNED_DEVICE_MEMORY_LIMIT", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
        ("CUDA_MPS_ACTIVE_THREADS_PERCENTAGE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(name: str, meant: str) -> None:
    (found,) = misspelt({name: "x", "PATH": "/bin"})
    assert (found.level, found.hint) == ("problem", f"write {meant} instead")


def test_a_variable_that_mps_does_not_know_is_found() -> None:
    (found,) = misspelt({"CUDA_MPS_TURBO": "1"})
    assert found.level == "warning"
    assert "CUDA_MPS_PIPE_DIRECTORY" in found.hint


@pytest.mark.parametrize(
    "name",
    ["NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "CUDA_VERSION", "CUDA_LAUNCH_BLOCKING", "HOME"],
)
def test_variables_of_other_software_are_ignored(name: str) -> None:
    assert list(misspelt({name: "x"})) == []


@pytest.mark.parametrize("domain", [ONE, TWO])
def test_the_environment_of_a_device_is_right(domain: DomainPlan) -> None:
    right = {**RIGHT, "CUDA_VISIBLE_DEVICES": domain.gpu_uuids[-1]}
    assert [*misspelt(right), *check_values(right, domain, HINT)] == []


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, "warning", "the control daemon numbers GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "problem", "no GPU '2'"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "problem", "no GPU '-1'"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "problem", "no GPU ''"),
        ({"CUDA_VISIBLE_DEVICES": "\N{SUPERSCRIPT TWO}"}, "problem", "no GPU '\N{SUPERSCRIPT TWO}'"),
        ({"CUDA_VISIBLE_DEVICES": f"{SECOND},GPU-0"}, "problem", "no GPU 'GPU-0'"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-2cc993d0"}, "problem", "MIG device"),
        ({"CUDA_VISIBLE_DEVICES": None}, "warning", "sees all 2 GPUs"),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS"}, "problem", "which is not a valid value"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "1=1G"}, "problem", "numbered from 0; one such entry disables"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "5760M"}, "problem", "valid"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5.5G"}, "problem", "valid"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G, 1=1G"}, "problem", "' 1=1G' is not valid"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": '"0=1G"'}, "problem", "valid"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=6G"}, "warning", "exceeds the 5760 MiB"),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}, "warning", "the control daemon allows only 25 %"),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "0"}, "problem", "valid"),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25%"}, "problem", "valid"),
    ],
    ids=str,
)
def test_a_value_that_does_something_else_than_was_meant_is_found(
    changed: dict[str, str | None], level: str, words: str
) -> None:
    given = {name: value for name, value in {**RIGHT, **changed}.items() if value is not None}
    found = [one for one in check_values(given, TWO, HINT) if words in one.what]
    assert [one.level for one in found] == [level]
    assert found[0].hint


@pytest.mark.parametrize("order", [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}])
def test_numbers_without_the_order_of_pci_addresses_are_found(order: dict[str, str]) -> None:
    given = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_MPS_PIPE_DIRECTORY": "/run/mps", **order}
    assert any("CUDA numbers GPUs by speed" in one.what for one in check_values(given, TWO, HINT))
    assert not any("fastest" in one.what for one in check_values(given, ONE, HINT))


def test_limits_in_any_unit_that_is_known_are_compared() -> None:
    for text in ("0=5G", "0=5760MB", "0=5898240K", "0=1000000000"):
        assert list(check_values({**RIGHT, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": text}, TWO, HINT)) == []


def test_a_missing_pipe_directory_is_found_with_what_follows_from_it() -> None:
    found = not_served({}, "/tmp/nvidia-mps", ["/run/mps"], HINT)
    assert found.level == "problem"
    assert "CUDA looks in /tmp/nvidia-mps, which no yunion-mps control daemon serves" in found.what
    assert found.hint == (
        "start it with: yunion-mps run python3 train.py; "
        'or set the variables of a device: eval "$(yunion-mps env 00:06.0-1)"'
    )
    other = not_served({"CUDA_MPS_PIPE_DIRECTORY": "/mps"}, "/tmp/nvidia-mps", ["/run/mps"], HINT)
    assert "CUDA_MPS_PIPE_DIRECTORY is /mps" in other.what


# -- containers


def test_a_pipe_directory_that_is_not_mounted_is_found() -> None:
    command = "--ipc host -v /data:/data -e CUDA_MPS_PIPE_DIRECTORY=/mps image"
    (found,) = sharing_problems(command.split())
    assert (found.what, found.hint) == ("the container does not see /mps", "add -v /mps:/mps")


@pytest.mark.parametrize("sharing", ["--ipc=host", "--ipc host", "-v /dev/shm:/dev/shm"])
def test_a_container_must_share_the_hosts_memory(sharing: str) -> None:
    (found,) = sharing_problems(["image"])
    assert "private /dev/shm" in found.what
    assert sharing_problems(f"{sharing} image".split()) == []


def test_words_after_the_image_are_not_options_of_the_container() -> None:
    (found,) = sharing_problems(["image", "train", "--ipc=host", "-e", "CUDA_MPS_PIPE_DIRECTORY=/mps"])
    assert "private /dev/shm" in found.what


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [
        ("CUDA_VISIBLE_DEVICES", "{}", "no GPU '9999"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "{}=1G", "numbered from 0; one such entry disables"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0={}G", "exceeds the 5760 MiB"),
    ],
)
def test_a_number_of_thousands_of_digits_is_found(name: str, form: str, words: str) -> None:
    """int() refuses to convert it."""
    found = list(check_values({**RIGHT, name: form.format("9" * 5000)}, TWO, HINT))
    assert any(words in one.what for one in found)
