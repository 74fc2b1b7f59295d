"""Publishes the node's devices as ResourceSlices, and keeps these current.

All slices form one pool, named after the node, with one generation. Writes are rare: the API server of 5,000
nodes has to store each of them and to tell every scheduler.

Source: Kubernetes API, ResourceSlice, ResourcePool; k8s.io/api/resource/v1/types.go.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from http import HTTPStatus
from typing import NamedTuple, TypedDict

from yunion_mps.core.tasks import first_of
from yunion_mps.kubernetes.api.credentials import ApiServerError
from yunion_mps.kubernetes.api.objects import ApiObject, ObjectMeta, OwnerReference, Resource
from yunion_mps.kubernetes.api.server import NODES, ApiServer, Backoff
from yunion_mps.kubernetes.dra.resource_objects import API_VERSION, SINCE, DeviceTaint, SliceDevice
from yunion_mps.kubernetes.dra.slice_devices import DRIVER, OfferedDevice
from yunion_mps.kubernetes.metrics import API_SERVER, Counts

log = logging.getLogger(__name__)

#: A slice may have 128 devices, but only 64 if any has a taint, and any device may get one.
MAX_DEVICES = 64
#: The least time between writes, unless a device's health has changed, in s.
INTERVAL_S = 5.0
#: Taints that say how a device is used, not whether it is healthy.
_USE_TAINTS = ("leased", "no_memory", "pending", "reserved")
_MAX_NAME = 253
_HASH_LENGTH = 8


class SlicePool(TypedDict):
    name: str
    generation: int
    resourceSliceCount: int


class PooledSpec(TypedDict):
    driver: str
    nodeName: str
    pool: SlicePool


class SliceSpec(PooledSpec, total=False):
    devices: list[SliceDevice]


class StoredDevices(NamedTuple):
    """What is kept of a stored slice's devices: several thousand would take much memory."""

    digest: str
    have_taints: bool


class SpecifiedSlice(ApiObject):
    spec: SliceSpec


class ResourceSlice(SpecifiedSlice, total=False):
    """One that the API server has stored has `stored` instead of its devices."""

    stored: StoredDevices


def _summarized(stored: ResourceSlice) -> ResourceSlice:
    spec: SliceSpec = {**stored["spec"], "devices": []}
    return {**stored, "spec": spec, "stored": summary(stored["spec"].get("devices", ()))}


#: A page of 8 full slices takes 2 MiB once it is parsed.
SLICES = Resource(f"/apis/{API_VERSION}", "resourceslices", ResourceSlice, SINCE, page=8, keep=_summarized)


class SliceWrite(NamedTuple):
    """A slice to write."""

    #: With a resource version, it replaces the stored slice.
    metadata: ObjectMeta
    pool: SlicePool
    devices: Sequence[OfferedDevice]

    def build(self) -> ResourceSlice:
        """Build one slice; those of several thousand devices would take much memory at the same time."""
        spec: SliceSpec = {"driver": DRIVER, "nodeName": self.pool["name"], "pool": self.pool}
        spec["devices"] = [device.device for device in self.devices]
        return {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": self.metadata,
            "spec": spec,
        }


class Writes(NamedTuple):
    """The writes that make the stored slices the desired ones."""

    #: The slices to create or replace.
    stored: Sequence[SliceWrite]
    #: The names of the slices to delete.
    deleted: Sequence[str]


def slices_of(offered: Iterable[OfferedDevice], *, with_taints: bool = True) -> list[list[OfferedDevice]]:
    """Return the devices of each slice. A GPU's are in one slice if they fit: its loss changes only one.

    Without taints, because the cluster does not support them, devices that would have one are left out.
    """
    by_gpu: dict[str, list[OfferedDevice]] = {}
    for device in offered:
        if with_taints or not device.taint:
            by_gpu.setdefault(device.gpu, []).append(device)
    slices: list[list[OfferedDevice]] = [[]]
    for devices in by_gpu.values():
        if len(slices[-1]) + min(len(devices), MAX_DEVICES) > MAX_DEVICES:
            slices.append([])
        for device in devices:
            if len(slices[-1]) == MAX_DEVICES:
                slices.append([])
            slices[-1].append(device)
    return slices


