"""MIG layouts as pure functions: which GPU instances a layout means, where they fit, and what must change.

Which profiles a GPU has, and where their instances can be, is always what its driver reports; the names of
layouts are those of NVIDIA's mig-parted. Invariants, held by property tests: no two instances of a layout
overlap, there are never more than the GPU has room for, the order in which they are written does not matter,
and a layout that is in effect needs no change.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from yunion_mps.addresses import is_part
from yunion_mps.enums import NOT_SHARED
from yunion_mps.mig import ALL, BALANCED, DISABLED, MigInstance, MigLayout, MigProfile
from yunion_mps.models import Gpu, Plan
from yunion_mps.reasons import MIG_PENDING, Reason
from yunion_mps.settings import DeviceEntry
from yunion_mps.text import count

#: The slices of the instances of `all-balanced`, by those of the whole GPU (mig-parted's balancedFormula).
_BALANCED_SLICES = {7: (3, 2, 1, 1), 4: (2, 1, 1)}


class LayoutError(ValueError):
    """A layout that a GPU cannot have: what is wrong, and a hint."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


class Placement(NamedTuple):
    """A GPU instance to create: its profile, and the first memory slice that it occupies.

    `is_whole`: it becomes one MIG device; otherwise it gets no compute instance.
    """

    profile: MigProfile
    start: int
    is_whole: bool = True


class LayoutChange(NamedTuple):
    """The steps to a layout; if instances `in_the_way` prevent it, there are none.

    `complete` has the instances among those to `keep` that lack a compute instance.
    """

    keep: tuple[MigInstance, ...] = ()
    complete: tuple[MigInstance, ...] = ()
    destroy: tuple[MigInstance, ...] = ()
    create: tuple[Placement, ...] = ()
    in_the_way: tuple[MigInstance, ...] = ()

    @property
    def is_due(self) -> bool:
        return bool(self.destroy or self.create or self.in_the_way)


def resolve(names: Sequence[str], gpu: Gpu) -> tuple[MigProfile, ...]:
    """Return the profiles of the instances that a layout has on this GPU, in one order; raises LayoutError.

    `names` are profiles, or the name of one layout; `all-disabled` has no instances.
    """
    desired = _in_order(_expand(names, gpu))
    if desired and _place(desired) is None:
        what = f"{describe(desired)} do not fit on {_name(gpu)}"
        raise LayoutError(what, f"write fewer or smaller ones, or a layout: {', '.join(layouts(gpu))}")
    return desired


def _expand(names: Sequence[str], gpu: Gpu) -> list[MigProfile]:
    if not gpu.mig_profiles:
        if gpu.mig_enabled is None:
            hint = "remove mig, or check that the driver offers it: nvidia-smi -q -d MIG"
            raise LayoutError(f"{_name(gpu)} has no MIG mode", hint)
        hint = "remove mig, or update the driver; see: nvidia-smi mig -lgip"
        raise LayoutError(f"{_name(gpu)} has a MIG mode, but its driver reports no MIG profiles", hint)
    if not names[0].startswith(ALL):
        return [_profile(name, gpu) for name in names]
    if names[0] == DISABLED:
        return []
    if names[0] == BALANCED:
        balanced = _balanced(gpu)
        if not balanced:
            raise LayoutError(f"{_name(gpu)} has no layout {BALANCED}", _possible(gpu))
        return balanced
    return _as_many_as_fit(_profile(names[0].removeprefix(ALL), gpu))


def layouts(gpu: Gpu) -> list[str]:
    """Return the names of the layouts that the GPU can have, smallest instances first."""
    named = [f"{ALL}{_layout_name(profile.name)}" for profile in _smallest_first(gpu)]
    return [*named, *([BALANCED] if _balanced(gpu) else []), DISABLED]


def describe(profiles: Iterable[MigProfile | MigInstance]) -> str:
    """Return `2 x 1g.10gb + 1 x 3g.40gb`."""
    names = Counter(one.name if isinstance(one, MigProfile) else one.profile for one in profiles)
    return " + ".join(f"{number} x {name}" for name, number in sorted(names.items()))


