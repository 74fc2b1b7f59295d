"""Deleted pods: their MPS clients are terminated before the kubelet kills them.

A client that gets SIGKILL while it uses the GPU may take its MPS server and all of that server's clients with
it; one that the server has disconnected cannot. The API server knows when the kubelet will do that: a pod's
`deletionTimestamp` is the end of its grace period.

Source: Kubernetes API, ObjectMeta, deletionTimestamp; Pod Lifecycle, section "Termination of Pods".
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypedDict, cast

from yunion_mps.core.errors import NotFoundError, YunionError
from yunion_mps.core.tasks import cancel, first_of
from yunion_mps.host.log import Failures
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.http.operations import GET_CLIENTS, TERMINATE_CLIENT
from yunion_mps.kubernetes.api.credentials import ApiServerError
from yunion_mps.kubernetes.api.objects import ApiObject, ObjectMeta, Resource, utc_s
from yunion_mps.kubernetes.api.server import NODES, ApiServer, MissingObjectError, missing_node, node_failure
from yunion_mps.kubernetes.metrics import API_SERVER, Counts

if TYPE_CHECKING:
    from yunion_mps.answers import MpsClientJson

log = logging.getLogger(__name__)

#: How long before the end of the grace period clients are terminated, in s; at most half of it.
_MARGIN_S = 3.0
#: Kubernetes' own default (Pod Lifecycle, section "Pod Termination Flow").
_GRACE_S = 30
#: How often, and until how long after the end of the grace period, a termination is retried, in s.
_RETRY_S = 0.5
_LATE_S = 60.0
#: Marks the mirror of a static pod, which continues when this object is deleted (Kubernetes: Create static
#: Pods, section "Observe static pod behavior").
_MIRROR = "kubernetes.io/config.mirror"
_ENDED = ("Succeeded", "Failed")


class ContainerStatus(TypedDict, total=False):
    containerID: str


class PodStatus(TypedDict, total=False):
    """The members of a pod's `status` that are used here."""

    phase: str
    containerStatuses: list[ContainerStatus]
    initContainerStatuses: list[ContainerStatus]
    ephemeralContainerStatuses: list[ContainerStatus]


class Pod(ApiObject, total=False):
    status: PodStatus


#: The members of a pod's metadata that are used here; others, such as managedFields, are large.
_METADATA = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds")


def _summarized(pod: Pod) -> Pod:
    """Return what is used of a pod; the whole object of each pod of a node would take several MiB."""
    members: Mapping[str, object] = pod["metadata"]
    metadata = cast("ObjectMeta", {name: members[name] for name in _METADATA if name in members})
    if _MIRROR in pod["metadata"].get("annotations", {}):
        metadata["annotations"] = {_MIRROR: ""}
    containers: list[ContainerStatus] = [{"containerID": id_} for id_ in sorted(_containers(pod))]
    phase = pod.get("status", {}).get("phase", "")
    return {"metadata": metadata, "status": {"phase": phase, "containerStatuses": containers}}


PODS = Resource("/api/v1", "pods", Pod, page=20, keep=_summarized)


class TerminatingPod(NamedTuple):
    """A pod that is being deleted, or was, with its namespace and name."""

    name: str
    #: The ids of its containers.
    containers: frozenset[str]
    #: Its grace period, in s.
    grace_s: float
    #: When that ends (monotonic), in s.
    ends_s: float

    @property
    def due_s(self) -> float:
        """When its clients have to be terminated (monotonic), in s."""
        return self.ends_s - min(_MARGIN_S, self.grace_s / 2)

    def has(self, client: MpsClientJson) -> bool:
        """Return whether it is a client of an MPS server, in one of the containers."""
        return client["server"] is not None and client["container_id"] in self.containers


class Deletions:
    """The pods that are being deleted, and when to terminate the clients of each."""

    def __init__(self) -> None:
        #: The pods that are not being deleted: their names and containers.
        self._running: dict[str, tuple[str, frozenset[str]]] = {}
        self._ending: dict[str, TerminatingPod] = {}
        #: Those that take_due has returned.
        self._taken: set[str] = set()

    def update(self, pods: Mapping[str, Pod], now_s: float, now_utc_s: float) -> None:
        """Take note of all pods of the node, by uid; `now_utc_s` are seconds since 1970."""
        for uid in self._taken - pods.keys():
            self._taken.remove(uid)
            self._ending.pop(uid, None)
        for uid in self._ending.keys() - pods.keys():  # its containers, if they still run, are being killed
            self._ending[uid] = self._ending[uid]._replace(ends_s=now_s)
        for uid in self._running.keys() - pods.keys():
            name, containers = self._running[uid]
            self._ending[uid] = TerminatingPod(name, containers, 0.0, now_s)
        self._running.clear()
        for uid, pod in pods.items():
            metadata = pod["metadata"]
            if _MIRROR in metadata.get("annotations", {}) or pod.get("status", {}).get("phase") in _ENDED:
                continue
            name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
            if "deletionTimestamp" in metadata:
                self._note_deletion(uid, name, pod, now_s, now_utc_s)
            else:
                self._running[uid] = name, _containers(pod)

    def _note_deletion(self, uid: str, name: str, pod: Pod, now_s: float, now_utc_s: float) -> None:
        metadata = pod["metadata"]
        grace_s = float(metadata.get("deletionGracePeriodSeconds", _GRACE_S))
        left_s = utc_s(metadata["deletionTimestamp"]) - now_utc_s
        ends_s = now_s + min(max(left_s, 0.0), grace_s)
        before = self._ending.get(uid)
        if before:  # deleted again with a shorter period
            ends_s = min(ends_s, before.ends_s)
        self._ending[uid] = TerminatingPod(name, _containers(pod), grace_s, ends_s)

    def take_due(self, now_s: float) -> list[TerminatingPod]:
        """Return the pods whose time has come; each is returned once."""
        due: list[TerminatingPod] = []
        for uid, pod in self._ending.items():
            if uid not in self._taken and pod.due_s <= now_s:
                self._taken.add(uid)
                due.append(pod)
        return due

    def next_s(self) -> float | None:
        """Return when the next pod is due (monotonic), in s; None if none is."""
        waiting = [pod.due_s for uid, pod in self._ending.items() if uid not in self._taken]
        return min(waiting, default=None)


