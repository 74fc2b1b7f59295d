"""The holders of leases: each is watched until it ends, and described in answers, logs and events.

A lease taken by name expires one TTL after its last renewal, across restarts of the daemon. Times are
monotonic: that clock cannot be set, and stops while the host is suspended and no holder can renew.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from yunion_mps.core.errors import ShortageError
from yunion_mps.core.models import CDI_KIND, Device, Holder, Lease
from yunion_mps.core.reasons import Reason
from yunion_mps.core.units import rfc3339
from yunion_mps.host.proc import command_of, started_ticks, user_name
from yunion_mps.host.processes import Process, refuse_if_no_file_can_be_opened
from yunion_mps.leases.request import QueuedRequest
from yunion_mps.planning.environment import process_percentage, sharing_of

if TYPE_CHECKING:
    from yunion_mps import answers
    from yunion_mps.containers.lookup import Containers

#: How long a holder has to renew its lease after the daemon could not be reached.
RENEWAL_GRACE_S = 10.0


def renew(lease: Lease, now_s: float) -> Lease:
    """Return the lease with its full time to live from now; unchanged if it does not expire."""
    if lease.holder.binding != "name" or not lease.holder.ttl_s:
        return lease
    return lease._replace(ends_s=now_s + lease.holder.ttl_s, is_extended=False)


def with_time_left(lease: Lease, now_s: float) -> Lease:
    """Return the lease after a restart of the daemon: with the time that it had left.

    A lease that expired while the daemon was unreachable, or is about to, is extended by `RENEWAL_GRACE_S` so
    that its holder can renew it; only once, so that frequent restarts do not preserve a dead job's lease.
    """
    if lease.ends_s is None:  # it does not expire, or was written by a version that did not store it
        return renew(lease, now_s)
    soonest_s = now_s + min(lease.holder.ttl_s, RENEWAL_GRACE_S)
    if lease.ends_s < soonest_s and not lease.is_extended:
        return lease._replace(ends_s=soonest_s, is_extended=True)
    return lease._replace(ends_s=min(lease.ends_s, now_s + lease.holder.ttl_s))  # after a boot, a slow clock


class HolderWatch:
    """Watches the processes and timers that end leases, on the event loop.

    end: called with a lease's id and why it has ended.
    """

    def __init__(self, end: Callable[[str, str], None]) -> None:
        self._end = end
        self._processes: dict[str, Process] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def watch(self, lease: Lease) -> bool:
        """Watch the holder's process or timer in place of the previous one; return False if it has ended.

        In that case, and if this raises ShortageError, the previous one is still watched.
        """
        loop = asyncio.get_running_loop()
        holder = lease.holder
        if holder.binding == "name":
            self.forget(lease.id)
            cause = "it was not renewed in time"
            if lease.ends_s is not None:
                self._timers[lease.id] = loop.call_at(lease.ends_s, self._end, lease.id, cause)
            return True
        if holder.is_awaited:
            self.forget(lease.id)
            return True
        process = Process.adopt(holder.pid or 0)
        if process is None:
            return False
        try:
            has_ended = _has_ended(process, holder)
        except ShortageError:
            process.close()
            raise
        if has_ended:
            process.close()
            return False
        self.forget(lease.id)
        self._processes[lease.id] = process
        loop.add_reader(process.fileno(), self._end, lease.id, "its process ended")
        return True

    def forget(self, lease_id: str) -> None:
        """Stop watching the lease's holder."""
        timer = self._timers.pop(lease_id, None)
        if timer:
            timer.cancel()
        process = self._processes.pop(lease_id, None)
        if process:
            asyncio.get_running_loop().remove_reader(process.fileno())
            process.close()

    def expires_s(self, lease_id: str) -> float | None:
        """Return when a lease taken by name ends if it is not renewed, in s since 1970; None for others."""
        timer = self._timers.get(lease_id)
        if timer is None:
            return None
        return time.time() + timer.when() - asyncio.get_running_loop().time()


def _has_ended(process: Process, holder: Holder) -> bool:
    """Return whether the holder has ended, even if its PID was reused.

    Raises ShortageError if the process cannot be inspected for want of descriptors.
    """
    started = started_ticks(process.pid)
    if started is None and process.status() is None:  # it runs, but cannot be inspected
        refuse_if_no_file_can_be_opened(f"PID {process.pid} cannot be inspected")
        return False  # only its first thread has ended
    return started != holder.started


# -- in answers, logs and events


