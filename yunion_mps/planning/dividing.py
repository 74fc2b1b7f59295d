"""How an entry divides its GPU: into equal devices, into unequal ones, or by amounts out of a pool.

Threads are reckoned in tenths of a percent, as whole numbers: that is how exact NVIDIA's programs are.
"""

from __future__ import annotations

from yunion_mps.models import Config, DeviceEntry, Gpu, PlannedGpu, Pool, Slice, SliceEntry

_ALL_TENTHS = 1000

#: How often the policies of `cuda_mps_thread_percentage` give the threads away; None does not limit them.
_OVERCOMMIT = {"equal": 1.0, "double": 2.0, "none": None}


def divide(entry: DeviceEntry, gpu: Gpu, config: Config, domain: str, clients: int) -> PlannedGpu:
    """The GPU divided as the entry says, which must be right for it; `clients` is how many MPS allows."""
    uuid, total_mib = str(gpu.uuid), gpu.memory_mib or 0
    overcommit = overcommit_of(entry, config)
    if entry.slices:
        slices = tuple(
            Slice(one.memory_mib, _tenths(one, total_mib, overcommit) / 10, one.priority)
            for one in entry.slices
        )
        most_mib = max(one.memory_limit_mib for one in slices)
        most = max(one.thread_percentage for one in slices)
        return PlannedGpu(uuid, most_mib, len(slices), most, slices)
    if entry.memory_unit_mib:
        reserve_mib = entry.memory_reserve_mib
        unit_mib = entry.memory_unit_mib
        most_mib = _whole_units(total_mib - reserve_mib, unit_mib)
        pool = Pool(uuid, domain, unit_mib, most_mib, total_mib, reserve_mib, clients, overcommit)
        return PlannedGpu(uuid, most_mib, 0, share_percentage(most_mib, total_mib, overcommit), pool=pool)
    number = entry.virtual_number
    percentage, share_mib = thread_percentage(config.cuda_mps_thread_percentage, number), total_mib // number
    together = min(config.cuda_mps_combine, number)
    if together == 1:
        return PlannedGpu(uuid, share_mib, number, percentage)
    most = min(100.0, round(percentage * together, 1))
    return PlannedGpu(uuid, share_mib * together, number, most, (Slice(share_mib, percentage),) * number)


def thread_percentage(policy: str, virtual_number: int) -> float:
    """The share of SM threads in percent: 100/n, 100/(0.5 n) or 100, one decimal, rounded down, at least 0.1.

    NVIDIA suggests the first for clients that are always busy, the second to let them use idle time.
    """
    return share_percentage(1, virtual_number, _OVERCOMMIT[policy])


def share_percentage(part: int, whole: int, overcommit: float | None) -> float:
    """The part's share of the SM threads in percent, over-committed; rounded as `thread_percentage`."""
    return _share_tenths(part, whole, overcommit) / 10


def overcommit_of(entry: DeviceEntry, config: Config) -> float | None:
    """How often the GPU's threads may be given away, None for as often as there are clients."""
    if entry.thread_overcommit is not None:
        return entry.thread_overcommit
    return _OVERCOMMIT[config.cuda_mps_thread_percentage]


def wrong_slices(entry: DeviceEntry, gpu: Gpu, config: Config) -> list[tuple[str, str]]:
    """What the slices take that the GPU has not, and the remedies."""
    total_mib = gpu.memory_mib
    if total_mib is None:
        return []
    wrong = []
    taken_mib = sum(one.memory_mib for one in entry.slices)
    if taken_mib > total_mib:
        what = f"slices have {taken_mib} MiB in all, more than the {total_mib} MiB of {_named(gpu)}"
        wrong.append((what, f"take {taken_mib - total_mib} MiB off them"))
    overcommit = overcommit_of(entry, config)
    by_share = all(one.thread_percentage is None for one in entry.slices)
    if overcommit is None or by_share:
        return wrong
    tenths = sum(_tenths(one, total_mib, overcommit) for one in entry.slices)
    if tenths > round(_ALL_TENTHS * overcommit):
        most = f"more than {100 * overcommit:g} %"
        what = f"slices have {tenths / 10:g} % of the threads of {_named(gpu)} in all, {most}"
        more = -(-tenths // 10) / 100
        wrong.append((what, f"lower their thread_percentage, or over-commit it: thread_overcommit: {more:g}"))
    return wrong


def wrong_pool(entry: DeviceEntry, gpu: Gpu) -> list[tuple[str, str]]:
    """Why no client could get anything of the pool, and the remedy."""
    if gpu.memory_mib is None or gpu.memory_mib >= entry.memory_unit_mib + entry.memory_reserve_mib:
        return []
    what, smaller = f"memory_unit is {entry.memory_unit_mib} MiB,", "a smaller one"
    if entry.memory_reserve_mib:
        what = f"{what[:-1]} and memory_reserve {entry.memory_reserve_mib} MiB, together"
        smaller = "smaller ones"
    what += f" more than the {gpu.memory_mib} MiB of {_named(gpu)}"
    return [(what, f"write {smaller}, or divide the GPU by virtual_number")]


def _whole_units(memory_mib: int, unit_mib: int) -> int:
    return max(0, memory_mib) // unit_mib * unit_mib


def _tenths(one: SliceEntry, total_mib: int, overcommit: float | None) -> int:
    if one.thread_percentage is not None:
        return round(one.thread_percentage * 10)
    return _share_tenths(one.memory_mib, total_mib, overcommit)


def _share_tenths(part: int, whole: int, overcommit: float | None) -> int:
    if overcommit is None:
        return _ALL_TENTHS
    hundredths = round(
        overcommit * 100
    )  # as the configuration has it: a whole number keeps the division exact
    return max(1, min(_ALL_TENTHS, _ALL_TENTHS * part * hundredths // (100 * whole)))


def _named(gpu: Gpu) -> str:
    return f"GPU {gpu.address} ({gpu.name})"
