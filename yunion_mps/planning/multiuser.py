"""Which users a control daemon serves at once: one, or all of them in multiuser mode.

Before Volta, NVIDIA's control program accepts multiuser mode, and then refuses the clients of every user
except root (CUDA_ERROR_NOT_PERMITTED), as users have reported. So GPUs that are not known to be Volta or
newer do without it.

Source: NVIDIA: Multi-Process Service, section "Provisioning Sequence", Server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from yunion_mps.core.enums import MPS
from yunion_mps.core.models import Gpu, Inventory, Plan
from yunion_mps.core.reasons import MULTIUSER_UNSUPPORTED, Reason
from yunion_mps.core.settings import Config
from yunion_mps.core.text import count, list_of
from yunion_mps.planning.division import enforces_budgets, why_unenforced


def is_multiuser(config: Config, gpus: Sequence[Gpu]) -> bool:
    """Return whether the control daemon of these GPUs serves all users at once."""
    return config.cuda_mps_multiuser and not gpus_without_multiuser(gpus)


def gpus_without_multiuser(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that are not known to be Volta or newer, so that multiuser mode does not work."""
    return [gpu for gpu in gpus if not enforces_budgets(gpu)]


def multiuser_warnings(config: Config, served: Sequence[Gpu]) -> Iterator[Reason]:
    """Warn of GPUs, among those that are shared through MPS, that are served without multiuser mode."""
    unsupported = gpus_without_multiuser(served)
    if not config.cuda_mps_multiuser or not unsupported:
        return
    reasons = list_of(f"GPU {_name(gpu)} is {why_unenforced(gpu, MPS)}" for gpu in unsupported)
    text = f"cuda_mps_multiuser is true, but {reasons}"
    place = "there" if config.cuda_mps_scope == "gpu" else "on this host"
    yield Reason(f"{text}: {place}, only one user's jobs run at a time", MULTIUSER_UNSUPPORTED)


def describe_users(plan: Plan, inventory: Inventory, *, knows_multiuser: bool | None) -> str:
    """Return whose jobs run at the same time, and what would let more users share the host.

    `knows_multiuser` is whether NVIDIA's control program supports multiuser mode, None if that is unknown.
    Empty if no GPU is shared through MPS.
    """
    if not plan.domains:
        return ""
    one_user_gpus: set[str] = set()
    all_users_gpus: set[str] = set()
    is_shared = False
    for domain in plan.domains:
        if domain.multiuser:
            all_users_gpus.update(domain.gpu_uuids)
        else:
            one_user_gpus.update(domain.gpu_uuids)
            is_shared = is_shared or len(domain.gpu_uuids) > 1
    if not one_user_gpus:
        return "jobs of all users run at the same time"
    gpus = [gpu for gpu in inventory.gpus if gpu.uuid in one_user_gpus]
    places = _places(gpus, is_shared=is_shared, has_others=bool(all_users_gpus))
    text = f"only one user's jobs run at a time on {places}; others wait"
    if all_users_gpus:
        addresses = [gpu.address for gpu in inventory.gpus if gpu.uuid in all_users_gpus]
        text += f"; on GPU {', '.join(addresses)}, jobs of all users run at the same time"
    if unsupported := gpus_without_multiuser(gpus):
        why_not = f"GPU {_name(unsupported[0])} is {why_unenforced(unsupported[0], MPS)}"
    elif knows_multiuser is False:
        why_not = "its NVIDIA control program does not support that (570 and later do)"
    else:
        return f"{text}. To run all users' jobs at the same time, set cuda_mps_multiuser: true in host.conf"
    if all_users_gpus:
        return f"{text}. The others wait because {why_not}"
    text += f". This host cannot run all users' jobs at the same time: {why_not}"
    if is_shared:
        text += ". To have one user at a time on each GPU instead, set cuda_mps_scope: gpu in host.conf"
    return text


def _places(gpus: Sequence[Gpu], *, is_shared: bool, has_others: bool) -> str:
    if len(gpus) == 1:
        return f"GPU {gpus[0].address}"
    if not is_shared and has_others:
        return f"each of GPU {', '.join(gpu.address for gpu in gpus)}"
    return f"these {count(len(gpus), 'GPU')} together" if is_shared else "each GPU"


def _name(gpu: Gpu) -> str:
    return f"{gpu.address} ({gpu.name})" if gpu.name else gpu.address
