"""The use of the last hour: what is kept of each minute, what is forgotten, and how little room it takes."""

from __future__ import annotations

import sys
from typing import Any

from yunion_mps.service.usage import MINUTES, UsageHistory

#: Some minutes after the boot, and what that is in s since 1970.
BOOT_S = 1_788_000_000.0
GPU, DEVICE, OTHER = "00:06.0", "00:06.0-1", "00:07.0-1"


def told(
    usage: UsageHistory, now_s: float, gpu: str | None = None, *, devices: bool = True
) -> dict[str, Any]:
    """By address, the last minutes up to the newest that is not like the ones before it."""
    answer = usage.last_hour(now_s, BOOT_S + now_s, gpu, devices=devices)
    return {one["addr"]: one["memory_used"] for one in [*answer["gpus"], *answer["devices"]]}


def test_of_each_minute_the_most_is_kept() -> None:
    usage = UsageHistory()
    for now_s, mib in ((6000, 10), (6010, 300), (6020, 20), (6060, 5)):
        usage.record(now_s, {GPU: mib})
    assert told(usage, 6070)[GPU][-3:] == [None, 300, 5]


def test_a_minute_in_which_nobody_looked_is_told_from_one_in_which_nothing_was_used() -> None:
    usage = UsageHistory()
    usage.record(6000, {GPU: 7})
    usage.record(6060, {})
    usage.record(6180, {GPU: 9})
    assert told(usage, 6181)[GPU][-4:] == [7, 0, None, 9]
    assert usage.last_hour(6181, BOOT_S, None, devices=True)["looked"][-5:] == [
        False,
        True,
        True,
        False,
        True,
    ]


def test_the_first_minute_is_an_hour_back_by_the_wall_clock() -> None:
    usage = UsageHistory()
    usage.record(6030, {GPU: 7})
    answer = usage.last_hour(6030, BOOT_S, None, devices=True)
    assert (answer["begin"], answer["step"]) == (BOOT_S - 30 - 59 * 60, 60)
    assert len(answer["looked"]) == len(answer["gpus"][0]["memory_used"]) == MINUTES


def test_what_is_an_hour_ago_is_forgotten_and_takes_no_room() -> None:
    usage = UsageHistory()
    usage.record(6000, {GPU: 7, DEVICE: 7})
    usage.record(6000 + 59 * 60, {GPU: 8})
    assert told(usage, 6000 + 59 * 60) == {GPU: [7, *[None] * 58, 8], DEVICE: [7, *[None] * 58, 0]}
    assert told(usage, 6000 + 60 * 60) == {GPU: [*[None] * 58, 8, None]}
    assert told(usage, 6000 + 1000 * 60) == {}
    assert not usage._series


def test_one_gpu_and_its_devices_or_only_gpus_can_be_asked_for() -> None:
    usage = UsageHistory()
    usage.record(6000, {GPU: 2, DEVICE: 1, "00:07.0": 3, OTHER: 3})
    assert set(told(usage, 6000)) == {GPU, DEVICE, "00:07.0", OTHER}
    assert set(told(usage, 6000, GPU)) == {GPU, DEVICE}
    assert set(told(usage, 6000, devices=False)) == {GPU, "00:07.0"}
    assert told(usage, 6000, "00:0") == {}


def test_an_hour_of_3072_devices_takes_little_room_and_an_idle_one_nothing() -> None:
    usage = UsageHistory()
    usage.record(6000, {})
    assert not usage._series
    addresses = [f"{gpu:02x}:00.0-{slot}" for gpu in range(64) for slot in range(48)]
    usage.record(6000, dict.fromkeys(addresses, 512))
    size = sys.getsizeof(usage._series) + sum(sys.getsizeof(series) for series in usage._series.values())
    assert len(usage._series) == 3072
    assert size < 1_200_000
