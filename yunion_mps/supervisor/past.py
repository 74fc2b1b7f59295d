"""What an earlier daemon that was killed left behind: control daemons, and compute modes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from yunion_mps.errors import HostError
from yunion_mps.models import DomainPlan
from yunion_mps.mps.adoption import Left, left_behind
from yunion_mps.mps.control import PROGRAM
from yunion_mps.store import Store

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


def judge(left: Mapping[str, Left], planned: Sequence[DomainPlan]) -> list[tuple[str, str]]:
    """(what, hint) of each that the plan does not take over.

    It may have jobs: it is not ended but reported. Raises HostError where one serves a GPU that the plan
    needs, for none of them gets a second control daemon.
    """
    places = {plan.pipe_directory for plan in planned}
    needed = {uuid for plan in planned for uuid in plan.gpu_uuids}
    found = []
    for place, one in left.items():
        if place in places:
            continue
        what = f"a control daemon (PID {one.pid}) of an earlier daemon still serves {place}"
        hint = f"when its jobs are done: echo quit | CUDA_MPS_PIPE_DIRECTORY={place} {PROGRAM}; {AFTERWARDS}"
        if needed & set(one.gpu_uuids):
            raise HostError(what, hint)
        found.append((what, hint))
    return found