def describe_layout(plan: Plan, gpu: Gpu) -> str:
    """Return the layout that the plan has for the GPU; empty if it has none."""
    layout = next((layout for layout in plan.layouts if layout.gpu_uuid == gpu.uuid), None)
    if layout is None:
        return ""
    return describe(layout.profiles) if layout.enabled else "MIG mode off"


def describe_result(after: Plan, gpu: Gpu) -> str:
    """Return the layout, and the number of devices in the plan `after` it if these are not its instances.

    Empty without a layout.
    """
    text = describe_layout(after, gpu)
    if not text:
        return ""
    instances = sum(len(layout.profiles) for layout in after.layouts if layout.gpu_uuid == gpu.uuid)
    devices = sum(is_part(device.addr, gpu.address) for device in after.devices)
    return text if devices == instances else f"{text}, {count(devices, 'device')}"


def change(
    desired: Sequence[MigProfile],
    existing: Sequence[MigInstance],
    fixed: Collection[int],
    useless: Collection[int] = (),
    used: Collection[int] = (),
) -> LayoutChange:
    """Return how to get from the instances that exist to those desired, with as few changes as possible.

    Instances with an id in `fixed` are never destroyed. They are kept if the layout has them and they are not
    `useless` (ids); otherwise, the layout avoids them. If it cannot, they are `in_the_way`. Above all, those
    that are `used` (ids), by leases or processes, are kept.
    """
    desired = _in_order(desired)
    stay = [one for one in existing if one.id in fixed]
    useful = [one for one in existing if one.id not in useless]
    for keep in _kept(desired, useful, used):
        occupied = {*keep, *stay}
        rest = _without(desired, keep)
        places = _place(rest, tuple(occupied))
        if places is not None:
            destroy = tuple(one for one in existing if one not in occupied)
            complete = tuple(one for one in keep if not one.compute_instances)
            return LayoutChange(keep, complete, destroy, places)
    free = change(desired, existing, (), useless, used)
    blocking = tuple(one for one in free.destroy if one in stay and _blocks(one, free.create))
    return LayoutChange(in_the_way=blocking or tuple(one for one in free.destroy if one in stay))


def change_to(
    places: Sequence[Placement], existing: Sequence[MigInstance], fixed: Collection[int]
) -> LayoutChange:
    """Return how to get from the instances that exist to instances at these places.

    Instances with an id in `fixed` are never destroyed: those that occupy a place are `in_the_way`. One that
    is a MIG device, where it should not be whole, is created again without compute instances.
    """
    shells = {(place.profile.name, place.start) for place in places if not place.is_whole}
    there = {(one.profile, one.start): one for one in existing}
    there = {at: one for at, one in there.items() if at not in shells or not one.uuid or one.id in fixed}
    kept = [(place, there.get((place.profile.name, place.start))) for place in places]
    keep = tuple(one for _, one in kept if one)
    complete = tuple(one for place, one in kept if one and place.is_whole and not one.compute_instances)
    create = tuple(place for place, one in kept if not one)
    rest = [one for one in existing if one not in keep]
    stay = [one for one in rest if one.id in fixed]
    blocking = tuple(one for one in stay if _blocks(one, create))
    if blocking:
        return LayoutChange(in_the_way=blocking)
    return LayoutChange(keep, complete, tuple(one for one in rest if one not in stay), create)


class Instances(NamedTuple):
    """How MIG entries divide their GPUs: by the entry of each instance, by its address.

    `waiting` says, by GPU address, why layouts are not in effect. Instances that already exist are used.
    """

    entries: Mapping[str, DeviceEntry] = {}
    layouts: tuple[MigLayout, ...] = ()
    waiting: Mapping[str, Reason] = {}


