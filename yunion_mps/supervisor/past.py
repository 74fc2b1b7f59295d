"""What an earlier daemon that was killed left behind: control daemons, and compute modes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from yunion_mps.errors import HostError
from yunion_mps.host.store import Store
from yunion_mps.inventory import Nvml
from yunion_mps.models import DomainPlan, Plan
from yunion_mps.mps.applying import InForce
from yunion_mps.mps.control import PROGRAM
from yunion_mps.mps.ownership import MpsProcess, our_processes
from yunion_mps.supervisor.compute_modes import ModeWork, carry_out, noted
from yunion_mps.supervisor.notes import from_json

log = logging.getLogger(__name__)

AFTERWARDS = "the next start of yunion-mps-daemon then puts its GPUs' compute modes back"


def left_running(store: Store | None, watched: Collection[str] = ()) -> list[MpsProcess]:
    """The MPS processes of ours that run in pipe directories which are not `watched`.

    What is noted of directories without any is removed. Raises ShortageError if processes cannot be listed.
    """
    running = our_processes()
    used = {*watched, *(one.pipe_directory for one in running)}
    try:
        for place in store.domains() if store else ():
            if store and place not in used:
                store.forget_in_force(place)
    except HostError as error:
        log.warning("records of ended control daemons cannot be deleted: %s. %s", error.message, error.hint)
    return [one for one in running if one.pipe_directory not in watched]


def gpus_of(processes: Iterable[MpsProcess]) -> set[str]:
    """The UUIDs of the GPUs that they serve."""
    return {uuid for one in processes for uuid in one.gpu_uuids}


class Past(NamedTuple):
    """What an earlier daemon left behind, and the plan does not take over.

    `running` are all processes of ours, `known` is to be looked after until it has no jobs, and `notice` says
    what the operator has to do about a control daemon without a record.
    """

    running: list[MpsProcess]
    known: list[InForce]
    notice: str


def find_past(store: Store | None, planned: Sequence[DomainPlan]) -> Past:
    """What is left; raises HostError where one of which nothing is noted serves a GPU that the plan needs.

    It may have jobs, so it is not touched; and none of its GPUs gets a second control daemon.
    """
    gpus = {plan.pipe_directory: set(plan.gpu_uuids) for plan in planned}
    needed = {uuid for uuids in gpus.values() for uuid in uuids}
    past = Past(left_running(store), [], "")
    for one in past.running:
        place = one.pipe_directory
        if one.is_server or gpus.get(place, set()) & set(one.gpu_uuids):
            continue
        noted = (from_json(store.in_force(place)) if store else None) or from_json(
            {"plan": one.plan, "old_servers": ()}  # it was started, and its daemon ended before it served
        )
        if noted and noted.plan.gpu_uuids == one.gpu_uuids:
            past.known.append(noted)
            continue
        what = f"a control daemon (PID {one.pid}) of an earlier daemon still serves {place}"
        hint = f"when its jobs are done: echo quit | CUDA_MPS_PIPE_DIRECTORY={place} {PROGRAM}; {AFTERWARDS}"
        if needed & set(one.gpu_uuids):
            raise HostError(what, hint)
        log.error("%s. %s", what, hint)
        past = past._replace(notice=f"{what}; {hint}")
    return past


def settle_modes(past: Past, target: Plan, nvml: Nvml | None, store: Store) -> None:
    """Put back the compute modes of GPUs that neither the plan nor anything of the past needs any more."""
    spare = {*target.compute_modes, *gpus_of(past.running)}
    modes = {uuid: mode for uuid, mode in noted(store).items() if uuid not in spare}
    carry_out(ModeWork(put_back=modes), nvml, store)
