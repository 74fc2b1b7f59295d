"""Our encoding of messages is what protobuf makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.kubernetes.kubelet import device_plugin_api, dra_api, pod_resources_api
from yunion_mps.kubernetes.kubelet.protobuf import DecodeError, Message

#: As the kubelet's api.proto files have them: the types of all fields that we use, by their numbers.
PUBLISHED = {
    "DevicePluginOptions": {1: "bool", 2: "bool"},
    "RegisterRequest": {1: "string", 2: "string", 3: "string", 4: "DevicePluginOptions"},
    "NumaNode": {1: "int64"},
    "TopologyInfo": {1: "repeated NumaNode"},
    "PluginDevice": {1: "string", 2: "string", 3: "TopologyInfo"},
    "ListAndWatchResponse": {1: "repeated PluginDevice"},
    "ContainerPreferredAllocationRequest": {1: "repeated string", 2: "repeated string", 3: "int32"},
    "PreferredAllocationRequest": {1: "repeated ContainerPreferredAllocationRequest"},
    "ContainerPreferredAllocationResponse": {1: "repeated string"},
    "PreferredAllocationResponse": {1: "repeated ContainerPreferredAllocationResponse"},
    "ContainerAllocateRequest": {1: "repeated string"},
    "AllocateRequest": {1: "repeated ContainerAllocateRequest"},
    "CdiDevice": {1: "string"},
    "MountSpec": {1: "string", 2: "string", 3: "bool"},
    "DeviceSpec": {1: "string", 2: "string", 3: "string"},
    "ContainerAllocateResponse": {
        1: "map string",
        2: "repeated MountSpec",
        3: "repeated DeviceSpec",
        5: "repeated CdiDevice",
    },
    "AllocateResponse": {1: "repeated ContainerAllocateResponse"},
    "PreStartContainerRequest": {1: "repeated string"},
    "ContainerDevices": {1: "string", 2: "repeated string"},
    "DynamicResource": {2: "string", 3: "string"},
    "ContainerResources": {1: "string", 2: "repeated ContainerDevices", 5: "repeated DynamicResource"},
    "PodResources": {1: "string", 2: "string", 3: "repeated ContainerResources"},
    "ListPodResourcesResponse": {1: "repeated PodResources"},
    "PluginInfo": {1: "string", 2: "string", 3: "string", 4: "repeated string"},
    "RegistrationStatus": {1: "bool", 2: "string"},
    "ClaimReference": {1: "string", 2: "string", 3: "string"},
    "NodePrepareResourcesRequest": {1: "repeated ClaimReference"},
    "PreparedDevice": {1: "repeated string", 2: "string", 3: "string", 4: "repeated string", 5: "string"},
    "NodePrepareResourceResponse": {1: "repeated PreparedDevice", 2: "string"},
    "NodePrepareResourcesResponse": {1: "map NodePrepareResourceResponse"},
    "NodeUnprepareResourcesRequest": {1: "repeated ClaimReference"},
    "NodeUnprepareResourceResponse": {1: "string"},
    "NodeUnprepareResourcesResponse": {1: "map NodeUnprepareResourceResponse"},
    "DeviceIdentifier": {1: "string", 2: "string"},
    "DeviceHealth": {1: "DeviceIdentifier", 2: "int32", 3: "int64", 4: "int64", 5: "string"},
    "NodeWatchResourcesResponse": {1: "repeated DeviceHealth"},
}
_TYPES = {"string": 9, "bool": 8, "int32": 5, "int64": 3}
_MESSAGE = 11
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(max_size=200),
    "bool": st.booleans(),
    "int32": st.integers(-(1 << 31), (1 << 31) - 1),
    "int64": st.integers(-(1 << 63), (1 << 63) - 1),
}


def _file(messages: Mapping[str, Mapping[int, str]]) -> Any:
    """The messages as protobuf has them; fields are called f1, f2, and so on."""
    file = descriptor_pb2.FileDescriptorProto(name="api.proto", package="api", syntax="proto3")
    for name, numbers in messages.items():
        message = file.message_type.add(name=name)
        for number, words in numbers.items():
            is_many, kind = words.startswith(("repeated", "map")), words.split()[-1]
            if words.startswith("map"):
                entry = message.nested_type.add(name=f"F{number}Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=9, label=1)
                _set_type(entry.field.add(name="value", number=2, label=1), kind)
                kind = f"{name}.F{number}Entry"
            _set_type(message.field.add(name=f"f{number}", number=number, label=3 if is_many else 1), kind)
    return file


def _set_type(field: Any, kind: str) -> None:
    field.type = _TYPES.get(kind, _MESSAGE)
    if kind not in _TYPES:
        field.type_name = f".api.{kind}"


POOL = descriptor_pool.DescriptorPool()
POOL.Add(_file(PUBLISHED))
MESSAGES = {**vars(device_plugin_api), **vars(pod_resources_api), **vars(dra_api)}
KINDS = {name: MESSAGES[name] for name in PUBLISHED}


def theirs(message: Message) -> Any:
    """The same message of protobuf's."""
    kind = message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"api.{type(message).__name__}"))
    made = kind()
    for one in fields(message):
        name, value = f"f{one.metadata['number']}", getattr(message, one.name)
        if isinstance(value, Message):
            getattr(made, name).MergeFrom(theirs(value))
            getattr(made, name).SetInParent()
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, Message):
                    getattr(made, name)[key].MergeFrom(theirs(item))
                else:
                    getattr(made, name)[key] = item
        elif isinstance(value, tuple):
            getattr(made, name).extend(theirs(item) if isinstance(item, Message) else item for item in value)
        elif value is not None:
            setattr(made, name, value)
    return made


