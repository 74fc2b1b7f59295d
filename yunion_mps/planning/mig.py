"""MIG layouts as pure functions: which GPU instances a layout means, where they fit, and what must change.

Which profiles a GPU has, and where their instances can be, is always what its driver reports; the names of
layouts are those of NVIDIA's mig-parted. Invariants, held by property tests: no two instances of a layout
overlap, there are never more than the GPU has room for, the order in which they are written does not matter,
and a layout that is in effect needs no change.

Source: NVIDIA: Multi-Instance GPU User Guide, sections "Partitioning" and "List GPU Instance Profiles"; for
the layouts, github.com/NVIDIA/mig-parted, pkg/mig/builder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from yunion_mps.core.addresses import is_part
from yunion_mps.core.enums import NOT_SHARED
from yunion_mps.core.mig import ALL, BALANCED, DISABLED, MigInstance, MigLayout, MigProfile
from yunion_mps.core.models import Gpu, Plan
from yunion_mps.core.reasons import MIG_PENDING, Reason
from yunion_mps.core.settings import DeviceEntry
from yunion_mps.core.text import count

#: The slices of the instances of `all-balanced`, by those of the whole GPU.
#: Source: github.com/NVIDIA/mig-parted, pkg/mig/builder/balanced.go, balancedFormula.
_BALANCED_SLICES = {7: (3, 2, 1, 1), 4: (2, 1, 1)}


class LayoutError(ValueError):
    """A layout that a GPU cannot have: what is wrong, and a hint."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.what = message
        self.hint = hint


class Placement(NamedTuple):
    """A GPU instance to create."""

    profile: MigProfile
    #: The first memory slice that it occupies.
    start: int
    #: It becomes one MIG device; otherwise it gets no compute instance.
    is_whole: bool = True

    @property
    def slices(self) -> range:
        """The memory slices that it occupies."""
        return range(self.start, self.start + self.profile.size)


class LayoutChange(NamedTuple):
    """The steps to a layout; if instances prevent it, there are none."""

    keep: tuple[MigInstance, ...] = ()
    #: Those among the instances to keep that lack a compute instance.
    complete: tuple[MigInstance, ...] = ()
    destroy: tuple[MigInstance, ...] = ()
    create: tuple[Placement, ...] = ()
    #: The instances that prevent the layout.
    in_the_way: tuple[MigInstance, ...] = ()

    @property
    def is_due(self) -> bool:
        """Whether instances are created or destroyed, now or once nothing is in the way."""
        return bool(self.destroy or self.create or self.in_the_way)


def layout_profiles(names: Sequence[str], gpu: Gpu) -> tuple[MigProfile, ...]:
    """Return the profiles of the instances that a layout has on this GPU, in one order.

    names: profiles, or the name of one layout; `all-disabled` has no instances.

    Raises LayoutError if the GPU cannot have them.
    """
    desired = _in_order(_expand(names, gpu))
    if desired and _place(desired) is None:
        message = f"{describe(desired)} do not fit on {_name(gpu)}"
        raise LayoutError(
            message, f"write fewer or smaller ones, or a layout: {', '.join(layout_names(gpu))}"
        )
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


def layout_names(gpu: Gpu) -> list[str]:
    """Return the names of the layouts that the GPU can have, smallest instances first."""
    names = [f"{ALL}{_layout_name(profile.name)}" for profile in _smallest_first(gpu)]
    if _balanced(gpu):
        names.append(BALANCED)
    return [*names, DISABLED]


def describe(profiles: Iterable[MigProfile | MigInstance]) -> str:
    """Return `2 x 1g.10gb + 1 x 3g.40gb`."""
    counts = Counter[str]()
    for profile in profiles:
        name = profile.name if isinstance(profile, MigProfile) else profile.profile
        counts[name] += 1
    return " + ".join(f"{number} x {name}" for name, number in sorted(counts.items()))


def describe_layout(plan: Plan, gpu: Gpu) -> str:
    """Return the layout that the plan has for the GPU; empty if it has none."""
    for layout in plan.layouts:
        if layout.gpu_uuid == gpu.uuid:
            return describe(layout.profiles) if layout.enabled else "MIG mode off"
    return ""


