"""Tasks that run for good, and their end."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from yunion_mps.daemon.loop import cancel_all

_PATIENCE_S = 60.0


async def turns_of_the_loop(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(6))
def test_a_task_ends_also_when_it_is_woken_just_then(turns: int) -> None:
    """In some of these turns asyncio.wait_for forgets its cancellation, before Python 3.12."""

    async def main() -> None:
        wake = asyncio.Event()

        async def work() -> None:
            while True:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(wake.wait(), _PATIENCE_S)
                wake.clear()

        task = asyncio.create_task(work())
        await turns_of_the_loop(5)  # until it waits
        wake.set()
        await turns_of_the_loop(turns)
        await asyncio.wait({asyncio.ensure_future(cancel_all([task]))}, timeout=_PATIENCE_S / 2)
        assert task.cancelled()

    asyncio.run(main())


def test_what_has_ended_by_a_fault_keeps_it() -> None:
    async def main() -> None:
        async def work() -> None:
            raise ValueError("a fault")

        task = asyncio.create_task(work())
        await turns_of_the_loop(1)
        await cancel_all([task])
        assert str(task.exception()) == "a fault"

    asyncio.run(main())
