"""docs/kubernetes-scale.md: the sizes that it calculates with are those of our messages and objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from yunion_mps.kubernetes.dra.slice_devices import offered_devices
from yunion_mps.kubernetes.dra.slices import slices_of
from yunion_mps.kubernetes.kubelet.device_plugin_api import HEALTHY
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import ListAndWatchResponse

from kubernetes.offered_devices import facts, share

PAGE = (Path(__file__).parents[2] / "docs/kubernetes-scale.md").read_text()
MAX_MESSAGE_BYTES = 4 << 20
_UNITS = {"bytes": 1, "kB": 1000, "MB": 1_000_000}


def units(gpus: int, mib: int) -> list[str]:
    number = 140 * 1024 // mib
    return [f"{gpu:02x}:00.0-u{mib}-{unit}" for gpu in range(gpus) for unit in range(number)]


def addresses(gpus: int, number: int) -> list[str]:
    return [f"{gpu:02x}:00.0-{slot}" for gpu in range(gpus) for slot in range(number)]


@pytest.mark.parametrize(
    ("row", "ids"),
    [
        ("1 GPU, `virtual_number: 4`", lambda: addresses(1, 4)),
        ("64 GPUs, `virtual_number: 48`", lambda: addresses(64, 48)),
        ("8 GPUs with 140 GiB, units of 1 GiB", lambda: units(8, 1024)),
        ("8 GPUs with 140 GiB, units of 128 MiB", lambda: units(8, 128)),
        ("64 GPUs with 140 GiB, units of 128 MiB", lambda: units(64, 128)),
    ],
)
def test_a_list_of_devices_has_the_size_of_its_row(row: str, ids: Callable[[], list[str]]) -> None:
    (cells,) = re.findall(rf"^\| {re.escape(row)} \| ([0-9,]+) \| ([0-9.]+) (\w+) \|$", PAGE, re.MULTILINE)
    number, size, unit = cells
    message = ListAndWatchResponse()
    for name in ids():
        message.devices.add(ID=name, health=HEALTHY).topology.nodes.add(ID=1)
    assert len(message.devices) == int(number.replace(",", ""))
    assert message.ByteSize() == pytest.approx(float(size) * _UNITS[unit], rel=0.1)
    assert message.ByteSize() < MAX_MESSAGE_BYTES


@pytest.mark.parametrize(("gpus", "number"), [(8, 4), (64, 48)])
def test_the_slices_of_a_node_have_the_size_of_their_row(gpus: int, number: int) -> None:
    row = rf"^\| {gpus} GPUs, {number} devices each \| (\d+) of (\d+) kB \|"
    ((count, size_kb),) = re.findall(row, PAGE, re.MULTILINE)
    offered = offered_devices(facts([share(gpu, slot) for gpu in range(gpus) for slot in range(number)]))
    slices = slices_of(offered)
    assert len(slices) == int(count)
    size = len(json.dumps([one.device for one in slices[0]], separators=(",", ":")))
    assert size == pytest.approx(int(size_kb) * 1000, rel=0.1)
