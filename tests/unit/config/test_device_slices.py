"""What an entry may say beside `virtual_number`: unequal slices, and memory in units."""

from __future__ import annotations

import pytest
from yunion_mps.config import load
from yunion_mps.core.settings import DeviceEntry, SliceEntry, Source

from unit.config.conftest import DEVICES, Files, annotated

ENTRY = "devices:\n- type: NVIDIA_MPS\n  path: 00:06.0\n"
UNITS = "but must be 1GiB or 128MiB"
HINTS = {
    "AMOUNT": "write a whole number of MiB or GiB, for example 8192MiB or 8GiB",
    "DASH": "write each device after a dash: - {memory: 8GiB, thread_percentage: 50}",
    "OVERCOMMIT": "write a number from 1 to 4096, with at most 2 decimals",
    "PERCENTAGE": "write a number from 0.1 to 100, with at most one decimal",
    "UNITS": UNITS,
}


def entry_of(files: Files, text: str) -> DeviceEntry:
    (entry,) = files.write(devices=ENTRY + text).load().devices
    return entry


def test_slices_are_read_with_their_memory_percentage_and_priority(files: Files) -> None:
    entry = entry_of(
        files,
        "  slices:\n"
        "  - {memory: 8GiB, thread_percentage: 50}\n"
        "  - memory: 4096MiB\n"
        "    thread_percentage: 12.5\n"
        "    priority: below_normal\n"
        "  - {memory: 1MiB, priority: normal}\n",
    )
    assert entry.slices == (
        SliceEntry(8192, 50.0, "normal"),
        SliceEntry(4096, 12.5, "below_normal"),
        SliceEntry(1, None, "normal"),
    )
    assert (entry.virtual_number, entry.memory_unit_mib, entry.thread_overcommit) == (0, 0, None)
    assert entry.divided_at == Source(str(files.devices), 4)


@pytest.mark.parametrize(("unit", "mib"), [("128MiB", 128), ("1GiB", 1024)])
@pytest.mark.parametrize("number", ["", "  virtual_number: 0\n"])
def test_a_memory_unit_needs_no_virtual_number_or_0(files: Files, unit: str, mib: int, number: str) -> None:
    entry = entry_of(files, f"{number}  memory_unit: {unit}\n")
    assert (entry.virtual_number, entry.slices, entry.memory_unit_mib) == (0, (), mib)
    assert (entry.memory_reserve_mib, entry.thread_overcommit) == (0, None)
    assert entry.divided_at == Source(str(files.devices), 5 if number else 4)


def test_the_reserve_and_the_overcommit_are_read(files: Files) -> None:
    entry = entry_of(files, "  memory_unit: 1GiB\n  memory_reserve: 64MiB\n  thread_overcommit: 1.5\n")
    assert (entry.memory_reserve_mib, entry.thread_overcommit, entry.thread_percentage) == (64, 1.5, 0)
    assert entry_of(files, "  memory_unit: 1GiB\n  thread_percentage: 10\n").thread_percentage == 10
    entry = entry_of(files, "  slices: [{memory: 1GiB}]\n  thread_overcommit: 2\n")
    assert entry.thread_overcommit == 2.0


def test_what_a_gpu_is_reserved_for_is_read(files: Files) -> None:
    assert entry_of(files, "  virtual_number: 2\n  reserved_for: kubernetes\n").reserved_for == "kubernetes"
    assert entry_of(files, "  memory_unit: 1GiB\n  reserved_for: kubernetes\n").reserved_for == "kubernetes"
    assert entry_of(files, "  slices: [{memory: 1GiB}]\n").reserved_for == ""


def test_what_happens_over_budget_is_read(files: Files) -> None:
    assert entry_of(files, "  virtual_number: 2\n  over_budget: terminate\n").over_budget == "terminate"
    assert entry_of(files, "  virtual_number: 2\n").over_budget == "", "host.conf says it"


