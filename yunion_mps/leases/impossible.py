"""Requests that no waiting helps: they could not be met if everything were free and served."""

from __future__ import annotations

from yunion_mps.errors import HostError, NeverFreeError
from yunion_mps.leases.matching import devices_for, pools_for
from yunion_mps.leases.offers import Offers
from yunion_mps.leases.placement import pick
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.models import Device
from yunion_mps.planning import free_units, units_for

UNENFORCED_HINT = "take it all the same: --allow-unlimited (in Python: allow_unlimited=True)"


def refuse_impossible(request: LeaseRequest, offers: Offers) -> None:
    """Raise NeverFreeError where the request could not be met if everything were free and served.

    Raises HostError where it could, by GPUs that enforce no budget.
    """
    pools = pools_for(request, offers) if request.memory_mib else []
    if any(units_for(one.pool, request.memory_mib) <= free_units(one.pool) for one in pools):
        return
    by_gpu: dict[str, list[Device]] = {}
    for offer in devices_for(request, offers):
        by_gpu.setdefault(offer.device.gpu_uuid, []).append(offer.device)
    if pick(request, by_gpu, offers):
        return
    if request.enforced:
        anywhere = request._replace(enforced=False)
        refuse_impossible(anywhere, offers)
        raise HostError(_unenforced(anywhere, offers), UNENFORCED_HINT)
    number, gpus = sum(map(len, by_gpu.values())), len(by_gpu)
    there = f"{number} such devices on {gpus} GPU{'' if gpus == 1 else 's'}" if number else "no such devices"
    hint = "see: yunion-mps list" if offers.devices else "see why: yunion-mps status"
    if not by_gpu and pools_for(request, offers):
        hint = "memory is handed out in units here: --gpu-mem 2GiB"
    if request.memory_mib:
        sizes = [f"at most {one.pool.memory_mib} MiB of GPU {one.gpu}" for one in pools]
        there = ", ".join(sizes) or "no GPUs whose memory is handed out in units, and no slices of that size"
        hint = "see memory_unit and slices: man yunion-mps-host_container_device.yml"
    raise NeverFreeError(f"{request} can never be had: there are {there}", hint)


def _unenforced(request: LeaseRequest, offers: Offers) -> str:
    of = {one.device.gpu_uuid for one in devices_for(request, offers)}
    of |= {one.pool.gpu_uuid for one in pools_for(request, offers)}
    names = [name for uuid, name in offers.unenforced.items() if uuid in of]
    which = f"GPU {names[0]}, which is" if len(names) == 1 else f"GPUs {', '.join(names)}, which are"
    return f"no budget is enforced on {which} older than Volta: a command could use all of the memory"