def describe_result(after: Plan, gpu: Gpu) -> str:
    """Return the layout, and the number of devices in the plan `after` it if these are not its instances.

    Empty without a layout.
    """
    text = describe_layout(after, gpu)
    if not text:
        return ""
    instances = 0
    for layout in after.layouts:
        if layout.gpu_uuid == gpu.uuid:
            instances += len(layout.profiles)
    devices = [device for device in after.devices if is_part(device.addr, gpu.address)]
    return text if len(devices) == instances else f"{text}, {count(len(devices), 'device')}"


def change(
    desired: Sequence[MigProfile],
    existing: Sequence[MigInstance],
    fixed: Collection[int],
    useless: Collection[int] = (),
    used: Collection[int] = (),
) -> LayoutChange:
    """Return how to get from the instances that exist to those desired, with as few changes as possible.

    fixed: ids of instances that are never destroyed. They are kept if the layout has them and they are not
    useless; otherwise, the layout avoids them. If it cannot, they are in the way.
    useless: ids of instances that are not kept for the layout.
    used: ids of the instances that leases or processes use, which are kept above all.
    """
    desired = _in_order(desired)
    stay = [instance for instance in existing if instance.id in fixed]
    useful = [instance for instance in existing if instance.id not in useless]
    for keep in _kept(desired, useful, used):
        occupied = {*keep, *stay}
        places = _place(_without(desired, keep), tuple(occupied))
        if places is not None:
            return LayoutChange(
                keep=keep,
                complete=_incomplete(keep),
                destroy=tuple(instance for instance in existing if instance not in occupied),
                create=places,
            )
    unhindered = change(desired, existing, (), useless, used)
    removed: list[MigInstance] = []
    blocking: list[MigInstance] = []
    for instance in unhindered.destroy:
        if instance.id in fixed:
            removed.append(instance)
            if _blocks(instance, unhindered.create):
                blocking.append(instance)
    return LayoutChange(in_the_way=tuple(blocking or removed))


def _incomplete(instances: Iterable[MigInstance]) -> tuple[MigInstance, ...]:
    return tuple(instance for instance in instances if not instance.compute_instances)


def change_to(
    places: Sequence[Placement], existing: Sequence[MigInstance], fixed: Collection[int]
) -> LayoutChange:
    """Return how to get from the instances that exist to instances at these places.

    A MIG device, where an instance should not be whole, is created again without compute instances.

    fixed: ids of instances that are never destroyed: those that occupy a place are in the way.
    """
    by_place = {(instance.profile, instance.start): instance for instance in existing}
    keep: list[MigInstance] = []
    complete: list[MigInstance] = []
    create: list[Placement] = []
    for place in places:
        instance = by_place.get((place.profile.name, place.start))
        if instance is None:
            create.append(place)
            continue
        is_undesired_device = bool(instance.uuid) and not place.is_whole
        if is_undesired_device and instance.id not in fixed:
            create.append(place)
            continue
        keep.append(instance)
        if place.is_whole and not instance.compute_instances:
            complete.append(instance)
    blocking: list[MigInstance] = []
    destroy: list[MigInstance] = []
    for instance in existing:
        if instance in keep:
            continue
        if instance.id not in fixed:
            destroy.append(instance)
        elif _blocks(instance, create):
            blocking.append(instance)
    if blocking:
        return LayoutChange(in_the_way=tuple(blocking))
    return LayoutChange(
        keep=tuple(keep), complete=tuple(complete), destroy=tuple(destroy), create=tuple(create)
    )


class Instances(NamedTuple):
    """How MIG entries divide their GPUs. Instances that already exist are used."""

    #: The entry of each instance, by its address.
    entries: Mapping[str, DeviceEntry] = {}
    layouts: tuple[MigLayout, ...] = ()
    #: Why layouts are not in effect, by the address of their GPU.
    waiting: Mapping[str, Reason] = {}


