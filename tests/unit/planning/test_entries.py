"""Which GPU an entry means: now, after a reboot, and after cards were moved, removed or replaced."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.core import reasons
from yunion_mps.core.models import Controller, Gpu, Inventory, MeantGpu
from yunion_mps.core.reasons import GPU_LOST, Reason
from yunion_mps.core.settings import DeviceEntry, Source
from yunion_mps.planning.entries import Resolution, confirm_replacements, resolve_entries

from unit.builders import DEVICES, P40, config, entry, find_gpu, gpu, inventory, messages, planned


@pytest.mark.parametrize(
    "spelling",
    [
        "/dev/dri/renderD128",
        " /dev/dri/renderD128 ",
        "/dev/dri/by-path/pci-0000:00:06.0-render",
        "00:06.0",
        "0000:00:06.0",
        "00000000:00:06.0",
        "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400",
        "gpu-76AEF7FF-372D-2432-B4B4-BECA4D8D3400",
    ],
)
def test_a_gpu_is_found_by_render_node_pci_address_and_uuid(spelling: str) -> None:
    assert find_gpu(spelling, [gpu(1), P40, gpu(2)]) is P40


@pytest.mark.parametrize("spelling", ["10000:E1:00.0", "10000:e1:00.0", "00010000:e1:00.0"])
def test_a_gpu_in_another_pci_domain_is_found_with_its_domain(spelling: str) -> None:
    other = gpu(1, pci_address="10000:e1:00.0")
    assert find_gpu(spelling, [gpu(2, pci_address="0000:e1:00.0"), other]) is other


@pytest.mark.parametrize(
    "spelling",
    [
        "/dev/dri/renderD129",
        "/dev/dri/card0",
        "/dev/nvidia0",
        "00:07.0",
        "0001:00:06.0",
        "1:00:06.0",
        "00:06.1",
        "00:06",
        "6.0",
        "GPU-76aef7ff",
        "0",
        "all",
        ":",
        "::",
    ],
)
def test_nothing_else_names_a_gpu(spelling: str) -> None:
    assert find_gpu(spelling, [P40]) is None


def test_an_address_without_domain_is_in_domain_0000() -> None:
    other = gpu(1, pci_address="0001:00:06.0")
    assert find_gpu("00:06.0", [other]) is None
    assert find_gpu("00:06.0", [other, P40]) is P40


def test_a_gpu_named_twice_is_named_with_its_first_line_and_spelling() -> None:
    path, uuid = "/dev/dri/renderD128", str(P40.uuid).upper()
    settings = config(entry(path, 4), entry("0000:00:06.0", 2, 5), entry(uuid, 2, 8), entry(path, 2, 11))
    already, hint = "is GPU 00:06.0, which is already divided on line 2", "remove one of the two entries"
    assert messages(settings, inventory(P40)) == [
        f"{DEVICES}:5: path 0000:00:06.0 {already} as {path}: {hint}",
        f"{DEVICES}:8: path {uuid} {already} as {path}: {hint}",
        f"{DEVICES}:11: path {path} {already}: {hint}",
    ]


def test_a_by_path_link_names_its_slot_even_without_nvidia_drm() -> None:
    bare = Gpu("0000:00:06.0")
    assert find_gpu("/dev/dri/by-path/pci-0000:00:06.0-render", [bare]) is bare


# -- entries whose GPU is not there


def resolved(entries: Sequence[DeviceEntry], host: Inventory) -> Resolution:
    resolution = resolve_entries(config(*entries), host)
    assert resolution.problems == []
    return resolution


def meanings(resolution: Resolution) -> dict[str, str]:
    """The address of the GPU that each path divides."""
    return {entry.path: address for address, entry in resolution.entries.items()}


def missing(resolution: Resolution) -> dict[str, tuple[str, str]]:
    return {one.path: (str(one.reason), one.reason.code) for one in resolution.missing}


@pytest.mark.parametrize("path", ["02:00.0", "/dev/dri/by-path/pci-0000:02:00.0-render"])
def test_without_a_gpu_in_the_slot_the_others_serve(path: str) -> None:
    resolution = resolved([entry("01:00.0", 4), entry(path, 4, 5)], inventory(gpu(1)))
    assert meanings(resolution) == {"01:00.0": "0000:01:00.0"}
    assert missing(resolution) == {path: ("there is no GPU at 02:00.0", reasons.GPU_MISSING)}
    assert resolution.missing[0].place == f"{DEVICES}:5"


def test_without_a_gpu_of_that_uuid_the_others_serve() -> None:
    resolution = resolved([entry(str(gpu(2).uuid), 4), entry("01:00.0", 4, 5)], inventory(gpu(1)))
    assert meanings(resolution) == {"01:00.0": "0000:01:00.0"}
    assert missing(resolution) == {
        gpu(2).uuid: ("this host has no GPU with this UUID now", reasons.GPU_MISSING)
    }


def test_a_gpu_that_reports_no_uuid_may_be_the_one_of_the_entry() -> None:
    lost = Gpu("0000:02:00.0", reason=Reason("GPU is lost", GPU_LOST))
    resolution = resolved([entry("01:00.0", 2), entry(str(gpu(2).uuid), 2, 5)], inventory(gpu(1), lost))
    text = "this host has no GPU with this UUID now; it may be GPU 02:00.0: GPU is lost"
    assert missing(resolution) == {gpu(2).uuid: (text, GPU_LOST)}


def test_a_render_node_that_is_not_there_is_missing() -> None:
    resolution = resolved([entry("/dev/dri/renderD130", 4)], inventory(gpu(1)))
    assert missing(resolution) == {
        "/dev/dri/renderD130": ("there is no such render node", reasons.GPU_MISSING)
    }


def test_without_any_render_node_nvidia_drm_is_named() -> None:
    resolution = resolved([entry("/dev/dri/renderD129", 4)], inventory(gpu(1, render_node=None)))
    text = "no NVIDIA GPU has a render node: nvidia-drm is not loaded"
    assert missing(resolution) == {"/dev/dri/renderD129": (text, reasons.RENDER_NODE_MISSING)}


@pytest.mark.parametrize("path", ["03:00.0", "/dev/dri/renderD128"])
def test_a_device_of_another_vendor_is_named_with_its_driver(path: str) -> None:
    other = Controller("0000:03:00.0", "0x1002", "amdgpu", "/dev/dri/renderD128")
    host = inventory(gpu(1))._replace(controllers=(other,))
    text = "the device at 03:00.0 is not an NVIDIA GPU (driver amdgpu)"
    assert missing(resolved([entry(path, 4)], host)) == {path: (text, reasons.GPU_MISSING)}


def test_without_entries_a_gpu_of_another_driver_is_left_alone() -> None:
    passed_through = gpu(2, reason=Reason("it is bound to vfio-pci", reasons.GPU_OTHER_DRIVER))
    assert planned(config(), inventory(gpu(1), passed_through)).sharing == {"0000:01:00.0": "mps"}


# -- entries that were resolved before


def meant(path: str, one: Gpu) -> dict[str, MeantGpu]:
    return {path: MeantGpu(str(one.uuid), one.pci_address)}


def test_a_renumbered_render_node_still_means_the_recorded_gpu() -> None:
    moved = gpu(2, render_node="/dev/dri/renderD129")
    host = inventory(moved, gpu(3, render_node="/dev/dri/renderD130"))
    host = host._replace(meant=meant("/dev/dri/renderD130", gpu(2)))
    resolution = resolved([entry("/dev/dri/renderD130", 4)], host)
    assert meanings(resolution) == {"/dev/dri/renderD130": "0000:02:00.0"}
    (warning,) = resolution.warnings
    assert warning == (
        f"path /dev/dri/renderD130 ({DEVICES}:2) leads to GPU 03:00.0 now, "
        f"but still means the GPU that it led to before: 02:00.0, {gpu(2).uuid}"
    )
    assert warning.code == reasons.PATH_OUTDATED


def test_a_card_that_was_moved_to_another_slot_is_still_meant() -> None:
    moved = gpu(2, pci_address="0000:07:00.0")
    host = inventory(moved)._replace(meant=meant("0000:02:00.0", gpu(2)))
    resolution = resolved([entry("02:00.0", 4)], host)
    assert meanings(resolution) == {"02:00.0": "0000:07:00.0"}
    assert resolution.meant == meant("0000:02:00.0", moved)
    assert "leads to no GPU now" in resolution.warnings[0]


def test_a_card_in_the_slot_of_the_missing_one_is_named() -> None:
    successor = gpu(2)._replace(uuid="GPU-new", render_node="/dev/dri/renderD131")
    host = inventory(successor)._replace(meant=meant("/dev/dri/renderD130", gpu(2)))
    ((text, _),) = missing(resolved([entry("/dev/dri/renderD130", 4)], host)).values()
    assert text.endswith("; another card is in its slot now (GPU-new)")


def test_a_missing_gpu_is_not_swapped_for_its_render_node_s_new_owner() -> None:
    host = inventory(gpu(3, render_node="/dev/dri/renderD130"))
    host = host._replace(meant=meant("/dev/dri/renderD130", gpu(2)))
    resolution = resolved([entry("/dev/dri/renderD130", 4)], host)
    assert meanings(resolution) == {}
    text = (
        f"this host no longer has GPU 02:00.0 ({gpu(2).uuid}); /dev/dri/renderD130 leads to GPU 03:00.0 now"
    )
    assert missing(resolution) == {"/dev/dri/renderD130": (text, reasons.GPU_MISSING)}
    assert confirm_replacements(host.meant, host) == host.meant, "a reload confirms no renumbering"


def test_a_card_that_replaced_another_in_its_slot_is_used_and_both_named() -> None:
    new = gpu(2, uuid=str(gpu(9).uuid))
    host = inventory(new)._replace(meant=meant("0000:02:00.0", gpu(2)))
    resolution = resolved([entry("02:00.0", 4)], host)
    assert meanings(resolution) == {"02:00.0": "0000:02:00.0"}
    (warning,) = resolution.warnings
    assert warning == (
        f"path 02:00.0 ({DEVICES}:2) meant {gpu(2).uuid} before; "
        f"GPU 02:00.0 ({gpu(9).uuid}) is in its place now and is used"
    )
    again = resolved([entry("02:00.0", 4)], host._replace(meant=resolution.meant))
    assert again.warnings == (warning,), "until the next reload"
    confirmed = host._replace(meant=confirm_replacements(again.meant, host))
    assert resolved([entry("02:00.0", 4)], confirmed).warnings == ()


@pytest.mark.parametrize("is_back", [True, False])
def test_a_card_that_stood_in_for_another_is_given_up_once_moved_back(is_back: bool) -> None:
    stand_in = gpu(2, pci_address="0000:01:00.0")
    host = inventory(stand_in)._replace(meant=meant("0000:01:00.0", gpu(1)))
    shifted = resolved([entry("01:00.0", 4)], host)
    assert meanings(shifted) == {"01:00.0": "0000:01:00.0"}
    again = inventory(*([gpu(1)] if is_back else []), gpu(2))
    for meaning in (shifted.meant, confirm_replacements(shifted.meant, again)):
        resolution = resolved([entry("01:00.0", 4)], again._replace(meant=meaning))
        assert meanings(resolution) == ({"01:00.0": "0000:01:00.0"} if is_back else {})
        assert (resolution.warnings, len(resolution.missing)) == ((), 0 if is_back else 1)


def test_behind_a_render_node_a_replaced_card_is_used_after_a_reload() -> None:
    path = "/dev/dri/renderD130"
    new = gpu(2, uuid=str(gpu(9).uuid))
    host = inventory(new)._replace(meant=meant(path, gpu(2)))
    resolution = resolved([entry(path, 4)], host)
    text = f"GPU 02:00.0 is {gpu(9).uuid} now, but the entry meant {gpu(2).uuid}, "
    assert missing(resolution) == {
        path: (f"{text}which this host no longer has", reasons.GPU_REPLACED),
    }
    confirmed = host._replace(meant=confirm_replacements(resolution.meant, host))
    assert meanings(resolved([entry(path, 4)], confirmed)) == {path: "0000:02:00.0"}


def test_a_gpu_of_two_entries_is_divided_by_the_one_that_meant_it_before() -> None:
    host = inventory(gpu(2))._replace(meant=meant("/dev/dri/renderD140", gpu(2)))
    new, old = entry("/dev/dri/renderD130", 2), entry("/dev/dri/renderD140", 4, 5)
    resolution = resolved([new, old], host)
    assert meanings(resolution) == {"/dev/dri/renderD140": "0000:02:00.0"}
    text = "it leads to GPU 02:00.0, which belongs to the entry on line 5"
    assert missing(resolution) == {"/dev/dri/renderD130": (text, reasons.PATH_OUTDATED)}


def test_a_card_in_the_slot_of_a_missing_one_stays_with_its_own_entry() -> None:
    moved = gpu(1, pci_address="0000:02:00.0")
    records = {**meant("0000:01:00.0", gpu(1)), **meant("0000:02:00.0", gpu(2))}
    resolution = resolved(
        [entry("01:00.0", 4), entry("02:00.0", 2, 5)], inventory(moved)._replace(meant=records)
    )
    assert meanings(resolution) == {"01:00.0": "0000:02:00.0"}
    ((path, (text, code)),) = missing(resolution).items()
    assert (path, code) == ("02:00.0", reasons.GPU_MISSING)
    assert text == (
        f"this host no longer has the GPU that the entry means ({gpu(2).uuid}); "
        "it leads to GPU 02:00.0, which belongs to the entry on line 2"
    )


def test_a_silent_gpu_in_the_recorded_place_keeps_its_entry() -> None:
    silent = Gpu("0000:02:00.0", reason=Reason("GPU is lost", GPU_LOST))
    host = inventory(silent)._replace(meant=meant("/dev/dri/renderD130", gpu(2)))
    resolution = resolved([entry("/dev/dri/renderD130", 4)], host)
    assert meanings(resolution) == {"/dev/dri/renderD130": "0000:02:00.0"}
    assert resolution.meant == host.meant


def test_the_record_of_an_entry_that_was_removed_is_dropped() -> None:
    host = inventory(gpu(1), gpu(2))
    host = host._replace(meant={**meant("0000:01:00.0", gpu(1)), **meant("0000:02:00.0", gpu(2))})
    assert resolved([entry("01:00.0", 4)], host).meant == meant("0000:01:00.0", gpu(1))


# -- two entries for one GPU


def test_an_unrecorded_render_node_leaves_its_gpu_to_a_certain_path() -> None:
    """As at a first start with one GPU missing, which gives the others' render nodes other numbers."""
    node, uuid = entry("/dev/dri/renderD130", 2), entry(str(gpu(2).uuid), 4, 5)
    resolution = resolve_entries(config(node, uuid), inventory(gpu(2)))
    assert meanings(resolution) == {uuid.path: "0000:02:00.0"}
    assert missing(resolution) == {
        node.path: ("it is divided by the entry on line 5, too", reasons.ENTRY_REFUSED)
    }
    (problem,) = resolution.problems
    assert problem.is_minor


