"""MIG layouts: what each name means on each model, where instances fit, and what has to change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.core.mig import MigInstance, MigProfile
from yunion_mps.core.models import Gpu
from yunion_mps.planning.mig import (
    LayoutChange,
    LayoutError,
    change,
    change_to,
    describe,
    layout_names,
    layout_profiles,
)

from simhost.mig import PROFILES
from unit.builders import gpu


def with_mig(kind: str) -> Gpu:
    """A GPU with the profiles that the driver reports for this model."""
    profiles = tuple(
        MigProfile(
            one.id, one.name, one.slices, int(one.memory_gib * 1024), one.sm, one.most, one.size, one.starts
        )
        for one in PROFILES[kind]
    )
    return gpu(mig_profiles=profiles)


def named(layout: str, kind: str) -> str:
    return describe(layout_profiles([layout], with_mig(kind)))


# -- the tables of FPT (H100 SXM, H200 SXM, A100 80 GB), without its misprints of profiles, and
# of mig-parted's deployments/systemd/config-default.yaml (the others, and all-7g of the A100 80 GB)

TABLES = {
    "h100": {
        "all-1g.10gb": "7 x 1g.10gb",
        "all-1g.20gb": "4 x 1g.20gb",
        "all-2g.20gb": "3 x 2g.20gb",
        "all-3g.40gb": "2 x 3g.40gb",
        "all-4g.40gb": "1 x 4g.40gb",
        "all-7g.80gb": "1 x 7g.80gb",
        "all-balanced": "2 x 1g.10gb + 1 x 2g.20gb + 1 x 3g.40gb",
    },
    "h200": {
        "all-1g.18gb": "7 x 1g.18gb",
        "all-1g.35gb": "4 x 1g.35gb",
        "all-2g.35gb": "3 x 2g.35gb",
        "all-3g.71gb": "2 x 3g.71gb",
        "all-4g.71gb": "1 x 4g.71gb",
        "all-7g.141gb": "1 x 7g.141gb",
        "all-balanced": "2 x 1g.18gb + 1 x 2g.35gb + 1 x 3g.71gb",
    },
    "a100-80gb": {
        "all-1g.10gb": "7 x 1g.10gb",
        "all-1g.20gb": "4 x 1g.20gb",
        "all-2g.20gb": "3 x 2g.20gb",
        "all-3g.40gb": "2 x 3g.40gb",
        "all-4g.40gb": "1 x 4g.40gb",
        "all-7g.80gb": "1 x 7g.80gb",
        "all-balanced": "2 x 1g.10gb + 1 x 2g.20gb + 1 x 3g.40gb",
    },
    "a30": {
        "all-1g.6gb": "4 x 1g.6gb",
        "all-1g.6gb.me": "1 x 1g.6gb+me",
        "all-2g.12gb": "2 x 2g.12gb",
        "all-2g.12gb.me": "1 x 2g.12gb+me",
        "all-4g.24gb": "1 x 4g.24gb",
        "all-balanced": "2 x 1g.6gb + 1 x 2g.12gb",
    },
    "a100": {
        "all-1g.5gb": "7 x 1g.5gb",
        "all-1g.5gb.me": "1 x 1g.5gb+me",
        "all-1g.10gb": "4 x 1g.10gb",
        "all-2g.10gb": "3 x 2g.10gb",
        "all-3g.20gb": "2 x 3g.20gb",
        "all-4g.20gb": "1 x 4g.20gb",
        "all-7g.40gb": "1 x 7g.40gb",
        "all-balanced": "2 x 1g.5gb + 1 x 2g.10gb + 1 x 3g.20gb",
    },
    "h100-nvl": {
        "all-1g.12gb": "7 x 1g.12gb",
        "all-1g.24gb": "4 x 1g.24gb",
        "all-2g.24gb": "3 x 2g.24gb",
        "all-3g.47gb": "2 x 3g.47gb",
        "all-4g.47gb": "1 x 4g.47gb",
        "all-7g.94gb": "1 x 7g.94gb",
        "all-balanced": "2 x 1g.12gb + 1 x 2g.24gb + 1 x 3g.47gb",
    },
    "b200": {
        "all-1g.23gb": "7 x 1g.23gb",
        "all-1g.45gb": "4 x 1g.45gb",
        "all-2g.45gb": "3 x 2g.45gb",
        "all-3g.90gb": "2 x 3g.90gb",
        "all-4g.90gb": "1 x 4g.90gb",
        "all-7g.180gb": "1 x 7g.180gb",
        "all-balanced": "2 x 1g.23gb + 1 x 2g.45gb + 1 x 3g.90gb",
    },
}


@pytest.mark.parametrize(
    ("kind", "layout", "means"),
    [(kind, layout, means) for kind, table in TABLES.items() for layout, means in table.items()],
)
def test_a_named_layout_has_the_instances_of_the_tables(kind: str, layout: str, means: str) -> None:
    assert named(layout, kind) == means


@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind, table in TABLES.items() for layout in table]
)
def test_an_instance_has_at_most_the_memory_of_its_name(kind: str, layout: str) -> None:
    """And at most an eighth less: the 16 GiB of an H200's 1g.18gb are the least."""
    for one in layout_profiles([layout], with_mig(kind)):
        gigabytes = int(one.name.partition(".")[2].partition("gb")[0])
        assert gigabytes * 1024 * 7 / 8 <= one.memory_mib <= gigabytes * 1024


