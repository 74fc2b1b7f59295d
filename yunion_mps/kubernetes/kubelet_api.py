"""The messages of the kubelet's two APIs and their protobuf encoding: the parts that the plugin uses.

The field numbers are those of k8s.io/kubelet/pkg/apis: deviceplugin/v1beta1/api.proto and
podresources/v1/api.proto. Newer kubelets may send fields that are unknown here, which are skipped. The
encoding is proto3's (protobuf.dev/programming-guides/encoding).
"""
# Without `from __future__ import annotations`, like client/values: a field's type says how it is encoded.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Optional, TypeVar, Union

VERSION = "v1beta1"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_LENGTHS = {_FIXED64: 8, _FIXED32: 4}
_NUMBER_BITS = 64

MessageT = TypeVar("MessageT", bound="Message")
RequestT = TypeVar("RequestT", bound="Message")
AnswerT = TypeVar("AnswerT", bound="Message")


class DecodeError(Exception):
    """The bytes are not an encoded message of the expected type."""


@dataclass(frozen=True)
class Message:
    """A message, whose fields are declared with their numbers by `_one`, `_many` and `_map`."""

    def encode(self) -> bytes:
        encoded = bytearray()
        for one in fields(self):
            value, collection = getattr(self, one.name), one.metadata["collection"]
            if collection is dict:
                value = [one.metadata["kind"](*pair) for pair in value.items()]
            elif collection is None:
                value = [] if value in (None, "", 0) else [value]  # a default is not sent
            for item in value:
                encoded += _encode_field(one.metadata["number"], item)
        return bytes(encoded)

    @classmethod
    def decode(cls: type[MessageT], data: bytes) -> MessageT:  # noqa: PYI019 - there is no Self before 3.11
        """The message; raises DecodeError."""
        known = {one.metadata["number"]: one for one in fields(cls)}
        found: dict[str, list[Any]] = {}
        for number, wire_type, raw in _split(data):
            one = known.get(number)
            if one and wire_type == (_VARINT if one.metadata["kind"] in (int, bool) else _LENGTH):
                found.setdefault(one.name, []).append(_decode_value(one.metadata["kind"], raw))
        values: dict[str, Any] = {}
        for one in fields(cls):
            items, collection = found.get(one.name), one.metadata["collection"]
            if items and collection is dict:
                values[one.name] = {item.key: item.value for item in items}
            elif items:
                values[one.name] = tuple(items) if collection else items[-1]
        return cls(**values)


def _one(number: int, kind: type) -> Any:
    """A single value: a str, bool, int or message; a message that is not sent is None."""
    default = None if issubclass(kind, Message) else kind()
    return field(default=default, metadata={"number": number, "kind": kind, "collection": None})


def _many(number: int, kind: type) -> Any:
    return field(default=(), metadata={"number": number, "kind": kind, "collection": tuple})


def _map(number: int, entry: Optional[type] = None) -> Any:
    """A map from strings to strings, or to messages; `entry` is then a message of the key and the value."""
    kind = entry or _MapEntry
    return field(default_factory=dict, metadata={"number": number, "kind": kind, "collection": dict})


@dataclass(frozen=True)
class _MapEntry(Message):
    key: str = _one(1, str)
    value: str = _one(2, str)


@dataclass(frozen=True)
class Empty(Message):
    """Also stands for other messages without fields: their encoding is the same."""


@dataclass(frozen=True)
class DevicePluginOptions(Message):
    pre_start_required: bool = _one(1, bool)
    get_preferred_allocation_available: bool = _one(2, bool)


@dataclass(frozen=True)
class RegisterRequest(Message):
    version: str = _one(1, str)
    endpoint: str = _one(2, str)
    resource_name: str = _one(3, str)
    options: Optional[DevicePluginOptions] = _one(4, DevicePluginOptions)


@dataclass(frozen=True)
class NumaNode(Message):
    id: int = _one(1, int)


@dataclass(frozen=True)
class TopologyInfo(Message):
    nodes: tuple[NumaNode, ...] = _many(1, NumaNode)


@dataclass(frozen=True)
class PluginDevice(Message):
    """The API's `Device`. Its id has at most 63 characters."""

    id: str = _one(1, str)
    health: str = _one(2, str)
    topology: Optional[TopologyInfo] = _one(3, TopologyInfo)


@dataclass(frozen=True)
class ListAndWatchResponse(Message):
    devices: tuple[PluginDevice, ...] = _many(1, PluginDevice)


@dataclass(frozen=True)
class ContainerPreferredAllocationRequest(Message):
    available_device_ids: tuple[str, ...] = _many(1, str)
    must_include_device_ids: tuple[str, ...] = _many(2, str)
    allocation_size: int = _one(3, int)


@dataclass(frozen=True)
class PreferredAllocationRequest(Message):
    container_requests: tuple[ContainerPreferredAllocationRequest, ...] = _many(
        1, ContainerPreferredAllocationRequest
    )


@dataclass(frozen=True)
class ContainerPreferredAllocationResponse(Message):
    device_ids: tuple[str, ...] = _many(1, str)


@dataclass(frozen=True)
class PreferredAllocationResponse(Message):
    container_responses: tuple[ContainerPreferredAllocationResponse, ...] = _many(
        1, ContainerPreferredAllocationResponse
    )


@dataclass(frozen=True)
class ContainerAllocateRequest(Message):
    device_ids: tuple[str, ...] = _many(1, str)


@dataclass(frozen=True)
class AllocateRequest(Message):
    container_requests: tuple[ContainerAllocateRequest, ...] = _many(1, ContainerAllocateRequest)