def test_of_two_certain_paths_of_one_gpu_the_first_one_divides_it() -> None:
    address, uuid = entry("02:00.0", 2), entry(str(gpu(2).uuid), 4, 5)
    resolution = resolve_entries(config(address, uuid, entry("01:00.0", 4, 8)), inventory(gpu(1), gpu(2)))
    assert meanings(resolution) == {"02:00.0": "0000:02:00.0", "01:00.0": "0000:01:00.0"}
    (problem,) = resolution.problems
    assert (problem.is_minor, problem.entry) == (False, uuid.path)


def test_a_render_node_hides_no_certain_conflict() -> None:
    node, address = entry("/dev/dri/renderD130", 2), entry("02:00.0", 2, 5)
    uuid = entry(str(gpu(2).uuid), 4, 8)
    problems = resolve_entries(config(node, address, uuid), inventory(gpu(2))).problems
    assert [problem.is_minor for problem in problems] == [True, False]
    twice = resolve_entries(config(node, node._replace(path_at=Source(DEVICES, 5))), inventory(gpu(2)))
    assert [problem.is_minor for problem in twice.problems] == [False]


# -- a record that cannot be read


def test_with_a_damaged_record_a_render_node_waits_for_a_reload() -> None:
    host = inventory(gpu(2), gpu(3))._replace(meant_is_damaged=True)
    entries = [entry("/dev/dri/renderD130", 4), entry("03:00.0", 4, 5)]
    resolution = resolved(entries, host)
    assert meanings(resolution) == {"03:00.0": "0000:03:00.0"}
    text = "which GPU the entry meant before is not known, because the record was damaged; "
    text += f"it leads to GPU 02:00.0 ({gpu(2).uuid}) now"
    assert missing(resolution) == {"/dev/dri/renderD130": (text, reasons.RECORD_DAMAGED)}
    restarted = host._replace(meant=resolution.meant, meant_is_damaged=False)
    assert missing(resolved(entries, restarted)) == missing(resolution), "also after the next start"
    confirmed = restarted._replace(meant=confirm_replacements(resolution.meant, host))
    assert len(meanings(resolved(entries, confirmed))) == 2