@pytest.mark.parametrize("kind", TABLES)
def test_every_layout_that_is_named_as_possible_is(kind: str) -> None:
    names = layout_names(with_mig(kind))
    assert set(TABLES[kind]) < set(names)
    assert all(layout_profiles([name], with_mig(kind)) for name in names if name != "all-disabled")


@pytest.mark.parametrize("kind", TABLES)
def test_all_disabled_has_no_instances(kind: str) -> None:
    assert layout_profiles(["all-disabled"], with_mig(kind)) == ()


@pytest.mark.parametrize(
    ("written", "what", "hint"),
    [
        (["1g.5gb"], "has no MIG profile 1g.5gb", "1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb"),
        (["all-1g.5gb"], "has no MIG profile 1g.5gb", "use one of its profiles"),
        (["all-3g.40gb.me"], "has no MIG profile 3g.40gb+me", "use one of its profiles"),
        (["4g.40gb", "4g.40gb"], "2 x 4g.40gb do not fit", "all-1g.10gb, all-1g.10gb.me, all-1g.20gb"),
        (["1g.10gb+me"] * 2, "2 x 1g.10gb+me do not fit", "write fewer"),
        (["3g.40gb", *["1g.10gb"] * 5], "5 x 1g.10gb + 1 x 3g.40gb do not fit", "write fewer"),
    ],
)
def test_an_impossible_layout_is_refused_with_what_is_possible(
    written: list[str], what: str, hint: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        layout_profiles(written, with_mig("h100"))
    assert what in refused.value.what
    assert hint in refused.value.hint


def test_a_gpu_without_mig_has_no_layout() -> None:
    with pytest.raises(LayoutError, match="has no MIG mode"):
        layout_profiles(["all-balanced"], gpu()._replace(mig_enabled=None))


def test_a_gpu_whose_driver_reports_no_profiles_has_no_layout() -> None:
    with pytest.raises(LayoutError, match="has a MIG mode, but its driver reports no MIG profiles"):
        layout_profiles(["all-balanced"], gpu()._replace(mig_enabled=False))


# -- properties


@st.composite
def hosts(draw: st.DrawFn) -> Gpu:
    return with_mig(draw(st.sampled_from(sorted(PROFILES))))


@st.composite
def layouts_of(draw: st.DrawFn, one: Gpu) -> list[str]:
    """A list of profiles, which may be impossible, or a named layout."""
    names = [profile.name for profile in one.mig_profiles]
    listed = st.lists(st.sampled_from(names), min_size=1, max_size=8)
    return draw(st.one_of(listed, st.sampled_from(layout_names(one)).map(lambda name: [name])))


@st.composite
def possible_layouts(draw: st.DrawFn) -> tuple[Gpu, tuple[MigProfile, ...]]:
    one = draw(hosts())
    try:
        return one, layout_profiles(draw(layouts_of(one)), one)
    except LayoutError:
        return one, layout_profiles(["all-balanced"], one)


def instances_after(done: LayoutChange) -> tuple[MigInstance, ...]:
    """The instances after a change, each with an id that no earlier one had."""
    first = 100 + max((one.id for one in done.keep), default=0)
    made = (
        MigInstance(first + number, place.profile.name, place.start, place.profile.size, f"MIG-{number}")
        for number, place in enumerate(done.create)
    )
    return (*done.keep, *made)


def memory_parts(instances: tuple[MigInstance, ...]) -> list[int]:
    return [part for one in instances for part in range(one.start, one.start + one.size)]


def has_layout(one: Gpu, desired: tuple[MigProfile, ...], instances: tuple[MigInstance, ...]) -> bool:
    """Whether the instances are those desired, and the GPU has room for all of them at once."""
    by_name = {profile.name: profile for profile in one.mig_profiles}
    each = [by_name[instance.profile] for instance in instances]
    assert len(memory_parts(instances)) == len(set(memory_parts(instances)))
    assert sum(profile.slices for profile in each) <= max(profile.slices for profile in one.mig_profiles)
    assert all(
        instance.start in profile.starts and instance.size == profile.size
        for instance, profile in zip(instances, each)
    )
    counts = Counter(profile.name for profile in each)
    assert all(by_name[name].max_count >= number for name, number in counts.items())
    return counts == Counter(profile.name for profile in desired)


@given(possible_layouts())
def test_a_layout_never_has_more_than_the_gpu(case: tuple[Gpu, tuple[MigProfile, ...]]) -> None:
    one, desired = case
    assert has_layout(one, desired, instances_after(change(desired, (), ())))


@given(possible_layouts(), st.randoms())
def test_the_order_in_which_a_layout_is_written_does_not_matter(
    case: tuple[Gpu, tuple[MigProfile, ...]], mixed: st.DataObject
) -> None:
    one, desired = case
    written = [profile.name for profile in desired]
    mixed.shuffle(written)  # type: ignore[attr-defined]
    assert not written or layout_profiles(written, one) == desired
    assert change(tuple(reversed(desired)), (), ()) == change(desired, (), ())


@given(possible_layouts())
def test_a_layout_that_is_in_effect_needs_no_change(case: tuple[Gpu, tuple[MigProfile, ...]]) -> None:
    _, desired = case
    existing = instances_after(change(desired, (), ()))
    assert not change(desired, existing, ()).is_due
    assert not change(desired, tuple(reversed(existing)), [one.id for one in existing]).is_due


@given(possible_layouts(), st.data())
def test_a_change_to_places_leads_there_or_names_what_prevents_it(
    case: tuple[Gpu, tuple[MigProfile, ...]], data: st.DataObject
) -> None:
    one, former = case
    places = change(former, (), ()).create
    existing = instances_after(
        change(layout_profiles([data.draw(st.sampled_from(layout_names(one)[:-1]))], one), (), ())
    )
    fixed = data.draw(st.sets(st.sampled_from([one.id for one in existing])))
    done = change_to(places, existing, fixed)
    assert not {instance.id for instance in done.destroy} & fixed
    assert {instance.id for instance in done.in_the_way} <= fixed
    if done.in_the_way:
        assert done == LayoutChange(in_the_way=done.in_the_way)
        return
    expected = {(place.profile.name, place.start) for place in places}
    assert {(instance.profile, instance.start) for instance in instances_after(done)} == expected


@pytest.mark.parametrize("start", range(4))
def test_a_change_keeps_the_instance_that_is_used(start: int) -> None:
    """Of seven small ones, two can stay beside the larger ones: not only the first two."""
    existing = tuple(instance(7 + at, "1g.10gb", at, 1) for at in range(7))
    desired = layout_profiles(["all-balanced"], with_mig("h100"))
    done = change(desired, existing, (), (), {7 + start})
    assert existing[start] in done.keep
    assert len(done.keep) == 2
    assert done == change(desired, existing, {7 + start}, (), {7 + start})


@given(possible_layouts(), st.data())
def test_a_change_never_destroys_what_is_fixed(
    case: tuple[Gpu, tuple[MigProfile, ...]], data: st.DataObject
) -> None:
    one, former = case
    existing = instances_after(change(former, (), ()))
    try:
        desired = layout_profiles(data.draw(layouts_of(one)), one)
    except LayoutError:
        return
    fixed = data.draw(st.sets(st.sampled_from([one.id for one in existing]))) if existing else set()
    done = change(desired, existing, fixed)
    assert not {instance.id for instance in done.destroy} & fixed
    if done.in_the_way:
        assert {instance.id for instance in done.in_the_way} <= fixed
        assert done == LayoutChange(in_the_way=done.in_the_way)
        return
    assert has_layout(one, desired, instances_after(done))
    stays = [instance for instance in existing if instance.id in fixed and instance not in done.keep]
    assert not set(memory_parts(tuple(stays))) & set(memory_parts(instances_after(done)))


# -- what is kept, and what is in the way


def instance(number: int, profile: str, start: int, size: int, **given: Any) -> MigInstance:
    return MigInstance(number, profile, start, size, f"MIG-{number}")._replace(**given)


def test_instances_that_already_match_are_kept() -> None:
    desired = layout_profiles(["all-balanced"], with_mig("h100"))
    small = instance(7, "1g.10gb", 2, 1)
    done = change(desired, (small, instance(3, "2g.20gb", 0, 2)), ())
    assert small in done.keep
    assert describe(done.keep) == "1 x 1g.10gb + 1 x 2g.20gb"
    assert done.destroy == ()


def test_an_instance_is_moved_only_if_the_others_do_not_fit_beside_it() -> None:
    desired = layout_profiles(["3g.40gb", "3g.40gb"], with_mig("h100"))
    awkward = instance(5, "1g.10gb", 4, 1)
    assert change(desired, (awkward,), ()).destroy == (awkward,)
    moved = layout_profiles(["4g.40gb", "1g.10gb"], with_mig("h100"))
    low = instance(9, "1g.10gb", 0, 1)
    done = change(moved, (low,), ())
    assert done.destroy == (low,)
    assert [(place.profile.name, place.start) for place in done.create] == [("4g.40gb", 0), ("1g.10gb", 4)]


def test_an_instance_beside_the_layout_is_no_obstacle() -> None:
    other = instance(2, "3g.40gb", 4, 4)
    done = change(layout_profiles(["2g.20gb", "2g.20gb"], with_mig("h100")), (other,), {2})
    assert [place.start for place in done.create] == [0, 2]
    assert done.in_the_way == ()


def test_only_instances_that_take_the_layouts_place_are_in_the_way() -> None:
    big, small = instance(1, "4g.40gb", 0, 4), instance(9, "1g.10gb", 6, 1)
    done = change(layout_profiles(["4g.40gb", "1g.10gb", "2g.20gb"], with_mig("h100")), (big, small), {1, 9})
    assert done.in_the_way == ()
    done = change(layout_profiles(["all-2g.20gb"], with_mig("h100")), (big, small), {1, 9})
    assert done.in_the_way == (big,)


def test_an_instance_without_a_compute_instance_gets_one() -> None:
    half = instance(1, "4g.40gb", 0, 4, uuid="", compute_instances=0)
    assert change(layout_profiles(["4g.40gb"], with_mig("h100")), (half,), ()).keep == (half,)


def test_an_instance_with_several_compute_instances_does_not_match() -> None:
    shared = instance(1, "4g.40gb", 0, 4, uuid="", compute_instances=2)
    assert change(layout_profiles(["4g.40gb"], with_mig("h100")), (shared,), {1}).in_the_way == (shared,)