def test_the_unit_of_requests_is_1_gib_unless_the_file_says_otherwise(files: Files) -> None:
    found = files.write(devices="devices: []\n").load()
    assert (found.gpu_memory_unit_mib, found.gpu_memory_unit_at) == (1024, Source("default", None))
    found = files.write(devices="devices: []\ngpu_memory_unit: 128MiB\n").load()
    assert (found.gpu_memory_unit_mib, found.gpu_memory_unit_at) == (128, Source(str(files.devices), 2))
    assert files.write(devices=None).load().gpu_memory_unit_mib == 1024


def test_slices_given_by_alias_count_in_the_line_of_their_own_entry(files: Files) -> None:
    files.write(
        devices="devices:\n"
        "- {path: 00:06.0, type: NVIDIA_MPS, slices: &both [{memory: 1GiB}, {memory: 2GiB}]}\n"
        "- {path: 00:07.0, type: NVIDIA_MPS, slices: *both}\n"
    )
    first, second = files.load().devices
    assert first.slices == second.slices == (SliceEntry(1024), SliceEntry(2048))
    assert (first.divided_at.line, second.divided_at.line) == (2, 3)


WRONG = """\
devices:
- {type: NVIDIA_MPS, path: 00:06.0, slices: []}
! slices is an empty list: $DASH
- {type: NVIDIA_MPS, path: 00:06.0, slices: 8GiB}
! slices is "8GiB", not a list: $DASH
- {type: NVIDIA_MPS, path: 00:06.0, slices: }
! slices is empty (null), not a list: $DASH
- type: NVIDIA_MPS
  path: 00:06.0
  slices:
  - 8GiB
! a slice is "8GiB", not a mapping: write - {memory: 8GiB, thread_percentage: 50}
  - {}
! a slice has no memory: add memory, for example memory: 8GiB
  - {memory: 1GiB}
  - {thread_percentage: 50}
! a slice has no memory: add memory, for example memory: 8GiB
  - {memory: 8GB}
! memory is "8GB", not an amount of memory: $AMOUNT
  - {memory: 8192}
! memory is 8192, not an amount of memory: $AMOUNT
  - {memory: 1.5GiB}
! memory is "1.5GiB", not an amount of memory: $AMOUNT
  - {memory: 8gib}
! memory is "8gib", not an amount of memory: $AMOUNT
  - {memory: }
! memory is empty (null), not an amount of memory: $AMOUNT
  - {memory: 0GiB}
! memory is "0GiB", too little: write at least 1MiB
  - {memory: 1GiB, thread_percentage: 0}
! thread_percentage is 0, out of range: $PERCENTAGE
  - {memory: 1GiB, thread_percentage: 100.1}
! thread_percentage is 100.1, out of range: $PERCENTAGE
  - {memory: 1GiB, thread_percentage: 50%}
! thread_percentage is "50%", not a number: $PERCENTAGE
  - {memory: 1GiB, thread_percentage: 33.33}
! thread_percentage is 33.33, too precise: $PERCENTAGE
  - {memory: 1GiB, thread_percentage: .nan}
! thread_percentage is .nan, out of range: $PERCENTAGE
  - {memory: 1GiB, priority: below-normal}
! priority is "below-normal", but must be normal or below_normal: did you mean below_normal?
  - {memory: 1GiB, priority: 1}
! priority is 1, but must be normal or below_normal
  - {memroy: 1GiB}
! unknown key memroy in a slice (did you mean memory?)
  - {memory: 1GiB, colour: 1}
! unknown key colour in a slice: remove it; the valid keys of a slice are memory, thread_percentage, priority
  - memory: 1GiB
    memory: 1MiB
! duplicate key memory: keep one of the two lines (the other is line 27)
- {type: NVIDIA_MPS, path: 00:06.0, slices: [{memory: 1GiB}], memory_reserve: 64MiB}
! memory_reserve is not allowed with slices, only with memory_unit: remove it
- {type: NVIDIA_MPS, path: 00:06.0, virtual_number: 1, reserved_for: ray}
! reserved_for is "ray", but must be kubernetes or slurm
- {type: NVIDIA_MPS, path: 00:06.0, virtual_number: 1, over_budget: kill}
! over_budget is "kill", but must be report or terminate
- {type: NVIDIA_MPS, path: 00:06.0, slice: [{memory: 1GiB}]}
! unknown key slice in an NVIDIA_MPS entry (did you mean slices?)
- {type: NVIDIA_MPS, path: 00:06.0, memory_unti: 1GiB}
! unknown key memory_unti in an NVIDIA_MPS entry (did you mean memory_unit?)
- {type: NVIDIA_MPS, path: 00:06.0, memory_unit: 256MiB}
! memory_unit is "256MiB", $UNITS
- {type: NVIDIA_MPS, path: 00:06.0, memory_unit: 128}
! memory_unit is 128, $UNITS
- type: NVIDIA_MPS
  path: 00:06.0
  memory_unit: 1GiB
  memory_reserve: 64
! memory_reserve is 64, not an amount of memory: $AMOUNT
  thread_overcommit: 0.5
! thread_overcommit is 0.5, out of range: $OVERCOMMIT
  thread_percentage: 12.5
! thread_percentage is 12.5, not a whole number: write a whole number from 1 to 100
- type: NVIDIA_MPS
  path: 00:06.0
  slices: [{memory: 1GiB}]
  thread_percentage: 10
! thread_percentage is not allowed with slices, only with memory_unit: write it in each slice
- type: NVIDIA_MPS
  path: 00:06.0
  virtual_number: 4
  memory_reserve: 64MiB
! memory_reserve is not allowed with virtual_number, only with memory_unit: remove it
  thread_overcommit: 2
! thread_overcommit is not allowed with virtual_number, only with slices or memory_unit: remove it,
!   or set cuda_mps_thread_percentage in host.conf
"""