def slice_name(node: str, index: int) -> str:
    """Return the name of a slice: with the node's or, if that is too long, a hash of it.

    Source: Kubernetes: Object Names and IDs, section "DNS Subdomain Names".
    """
    name = f"{node}-{DRIVER}-{index}"
    if len(name) <= _MAX_NAME:
        return name
    digest = sha256(node.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{node[: _MAX_NAME - len(name) - _HASH_LENGTH - 1]}-{digest}-{DRIVER}-{index}"


def plan_writes(
    existing: Mapping[str, ResourceSlice],
    desired: Sequence[Sequence[OfferedDevice]],
    node: str,
    owner: OwnerReference | None,
) -> Writes:
    """Return what to write.

    existing: the stored slices of the driver on this node, by name
    desired: the devices of each slice
    owner: the node, so that the slices are deleted with it; None if it is not known

    The generation is kept if a single slice changes; otherwise, schedulers ignore the old slices, and wait
    until they have all new ones.
    """
    slices = {slice_name(node, index): devices for index, devices in enumerate(desired)}
    generation = max((stored["spec"]["pool"]["generation"] for stored in existing.values()), default=0)
    pool: SlicePool = {"name": node, "generation": generation, "resourceSliceCount": len(desired)}
    changed: list[str] = []
    for name, devices in slices.items():
        stored = existing.get(name)
        if stored is None or stored["spec"]["pool"] != pool or stored["stored"] != _summary_of(devices):
            changed.append(name)
    deleted = [name for name in existing if name not in slices]
    if len(changed) + len(deleted) > 1 or (changed and changed[0] not in existing):
        pool = {**pool, "generation": generation + 1}
        changed = list(slices)
    writes: list[SliceWrite] = []
    for name in changed:
        metadata: ObjectMeta = {"name": name}
        if owner:
            metadata["ownerReferences"] = [owner]
        if name in existing:
            metadata["resourceVersion"] = existing[name]["metadata"]["resourceVersion"]
        writes.append(SliceWrite(metadata, pool, slices[name]))
    return Writes(writes, deleted)


def _summary_of(devices: Iterable[OfferedDevice]) -> StoredDevices:
    return summary(device.device for device in devices)


def summary(devices: Iterable[SliceDevice]) -> StoredDevices:
    """Return a summary of the devices without the times that the API server adds to taints."""
    digest = sha256()
    have_taints = False
    for device in devices:
        taints = device.get("taints")
        if taints:
            have_taints = True
            device = {**device, "taints": [_without_time(taint) for taint in taints]}
        digest.update(json.dumps(device, sort_keys=True).encode())
    return StoredDevices(digest.hexdigest(), have_taints)


def _without_time(taint: DeviceTaint) -> DeviceTaint:
    return {"key": taint["key"], "effect": taint["effect"]}


class SlicePublisher:
    """Keeps the node's slices. `offer` says what there is, `run` writes it."""

    def __init__(
        self,
        server: ApiServer,
        node: str,
        counts: Counts,
        interval_s: float = INTERVAL_S,
        backoff: Backoff | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Publish nothing yet.

        node: the node's name
        interval_s: the least time between two writes; health is written at once
        backoff: how long to wait after failures
        sleep: waits for a number of seconds
        """
        self._server = server
        self._node = node
        self._counts = counts
        self._interval_s = interval_s
        self._backoff = backoff or Backoff()
        self._sleep = sleep
        self._offered: Sequence[OfferedDevice] | None = None
        self._existing: dict[str, ResourceSlice] | None = None
        #: The number of states that the watch has delivered: the answer to an overlapping write may be older.
        self._seen = 0
        #: The devices as they were sent, by resource version: a cluster drops what it does not support.
        self._sent: dict[str, StoredDevices] = {}
        self._with_taints = True
        self._owner: OwnerReference | None = None
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self._written_s = -math.inf
        #: What is published, or why not, in one line.
        self.status = "the devices are not published yet"

    def offer(self, offered: Sequence[OfferedDevice]) -> None:
        """Publish these devices from now on: at once if the health of one has changed, otherwise soon."""
        if offered == self._offered:
            return
        if _health(offered) != _health(self._offered or ()):
            self._urgent.set()
        self._offered = offered
        self._changed.set()

    async def run(self) -> None:
        """Follow the stored slices, and write those that differ, without end."""
        await first_of(self._watch(), self._publish())

    async def _publish(self) -> None:
        while True:
            await self._changed.wait()
            await self._wait_for_turn()
            self._changed.clear()
            self._urgent.clear()
            try:
                await self._write()
                self._backoff.reset()
            except ApiServerError as error:
                self._report(error)
                self._changed.set()
                self._urgent.set()  # the backoff is the only wait
                await self._sleep(self._backoff.next_s())

    async def _watch(self) -> None:
        selection = f"spec.driver={DRIVER},spec.nodeName={self._node}"
        async for slices in self._server.watch(SLICES, fields=selection, on_failure=self._report):
            self._existing = _by_name(slices.values())
            self._seen += 1
            self._changed.set()

    async def _wait_for_turn(self) -> None:
        """Wait until the interval since the last write has passed, or a device's health changes."""
        left_s = self._written_s + self._interval_s - time.monotonic()
        if left_s <= 0 or self._urgent.is_set():
            return
        await first_of(self._urgent.wait(), self._sleep(left_s))

    async def _write(self) -> None:
        if self._offered is None or self._existing is None:
            return
        desired = slices_of(self._offered, with_taints=self._with_taints)
        writes = plan_writes(self._as_sent(), desired, self._node, self._owner)
        if not (writes.stored or writes.deleted):
            self._note_published(desired)
            return
        if self._owner is None:
            await self._find_owner()
        await self._read()  # the watch may not have delivered the last write yet
        writes = plan_writes(self._as_sent(), desired, self._node, self._owner)
        seen = self._seen
        for write in writes.stored:
            await self._store(write.build())
        for name in writes.deleted:
            await self._server.delete(SLICES, name)
            self._existing.pop(name, None)
        if self._seen != seen:
            await self._read()
        self._written_s = time.monotonic()
        self._note_published(desired)

    async def _store(self, desired: ResourceSlice) -> None:
        assert self._existing is not None
        try:
            if "resourceVersion" in desired["metadata"]:
                stored = await self._server.replace(SLICES, desired)
            else:
                stored = await self._server.create(SLICES, desired)
        except ApiServerError as error:
            if error.status in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                await self._read()  # another writer, or a kubelet that removed the slices
            raise
        self._existing[desired["metadata"]["name"]] = stored
        desired_summary = summary(desired["spec"]["devices"])
        versions = {existing["metadata"]["resourceVersion"] for existing in self._existing.values()}
        self._sent = {version: devices for version, devices in self._sent.items() if version in versions}
        self._sent[stored["metadata"]["resourceVersion"]] = desired_summary
        if desired_summary.have_taints and not stored["stored"].have_taints:
            log.warning("the cluster does not support device taints: publishing only untainted devices")
            self._with_taints = False
            self._changed.set()
            self._urgent.set()

    async def _read(self) -> None:
        """Read the stored slices; what arrives while they are read may be newer, so it is read again."""
        selection = f"spec.driver={DRIVER},spec.nodeName={self._node}"
        seen = -1
        while seen != self._seen:
            seen = self._seen
            slices, _ = await self._server.list(SLICES, fields=selection)
        self._existing = _by_name(slices)

    def _as_sent(self) -> dict[str, ResourceSlice]:
        """Return the stored slices, with the devices that were sent if nothing else has changed them."""
        slices: dict[str, ResourceSlice] = {}
        for name, stored in (self._existing or {}).items():
            sent = self._sent.get(stored["metadata"]["resourceVersion"])
            slices[name] = stored if sent is None else {**stored, "stored": sent}
        return slices

    async def _find_owner(self) -> None:
        """Find the node, which owns its slices, so that they are deleted with it.

        Source: Kubernetes: Garbage Collection, section "Owners and dependents".
        """
        try:
            node = await self._server.get(NODES, self._node)
        except ApiServerError as error:
            if error.status not in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
                raise
            log.warning("the slices will not be deleted with the node: %s", error.message)
            return
        self._owner = {
            "apiVersion": "v1", "kind": "Node", "name": self._node, "uid": node["metadata"]["uid"],
            "controller": True,
        }  # fmt: skip

    def _note_published(self, desired: Sequence[Sequence[OfferedDevice]]) -> None:
        status = f"{sum(map(len, desired))} devices are published in {len(desired)} slices"
        if status != self.status:
            log.info("%s", status)
        self.status = status

    def _report(self, error: ApiServerError) -> None:
        self._counts.errors[API_SERVER] += 1
        if error.message != self.status:
            log.warning("%s; running pods are not affected", error.message)
        self.status = error.message


def _health(offered: Iterable[OfferedDevice]) -> dict[str, str]:
    """Return the taints of devices that cannot serve, by name."""
    taints = {device.name: device.taint for device in offered}
    return {name: taint for name, taint in taints.items() if taint and taint not in _USE_TAINTS}


def _by_name(slices: Iterable[ResourceSlice]) -> dict[str, ResourceSlice]:
    return {stored["metadata"]["name"]: stored for stored in slices}