def lease_json(
    lease: Lease,
    expires_s: float | None,
    containers: Containers | None,
    sm_of: Callable[[str], int | None] = lambda _: None,
    peak_of: Callable[[str], int | None] = lambda _: None,
) -> answers.LeaseRecordJson:
    """Return the record of a lease.

    expires_s: in s since 1970; None if the lease ends with a process or a connection.
    containers: without them, the record is brief: what only the kernel knows about the holder is left out.
    sm_of: returns the SM utilization of a device (by address), in percent.
    peak_of: returns the highest memory use of a device (by address), in MiB.
    """
    budgets: list[answers.DeviceBudgetJson] = []
    for device in lease.devices:
        budget: answers.DeviceBudgetJson = {
            "addr": device.addr,
            "gpu": device.gpu_address,
            "memory_mib": device.memory_limit_mib,
            "thread_percentage": device.thread_percentage,
            "memory_peak_mib": peak_of(device.addr),
            "sm_utilization": sm_of(device.addr),
        }
        budgets.append(budget)
    return {
        "id": lease.id,
        "devices": [device.addr for device in lease.devices],
        "gpus": _gpus(lease.devices),
        "budgets": budgets,
        "thread_percentage": process_percentage(lease.devices, lease.environment),
        "budget_enforced": all(device.budget_enforced for device in lease.devices),
        "unenforced_gpus": _gpus(device for device in lease.devices if not device.budget_enforced),
        "sharing": sharing_of(lease.devices),
        "binding": lease.holder.binding,
        **_holder_json(lease.holder, lease.since_s, containers),
        "expires": None if expires_s is None else rfc3339(expires_s),
        "cdi": f"{CDI_KIND}={lease.cdi_name}" if lease.cdi else None,
        "environment": dict(lease.environment),
    }


def queued_json(queued: QueuedRequest, why: Reason, containers: Containers) -> answers.QueuedRequestJson:
    """Return the record of a queued request, and why it waits; its place in the list is its position."""
    return {
        **_holder_json(queued.holder, queued.since_s, containers),
        "requested": str(queued.request),
        "reason": why,
        "reason_code": why.code,
    }


def _holder_json(holder: Holder, since_s: float, containers: Containers | None) -> answers.HolderFieldsJson:
    pid = holder.pid
    command = None
    container = None
    runs = containers is not None and _still_runs(holder)
    if containers is not None and pid is not None and runs:
        command = holder.command or command_of(pid)
        container = containers.of(pid)
    return {
        # A claim outlives its containers, whose PIDs are reused.
        "pid": pid if runs or holder.binding != "name" else None,
        "uid": holder.uid,
        "user": user_name(holder.uid),
        "for_user": None if holder.job_uid is None else user_name(holder.job_uid),
        "command": command,
        "container": container.name if container else None,
        "container_id": container.id if container else None,
        "name": holder.name or None,
        "since": rfc3339(since_s),
    }


def _gpus(devices: Iterable[Device]) -> list[str]:
    return list(dict.fromkeys(device.gpu_address for device in devices))


def hint_for_another(holder: Holder) -> str:
    """Return what to do about a second container that is to have this container's lease."""
    if holder.name:  # one that was awaited, as the kubelet's plugin does
        return "it can start once that one has ended; the kubelet tries again: kubectl describe pod POD"
    return "take another lease: yunion-mps run --podman"


def _user_of(holder: Holder) -> str:
    """Return the user whose processes use the devices, as far as that is known, or else the lease's owner."""
    return user_name(holder.uid if holder.job_uid is None else holder.job_uid)


def describe_holder(holder: Holder, containers: Containers) -> str:
    """Return `job-17 of alice`, `python3 train.py (PID 4260, alice)` or `container web (PID 4260, root)`."""
    user = _user_of(holder)
    if holder.pid is None or holder.binding == "name":
        return f"{holder.name} of {user}"
    text = holder.command or command_of(holder.pid) or "a process"
    container = containers.of(holder.pid) if holder.binding == "container" else None
    if container:
        text = f"container {container.name}"
    return f"{text} (PID {holder.pid}, {user})"


#: The name of a claim's lease (kubernetes/dra/claims).
_CLAIM = re.compile(r"claim:(?P<namespace>[^/]+)/(?P<claim>[^@]+)@.+")


def _claim(holder: Holder) -> re.Match[str] | None:
    if holder.binding != "name" or holder.uid != 0:
        return None
    return _CLAIM.fullmatch(holder.name)


def with_container(lease: Lease, container: Holder) -> Lease:
    """Return the lease of a resource claim with the process of the container last started with it.

    Other leases that are taken by name are not changed, because users look for that name.
    """
    if not _claim(lease.holder):
        return lease
    holder = lease.holder._replace(pid=container.pid, started=container.started)
    return lease._replace(holder=holder)


@lru_cache(4096)  # each scrape of the metrics asks for all holders
def kubernetes_labels(holder: Holder, containers: Containers) -> Mapping[str, str] | None:
    """Return the pod with its container, or the resource claim, as labels; None outside Kubernetes."""
    claim = _claim(holder)
    if claim:
        return {"namespace": claim["namespace"], "pod": "", "container": "", "claim": claim["claim"]}
    process_container = containers.of(holder.pid) if holder.pid is not None else None
    if not process_container or not process_container.pod:
        return None
    namespace, pod, container = process_container.pod
    return {"namespace": namespace, "pod": pod, "container": container, "claim": ""}


def short_holder_label(holder: Holder, containers: Containers) -> str:
    """Return the user and the name, container or process: `bob (job-17)`, `alice (PID 4260)`."""
    container = None
    if holder.pid is not None and (holder.binding != "name" or _still_runs(holder)):
        container = containers.of(holder.pid)
    text = container.name if container else ""
    return f"{_user_of(holder)} ({text or holder.name or f'PID {holder.pid}'})"


def _still_runs(holder: Holder) -> bool:
    return holder.pid is not None and started_ticks(holder.pid) == holder.started