def test_errors_of_a_division_have_a_hint(files: Files) -> None:
    content, messages = annotated(WRONG, **HINTS)
    assert files.write(devices=content).messages() == [f"{DEVICES}:{message}" for message in messages]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("slices: [{memory: 1GiB}]", "virtual_number: 4"),
        ("virtual_number: 0", "slices: [{memory: 1GiB}]"),
        ("memory_unit: 1GiB", "virtual_number: 4"),
        ("virtual_number: false", "memory_unit: 1GiB"),
    ],
)
def test_a_second_way_to_divide_the_gpu_is_named(files: Files, first: str, second: str) -> None:
    files.write(devices=f"{ENTRY}  {first}\n  {second}\n")
    means, also = first.partition(":")[0], second.partition(":")[0]
    what = f"{also} divides the GPU, but {means} on line 4 already does: keep one of the two"
    assert files.messages() == [f"{DEVICES}:5: {what}"]


def test_more_slices_than_any_gpu_may_have_are_named(files: Files) -> None:
    files.write(devices=f"{ENTRY}  slices: [{'{memory: 1MiB}, ' * 61}]\n")
    what = "slices has 61 devices, more than a GPU can have: write at most 60"
    assert files.messages() == [f"{DEVICES}:4: {what}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_memory_unit: 2GiB", f'1: gpu_memory_unit is "2GiB", {UNITS}'),
        ("gpu_memory_unti: 1GiB", "1: unknown key gpu_memory_unti (did you mean gpu_memory_unit?)"),
        (
            "gpu_memory_unit: 1GiB\ngpu_memory_unit: 128MiB",
            "2: duplicate key gpu_memory_unit: keep one of the two lines (the other is line 1)",
        ),
    ],
)
def test_a_bad_unit_of_requests_is_named_as_well(files: Files, text: str, message: str) -> None:
    assert files.write(devices=f"{text}\ndevices: []\n").messages() == [f"{DEVICES}:{message}"]


def test_an_entry_with_an_invalid_division_counts_as_one_device(files: Files) -> None:
    for text in (
        "slices: []",
        "slices: [{memory: 1}]",
        "memory_unit: 5",
        "slices: [{memory: 1GiB}]\n  virtual_number: 1",
    ):
        config, problems = load(files.write(devices=f"{ENTRY}  {text}\n").paths)
        (entry,) = config.devices
        assert (entry.virtual_number, entry.slices, entry.memory_unit_mib, len(problems)) == (1, (), 0, 1)
