"""The queries of Client and AsyncClient, independent of the transport."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import datetime, timedelta, timezone

from yunion_mps.client.retry import OnMessage, follow_events, watch
from yunion_mps.client.transport import Transport
from yunion_mps.client.values import Device, DeviceDetails, Event, Gpu, LeaseDetails, QueuedRequest, Status
from yunion_mps.errors import YunionError
from yunion_mps.http.operations import (
    GET_DEVICE,
    GET_DEVICES,
    GET_EVENTS,
    GET_GPUS,
    GET_LEASES,
    GET_STATUS,
    MAX_EVENTS,
)
from yunion_mps.http.parameters import LATEST_S
from yunion_mps.reasons import INVALID_REQUEST
from yunion_mps.units import rfc3339


class ClientQueries:
    def __init__(self, transport: Transport, on_message: OnMessage) -> None:
        self._call = transport.call
        self._transport = transport
        self._on_message = on_message

    async def devices(self, *, unused: bool) -> list[Device]:
        answer = await self._call(GET_DEVICES, limit=0, unused=unused)
        return [Device.of(device) for device in answer["isolated_devices"]]

    async def watch_devices(self) -> AsyncGenerator[list[Device], None]:
        async for answer in watch(self._transport, GET_DEVICES, self._on_message, limit=0):
            yield [Device.of(device) for device in answer["isolated_devices"]]

    async def device(self, name: str) -> DeviceDetails:
        answer = await self._call(GET_DEVICE, id=name)
        return DeviceDetails.of(answer)

    async def gpus(self) -> list[Gpu]:
        return [Gpu.of(gpu) for gpu in (await self._call(GET_GPUS))["gpus"]]

    async def status(self) -> Status:
        return Status.of(await self._call(GET_STATUS))

    async def leases(self) -> list[LeaseDetails]:
        return [LeaseDetails.of(lease) for lease in (await self._call(GET_LEASES))["leases"]]

    async def queue(self) -> list[QueuedRequest]:
        return [QueuedRequest.of(queued) for queued in (await self._call(GET_LEASES))["waiting"]]

    async def events(
        self, since: datetime | timedelta | None, kind: str | None, *, follow: bool
    ) -> AsyncGenerator[Event, None]:
        first = format_since(since)
        answer = await self._call(GET_EVENTS, limit=MAX_EVENTS, since=first, kind=kind)
        for event in answer["events"]:
            yield Event.of(event)
        if follow:
            async for some in follow_events(self._transport, answer["last"], kind, self._on_message):
                for event in some:
                    yield Event.of(event)


def format_since(since: datetime | timedelta | None) -> str | None:
    """The start time of a query for events, as the API takes it; raises YunionError."""
    if since is None:
        return None
    moment = datetime.now(timezone.utc) - since if isinstance(since, timedelta) else since
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        what = f"since: {since!r} is not a time with a time zone"
        hint = "write datetime.now(timezone.utc), or a timedelta that is subtracted from now"
        raise YunionError(what, hint, INVALID_REQUEST)
    return rfc3339(min(max(0.0, moment.timestamp()), LATEST_S))
