"""Entries of the type NVIDIA_GPU_SHARE: their GPU is time-sliced."""

from __future__ import annotations

import pytest

from unit.config.conftest import DEVICES, Files

ENTRY = "devices:\n- path: 00:06.0\n  type: NVIDIA_GPU_SHARE\n"
VALID = (
    "the valid keys of an NVIDIA_GPU_SHARE entry are path, type, virtual_number, memory, time_slice, "
    "reserved_for, cuda_mps_compute_mode, mig, mig_restore"
)
EXAMPLE = "add virtual_number, for example virtual_number: 4"
NUMBER = "write a whole number from 1 to 256"
WORDS = "but must be default, short, medium or long"


def test_an_entry_has_replicas_a_time_slice_and_a_reservation(files: Files) -> None:
    text = "  virtual_number: 256\n  time_slice: short\n  reserved_for: slurm\n"
    (entry,) = files.write(devices=ENTRY + text).load().devices
    assert (entry.path, entry.sharing, entry.virtual_number) == ("00:06.0", "time-slicing", 256)
    assert (entry.time_slice, entry.reserved_for, entry.divided_at.line) == ("short", "slurm", 4)


def test_the_time_slice_is_left_alone_unless_it_is_written(files: Files) -> None:
    (entry,) = files.write(devices=ENTRY + "  virtual_number: 2\n").load().devices
    assert (entry.time_slice, entry.over_budget) == ("", "")


@pytest.mark.parametrize("key", ["slices: [{memory: 8GiB}]", "memory_unit: 1GiB", "thread_overcommit: 2"])
def test_keys_that_divide_a_gpu_otherwise_are_refused_with_one_problem(files: Files, key: str) -> None:
    text = f"  {key}\n" + ("  virtual_number: 2\n" if "overcommit" in key else "")
    what = f"unknown key {key.partition(':')[0]} in an NVIDIA_GPU_SHARE entry: remove it; {VALID}"
    assert files.write(devices=ENTRY + text).messages() == [f"{DEVICES}:4: {what}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "2: an NVIDIA_GPU_SHARE entry has no virtual_number: " + EXAMPLE),
        ("  virtual_number: 257\n", "4: virtual_number is 257, out of range: " + NUMBER),
        ("  virtual_number: 2\n  time_slice: longest\n", f'5: time_slice is "longest", {WORDS}'),
        ("  virtual_number: 2\n  time_slice: 2\n", f"5: time_slice is 2, {WORDS}"),
    ],
)
def test_a_wrong_value_is_refused(files: Files, text: str, message: str) -> None:
    assert files.write(devices=ENTRY + text).messages() == [f"{DEVICES}:{message}"]


def test_a_time_slice_of_a_gpu_that_is_shared_through_mps_is_refused(files: Files) -> None:
    text = ENTRY.replace("NVIDIA_GPU_SHARE", "NVIDIA_MPS") + "  virtual_number: 2\n  time_slice: long\n"
    (message,) = files.write(devices=text).messages()
    assert message.startswith(f"{DEVICES}:5: unknown key time_slice in an NVIDIA_MPS entry: remove it")


def test_a_misspelt_type_names_the_right_one(files: Files) -> None:
    text = ENTRY.replace("NVIDIA_GPU_SHARE", "NVIDIA_GPU_SHARES") + "  virtual_number: 2\n"
    (message,) = files.write(devices=text).messages()
    assert message == f"{DEVICES}:3: unknown type NVIDIA_GPU_SHARES (did you mean NVIDIA_GPU_SHARE?)"