def instances_of(entry: DeviceEntry, gpu: Gpu, gpus: Iterable[Gpu], used: Collection[str] = ()) -> Instances:
    """Return how a MIG entry divides its GPU, as far as its layout is in effect.

    `gpus` has the instances of the GPU, lost ones included, and `used` the UUIDs of those that are leased or
    have processes. Nothing if the layout is impossible.
    """
    children = [one for one in gpus if one.parent and one.physical_address == gpu.pci_address]
    each = entry._replace(mig=(), virtual_number=entry.virtual_number or 1)
    if not entry.virtual_number:
        each = each._replace(sharing=NOT_SHARED)
    if not gpu.mig_profiles:  # lost, as are its instances
        return Instances({one.pci_address: each for one in children})
    try:
        layout = layout_of(entry, gpu)
    except LayoutError:
        return Instances()
    if not layout.enabled:
        waiting = {gpu.pci_address: _waiting("MIG mode is still on", layout)} if gpu.mig_enabled else {}
        return Instances({} if waiting else {gpu.pci_address: entry._replace(mig=())}, (layout,), waiting)
    in_use = [one.id for one in gpu.mig_instances if one.uuid in used]
    done = change(layout.profiles, gpu.mig_instances, (), (), in_use)
    kept = {one.uuid for one in done.keep}
    missing = Counter(place.profile.name for place in done.create)
    used = {one.pci_address for one in children if one.uuid in kept}
    for one in children:
        if one.reason and one.uuid not in kept and missing[one.mig_profile]:
            missing[one.mig_profile] -= 1
            used.add(one.pci_address)
    waiting = {}
    if not gpu.mig_enabled:
        waiting[gpu.pci_address] = _waiting("MIG mode is off", layout)
    elif done.create or not all(kept):
        have = describe(done.keep) or "none of its instances"
        waiting[gpu.pci_address] = _waiting(f"the GPU has {have}", layout)
    return Instances(dict.fromkeys(used, each), (layout,), waiting)


def layout_of(entry: DeviceEntry, gpu: Gpu) -> MigLayout:
    """Return the layout that the entry specifies for its GPU; raises LayoutError."""
    enabled = entry.mig != (DISABLED,)
    return MigLayout(str(gpu.uuid), enabled, resolve(entry.mig, gpu), entry.mig_restore)


def with_layouts(gpus: Sequence[Gpu], layouts: Iterable[MigLayout]) -> tuple[Gpu, ...]:
    """Return the GPUs as they are once the layouts are in effect; new instances have no real address yet."""
    by_uuid = {layout.gpu_uuid: layout for layout in layouts}
    after: list[Gpu] = []
    for gpu in gpus:
        layout = by_uuid.get(gpu.parent or str(gpu.uuid))
        if layout is None:
            after.append(gpu)
        elif not gpu.parent:
            after += _split(gpu, layout, [one for one in gpus if one.parent == gpu.uuid])
    return tuple(after)


def _split(gpu: Gpu, layout: MigLayout, children: Sequence[Gpu]) -> list[Gpu]:
    done = change(layout.profiles, gpu.mig_instances if gpu.mig_enabled else (), ())
    kept = {one.uuid for one in done.keep}
    made = [
        MigInstance(-number, place.profile.name, place.start, place.profile.size, f"{gpu.uuid}/{number}")
        for number, place in enumerate(done.create, 1)
    ]
    new = [
        Gpu(
            f"{gpu.pci_address}-g{one.id}", one.uuid, gpu.name,
            memory_mib=place.profile.memory_mib, compute_capability=gpu.compute_capability,
            parent=str(gpu.uuid), identity=f"{gpu.uuid}/{one.profile}@{one.start}",
        )
        for one, place in zip(made, done.create)
    ]  # fmt: skip
    instances = tuple(sorted([*done.keep, *made]))
    whole = gpu._replace(mig_enabled=layout.enabled, mig_pending=layout.enabled, mig_instances=instances)
    return [whole, *(one for one in children if one.uuid in kept), *new]


def _waiting(what: str, layout: MigLayout) -> Reason:
    named = describe(layout.profiles) or DISABLED
    return Reason(f"its MIG layout ({named}) is not in effect yet: {what}", MIG_PENDING)


