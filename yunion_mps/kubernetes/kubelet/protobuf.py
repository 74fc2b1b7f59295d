"""Messages and their encoding, which is proto3's.

A kubelet may send fields that are unknown here, because it is newer: they are skipped.

Source: Protocol Buffers Documentation, section "Encoding" (protobuf.dev/programming-guides/encoding).
"""
# Without `from __future__ import annotations`, like client/values: a field's type says how it is encoded.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Any:
        return lambda kind: kind


#: The wire types; those of numbers of fixed length, with their lengths in bytes, are only skipped.
_VARINT = 0
_LENGTH = 2
_FIXED_LENGTHS = {1: 8, 5: 4}
_NUMBER_BITS = 64
#: The most fields of a message. A node has at most 71,680 units of memory, and an empty field takes 150
#: times its two bytes once it is decoded.
_MAX_FIELDS = 100_000

MessageT = TypeVar("MessageT", bound="Message")


class DecodeError(Exception):
    """The bytes are not an encoded message of the expected type."""


def field_number(value: int) -> Any:
    """Give a message's field its number."""
    return value


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Message:
    """A message. Its subclasses are frozen dataclasses with fields such as `name: str = field_number(1)`.

    A type is str, bool, int, an optional message, a tuple of these, or a Mapping from str to str or messages.
    The default is the empty value of the type.
    """

    def __init_subclass__(cls) -> None:
        for name, hint in get_type_hints(cls).items():
            arguments = get_args(hint)
            collection: type[Any] | None = None
            default: Any
            if get_origin(hint) is tuple:
                kind = arguments[0]
                collection = tuple
                default = tuple
            elif get_origin(hint) is Mapping:
                kind = arguments[1]
                collection = dict
                default = dict
            elif arguments:  # an optional message
                kind = arguments[0]
                default = type(None)
            else:
                kind = hint
                default = hint
            metadata = {"number": getattr(cls, name), "kind": kind, "collection": collection}
            setattr(cls, name, field(default_factory=default, metadata=metadata))
        dataclass(frozen=True)(cls)

    def encode(self) -> bytes:
        encoded = bytearray()
        for member in fields(self):
            number = member.metadata["number"]
            for value in _values_of(getattr(self, member.name), member.metadata["collection"]):
                encoded += _encode_field(number, value)
        return bytes(encoded)

    @classmethod
    def decode(cls: type[MessageT], data: bytes) -> MessageT:  # noqa: PYI019 - there is no Self before 3.11
        """Return the message.

        Raises DecodeError if the bytes are not one of this type.
        """
        encoded: dict[tuple[int, int], list[Any]] = {}
        for number, wire_type, raw in _split(data):
            encoded.setdefault((number, wire_type), []).append(raw)
        values: dict[str, Any] = {}
        for member in fields(cls):
            kind = member.metadata["kind"]
            collection = member.metadata["collection"]
            decode = _decode_entry if collection is dict else _decode_value
            wire_type = _VARINT if kind in (int, bool) else _LENGTH
            items = [decode(kind, raw) for raw in encoded.get((member.metadata["number"], wire_type), ())]
            if items:  # of a field that is no collection, the last value counts
                values[member.name] = collection(items) if collection else items[-1]
        return cls(**values)


class Empty(Message):
    """Also stands for other messages without fields: their encoding is the same."""


def _values_of(value: Any, collection: Any) -> Sequence[Any]:
    """Return what is sent of a field's value: the entries of a map are messages, and no default is sent."""
    if collection is dict:
        return [_encode_field(1, key) + _encode_field(2, item) for key, item in value.items()]
    if collection is tuple:
        return cast("Sequence[Any]", value)
    return [] if value in (None, "", 0) else [value]


def _encode_field(number: int, value: Union[int, str, bytes, Message]) -> bytes:
    if isinstance(value, int):  # or bool
        return _encode_number(number << 3 | _VARINT) + _encode_number(value)
    data = value if isinstance(value, bytes) else value.encode()
    return _encode_number(number << 3 | _LENGTH) + _encode_number(len(data)) + data


def _encode_number(value: int) -> bytes:
    """Return the varint of a number; a negative one is its complement to 2 to the power of 64."""
    value %= 1 << _NUMBER_BITS
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _decode_number(data: bytes, start: int) -> tuple[int, int]:
    """Return the number at `start`, and where the next part starts; raises DecodeError."""
    value = 0
    shift = 0
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
    fields_left = _MAX_FIELDS
    while place < len(data):
        if not fields_left:
            raise DecodeError(f"it has more than {_MAX_FIELDS} fields")
        fields_left -= 1
        key, place = _decode_number(data, place)
        number = key >> 3
        wire_type = key & 7
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


def _decode_entry(kind: type, raw: bytes) -> tuple[str, Any]:
    """Return the key and value of a map's entry."""
    parts = {number: part for number, wire_type, part in _split(raw) if wire_type == _LENGTH}
    key = _decode_value(str, parts.get(1, b""))
    return key, _decode_value(kind, parts.get(2, b""))


def _decode_value(kind: type, raw: Any) -> Any:
    if issubclass(kind, Message):
        return kind.decode(raw)
    if kind is bool:
        return bool(raw)
    if kind is int:
        is_negative = raw >> _NUMBER_BITS - 1
        return raw - (1 << _NUMBER_BITS) if is_negative else raw
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise DecodeError("a string is not UTF-8") from None
