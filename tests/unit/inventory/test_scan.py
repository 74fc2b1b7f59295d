"""The GPUs that are found, and the file of those that have served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from yunion_mps.core.models import Controller, Driver, Gpu, Inventory, MeantGpu, PcieLink
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import GPU_OTHER_DRIVER
from yunion_mps.inventory.scan import Scanner, ServedGpus, load_served, not_found, save_served

from simhost.catalog import KINDS
from simhost.mig import PROFILES
from unit.as_user import as_user, needs_root
from unit.inventory.conftest import OpenHost


def test_the_reference_case_has_every_field(open_host: OpenHost) -> None:
    assert open_host().scan() == Inventory(
        Driver("535.261.03", "12.2"),
        (
            Gpu(
                pci_address="0000:00:06.0",
                uuid="GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400",
                name="Tesla P40",
                nvml_index=0,
                minor=0,
                memory_mib=23040,
                compute_mode="Default",
                compute_capability=(6, 1),
                mig_enabled=None,
                vendor_device_id="10de:1b38",
                numa_node=-1,
                link=PcieLink("3.0", "8GT/s", 16, "15.76 GB/s"),
                render_node="/dev/dri/renderD128",
            ),
        ),
        controllers=(Controller("0000:00:06.0", "0x10de", "nvidia", "/dev/dri/renderD128"),),
        drm_is_loaded=True,
    )


def test_every_kind_from_kepler_to_blackwell_is_described(open_host: OpenHost) -> None:
    host = open_host([{"kind": kind, "numa_node": slot % 2} for slot, kind in enumerate(KINDS)])
    found = host.gpus()
    assert [gpu.name for gpu in found] == [kind.name for kind in KINDS.values()]
    for slot, (gpu, kind) in enumerate(zip(found, KINDS.values())):
        link = gpu.link
        assert link is not None
        assert {profile.name for profile in gpu.mig_profiles} == {
            profile.name for profile in PROFILES.get(list(KINDS)[slot], ())
        }
        assert gpu._replace(link=None, mig_profiles=()) == Gpu(
            pci_address=f"0000:{slot // 16:02x}:{6 + slot % 16:02x}.0",
            uuid=host.sim.gpus[slot].uuid,
            name=kind.name,
            nvml_index=slot,
            minor=slot,
            memory_mib=kind.memory_mib,
            compute_mode="Default",
            compute_capability=kind.capability,
            mig_enabled=False if kind.mig else None,
            mig_pending=False if kind.mig else None,
            vendor_device_id=f"10de:{kind.device:04x}",
            numa_node=slot % 2,
            render_node=f"/dev/dri/renderD{128 + slot}",
        )
        assert (link.version, link.lane_width) == (f"{kind.generation}.0", 16)


def test_other_pci_domains_are_kept_and_follow_in_the_order_of_the_bus(open_host: OpenHost) -> None:
    addresses = ["10000:e1:00.0", "0001:00:06.0", "0000:00:06.0", "ffff:01:00.0"]
    found = open_host([{"kind": "t4", "pci": pci} for pci in addresses]).gpus()
    assert [gpu.pci_address for gpu in found] == [
        "0000:00:06.0",
        "0001:00:06.0",
        "ffff:01:00.0",
        "10000:e1:00.0",
    ]
    assert [gpu.address for gpu in found] == ["00:06.0", "0001:00:06.0", "ffff:01:00.0", "10000:e1:00.0"]
    assert [gpu.render_node for gpu in found] == [
        f"/dev/dri/renderD{number}" for number in (130, 129, 131, 128)
    ]
    assert all(gpu.link for gpu in found)


@pytest.mark.parametrize(
    ("kind", "mig", "found"), [("a100", True, True), ("a100", False, False), ("t4", False, None)]
)
def test_mig_mode_is_on_off_or_unknown_to_the_gpu(
    open_host: OpenHost, kind: str, mig: bool, found: bool | None
) -> None:
    assert open_host([{"kind": kind, "mig": mig}]).gpus()[0].mig_enabled is found


def test_a_gpu_without_render_node_has_none(open_host: OpenHost) -> None:
    assert open_host([{"kind": "t4", "render": None}]).gpus()[0].render_node is None


def test_names_from_the_driver_are_escaped(open_host: OpenHost) -> None:
    gpu = {"kind": "tesla-p40", "name": "Tesla\n\x1b[2J P40", "uuid": "GPU-\x1b[2J"}
    found = open_host({"driver": {"version": "535\r\n<2>forged"}, "gpus": [gpu]}).scan()
    assert (found.gpus[0].name, found.gpus[0].uuid) == ("Tesla\\n\\x1b[2J P40", "GPU-\\x1b[2J")
    assert found.driver.version == "535\\r\\n<2>forged"


def test_a_second_scan_reads_again_only_what_can_change(open_host: OpenHost) -> None:
    opened = open_host([{"kind": "a100"}, {"kind": "a100"}])
    scanner = Scanner(opened.paths)
    first = scanner.scan(opened.nvml).gpus
    (opened.sim.root / "sys/bus/pci/devices/0000:00:06.0").unlink()  # nothing of it is read again
    opened.sim.gpus[0].mig = True
    in_mig_mode = first[0]._replace(mig_enabled=True, mig_pending=True)
    for again in (scanner, Scanner(opened.paths, first)):
        assert again.scan(opened.nvml).gpus == (in_mig_mode, first[1])


def test_a_scan_after_a_loss_reads_the_gpu_again(open_host: OpenHost) -> None:
    opened = open_host([{"kind": "a100"}, {"kind": "a100"}])
    scanner = Scanner(opened.paths)
    first = scanner.scan(opened.nvml)
    opened.sim.gpus[1].lose()
    lost = scanner.scan(opened.nvml).gpus[1]
    assert (lost.pci_address, "lost" in lost.reason) == ("0000:00:07.0", True)
    (opened.sim.root / "sys/bus/pci/devices/0000:00:07.0/numa_node").write_text("1\n")
    opened.sim.gpus[1].restore()
    assert scanner.scan(opened.nvml).gpus == (first.gpus[0], first.gpus[1]._replace(numa_node=1))


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        ("vfio-pci", "the GPU is bound to the driver vfio-pci, so the NVIDIA driver cannot use it"),
        ("", "the GPU is not bound to any driver"),
    ],
)
def test_a_gpu_of_another_driver_is_named_with_it(open_host: OpenHost, driver: str, text: str) -> None:
    opened = open_host([{"kind": "a100"}, {"kind": "a100"}])
    opened.sim.gpus[1].bind(driver)
    bound = opened.scan().gpus[1]
    assert (bound.reason, bound.reason.code) == (text, GPU_OTHER_DRIVER)
    assert not_found(opened.scan()) == frozenset(), "NVML need not be initialised again for it"


def test_a_controller_of_another_vendor_is_known_and_is_no_gpu(open_host: OpenHost) -> None:
    other = {"kind": "amd", "pci": "0000:03:00.0", "render": 128}
    opened = open_host({"gpus": [{"kind": "a100", "render": 129}], "others": [other]})
    found = opened.scan()
    assert [gpu.pci_address for gpu in found.gpus] == ["0000:00:06.0"]
    assert found.controllers[1] == Controller("0000:03:00.0", "0x1002", "amdgpu", "/dev/dri/renderD128")


GPU = Gpu("0000:00:06.0", "GPU-1", "Tesla V100", minor=0, memory_mib=16384, compute_capability=(7, 0))


def test_saved_gpus_and_what_the_entries_meant_are_loaded_again(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    assert load_served(paths) == ServedGpus()
    meant = {"0000:00:06.0": MeantGpu("GPU-1", "0000:00:06.0", replaced="GPU-0")}
    assert save_served(paths, [GPU], meant)
    assert load_served(paths) == ServedGpus((GPU,), meant=meant)


def test_render_nodes_saved_by_an_earlier_version_are_known(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    assert save_served(paths, [GPU._replace(render_node="/dev/dri/renderD128")], {})
    record = json.loads(Path(paths.served_gpus).read_text())
    del record["entries"]
    Path(paths.served_gpus).write_text(json.dumps(record))
    assert load_served(paths).meant == {"/dev/dri/renderD128": MeantGpu("GPU-1", "0000:00:06.0")}


@pytest.mark.parametrize("row", [7, {}, {"uuid": 1, "pci_address": "0000:00:06.0", "replaced": ""}])
def test_a_damaged_record_of_an_entry_spoils_no_other(tmp_path: Path, row: object) -> None:
    paths = Paths(str(tmp_path))
    meant = {"0000:00:07.0": MeantGpu("GPU-2", "0000:00:07.0")}
    assert save_served(paths, [GPU], meant)
    record = json.loads(Path(paths.served_gpus).read_text())
    record["entries"]["0000:00:06.0"] = row
    Path(paths.served_gpus).write_text(json.dumps(record))
    assert load_served(paths) == ServedGpus((GPU,), meant=meant, is_damaged=True)
    assert save_served(paths, [GPU], meant)
    assert Path(f"{paths.served_gpus}.unreadable").read_text() == json.dumps(record)
    assert not load_served(paths).is_damaged


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pci_address", None),
        ("pci_address", []),
        ("uuid", {}),
        ("uuid", None),
        ("name", 7),
        ("memory_mib", "16G"),
        ("minor", 1.5),
        ("numa_node", [1]),
        ("render_node", 128),
        ("compute_capability", "70"),
        ("link", [1]),
    ],
)
def test_a_field_of_the_wrong_type_names_no_gpu(tmp_path: Path, name: str, value: object) -> None:
    paths = Paths(str(tmp_path))
    save_served(paths, [GPU], {})
    text = json.loads(Path(paths.served_gpus).read_text())
    text["gpus"][0][name] = value
    Path(paths.served_gpus).write_text(json.dumps(text))
    assert load_served(paths) == ServedGpus(), "what the entries meant is read all the same"


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"gpus": 7}', '{"entries": {}}'], ids=len)
def test_an_invalid_served_gpus_file_names_no_gpu(tmp_path: Path, text: str) -> None:
    paths = Paths(str(tmp_path))
    save_served(paths, [GPU], {})
    Path(paths.served_gpus).write_text(text)
    assert load_served(paths) == ServedGpus(is_damaged=True)


@needs_root
def test_a_record_that_only_root_can_read_is_known_to_be_hidden(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    assert save_served(paths, [GPU], {})
    assert as_user(lambda: [str(load_served(paths))]) == [str(ServedGpus(is_hidden=True))]