def instances_of(entry: DeviceEntry, gpu: Gpu, gpus: Iterable[Gpu], used: Collection[str] = ()) -> Instances:
    """Return how a MIG entry divides its GPU, as far as its layout is in effect.

    Nothing if the layout is impossible.

    gpus: all GPUs, with the instances of this one, lost ones included.
    used: UUIDs of the instances that are leased or have processes.
    """
    children = [child for child in gpus if child.parent and child.physical_address == gpu.pci_address]
    child_entry = entry._replace(mig=(), virtual_number=entry.virtual_number or 1)
    if not entry.virtual_number:
        child_entry = child_entry._replace(sharing=NOT_SHARED)
    if not gpu.mig_profiles:  # lost, as are its instances
        return Instances({child.pci_address: child_entry for child in children})
    try:
        layout = layout_of(entry, gpu)
    except LayoutError:
        return Instances()
    address = gpu.pci_address
    if not layout.enabled and gpu.mig_enabled:
        return Instances({}, (layout,), {address: _waiting("MIG mode is still on", layout)})
    if not layout.enabled:
        return Instances({address: entry._replace(mig=())}, (layout,))
    in_use = [instance.id for instance in gpu.mig_instances if instance.uuid in used]
    needed = change(layout.profiles, gpu.mig_instances, (), (), in_use)
    waiting = {}
    if not gpu.mig_enabled:
        waiting[address] = _waiting("MIG mode is off", layout)
    elif needed.create or any(not instance.uuid for instance in needed.keep):
        present = describe(needed.keep) or "none of its instances"
        waiting[address] = _waiting(f"the GPU has {present}", layout)
    entries = dict.fromkeys(_divided_instances(children, needed), child_entry)
    return Instances(entries, (layout,), waiting)


def _divided_instances(children: Iterable[Gpu], needed: LayoutChange) -> list[str]:
    """Return the addresses of the instances that the layout has, or has lost."""
    kept_uuids = {instance.uuid for instance in needed.keep}
    missing = Counter(place.profile.name for place in needed.create)
    addresses: list[str] = []
    for child in children:
        if child.uuid in kept_uuids:
            addresses.append(child.pci_address)
        elif child.reason and missing[child.mig_profile]:
            # A lost instance counts as one of the missing ones, so that its devices stay listed.
            missing[child.mig_profile] -= 1
            addresses.append(child.pci_address)
    return addresses


def layout_of(entry: DeviceEntry, gpu: Gpu) -> MigLayout:
    """Return the layout that the entry specifies for its GPU.

    Raises LayoutError if the GPU cannot have it.
    """
    enabled = entry.mig != (DISABLED,)
    return MigLayout(str(gpu.uuid), enabled, layout_profiles(entry.mig, gpu), entry.mig_restore)


def with_layouts(gpus: Sequence[Gpu], layouts: Iterable[MigLayout]) -> tuple[Gpu, ...]:
    """Return the GPUs as they are once the layouts are in effect; new instances have no real address yet."""
    by_uuid = {layout.gpu_uuid: layout for layout in layouts}
    after: list[Gpu] = []
    for gpu in gpus:
        layout = by_uuid.get(gpu.parent or str(gpu.uuid))
        if layout is None:
            after.append(gpu)
        elif not gpu.parent:
            after += _split(gpu, layout, [child for child in gpus if child.parent == gpu.uuid])
    return tuple(after)


