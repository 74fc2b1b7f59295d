"""Whatever happens to a GPU is taken in at once, its return as its loss, without a regular look."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from yunion_mps.daemon import looking
from yunion_mps.daemon.looking import Looking
from yunion_mps.service.clients import Clients
from yunion_mps.service.faults import Faults

from unit.supervised import MakeHost, Supervise

TWO = [{"kind": "v100"}, {"kind": "a100"}]
PATIENCE_S = 60.0


def test_a_gpu_that_returns_and_is_lost_again_is_noticed_at_once(
    make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "RESCAN_S", 3600.0)
    host = make_host(TWO)
    made = supervise(host).start()

    async def follow() -> None:
        looked = asyncio.Event()
        faults = Faults(made.paths, made.supervisor, Clients(made.paths, made.supervisor))
        watch = Looking(
            made.paths, made.supervisor, asyncio.Lock(), faults, looked.set, lambda processes, now_s: None
        )

        async def until(available: int) -> None:
            while made.available != available:
                await asyncio.wait_for(looked.wait(), PATIENCE_S)
                looked.clear()

        task = asyncio.create_task(watch.run())
        watch.soon()
        await asyncio.wait_for(looked.wait(), PATIENCE_S)
        host.gpus[1].lose()
        watch.soon()  # the driver may not be listened to yet
        await until(4)
        for _ in range(2):
            host.gpus[1].restore()
            await until(8)
            host.gpus[1].lose()
            await until(4)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(follow())
    told = [event.what for event in made.events if event.kind == "gpu" and "XID" not in event.what]
    assert told == ["unavailable", *["available", "unavailable"] * 2]