def _values(words: str) -> st.SearchStrategy[Any]:
    many, kind = words.startswith("repeated"), words.split()[-1]
    value = _VALUES[kind] if kind in _VALUES else messages(kind)
    if words.startswith("map"):
        return st.dictionaries(st.text(max_size=5), value, max_size=2)
    if many:
        return st.lists(value, max_size=4 if kind in _VALUES else 2).map(tuple)
    return value if kind in _TYPES else st.none() | value


def messages(name: str) -> st.SearchStrategy[Message]:
    numbers = {one.metadata["number"]: one.name for one in fields(KINDS[name])}
    assert numbers.keys() == PUBLISHED[name].keys()
    return st.builds(
        KINDS[name], **{numbers[number]: _values(words) for number, words in PUBLISHED[name].items()}
    )


def outermost() -> list[str]:
    """The messages that are part of no other; the others are shown in these."""
    parts = {words.split()[-1] for numbers in PUBLISHED.values() for words in numbers.values()}
    return [name for name in PUBLISHED if name not in parts]


@pytest.mark.parametrize("name", outermost())
def test_messages_are_encoded_as_protobuf_does(name: str) -> None:
    @given(messages(name))
    def check(message: Message) -> None:
        same = theirs(message)
        assert type(message).decode(same.SerializeToString()) == message
        assert type(same).FromString(message.encode()) == same

    check()


def test_unknown_fields_are_skipped() -> None:
    newer = descriptor_pool.DescriptorPool()
    more = {2: "int64", 3: "string", 4: "repeated string", 9: "string"}
    newer.Add(_file({"ContainerDevices": {1: "string", **more}}))
    made = message_factory.GetMessageClass(newer.FindMessageTypeByName("api.ContainerDevices"))(
        f1="yunion.io/mps", f2=17, f3="x", f4=["y", "z"], f9="w"
    )
    fixed = b"\x51\1\2\3\4\5\6\7\x08" + b"\x5d\1\2\3\4"
    known = pod_resources_api.ContainerDevices.decode(made.SerializeToString() + fixed)
    assert known == pod_resources_api.ContainerDevices("yunion.io/mps")


@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=60))
def test_malformed_messages_are_refused_and_nothing_else_happens(name: str, data: bytes) -> None:
    try:
        message = KINDS[name].decode(data)
    except DecodeError:
        return
    assert KINDS[name].decode(message.encode()) == message


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",  # no length
        b"\x0a\x05four",  # too short
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x",  # a length of 2 to the power of 64
        b"\x0a" + b"\xff" * 11,  # a number that does not end
        b"\x02\x00",  # field 0
        b"\x0b\x0c",  # a group
        b"\x0a\x01\xff",  # not UTF-8
        b"\x0a\0" * 100_001,  # more fields than any kubelet sends, which would fill the memory
    ],
    ids=len,
)
def test_a_malformed_message_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        device_plugin_api.CdiDevice.decode(data)
