"""`yunion-mps-daemon --adopt PID`: a control daemon not started by us is adopted, with its jobs.

This changes nothing about that process: the daemon finds it at its next start, and sets its limits.
"""

from __future__ import annotations

import logging

from yunion_mps.errors import HostError
from yunion_mps.host.proc import environment_of
from yunion_mps.host.store import Store
from yunion_mps.mps.conversation import peer_of
from yunion_mps.mps.processes import MARK, PROGRAM, AdoptionOrder, could_be_ours, record_order
from yunion_mps.mps.startup import order_to_adopt
from yunion_mps.paths import Paths
from yunion_mps.supervisor.preflight import Preflight, run_preflight

log = logging.getLogger("yunion_mps.daemon")


def adopt(paths: Paths, pid: int) -> int:
    """Record that it is ours; raises YunionError with the reason if it cannot be."""
    preflight = run_preflight(paths)
    try:
        preflight.check()
        found = _judged(paths, pid, preflight)
    finally:
        preflight.close()
    if Store.exists(paths):
        store = Store(paths)
        try:
            store.forget_limits(found.pipe_directory)  # what is noted there is of another control daemon
        finally:
            store.close()
    record_order(found)
    log.info("the control daemon (PID %d) counts as ours now: yunion-mps-daemon goes on with it", pid)
    return 0


def _judged(paths: Paths, pid: int, preflight: Preflight) -> AdoptionOrder:
    config, plan = preflight.config, preflight.plan
    if config.cuda_mps_scope != "host" or not plan.domains:
        why = "cuda_mps_scope is gpu" if plan.domains else "the configuration divides no GPU"
        hint = "only the one control daemon of all GPUs can be adopted"
        raise HostError(f"the control daemon (PID {pid}) cannot be adopted: {why}", hint)
    domain = plan.domains[0]._replace(pipe_directory=paths.under(plan.domains[0].pipe_directory))
    peer = peer_of(domain.pipe_directory)
    if peer is None or peer.pid != pid:
        serves = f"PID {peer.pid} serves there" if peer else "none serves there"
        hint = f"adopt the one that does; all that there are: pgrep -a {PROGRAM[:15]}"
        raise HostError(f"PID {pid} is no control daemon that serves {domain.pipe_directory}: {serves}", hint)
    environment = environment_of(pid)
    if not could_be_ours(peer.pid) or not environment:
        what = f"PID {pid} (uid {peer.uid}) is not NVIDIA's {PROGRAM}, or not root's"
        raise HostError(what, f"look at it: ls -l /proc/{pid}/exe")
    if MARK in environment:
        raise HostError(f"the control daemon (PID {pid}) is ours already", "nothing is to be done")
    gpus = [gpu.uuid for gpu in preflight.inventory.gpus]
    return order_to_adopt(pid, environment, gpus, domain)