def test_a_reload_confirms_no_card_that_another_entry_means() -> None:
    moved = gpu(2, pci_address="0000:01:00.0", render_node="/dev/dri/renderD129")
    records = {**meant("/dev/dri/renderD129", gpu(1)), **meant("/dev/dri/renderD130", gpu(2))}
    assert confirm_replacements(records, inventory(moved)) == records


# -- an entry that does not fit its GPU


@pytest.mark.parametrize(
    ("divided", "what"),
    [
        (
            entry("01:00.0", 4),
            "virtual_number is 4, so each device of GPU 01:00.0 (NVIDIA H100 80GB HBM3) with 3 MiB",
        ),
        (
            entry("01:00.0", 60),
            "virtual_number is 60, more than the 48 clients that MPS allows on GPU 01:00.0",
        ),
        (entry("01:00.0", 0)._replace(memory_unit_mib=1024), "memory_unit is 1024 MiB, more than the 3 MiB"),
    ],
)
def test_an_entry_that_does_not_fit_its_gpu_is_refused_alone(divided: DeviceEntry, what: str) -> None:
    settings, host = config(divided, entry("02:00.0", 4, 5)), inventory(gpu(1, memory_mib=3), gpu(2))
    resolution = resolve_entries(settings, host)
    (problem,) = resolution.problems
    assert problem.is_minor
    assert what in str(problem)
    assert resolution.refused == {"0000:01:00.0": str(problem)}
    assert resolution.refused["0000:01:00.0"].code == reasons.ENTRY_REFUSED


