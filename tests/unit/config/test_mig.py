"""MIG layouts in host_container_device.yml."""

from __future__ import annotations

import pytest
from yunion_mps.core.settings import DeviceEntry

from unit.config.conftest import DEVICES, Files

MPS = "devices:\n- path: 00:06.0\n  type: NVIDIA_MPS\n"
SHARE = MPS.replace("NVIDIA_MPS", "NVIDIA_GPU_SHARE")


def entry(files: Files, text: str) -> DeviceEntry:
    (found,) = files.write(devices=text).load().devices
    return found


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("all-1g.10gb", ("all-1g.10gb",)),
        ("all-1g.10gb.me", ("all-1g.10gb.me",)),
        ("all-balanced", ("all-balanced",)),
        ("3g.40gb", ("3g.40gb",)),
        ("[3g.40gb, 1g.10gb+me, 1g.24gb+me.all, 1g.24gb-me]",
         ("3g.40gb", "1g.10gb+me", "1g.24gb+me.all", "1g.24gb-me")),
    ],
)  # fmt: skip
def test_a_layout_is_a_name_a_profile_or_a_list(files: Files, written: str, names: tuple[str, ...]) -> None:
    found = entry(files, f"{MPS}  mig: {written}\n")
    assert (found.mig, found.virtual_number, found.mig_restore) == (names, 0, False)
    assert found.divided_at.line == 4


@pytest.mark.parametrize(("text", "sharing"), [(MPS, "mps"), (SHARE, "time-slicing")])
def test_instances_can_be_divided_whatever_the_type(files: Files, text: str, sharing: str) -> None:
    found = entry(files, f"{text}  mig: all-balanced\n  virtual_number: 3\n  mig_restore: true\n")
    assert (found.sharing, found.virtual_number, found.mig_restore) == (sharing, 3, True)


@pytest.mark.parametrize(("text", "most"), [(MPS, 60), (SHARE, 256)])
def test_an_instance_can_have_as_many_devices_as_a_gpu_of_its_type(
    files: Files, text: str, most: int
) -> None:
    layout = f"{text}  mig: all-balanced\n  virtual_number: "
    assert entry(files, f"{layout}{most}\n").virtual_number == most
    (message,) = files.write(devices=f"{layout}{most + 1}\n").messages()
    assert message.endswith(f"out of range: write a whole number from 1 to {most}")


def test_a_gpu_whose_mig_mode_is_switched_off_is_divided_as_usual(files: Files) -> None:
    found = entry(files, f"{MPS}  mig: all-disabled\n  slices: [{{memory: 8GiB}}]\n")
    assert (found.mig, len(found.slices)) == (("all-disabled",), 1)


@pytest.mark.parametrize("layout", ["all-balanced", "all-disabled"])
def test_errors_of_a_layout_and_of_its_division_name_their_lines(files: Files, layout: str) -> None:
    found = entry(files, f"{MPS}  mig: {layout}\n  virtual_number: 49\n")
    assert found.divided_at.line == 5
    assert found.mig_at is not None
    assert found.mig_at.line == 4


LAYOUT = (
    "write a layout, for example all-1g.10gb, all-balanced, or a list of profiles such as [3g.40gb, 1g.10gb]"
)
PROFILES = "write the profiles of instances, for example [3g.40gb, 1g.10gb, 1g.10gb]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mig: balanced", f'4: mig is "balanced", not a MIG layout: {LAYOUT}'),
        ("mig: off", "4: mig is off, not a MIG layout: to switch MIG mode off, write mig: all-disabled"),
        ("mig: 7", f"4: mig is 7, not a MIG layout: {LAYOUT}"),
        ("mig: []", f"4: mig is an empty list, not a MIG layout: {LAYOUT}"),
        ("mig: [all-1g.10gb]", f'4: mig is "all-1g.10gb", not a MIG profile: {PROFILES}'),
        ("mig_restore: true\n  virtual_number: 2", "4: mig_restore is not allowed without mig: remove it"),
        ("mig: all-balanced\n  slices: [{memory: 8GiB}]",
         "5: slices is not allowed with mig: remove it; virtual_number divides each instance"),
        ("mig: all-balanced\n  memory_unit: 1GiB",
         "5: memory_unit is not allowed with mig: remove it; virtual_number divides each instance"),
        ("mig: all-disabled",
         "2: an NVIDIA_MPS entry has no virtual_number: add virtual_number, for example virtual_number: 4"),
    ],
)  # fmt: skip
def test_a_wrong_layout_is_refused(files: Files, text: str, message: str) -> None:
    assert files.write(devices=f"{MPS}  {text}\n").messages() == [f"{DEVICES}:{message}"]


def test_a_key_that_is_wrong_for_two_reasons_is_reported_once(files: Files) -> None:
    (message,) = files.write(devices=f"{MPS}  mig: all-balanced\n  time_slice: short\n").messages()
    assert message.startswith(f"{DEVICES}:5: unknown key time_slice in an NVIDIA_MPS entry: remove it")
