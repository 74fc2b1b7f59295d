"""How asyncio tasks end."""

from __future__ import annotations

import asyncio

import pytest
from yunion_mps.core.tasks import cancel, first_of, within


def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost: list[str] = []

    async def work() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append("a cancellation")

    async def run() -> bool:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        await cancel([task], retry_s=0.01)
        return task.cancelled()

    assert asyncio.run(run())
    assert lost == ["a cancellation"]


def test_a_task_that_has_already_ended_keeps_its_exception() -> None:
    async def run() -> BaseException | None:
        async def work() -> None:
            raise ValueError("a fault")

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        await cancel([task])
        return task.exception()

    assert str(asyncio.run(run())) == "a fault"


def test_the_tasks_that_do_not_end_first_are_cancelled() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("wait")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        asyncio.run(first_of(wait(), fail()))
    assert ended == ["wait"]


def test_work_that_takes_too_long_is_cancelled_and_its_error_raised() -> None:
    ended: list[str] = []

    async def work(delay_s: float) -> str:
        try:
            await asyncio.sleep(delay_s)
        finally:
            ended.append("work")
        return "done"

    assert asyncio.run(within(60, work(0), ValueError("too slow"))) == "done"
    with pytest.raises(ValueError, match="too slow"):
        asyncio.run(within(0.001, work(60), ValueError("too slow")))
    assert ended == ["work"] * 2
