"""How a plan divides a GPU, in words: for what shows a plan, or what another one would change."""

from __future__ import annotations

from itertools import groupby

from yunion_mps.models import NORMAL, Device, Plan, Pool


def division(plan: Plan, gpu_uuid: str | None) -> str:
    """Such as `1 x 8192 MiB, 50 % + 2 x 4096 MiB, 25 %` or `180 units of 128 MiB`; empty if unused."""
    pool = next((pool for pool in plan.pools if pool.gpu_uuid == gpu_uuid), None)
    if pool:
        return _pool(pool)
    devices = [device for device in plan.devices if device.gpu_uuid == gpu_uuid]
    return " + ".join(f"{len(list(group))} x {what}" for what, group in groupby(devices, _budget))


def _budget(device: Device) -> str:
    priority = "" if device.priority == NORMAL else f", {device.priority.replace('_', ' ')}"
    return f"{device.memory_limit_mib} MiB, {device.thread_percentage:g} %{priority}"


def _pool(pool: Pool) -> str:
    text = f"{pool.memory_mib // pool.unit_mib} units of {pool.unit_mib} MiB"
    if pool.reserve_mib:
        text += f", {pool.reserve_mib} MiB in reserve for each client"
    if pool.thread_overcommit is None:
        return text + ", threads not limited"
    return text if pool.thread_overcommit == 1 else f"{text}, threads {pool.thread_overcommit:g} times"
