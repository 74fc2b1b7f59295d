"""The record of a node's devices, and the lines for gres.conf and slurm.conf."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from yunion_mps.core.errors import HostError, NotFoundError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import SLURM_DEVICES_CHANGED
from yunion_mps.slurm.gres_conf import (
    gpus_for_slurm,
    gres_lines,
    node_lines,
    read_record,
    record_of,
)
from yunion_mps.slurm.node_state import counts_of

if TYPE_CHECKING:
    from yunion_mps.answers import GpuJson

from unit.slurm.slurm_answers import MIXED, RECORD, device, instance, sliced, write_record


def test_an_index_never_stands_for_another_device_than_the_recorded_one() -> None:
    devices = [device("00:06.0-0"), device("00:06.0-1")]
    assert RECORD.addresses((1,), devices) == {1: ["00:06.0-1"]}
    changed = [[device("00:06.0-0", 2048)], [sliced("00:06.0-0")], [instance("00:06.0-0")]]
    for index, now in ((2, devices), (1, devices[:1]), *((0, other) for other in changed)):
        with pytest.raises(NotFoundError) as caught:
            RECORD.addresses((index,), now)
        assert caught.value.code == SLURM_DEVICES_CHANGED


def test_a_node_without_a_record_has_no_devices_for_slurm(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    assert read_record(paths) is None
    place = Path(paths.slurm_devices)
    place.parent.mkdir(parents=True)
    for text in ("", "[[1]]", '{"a": 1}', '{"shards": false, "devices": [["00:06.0-0", 4096]]}'):
        place.write_text(text)
        with pytest.raises(HostError) as caught:
            read_record(paths)
        assert caught.value.code == SLURM_DEVICES_CHANGED


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    write_record(paths, record_of(MIXED, shards=False))
    assert read_record(paths) == record_of(MIXED, shards=False)


def test_a_device_of_unknown_memory_is_recorded_as_such(tmp_path: Path) -> None:
    paths, unknown = Paths(str(tmp_path)), sliced("00:06.0-0")
    unknown["memory_mib"] = None
    write_record(paths, record_of([unknown], shards=False))
    record = read_record(paths)
    assert record is not None
    assert record.devices[0].budget == "time-sliced with unknown memory"
    assert record.addresses((0,), [unknown]) == {0: ["00:06.0-0"]}
    with pytest.raises(NotFoundError, match="was time-sliced with unknown memory, but is now"):
        record.addresses((0,), [sliced("00:06.0-0")])


def test_each_way_of_sharing_and_each_mig_profile_is_a_type() -> None:
    record = record_of(MIXED, shards=False)
    assert gres_lines(record, "n1", Paths()) == [
        "NodeName=n1 Name=gpu Type=mps File=/dev/yunion-mps/mps[0-1]",
        "NodeName=n1 Name=gpu Type=mps File=/dev/yunion-mps/mps2",
        "NodeName=n1 Name=gpu Type=time-sliced File=/dev/yunion-mps/time-sliced3",
        "NodeName=n1 Name=gpu Type=1g.10gb File=/dev/yunion-mps/1g.10gb[4-5]",
        "NodeName=n1 Name=gpu Type=1g.10gb.me File=/dev/yunion-mps/1g.10gb.me6",
    ]
    gres = "gpu:mps:3,gpu:time-sliced:1,gpu:1g.10gb:2,gpu:1g.10gb.me:1"
    assert node_lines(record, "n1") == ["GresTypes=gpu", f"NodeName=n1 Gres={gres}"]
    record.require_numbers(counts_of(gres, "gpu"))


@pytest.mark.parametrize("gres", ["gpu:time-sliced:1,gpu:mps:3", "gpu:mps:3", "gpu:4", "(null)"])
def test_slurm_conf_must_list_the_types_in_the_recorded_order(gres: str) -> None:
    """Slurm counts the devices type by type, in the order of the node's line."""
    record = record_of([*MIXED[:3], MIXED[-1]], shards=False)
    with pytest.raises(NotFoundError, match="but needs gpu:mps:3,gpu:time-sliced:1 in this order") as caught:
        record.require_numbers(counts_of(gres, "gpu"))
    assert caught.value.code == SLURM_DEVICES_CHANGED


def test_with_shards_an_index_is_a_gpu_with_all_of_its_devices() -> None:
    devices = [device("00:06.0-0"), device("00:06.0-1"), device("00:07.0-0")]
    record = record_of(devices, shards=True)
    assert gres_lines(record, "n1", Paths()) == [
        "NodeName=n1 Name=gpu Type=mps File=/dev/yunion-mps/gpu0",
        "NodeName=n1 Name=shard Count=2 File=/dev/yunion-mps/gpu0",
        "NodeName=n1 Name=gpu Type=mps File=/dev/yunion-mps/gpu1",
        "NodeName=n1 Name=shard Count=1 File=/dev/yunion-mps/gpu1",
    ]
    assert node_lines(record, "n1") == ["GresTypes=gpu,shard", "NodeName=n1 Gres=gpu:mps:2,shard:3"]
    assert record.addresses((0, 1), devices) == {0: ["00:06.0-0", "00:06.0-1"], 1: ["00:07.0-0"]}
    with pytest.raises(NotFoundError, match="index 2 is not among the 2"):
        record.addresses((2,), devices)


def test_a_mig_instance_that_is_one_device_has_no_shards() -> None:
    record = record_of([sliced("00:07.0-0"), sliced("00:07.0-1"), instance("00:08.0-g9")], shards=True)
    assert gres_lines(record, "n1", Paths())[2:] == [
        "NodeName=n1 Name=gpu Type=1g.10gb File=/dev/yunion-mps/gpu1"
    ]
    assert node_lines(record, "n1")[1] == "NodeName=n1 Gres=gpu:time-sliced:1,gpu:1g.10gb:1,shard:2"
    assert [record.allows_steps(indices) for indices in ((0,), (1,))] == [False, True]


def test_all_shards_have_to_be_shared_in_the_same_way() -> None:
    for devices, found in ((MIXED, "mps and time-sliced"), ([instance("00:08.0-g9")], "none")):
        with pytest.raises(HostError, match=f"there are {found}") as caught:
            record_of(devices, shards=True)
        assert "omit --shards" in caught.value.hint


def test_only_reserved_gpus_are_offered_if_there_are_any() -> None:
    gpus = [cast("GpuJson", {"reserved_for": use}) for use in (None, "kubernetes", "slurm")]
    free, pods, ours = gpus
    assert gpus_for_slurm(gpus) == [ours]
    assert gpus_for_slurm([free, pods]) == [free]
