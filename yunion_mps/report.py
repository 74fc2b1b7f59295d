"""What `config show` and `config check` say: the configuration and its plan, from no daemon."""

from __future__ import annotations

from typing import Any

from yunion_mps.config import KEYS
from yunion_mps.examination import Examination
from yunion_mps.models import Config, Gpu, Plan, Source
from yunion_mps.planning import enforces_budgets


def config_json(config: Config) -> dict[str, Any]:
    """Every key with its value and where it stands, and the device entries."""
    keys = {name: {"value": getattr(config, name), "from": _place(config.sources[name])} for name in KEYS}
    devices = [
        {"path": entry.path, "virtual_number": entry.virtual_number, "from": _place(entry.path_at)}
        for entry in config.devices
    ]
    return {"keys": keys, "devices": devices}


def plan_json(examination: Examination) -> dict[str, Any]:
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
    first = devices[0] if devices else None
    mode = plan.compute_modes.get(gpu.uuid or "")
    changes = mode and mode != gpu.compute_mode
    return {
        "addr": gpu.address,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "devices": len(devices),
        "memory_limit": first.memory_limit_mib if first else None,
        "thread_percentage": first.thread_percentage if first else None,
        "compute_mode": f"{gpu.compute_mode or 'unknown'} -> {mode}" if changes else gpu.compute_mode,
        "domain": first.domain if first else None,
        "budget_enforced": enforces_budgets(gpu),
        "reason": gpu.reason
        or plan.unavailable.get(gpu.pci_address, "")
        or ("" if devices else "not configured"),
    }


def _place(source: Source) -> str:
    return source.file if source.line is None else f"{source.file}:{source.line}"