# -- any host


GPUS = [gpu(slot) for slot in range(1, 5)]


def forms_of_path(one: Gpu) -> list[str]:
    link = f"/dev/dri/by-path/pci-{one.pci_address}-render"
    return [str(one.render_node), one.address, one.pci_address, link, str(one.uuid)]


def draw_entries(data: st.DataObject) -> tuple[list[Gpu], list[DeviceEntry]]:
    """Draw GPUs, and entries that name them in any form."""
    configured = data.draw(st.lists(st.sampled_from(GPUS), unique=True, min_size=1))
    return configured, [
        entry(data.draw(st.sampled_from(forms_of_path(one))), 4, line)
        for line, one in enumerate(configured, 2)
    ]


def draw_host(data: st.DataObject) -> Inventory:
    """Draw which GPUs there are, in which slots, and with which render nodes."""
    slots = data.draw(st.permutations([one.pci_address for one in GPUS]))
    nodes = data.draw(st.permutations([one.render_node for one in GPUS]))
    are_present = data.draw(st.lists(st.booleans(), min_size=4, max_size=4))
    return inventory(
        *(
            one._replace(pci_address=slot, render_node=node)
            for one, slot, node, is_present in zip(GPUS, slots, nodes, are_present)
            if is_present
        )
    )


@given(st.data())
def test_once_all_gpus_are_back_the_entries_divide_what_they_did_at_first(data: st.DataObject) -> None:
    """Whatever stood in the slots of missing cards meanwhile, as long as no reload has confirmed it."""
    _, entries = draw_entries(data)
    before = resolved(entries, inventory(*GPUS))
    meant_now = before.meant
    for _ in range(data.draw(st.integers(1, 3))):
        meant_now = resolved(entries, draw_host(data)._replace(meant=meant_now)).meant
    after = resolved(entries, inventory(*GPUS)._replace(meant=meant_now))
    assert (after.entries, after.meant) == (before.entries, before.meant)


@given(st.data())
def test_no_gpu_is_divided_that_no_entry_meant(data: st.DataObject) -> None:
    """Then any GPUs are missing, render nodes have other numbers, and cards are in other slots."""
    configured, entries = draw_entries(data)
    before = resolved(entries, inventory(*GPUS))
    assert sorted(before.entries) == sorted(one.pci_address for one in configured)
    now = draw_host(data)._replace(meant=before.meant)
    after = resolved(entries, now)
    divided = {one.uuid for one in now.gpus if one.pci_address in after.entries}
    replacements = {one.uuid for one in after.meant.values() if one.replaced}
    expected = {one.uuid for one in configured}
    assert divided - replacements == expected & {one.uuid for one in now.gpus}
    assert len(after.missing) == len(expected) - len(divided)
    named = {one.uuid for one in now.gpus for item in entries if find_gpu(item.path, [one])}
    assert replacements <= named
    again = resolved(entries, now._replace(meant=after.meant))
    assert (again.entries, again.missing) == (after.entries, after.missing)
