"""Merge keys in the device file, and entries with several things wrong at once."""

from __future__ import annotations

import pytest
from yunion_mps.config import load

from unit.config.files import DEVICES, Files

NO_MERGE = "merge keys (<<) are not followed: write the keys out"


def test_an_entry_that_merges_another_software_s_type_is_left_alone(files: Files) -> None:
    files.write(
        devices="base: &b {type: NVIDIA_GPU, foo: 2}\n"
        "devices:\n- {<<: *b, path: /dev/nvidia0}\n- {<<: [*b]}\n"
    )
    config, problems = load(files.paths)
    assert config.devices == ()
    assert problems == []


@pytest.mark.parametrize(
    "entry", ["{<<: *b, path: a}", "{<<: [*b], path: a}", "{<<: *b, path: a, type: NVIDIA_MPS}"]
)
def test_an_entry_that_merges_our_keys_is_told_to_write_them_out(files: Files, entry: str) -> None:
    files.write(devices=f"base: &b {{type: NVIDIA_MPS, virtual_number: 2}}\ndevices:\n- {entry}\n")
    assert files.messages()[0] == f"{DEVICES}:3: {NO_MERGE}"


def test_the_path_of_an_entry_with_a_problem_can_still_be_checked(files: Files) -> None:
    files.write(
        devices='devices:\n- {path: a, type: NVIDIA_MPS, virtual_number: "4", foo: 1}\n'
        "- {path: 3, type: NVIDIA_MPS}\n"
    )
    config, problems = load(files.paths)
    assert [(entry.path, entry.virtual_number) for entry in config.devices] == [("a", 1)]
    assert [problem.what for problem in problems] == [
        "unknown key foo in an NVIDIA_MPS entry",
        'virtual_number is "4", not a whole number',
        "path is 3, not a text",
        "an NVIDIA_MPS entry has no virtual_number",
    ]
    assert {problem.file for problem in problems} == {str(files.devices)}
