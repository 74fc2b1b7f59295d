"""The client's values have the members of the answers' types, are frozen, and travel to other processes."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from datetime import datetime, timezone
from typing import Annotated, Any, Optional, Union, get_args, get_origin, get_type_hints

import pytest
from yunion_mps import answers
from yunion_mps.answers import fields as types_of_fields
from yunion_mps.client import values
from yunion_mps.client.values import (
    DeviceDetails,
    DeviceInfo,
    EventInfo,
    GpuInfo,
    LeaseRecord,
    Status,
    members,
)
from yunion_mps.core.errors import VersionError

from unit.http.fake_services import EXAMPLES

#: Members of Cloudpods' that say the same of every device, or what another member says.
OF_CLOUDPODS = {
    "dev_type", "index", "device_minor", "device_path",
    "mps_memory_limit", "mps_memory_total", "mps_thread_percentage",
}  # fmt: skip
#: The members that values do not have; the rank is for short lists, and earlier daemons do not send it.
LEFT_OUT: Mapping[Any, set[str]] = {
    DeviceInfo: OF_CLOUDPODS,
    DeviceDetails: OF_CLOUDPODS,
    EventInfo: {"rank"},
}
TIME: Any = types_of_fields.Time
KINDS = [one for one in vars(values).values() if isinstance(one, type) and one.__module__ == values.__name__]
VALUES = [one for one in KINDS if hasattr(one, "__dataclass_fields__")]


def value_type(name: str) -> Any:
    """The client's value for the answer of this name, None if it has none."""
    return getattr(values, f"{name}Info", None) or getattr(values, name, None)


#: Answers that are one value each.
SHOWN = [name for name in EXAMPLES if value_type(name)]


def as_value(kind: Any) -> Any:
    """The type of a value whose JSON is of this type."""
    if get_origin(kind) is Annotated:
        is_time = TIME.__metadata__[0] in kind.__metadata__
        return datetime if is_time else as_value(get_args(kind)[0])
    if get_origin(kind) in (Union, getattr(types, "UnionType", Union)):
        return Optional[as_value(get_args(kind)[0])]
    if get_origin(kind) is list:
        return tuple[as_value(get_args(kind)[0]), ...]  # type: ignore[misc]
    if get_origin(kind) is dict:
        return Mapping[str, str]
    return value_type(kind.__name__.removesuffix("Json")) if hasattr(kind, "__total__") else kind


@pytest.mark.skipif(sys.version_info < (3, 10), reason="`X | None` cannot be evaluated there")
@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_every_attribute_is_a_member_of_the_answer_and_of_its_type(kind: Any) -> None:
    answer = getattr(answers, f"{kind.__name__.removesuffix('Info')}Json")
    expected = {
        name: as_value(hint)
        for name, hint in get_type_hints(answer, include_extras=True).items()
        if name not in LEFT_OUT.get(kind, set())
    }
    assert members(kind) == expected


@pytest.mark.parametrize("name", SHOWN)
def test_each_example_is_a_value_that_can_be_pickled_and_hashed(name: str) -> None:
    value = value_type(name).of(EXAMPLES[name])
    assert pickle.loads(pickle.dumps(value)) == value
    assert {value: name}[value] == name


def test_values_have_units_datetimes_and_tuples() -> None:
    device = DeviceInfo.of(EXAMPLES["Device"])
    assert (device.addr, device.memory_mib, device.gpu_memory_mib) == ("00:06.0-1", 5760, 23040)
    assert device.pcie_info is not None
    assert device.pcie_info.lane_width == 16
    with pytest.raises(FrozenInstanceError):
        device.memory_mib = 1  # type: ignore[misc]
    answer: Any = {**EXAMPLES["Event"], "time": "2026-11-20T13:45:00.123Z"}
    event = EventInfo.of(answer)
    assert event.time == datetime(2026, 11, 20, 13, 45, 0, 123000, timezone.utc)
    lease = LeaseRecord.of(EXAMPLES["LeaseRecord"])
    assert isinstance(lease.devices, tuple)
    assert isinstance(lease.environment, dict)


def test_members_of_a_newer_daemon_are_ignored() -> None:
    newer: Any = {**EXAMPLES["Gpu"], "a_new_one": 1}
    assert GpuInfo.of(newer) == GpuInfo.of(EXAMPLES["Gpu"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"driver": {"version": "550"}}, "has no member cuda_version"),
        ({"started": 1788000000.5}, "has a member started of the wrong type"),
        ({"domains": None}, "has a member domains of the wrong type"),
    ],
)
def test_an_answer_of_another_version_is_an_error_that_says_so(change: Any, why: str) -> None:
    answer: Any = {**EXAMPLES["Status"], **change}
    with pytest.raises(VersionError, match=f"{why}: its version differs") as raised:
        Status.of(answer)
    assert raised.value.code == "version_differs"
    assert "daemon-reexec" in raised.value.hint
