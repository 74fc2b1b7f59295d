"""How a MIG entry divides the instances that its GPU has, or has had."""

from __future__ import annotations

from yunion_mps.core.mig import MigInstance
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import GPU_LOST, MIG_PENDING, NO_REASON, Reason
from yunion_mps.core.settings import DeviceEntry
from yunion_mps.planning.mig import (
    Instances,
    change,
    change_to,
    describe_layout,
    instances_of,
    layout_profiles,
    with_layouts,
)
from yunion_mps.planning.plan import make_plan

from unit.builders import MACHINE_ID, config, entry, inventory
from unit.planning.test_mig import instance, with_mig

LOST = Reason("it is lost", GPU_LOST)
H100 = with_mig("h100")._replace(mig_enabled=True, mig_pending=True)


def entry_with_layout(*layout: str) -> DeviceEntry:
    return entry("00:00.0", 0)._replace(mig=layout)


def mig_device(one: MigInstance, reason: Reason = NO_REASON) -> Gpu:
    """The MIG device of the instance."""
    return Gpu(
        f"{H100.pci_address}-g{one.id}", one.uuid, H100.name, parent=str(H100.uuid), memory_mib=9984,
        identity=f"{H100.uuid}/{one.profile}@{one.start}", reason=reason,
    )  # fmt: skip


def numbers(found: Instances) -> list[int]:
    return sorted(int(address.rpartition("-g")[2]) for address in found.entries)


SMALL = [instance(7 + start, "1g.10gb", start, 1) for start in range(3)]


def test_as_many_lost_instances_stay_listed_as_the_layout_lacks() -> None:
    """Destroyed instances stay listed, too; the profile's others belong to another layout."""
    has = H100._replace(mig_instances=(SMALL[0],))
    gpus = [has, mig_device(SMALL[0]), mig_device(SMALL[1], LOST), mig_device(SMALL[2], LOST)]
    assert numbers(instances_of(entry_with_layout("1g.10gb", "1g.10gb"), has, gpus)) == [7, 8]
    assert numbers(instances_of(entry_with_layout("1g.10gb"), has, gpus)) == [7]
    assert numbers(instances_of(entry_with_layout("1g.10gb", "1g.20gb"), has, gpus)) == [7]


def test_an_instance_that_exists_beside_the_layout_is_not_used() -> None:
    other = instance(11, "1g.10gb", 4, 1, compute_instances=2)
    has = H100._replace(mig_instances=(SMALL[0], other))
    assert numbers(
        instances_of(entry_with_layout("1g.10gb", "1g.10gb"), has, [mig_device(SMALL[0]), mig_device(other)])
    ) == [7]


def test_the_instances_of_a_lost_gpu_stay_listed() -> None:
    lost = H100._replace(mig_profiles=(), reason=LOST)
    found = instances_of(
        entry_with_layout("1g.10gb"), lost, [lost, *(mig_device(one, LOST) for one in SMALL)]
    )
    assert (numbers(found), found.layouts) == ([7, 8, 9], ())


def test_an_instance_without_a_uuid_is_waited_for() -> None:
    bare = instance(0, "7g.80gb", 0, 8, uuid="", compute_instances=0)
    found = instances_of(entry_with_layout("all-7g.80gb"), H100._replace(mig_instances=(bare,)), [])
    (why,) = found.waiting.values()
    assert (why.code, numbers(found)) == (MIG_PENDING, [])


def test_an_instance_whose_profile_is_used_up_is_in_the_way() -> None:
    """Also at another place: only one instance of the GPU has the media engines."""
    other = instance(13, "1g.10gb+me", 6, 1, compute_instances=2)
    done = change(layout_profiles(["1g.10gb+me"], H100), (other,), {13})
    assert (done.in_the_way, done.is_due) == ((other,), True)
    assert done.create == ()


def test_a_layout_has_its_largest_instances_first() -> None:
    desired = layout_profiles(["1g.10gb", "1g.20gb", "2g.20gb"], H100)
    assert [profile.name for profile in desired] == ["2g.20gb", "1g.20gb", "1g.10gb"]


def test_all_of_a_profile_are_as_many_as_have_a_place() -> None:
    """Even if the driver reports more than that as its maximum."""
    profiles = tuple(one._replace(max_count=7) for one in H100.mig_profiles)
    assert len(layout_profiles(["all-1g.20gb"], H100._replace(mig_profiles=profiles))) == 4


def test_a_place_that_was_not_whole_gets_no_compute_instance() -> None:
    (place,) = change(layout_profiles(["4g.40gb"], H100), (), ()).create
    half = instance(1, "4g.40gb", 0, 4, uuid="", compute_instances=0)
    assert change_to([place], (half,), ()).complete == (half,)
    assert change_to([place._replace(is_whole=False)], (half,), ()).complete == ()


def test_the_gpus_after_a_layout_have_its_instances_alone() -> None:
    """What the driver still reports of a GPU whose mode is off does not count."""
    has = H100._replace(mig_instances=tuple(SMALL))
    gpus = [has, *map(mig_device, SMALL)]
    plan, _ = make_plan(config(entry_with_layout("1g.10gb", "2g.20gb")), inventory(*gpus), MACHINE_ID)
    assert describe_layout(plan, has) == "1 x 1g.10gb + 1 x 2g.20gb"
    for enabled, kept in ((True, 1), (False, 0)):
        after = with_layouts([has._replace(mig_enabled=enabled), *gpus[1:]], plan.layouts)
        uuids = {one.uuid for one in SMALL}
        assert sorted(one.mig_profile for one in after[1:]) == ["1g.10gb", "2g.20gb"]
        assert sum(one.uuid in uuids for one in after[1:]) == kept
