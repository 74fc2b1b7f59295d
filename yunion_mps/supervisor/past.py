"""What an earlier daemon that was killed left behind: control daemons, and compute modes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.compute_modes import ModeWork, carry_out, noted
from yunion_mps.errors import HostError
from yunion_mps.inventory import Nvml
from yunion_mps.models import DomainPlan, Plan
from yunion_mps.mps.adoption import Left, left_behind
from yunion_mps.mps.applying import InForce
from yunion_mps.mps.control import PROGRAM
from yunion_mps.store import Store
from yunion_mps.supervisor.notes import from_json

log = logging.getLogger(__name__)

AFTERWARDS = "the next start of yunion-mps-daemon then puts its GPUs' compute modes back"


def left_running(store: Store, watched: Collection[str]) -> dict[str, Left]:
    """The control daemons of ours that run unwatched, by pipe directory; what has ended is forgotten."""
    left = {}
    for place in store.domains():
        one = left_behind(place)
        if one is None and place not in watched:
            store.forget_domain(place)
        elif one and place not in watched:
            left[place] = one
    return left


def gpus_of(left: Mapping[str, Left]) -> set[str]:
    """The UUIDs of the GPUs that they serve."""
    return {uuid for one in left.values() for uuid in one.gpu_uuids}


class Past(NamedTuple):
    """What an earlier daemon left behind, and the plan does not take over.

    `known` is to be looked after until it has no jobs, `gpu_uuids` are the GPUs that control daemons still
    serve, and `notice` says what a human has to do about one of which nothing is noted.
    """

    known: list[InForce]
    gpu_uuids: set[str]
    notice: str


def find_past(store: Store, planned: Sequence[DomainPlan]) -> Past:
    """What is left; raises HostError where one of which nothing is noted serves a GPU that the plan needs.

    It may have jobs, so it is not touched; and none of its GPUs gets a second control daemon.
    """
    gpus = {plan.pipe_directory: set(plan.gpu_uuids) for plan in planned}
    needed = {uuid for uuids in gpus.values() for uuid in uuids}
    left = left_running(store, ())
    past = Past([], gpus_of(left), "")
    for place, one in left.items():
        if gpus.get(place, set()) & set(one.gpu_uuids):
            continue
        noted = from_json(store.in_force(place))
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
    spare = {*target.compute_modes, *past.gpu_uuids}
    modes = {uuid: mode for uuid, mode in noted(store).items() if uuid not in spare}
    carry_out(ModeWork(put_back=modes), nvml, store)