class PodDeletionWatch:
    """Watches the node's pods. While the API server is unreachable, known deletions are still handled."""

    def __init__(
        self,
        server: ApiServer,
        node: str,
        daemon: AsyncDaemonClient,
        counts: Counts,
        utc_s: Callable[[], float] = time.time,
    ) -> None:
        """`utc_s` returns the seconds since 1970."""
        self._server = server
        self._node = node
        self._daemon = daemon
        self._utc_s = utc_s
        self._failures = Failures(log, counts.errors)
        self._deletions = Deletions()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Run without end."""
        await first_of(self._watch(), self._serve())

    async def _watch(self) -> None:
        fields = f"spec.nodeName={self._node}"
        is_checked = False
        async for pods in self._server.watch(PODS, fields=fields, confirm=True, on_failure=self._report):
            if self._failures.clear():
                log.info("watching the pods of node %s again", self._node)
            self._deletions.update(pods, _now_s(), self._utc_s())
            self._changed.set()
            if not is_checked:  # listing the pods of a node that does not exist succeeds, without pods
                is_checked = True
                await self._check_node()

    async def _check_node(self) -> None:
        try:
            await self._server.get(NODES, self._node)
        except MissingObjectError:
            log.warning("pod deletions cannot be seen: %s", missing_node(self._node))
        except ApiServerError:
            pass  # access is denied, or the watch of the pods fails, too, and reports it

    async def _serve(self) -> None:
        terminating: set[asyncio.Future[None]] = set()
        try:
            while True:
                for pod in self._deletions.take_due(_now_s()):
                    terminating.add(asyncio.ensure_future(self._terminate(pod)))
                terminating = {task for task in terminating if not task.done()}
                await self._wait()
        finally:
            await cancel(terminating)

    async def _wait(self) -> None:
        """Wait for a change of the pods, or until the next one is due."""
        next_s = self._deletions.next_s()
        left_s = math.inf if next_s is None else max(next_s - _now_s(), 0)
        await first_of(self._changed.wait(), asyncio.sleep(left_s))
        self._changed.clear()

    async def _terminate(self, pod: TerminatingPod) -> None:
        """Terminate the clients; while the daemon is unreachable, retry until the kubelet has killed them."""
        while True:
            try:
                clients = (await self._daemon.call(GET_CLIENTS))["clients"]
            except YunionError as error:
                if _now_s() > pod.ends_s + _LATE_S:
                    log.warning("pod %s: its MPS clients were not terminated: %s", pod.name, error)
                    return
                await asyncio.sleep(_RETRY_S)
            else:
                terminations = [self._terminate_client(pod, client) for client in clients if pod.has(client)]
                await asyncio.gather(*terminations)
                return

    async def _terminate_client(self, pod: TerminatingPod, client: MpsClientJson) -> None:
        try:
            ended = await self._daemon.call(TERMINATE_CLIENT, pid=client["pid"])
            text = f"terminated PID {client['pid']} before the kubelet kills it: {ended['how']}"
            log.info("pod %s: %s", pod.name, text)
        except NotFoundError:
            pass  # it has exited
        except YunionError as error:
            log.warning("pod %s: PID %d was not terminated: %s", pod.name, client["pid"], error)

    def _report(self, error: ApiServerError) -> None:
        text = "pod deletions cannot be seen, so a pod that is killed may end other pods' GPU work"
        self._failures.report(f"{text}: {node_failure(error, self._node)}", API_SERVER)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _containers(pod: Pod) -> frozenset[str]:
    """Return the ids of the pod's containers, without the runtime: `containerd://ID`.

    Source: Kubernetes API, ContainerStatus, containerID.
    """
    status = pod.get("status", {})
    containers: list[ContainerStatus] = []
    containers += status.get("containerStatuses", ())
    containers += status.get("initContainerStatuses", ())
    containers += status.get("ephemeralContainerStatuses", ())
    ids = {container.get("containerID", "").rpartition("/")[2] for container in containers}
    return frozenset(ids - {""})