def _split(gpu: Gpu, layout: MigLayout, children: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPU and its instances as they are once the layout is in effect."""
    needed = change(layout.profiles, gpu.mig_instances if gpu.mig_enabled else (), ())
    instances = list(needed.keep)
    kept_uuids = {instance.uuid for instance in instances}
    parts = [child for child in children if child.uuid in kept_uuids]
    for number, place in enumerate(needed.create, start=1):
        instance = MigInstance(
            id=-number,
            profile=place.profile.name,
            start=place.start,
            size=place.profile.size,
            uuid=f"{gpu.uuid}/{number}",
        )
        part = Gpu(
            pci_address=f"{gpu.pci_address}-g{instance.id}",
            uuid=instance.uuid,
            name=gpu.name,
            memory_mib=place.profile.memory_mib,
            compute_capability=gpu.compute_capability,
            parent=str(gpu.uuid),
            identity=f"{gpu.uuid}/{instance.profile}@{instance.start}",
        )
        instances.append(instance)
        parts.append(part)
    whole = gpu._replace(
        mig_enabled=layout.enabled,
        mig_pending=layout.enabled,
        mig_instances=tuple(sorted(instances, key=lambda instance: instance.id)),
    )
    return [whole, *parts]


def _waiting(cause: str, layout: MigLayout) -> Reason:
    named = describe(layout.profiles) or DISABLED
    return Reason(f"its MIG layout ({named}) is not in effect yet: {cause}", MIG_PENDING)


def _kept(
    desired: Sequence[MigProfile], existing: Sequence[MigInstance], used: Collection[int]
) -> list[tuple[MigInstance, ...]]:
    """Return the sets of existing instances that the layout could keep.

    Those with most `used` ones (ids) come first, and of these the largest.
    """

    def number_used(keep: Iterable[MigInstance]) -> int:
        return sum(instance.id in used for instance in keep)

    whole = [instance for instance in existing if instance.is_whole]
    whole.sort(key=lambda instance: (instance.start, instance.id))
    desired_names = Counter(profile.name for profile in desired)
    sets: list[tuple[MigInstance, ...]] = []
    for number in range(min(len(whole), len(desired)), -1, -1):
        for keep in combinations(whole, number):
            names = Counter(instance.profile for instance in keep)
            if not names - desired_names:
                sets.append(keep)
    sets.sort(key=number_used, reverse=True)  # which keeps the order of sets with equal numbers
    return sets


def _without(desired: Iterable[MigProfile], keep: Iterable[MigInstance]) -> list[MigProfile]:
    """Return the desired profiles that none of the kept instances has."""
    names = Counter(instance.profile for instance in keep)
    missing = []
    for profile in desired:
        if names[profile.name]:
            names[profile.name] -= 1
        else:
            missing.append(profile)
    return missing


def _place(
    desired: Sequence[MigProfile], occupied: Sequence[MigInstance] = ()
) -> tuple[Placement, ...] | None:
    """Return a place for each profile, at the lowest starts; None if they do not fit beside what is there.

    Source: NVML API Reference, nvmlDeviceGetGpuInstancePossiblePlacements: instances do not overlap.
    """
    counts = Counter[str]()
    taken_slices: set[int] = set()
    for instance in occupied:
        counts[instance.profile] += 1
        taken_slices.update(instance.slices)
    for profile in desired:
        counts[profile.name] += 1
        if counts[profile.name] > profile.max_count:
            return None
    return _search(desired, taken_slices)


def _search(
    desired: Sequence[MigProfile], taken_slices: set[int], least_start: int = 0
) -> tuple[Placement, ...] | None:
    """Return places for all profiles beside the memory slices that are taken; None if there are none.

    least_start: the least start of the first profile.
    """
    if not desired:
        return ()
    profile = desired[0]
    later_profiles = desired[1:]
    for start in sorted(profile.starts):
        place = Placement(profile, start)
        if start < least_start or not taken_slices.isdisjoint(place.slices):
            continue
        # Equal profiles are placed in one order only.
        is_repeated = bool(later_profiles) and later_profiles[0] == profile
        places = _search(later_profiles, taken_slices.union(place.slices), start if is_repeated else 0)
        if places is not None:
            return (place, *places)
    return None


def _blocks(instance: MigInstance, places: Iterable[Placement]) -> bool:
    """Return whether the instance occupies a memory slice of one of the places."""
    occupied = set(instance.slices)
    return any(not occupied.isdisjoint(place.slices) for place in places)


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
    """Return the profiles of `all-balanced`: of each size the plain one that most instances can have.

    Source: github.com/NVIDIA/mig-parted, pkg/mig/builder/balanced.go, groupProfilesByDevice.
    """
    plain = [profile for profile in gpu.mig_profiles if re.fullmatch(r"\d+g\.\d+gb", profile.name)]
    by_slices: dict[int, MigProfile] = {}
    for profile in sorted(plain, key=lambda profile: (profile.max_count, profile.name)):
        by_slices[profile.slices] = profile
    balanced = []
    for slices in _BALANCED_SLICES.get(max(by_slices, default=0), ()):
        if slices not in by_slices:
            return []
        balanced.append(by_slices[slices])
    return balanced


def _possible(gpu: Gpu) -> str:
    return f"use one of its layouts: {', '.join(layout_names(gpu))}"


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.address} ({gpu.name})"
