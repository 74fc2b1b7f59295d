"""The gateway's life: serve what the daemon's notice says, until it says nothing more."""

from __future__ import annotations

import asyncio

from yunion_mps.gateway import notice
from yunion_mps.gateway.doors import Doors
from yunion_mps.gateway.metrics import Metrics
from yunion_mps.gateway.web import Web
from yunion_mps.paths import Paths

#: How often the notice is read anew.
_LOOK_S = 2.0


async def serve(paths: Paths) -> None:
    """Serve until nothing is to be served."""
    doors = Doors({"metrics_listen": Metrics(paths), "web_listen": Web(paths)})
    while True:
        wanted = notice.read(paths)
        await doors.follow(wanted)
        if not wanted:
            return
        await asyncio.sleep(_LOOK_S)
