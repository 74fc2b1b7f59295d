from __future__ import annotations

from pathlib import Path

import pytest
from yunion_mps.core.addresses import sort_key
from yunion_mps.core.errors import HostError
from yunion_mps.core.models import PcieLink
from yunion_mps.core.paths import Paths
from yunion_mps.inventory.scan import machine_id
from yunion_mps.inventory.sysfs import (
    NVIDIA_VENDOR,
    controller_vendor,
    max_link,
    numa_node,
    pci_addresses,
    render_nodes,
)

ADDRESS = "0000:00:06.0"


@pytest.fixture
def tree(tmp_path: Path) -> Paths:
    (tmp_path / "sys/bus/pci/devices" / ADDRESS).mkdir(parents=True)
    return Paths(str(tmp_path))


def write(paths: Paths, name: str, text: str | bytes, address: str = ADDRESS) -> None:
    file = Path(paths.pci_devices, address, name)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)


@pytest.mark.parametrize(
    ("speed", "lanes", "link"),
    [
        ("2.5 GT/s PCIe", 16, PcieLink("1.0", "2.5GT/s", 16, "4.00 GB/s")),
        ("5.0 GT/s PCIe", 8, PcieLink("2.0", "5GT/s", 8, "4.00 GB/s")),
        ("8.0 GT/s PCIe", 16, PcieLink("3.0", "8GT/s", 16, "15.76 GB/s")),
        ("8 GT/s", 16, PcieLink("3.0", "8GT/s", 16, "15.76 GB/s")),
        ("16.0 GT/s PCIe", 16, PcieLink("4.0", "16GT/s", 16, "31.50 GB/s")),
        ("32.0 GT/s PCIe", 16, PcieLink("5.0", "32GT/s", 16, "63.01 GB/s")),
        ("64.0 GT/s PCIe", 16, PcieLink("6.0", "64GT/s", 16, "121.01 GB/s")),
        ("128.0 GT/s PCIe", 16, PcieLink("7.0", "128GT/s", 16, "242.00 GB/s")),
        ("8.0 GT/s PCIe", 1, PcieLink("3.0", "8GT/s", 1, "0.98 GB/s")),
    ],
)
def test_the_link_s_maximum_by_speed_and_lanes(tree: Paths, speed: str, lanes: int, link: PcieLink) -> None:
    write(tree, "max_link_speed", f"{speed}\n")
    write(tree, "max_link_width", f"{lanes}\n")
    assert max_link(tree, ADDRESS) == link


@pytest.mark.parametrize(
    ("speed", "width"),
    [("Unknown speed", "16"), ("256.0 GT/s", "16"), ("", "16"), ("8.0 GT/s", "x16"), ("8.0 GT/s", ""),
     (" ", "4"), (b"\xff\xfe", "16")],
)  # fmt: skip
def test_a_link_that_sysfs_does_not_know_is_absent(tree: Paths, speed: str | bytes, width: str) -> None:
    write(tree, "max_link_speed", speed)
    write(tree, "max_link_width", width)
    assert max_link(tree, ADDRESS) is None


@pytest.mark.parametrize(
    ("text", "node"), [("-1", -1), ("0", 0), ("1", 1), ("15\n", 15), ("", None), ("x", None)]
)
def test_the_numa_node_is_the_kernel_s_and_absent_if_it_names_none(
    tree: Paths, text: str, node: int | None
) -> None:
    write(tree, "numa_node", text)
    assert numa_node(tree, ADDRESS) == node


def test_only_display_controllers_of_nvidia_are_gpus(tree: Paths) -> None:
    kinds = {
        "0000:01:00.0": ("0x10de", "0x030200"),
        "0000:01:00.1": ("0x10de", "0x040300"),  # the sound of the same card
        "0000:02:00.0": ("0x10de", "0x068000"),  # an NVSwitch
        "0000:03:00.0": ("0x1002", "0x030000"),
        "10000:04:00.0": ("0x10de", "0x030000"),
        "0001:05:00.0": ("0x10de", "0x030000"),
    }
    for address, (vendor, kind) in kinds.items():
        write(tree, "vendor", f"{vendor}\n", address)
        write(tree, "class", f"{kind}\n", address)
    gpus = [address for address in pci_addresses(tree) if controller_vendor(tree, address) == NVIDIA_VENDOR]
    assert sorted(gpus, key=sort_key) == ["0000:01:00.0", "0001:05:00.0", "10000:04:00.0"]


def test_a_host_without_pci_and_render_nodes_has_none(tmp_path: Path) -> None:
    assert pci_addresses(Paths(str(tmp_path))) == []
    assert render_nodes(Paths(str(tmp_path))) == {}


def test_render_nodes_are_those_of_udev_s_links(tmp_path: Path) -> None:
    folder = tmp_path / "dev/dri/by-path"
    folder.mkdir(parents=True)
    (folder / "pci-0000:00:06.0-render").symlink_to("../renderD128")
    (folder / "pci-0000:00:06.0-card").symlink_to("../card0")
    (folder / "pci-10000:e1:00.0-render").symlink_to("../renderD200")
    (folder / "platform-gpu-render").symlink_to("../renderD129")
    assert render_nodes(Paths(str(tmp_path))) == {
        "0000:00:06.0": "/dev/dri/renderD128",
        "10000:e1:00.0": "/dev/dri/renderD200",
    }


def test_a_render_node_in_place_of_the_link_is_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "dev/dri/by-path"
    folder.mkdir(parents=True)
    (folder / "pci-0000:00:06.0-render").write_text("")
    assert render_nodes(Paths(str(tmp_path))) == {}


@pytest.mark.parametrize("content", [None, b"", b"uninitialized\n", b"5c3f\n", b"G" * 32, b"\xff" * 32])
def test_a_missing_machine_id_is_reported_with_how_to_create_it(
    tmp_path: Path, content: bytes | None
) -> None:
    (tmp_path / "etc").mkdir()
    if content is not None:
        (tmp_path / "etc/machine-id").write_bytes(content)
    with pytest.raises(HostError) as caught:
        machine_id(Paths(str(tmp_path)))
    assert caught.value.message == (
        f"{tmp_path}/etc/machine-id contains no machine id, from which the device ids are derived"
    )
    assert caught.value.hint == "create one: systemd-machine-id-setup"
