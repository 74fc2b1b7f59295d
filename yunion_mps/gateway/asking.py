"""What the page shows, asked of the daemon once for however many look at it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from yunion_mps.errors import UnreachableError
from yunion_mps.gateway.upstream import ask
from yunion_mps.http.query import encode
from yunion_mps.overview.picture import Told, picture
from yunion_mps.overview.uses import NOBODY, clients_told
from yunion_mps.paths import Paths

Json = dict[str, Any]

#: Who asks again sooner is told the same.
_FRESH_S = 1.0
#: The shortest time from one picture to the next.
_REST_S = 0.1
#: What no event tells of GPUs and devices, such as a compute mode, is asked again after so long.
_STALE_S = 30.0
#: Waking many GPUs takes the driver tens of seconds; the page does without after the first of these.
_CLIENTS_S = 2.0
_CLIENTS_AT_MOST_S = 150.0


class Asking:
    """Puts the picture together; asks for the GPUs and devices again only where something has happened."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._one_at_a_time = asyncio.Lock()
        self._picture: Json = {}
        self._taken_s = 0.0
        self._failure: UnreachableError | None = None
        self._last_event = 0
        self._seen: tuple[Any, ...] = ()
        self._looked_s = 0.0
        self._gpus: list[Json] = []
        self._devices: list[Json] = []
        self._clients = NOBODY
        self._asked_clients: asyncio.Task[Json] | None = None

    async def picture(self, event: int = 0) -> Json:
        """The picture of now, with a `mark` that is another when the picture is; raises UnreachableError.

        One that was taken before the `event` (its id) is no picture of now, however fresh. Who came while a
        daemon that hangs was asked in vain hears of that, and does not wait as long once more.
        """
        came_s = time.monotonic()
        async with self._one_at_a_time:
            if self._failure and came_s < self._taken_s:
                raise self._failure
            age_s = time.monotonic() - self._taken_s
            if self._failure or age_s > _FRESH_S or event > self._last_event:
                await asyncio.sleep(_REST_S - age_s)  # whoever asks without end costs no more than this
                try:
                    shown = picture(await self._told())
                except UnreachableError as error:
                    self._failure, self._taken_s = error, time.monotonic()
                    raise
                self._failure = None
                mark = sha256(encode(shown)).hexdigest()[:16]
                self._picture = {"mark": mark, "taken": time.time(), **shown}
                self._taken_s = time.monotonic()
            return self._picture

    async def _told(self) -> Told:
        last = self._last_event = (await self._get("/v1/events?limit=1"))["last"]
        status = await self._get("/v1/status")
        leases = await self._get("/v1/leases")
        seen = (last, status["devices"], status["gpus"], status["started"])
        if seen != self._seen or time.monotonic() - self._looked_s > _STALE_S:
            self._gpus = (await self._get("/v1/gpus"))["gpus"]
            self._devices = (await self._get("/v1/devices?limit=0"))["isolated_devices"]
            self._seen, self._looked_s = seen, time.monotonic()
        troubles = await self._ask_clients() if status["domains"] else []
        clients = self._clients if status["domains"] else NOBODY
        clients = clients._replace(troubles=[*clients.troubles, *troubles])
        return Told(status, self._gpus, self._devices, leases["leases"], leases["waiting"], clients)

    async def _ask_clients(self) -> Sequence[str]:
        """Ask who uses the GPUs, as the driver sees it; returns what keeps that from being known."""
        if self._asked_clients is None:
            question = self._get("/v1/clients?seen=true", _CLIENTS_AT_MOST_S)
            self._asked_clients = asyncio.ensure_future(question)
        await asyncio.wait({self._asked_clients}, timeout=_CLIENTS_S)
        if not self._asked_clients.done():
            return ["who uses the GPUs: the driver takes long to answer; what is shown was so before"]
        asked, self._asked_clients = self._asked_clients, None
        try:
            self._clients = clients_told(asked.result())
        except UnreachableError as error:
            return [f"who uses the GPUs: {error.message}"]
        return []

    async def _get(self, target: str, timeout_s: float = 10.0) -> Any:
        answer = await ask(self._paths, target, timeout_s=timeout_s)
        try:
            found = json.loads(answer.body)
        except ValueError:
            raise UnreachableError(
                "the daemon's answer is no JSON", "is another program on its socket?"
            ) from None
        if answer.status != 200:
            raise UnreachableError(str(found.get("detail")), str(found.get("hint") or ""))
        return found
