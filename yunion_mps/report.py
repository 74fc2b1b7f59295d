"""What `config show` and `config check` say: the configuration and its plan, from no daemon."""

from __future__ import annotations

from typing import Any

from yunion_mps.config import KEYS
from yunion_mps.models import Config, DeviceEntry, Gpu, Plan, Source
from yunion_mps.planning import division, enforces_budgets
from yunion_mps.supervisor.preflight import Preflight


def config_json(config: Config) -> dict[str, Any]:
    """Every key with its value and where it stands, and the device entries as far as the file has them."""
    keys = {name: {"value": getattr(config, name), "from": _place(config.sources[name])} for name in KEYS}
    unit = {"value": config.gpu_memory_unit_mib, "from": _place(config.gpu_memory_unit_at)}
    return {"keys": keys, "gpu_memory_unit": unit, "devices": [_entry_json(one) for one in config.devices]}


def _entry_json(entry: DeviceEntry) -> dict[str, Any]:
    """How an entry divides its GPU; memory is in MiB."""
    shown: dict[str, Any] = {"path": entry.path}
    if entry.slices:
        shown["slices"] = [
            {
                "memory": one.memory_mib,
                "thread_percentage": one.thread_percentage,
                "priority": one.priority,
            }
            for one in entry.slices
        ]
    elif entry.memory_unit_mib:
        shown["memory_unit"] = entry.memory_unit_mib
        shown["memory_reserve"] = entry.memory_reserve_mib
    else:
        shown["virtual_number"] = entry.virtual_number
    if entry.thread_overcommit is not None:
        shown["thread_overcommit"] = entry.thread_overcommit
    return {**shown, "from": _place(entry.path_at)}


def plan_json(examination: Preflight) -> dict[str, Any]:
    """The effective configuration and the plan: what each GPU would become, and the control daemons."""
    plan, inventory = examination.plan, examination.inventory
    notice = ""
    if not examination.config.enable_cuda_mps:
        notice = "enable_cuda_mps is false: this host offers no MPS devices"
    notice = "; ".join([*([notice] if notice else []), *examination.remarks])
    return {
        "notice": notice,
        "driver": examination.inventory.driver.version or None,
        "host_id": plan.host_id,
        "gpus": [_gpu_json(gpu, plan) for gpu in inventory.gpus],
        "domains": [
            {
                "name": domain.name,
                "pipe_directory": domain.pipe_directory,
                "gpus": list(domain.gpu_uuids),
                "memory_limits": list(domain.memory_limits_mib),
                "thread_percentage": domain.thread_percentage,
            }
            for domain in plan.domains
        ],
        "configuration": config_json(examination.config),
    }


def _gpu_json(gpu: Gpu, plan: Plan) -> dict[str, Any]:
    devices = [device for device in plan.devices if device.gpu_uuid == gpu.uuid]
    domain = next((d.name for d in plan.domains if gpu.uuid in d.gpu_uuids), None)
    budgets = {(device.memory_limit_mib, device.thread_percentage) for device in devices}
    memory_mib, percentage = budgets.pop() if len(budgets) == 1 else (None, None)
    mode = plan.compute_modes.get(gpu.uuid or "")
    changes = mode and mode != gpu.compute_mode
    return {
        "addr": gpu.address,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "devices": len(devices),
        "division": division(plan, gpu.uuid),
        "memory_limit": memory_mib,
        "thread_percentage": percentage,
        "compute_mode": f"{gpu.compute_mode or 'unknown'} -> {mode}" if changes else gpu.compute_mode,
        "domain": domain,
        "budget_enforced": enforces_budgets(gpu),
        "reason": gpu.reason
        or plan.unavailable.get(gpu.pci_address, "")
        or ("" if domain else "not configured"),
    }


def _place(source: Source) -> str:
    return source.file if source.line is None else f"{source.file}:{source.line}"
