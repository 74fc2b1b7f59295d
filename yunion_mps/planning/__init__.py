"""The plan: which control daemons, devices and limits the configuration asks of the GPUs found."""

from __future__ import annotations

from yunion_mps.planning.division import (
    division,
    enforces_budgets,
    free_units,
    max_clients,
    pool_device,
    pools_of,
    reason_against,
    units_for,
)
from yunion_mps.planning.environment import (
    DEVICE_VARIABLE,
    client_environment,
    decimal,
    whole_environment,
    why_not_honoured,
)
from yunion_mps.planning.plan import ModeChange, devices_of, make_plan, mode_changes

__all__ = [
    "DEVICE_VARIABLE",
    "ModeChange",
    "client_environment",
    "decimal",
    "devices_of",
    "division",
    "enforces_budgets",
    "free_units",
    "make_plan",
    "max_clients",
    "mode_changes",
    "pool_device",
    "pools_of",
    "reason_against",
    "units_for",
    "whole_environment",
    "why_not_honoured",
]