@dataclass(frozen=True)
class CdiDevice(Message):
    name: str = _one(1, str)


@dataclass(frozen=True)
class MountSpec(Message):
    """The API's `Mount`."""

    container_path: str = _one(1, str)
    host_path: str = _one(2, str)
    read_only: bool = _one(3, bool)


@dataclass(frozen=True)
class DeviceSpec(Message):
    container_path: str = _one(1, str)
    host_path: str = _one(2, str)
    permissions: str = _one(3, str)


@dataclass(frozen=True)
class ContainerAllocateResponse(Message):
    envs: Mapping[str, str] = _map(1)
    mounts: tuple[MountSpec, ...] = _many(2, MountSpec)
    devices: tuple[DeviceSpec, ...] = _many(3, DeviceSpec)
    cdi_devices: tuple[CdiDevice, ...] = _many(5, CdiDevice)


@dataclass(frozen=True)
class AllocateResponse(Message):
    container_responses: tuple[ContainerAllocateResponse, ...] = _many(1, ContainerAllocateResponse)


@dataclass(frozen=True)
class PreStartContainerRequest(Message):
    device_ids: tuple[str, ...] = _many(1, str)


@dataclass(frozen=True)
class ContainerDevices(Message):
    resource_name: str = _one(1, str)
    device_ids: tuple[str, ...] = _many(2, str)


@dataclass(frozen=True)
class DynamicResource(Message):
    """A resource claim of a container."""

    claim_name: str = _one(2, str)
    claim_namespace: str = _one(3, str)


@dataclass(frozen=True)
class ContainerResources(Message):
    name: str = _one(1, str)
    devices: tuple[ContainerDevices, ...] = _many(2, ContainerDevices)
    dynamic_resources: tuple[DynamicResource, ...] = _many(5, DynamicResource)


@dataclass(frozen=True)
class PodResources(Message):
    name: str = _one(1, str)
    namespace: str = _one(2, str)
    containers: tuple[ContainerResources, ...] = _many(3, ContainerResources)


@dataclass(frozen=True)
class ListPodResourcesResponse(Message):
    pod_resources: tuple[PodResources, ...] = _many(1, PodResources)


@dataclass(frozen=True)
class Rpc(Generic[RequestT, AnswerT]):
    """A method of a service, with the types of its messages; an answer may be one of a stream."""

    path: str
    request: type[RequestT]
    answer: type[AnswerT]


REGISTER = Rpc("/v1beta1.Registration/Register", RegisterRequest, Empty)
LIST_POD_RESOURCES = Rpc("/v1.PodResourcesLister/List", Empty, ListPodResourcesResponse)
_PLUGIN = "/v1beta1.DevicePlugin"
GET_OPTIONS = Rpc(f"{_PLUGIN}/GetDevicePluginOptions", Empty, DevicePluginOptions)
LIST_AND_WATCH = Rpc(f"{_PLUGIN}/ListAndWatch", Empty, ListAndWatchResponse)
GET_PREFERRED_ALLOCATION = Rpc(
    f"{_PLUGIN}/GetPreferredAllocation", PreferredAllocationRequest, PreferredAllocationResponse
)
ALLOCATE = Rpc(f"{_PLUGIN}/Allocate", AllocateRequest, AllocateResponse)
PRE_START_CONTAINER = Rpc(f"{_PLUGIN}/PreStartContainer", PreStartContainerRequest, Empty)


def _encode_field(number: int, value: Union[int, str, Message]) -> bytes:
    if isinstance(value, int):  # or bool
        return _encode_number(number << 3 | _VARINT) + _encode_number(value)
    data = value.encode()
    return _encode_number(number << 3 | _LENGTH) + _encode_number(len(data)) + data


def _encode_number(value: int) -> bytes:
    """The varint of a number; a negative one is its complement to 2 to the power of 64."""
    value %= 1 << _NUMBER_BITS
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _decode_number(data: bytes, start: int) -> tuple[int, int]:
    """The number at `start`, and where the next part starts; raises DecodeError."""
    value = shift = 0
    for place in range(start, len(data)):
        value |= (data[place] & 0x7F) << shift
        shift += 7
        if data[place] < 0x80:
            return value % (1 << _NUMBER_BITS), place + 1
        if shift > _NUMBER_BITS:
            break
    raise DecodeError("a number is incomplete or too long")


def _split(data: bytes) -> Iterator[tuple[int, int, Union[int, bytes]]]:
    """Yield the number, wire type and value of each field; raises DecodeError."""
    place = 0
    while place < len(data):
        key, place = _decode_number(data, place)
        number, wire_type = key >> 3, key & 7
        if not number:
            raise DecodeError("a field has the number 0")
        if wire_type == _VARINT:
            value, place = _decode_number(data, place)
            yield number, wire_type, value
            continue
        if wire_type == _LENGTH:
            length, place = _decode_number(data, place)
        elif wire_type in _FIXED_LENGTHS:
            length = _FIXED_LENGTHS[wire_type]
        else:
            raise DecodeError(f"field {number} has the unknown wire type {wire_type}")
        if length > len(data) - place:
            raise DecodeError(f"field {number} is incomplete")
        yield number, wire_type, data[place : place + length]
        place += length


def _decode_value(kind: type, raw: Any) -> Any:
    if issubclass(kind, Message):
        return kind.decode(raw)
    if kind is not str:
        return bool(raw) if kind is bool else raw - (1 << _NUMBER_BITS) if raw >> _NUMBER_BITS - 1 else raw
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise DecodeError("a string is not UTF-8") from None
