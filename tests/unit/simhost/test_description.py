"""Descriptions of simulated hosts: what is made up, and what is refused in which words."""

from __future__ import annotations

import pytest

from simhost import DescriptionError
from simhost.catalog import KINDS
from simhost.description import parse_description

T4 = {"kind": "t4"}


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
    host = parse_description([T4, {**T4, "pci": "0000:00:06.0", "render": 128}])
    assert [(gpu.address, gpu.render) for gpu in host.gpus] == [("0000:00:06.0", 128), ("0000:00:07.0", 129)]


WRONG: list[tuple[object, str]] = [
    (None, "the description: must be a mapping with the keys driver, gpus"),
    ({"gpu": []}, "gpu: unknown key; one of: driver, gpus"),
    ({"gpus": []}, "gpus: must be 1 to 64 GPUs, e.g. [{kind: tesla-p40}]"),
    ([T4, {}], f"gpus[1].kind: must be one of: {', '.join(KINDS)}"),
    ([T4, "t4"], "gpus[1]: must be a mapping with the keys kind, count, "),
    ([{**T4, "count": 40}] * 2, "gpus: must be 1 to 64 GPUs"),
    ([{**T4, "pci": "0000:00:08.0"}] * 2, "gpus: 2 GPUs have the same "),
    ([{**T4, "count": True}], "gpus[0].count: must be a whole number from 1 to 64, not True"),
    ([{**T4, "pci": 6.0}], "gpus[0].pci: must be a text like '0000:00:06.0', in quotes, not 6.0"),
    ([{**T4, "mig": True}], "gpus[0].mig: a t4 has no MIG mode"),
    ([{**T4, "lost": "yes"}], "gpus[0].lost: must be true or false, not 'yes'"),
    ([{**T4, "name": ""}], "gpus[0].name: must be a text of 1 to 90 ASCII characters, not ''"),
]


@pytest.mark.parametrize(("description", "words"), WRONG, ids=[words[:50] for _, words in WRONG])
def test_a_wrong_description_is_refused_with_its_place(description: object, words: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        parse_description(description)
    assert str(caught.value).startswith(words)
