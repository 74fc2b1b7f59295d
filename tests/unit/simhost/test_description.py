"""Descriptions of simulated hosts: what is made up, and what is refused in which words."""

from __future__ import annotations

import pytest

from simhost import DescriptionError
from simhost.catalog import KINDS
from simhost.description import parse_description

T4 = {"kind": "t4"}


def gpu(**values: object) -> dict[str, object]:
    return {"gpus": [{**T4, **values}]}


def test_what_is_made_up_is_unique_and_the_same_each_time() -> None:
    many = [{"kind": kind, "count": 4} for kind in KINDS]
    host = parse_description(many)
    assert host == parse_description(many)
    for values in (
        {gpu.uuid for gpu in host.gpus},
        {gpu.address for gpu in host.gpus},
        {gpu.render for gpu in host.gpus},
        {gpu.minor for gpu in host.gpus},
    ):
        assert len(values) == 64


def test_what_a_later_entry_asks_for_is_kept_for_it() -> None:
    host = parse_description([T4, {**T4, "pci": "0000:00:06.0", "render": 128, "minor": 0}])
    assert [(gpu.address, gpu.render, gpu.minor) for gpu in host.gpus] == [
        ("0000:00:06.0", 128, 0),
        ("0000:00:07.0", 129, 1),
    ]


def test_overrides_are_taken() -> None:
    (one,) = parse_description(
        gpu(
            name="X",
            uuid="GPU-x",
            memory_mib=1,
            compute_capability="8.6",
            vendor_device="10de:0001",
            lost=True,
        )
    ).gpus
    assert (one.name, one.uuid, one.memory_mib, one.capability) == ("X", "GPU-x", 1, (8, 6))
    assert (one.vendor, one.device, one.lost) == (0x10DE, 1, True)


WRONG: list[tuple[object, str]] = [
    (None, "the description: must be a mapping with the keys driver, gpus, failures"),
    ({"gpu": []}, "gpu: unknown key; one of: driver, gpus, failures"),
    ({"gpus": []}, "gpus: must be 1 to 64 GPUs, e.g. [{kind: tesla-p40}]"),
    ([{"kind": "h1000"}], "gpus[0].kind: must be one of: tesla-k80, "),
    ([T4, {}], f"gpus[1].kind: must be one of: {', '.join(KINDS)}, not None"),
    ([T4, "t4"], "gpus[1]: must be a mapping with the keys kind, count, "),
    ([{**T4, "count": 65}], "gpus[0].count: must be a whole number from 1 to 64, not 65"),
    ([{**T4, "count": 40}] * 2, "gpus: must be 1 to 64 GPUs"),
    ([{**T4, "count": 2, "minor": 0}], "gpus: 2 GPUs have the same minor, 0"),
    ([{**T4, "pci": "0000:00:08.0"}] * 2, "gpus: 2 GPUs have the same "),
    (gpu(memory_mb=1), "gpus[0].memory_mb: unknown key; one of: kind, "),
    (gpu(memory_mib="1"), "gpus[0].memory_mib: must be a whole number from 1 to 1099511627776, not '1'"),
    (gpu(count=True), "gpus[0].count: must be a whole number from 1 to 64, not True"),
    (gpu(pci=6.0), "gpus[0].pci: must be a text like '0000:00:06.0', in quotes, not 6.0"),
    (gpu(mig=True), "gpus[0].mig: a t4 has no MIG mode; these have: a100, h100, h200, b200, rtx-pro-6000"),
    (gpu(lost="yes"), "gpus[0].lost: must be true or false, not 'yes'"),
    (gpu(name=""), "gpus[0].name: must be a text of 1 to 90 ASCII characters, not ''"),
    (
        gpu(link={"speed": 7}),
        "gpus[0].link.speed: must be the GT/s of a PCIe generation, e.g. 2.5 or 8, not 7",
    ),
    (gpu(link={"width": 3}), "gpus[0].link.width: must be a number of lanes (1, 2, 4, 8, 12, 16, 32), not 3"),
    (gpu(processes=[{"pid": 1}]), "gpus[0].processes[0].used_mib: must be a whole number from 0 to "),
    ({"gpus": [T4], "failures": [{"call": "nvmlInit"}]}, "failures[0].error: must be one of: success, "),
]


@pytest.mark.parametrize(("description", "words"), WRONG, ids=[words[:50] for _, words in WRONG])
def test_a_wrong_description_is_refused_with_its_place(description: object, words: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        parse_description(description)
    assert str(caught.value).startswith(words)