def _kept(
    desired: Sequence[MigProfile], existing: Sequence[MigInstance], used: Collection[int]
) -> list[tuple[MigInstance, ...]]:
    """Return the sets of existing instances that the layout could keep.

    Those with most `used` ones (ids) come first, and of these the largest.
    """
    useful = sorted((one for one in existing if one.is_whole), key=lambda one: (one.start, one.id))
    names = Counter(profile.name for profile in desired)
    sets = [
        keep
        for number in range(min(len(useful), len(desired)), -1, -1)
        for keep in combinations(useful, number)
        if not Counter(one.profile for one in keep) - names
    ]
    return sorted(sets, key=lambda keep: -sum(one.id in used for one in keep))


def _without(desired: Iterable[MigProfile], keep: Iterable[MigInstance]) -> list[MigProfile]:
    names = Counter(one.profile for one in keep)
    rest = []
    for profile in desired:
        if names[profile.name]:
            names[profile.name] -= 1
        else:
            rest.append(profile)
    return rest


def _place(
    desired: Sequence[MigProfile], occupied: Sequence[MigInstance] = ()
) -> tuple[Placement, ...] | None:
    """Return a place for each, the first in order of starts; None if they do not fit beside those there."""
    there = Counter(one.profile for one in occupied)
    there.update(profile.name for profile in desired)
    if any(there[profile.name] > profile.max_count for profile in desired):
        return None
    return _search(desired, {part for one in occupied for part in range(one.start, one.start + one.size)})


def _search(desired: Sequence[MigProfile], taken: set[int], least: int = 0) -> tuple[Placement, ...] | None:
    if not desired:
        return ()
    profile, rest = desired[0], desired[1:]
    for start in sorted(profile.starts):
        parts = set(range(start, start + profile.size))
        if start < least or parts & taken:
            continue
        following = start if rest and rest[0] == profile else 0  # equal ones are placed in one order only
        places = _search(rest, taken | parts, following)
        if places is not None:
            return (Placement(profile, start), *places)
    return None


def _blocks(instance: MigInstance, places: Iterable[Placement]) -> bool:
    parts = range(instance.start, instance.start + instance.size)
    return any(
        part in parts for place in places for part in range(place.start, place.start + place.profile.size)
    )


def _in_order(profiles: Iterable[MigProfile]) -> tuple[MigProfile, ...]:
    """Return them largest first, which is how they fit best, and always in the same order."""
    return tuple(sorted(profiles, key=lambda profile: (-profile.slices, -profile.size, profile.name)))


def _smallest_first(gpu: Gpu) -> list[MigProfile]:
    return sorted(gpu.mig_profiles, key=lambda profile: (profile.slices, profile.size, profile.name))


def _profile(name: str, gpu: Gpu) -> MigProfile:
    for profile in gpu.mig_profiles:
        if name in (profile.name, _layout_name(profile.name)):
            return profile
    names = ", ".join(profile.name for profile in _smallest_first(gpu))
    meant = re.sub(r"(gb)\.", r"\1+", name)  # the inverse of _layout_name
    raise LayoutError(f"{_name(gpu)} has no MIG profile {meant}", f"use one of its profiles: {names}")


def _layout_name(profile: str) -> str:
    return profile.replace("+", ".")


def _as_many_as_fit(profile: MigProfile) -> list[MigProfile]:
    number = profile.max_count
    while number > 1 and _place([profile] * number) is None:
        number -= 1
    return [profile] * number


def _balanced(gpu: Gpu) -> list[MigProfile]:
    """Return the profiles of `all-balanced`: of each size the plain one that most instances can have."""
    plain = [profile for profile in gpu.mig_profiles if re.fullmatch(r"\d+g\.\d+gb", profile.name)]
    sizes = _BALANCED_SLICES.get(max((profile.slices for profile in plain), default=0), ())
    of_size = [[profile for profile in plain if profile.slices == slices] for slices in sizes]
    if not all(of_size):
        return []
    return [max(some, key=lambda profile: (profile.max_count, profile.name)) for some in of_size]


def _possible(gpu: Gpu) -> str:
    return f"use one of its layouts: {', '.join(layouts(gpu))}"


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.address} ({gpu.name})"
