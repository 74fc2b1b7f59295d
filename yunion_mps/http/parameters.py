"""The parameters of operations, in a path, a query, a header or a JSON body, and how they are validated."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union

from yunion_mps.core.errors import YunionError
from yunion_mps.core.reasons import INVALID_REQUEST
from yunion_mps.core.units import seconds

Value = Union[str, int, float, bool, Sequence[str], Mapping[str, Any], None]

#: The latest time that clients ask for (in s since 1970), in the year 5138.
LATEST_S = 99_999_999_999
_SHOWN_LENGTH = 100
_EXAMPLE = 'write a JSON object such as {"count": 2}'


class BadRequestError(YunionError):
    """The request cannot be understood; the message names the parameter."""

    exit_code = 2
    code = INVALID_REQUEST


class MediaTypeError(BadRequestError):
    """The body is not declared as JSON."""


class Parameter(NamedTuple):
    """One parameter: its type, its constraints and its default."""

    name: str
    description: str
    #: `string`, `integer`, `boolean`, `time`, `array` of strings or, in a body, `object` with `members`.
    type: str = "string"
    default: Value = None
    #: The lowest and the highest value of an integer, or the fewest and the most strings of an array.
    minimum: int = 0
    maximum: int = 0
    #: All possible values of a string.
    choices: tuple[str, ...] = ()
    #: The regular expression of a string, as in JSON Schema.
    pattern: str = ""
    #: How to correct an invalid string.
    hint: str = ""
    #: Only of a parameter in the path.
    example: Value = None
    members: tuple[Parameter, ...] = ()

    @property
    def argument(self) -> str:
        """Its name in Python: `Idempotency-Key` is `idempotency_key`."""
        return self.name.lower().replace("-", "_")

    def value(self, text: str) -> Value:
        """Parse a value in a query or a header; raises BadRequestError."""
        value: Value = text
        if self.type == "boolean":
            value = {"true": True, "false": False}.get(text, text)
        elif self.type == "integer":
            sign = "-?" if self.minimum < 0 else ""
            if re.fullmatch(f"{sign}[0-9]{{1,11}}", text):
                value = int(text)
        return self._check(value, self.name, repr(text[:_SHOWN_LENGTH]))

    def member(self, value: Any, path: str) -> Value:
        """Validate the value of a member of a JSON body; raises BadRequestError."""
        if self.type == "object":
            return members_of(value, self.members, path)
        if self.type == "array":
            if isinstance(value, list) and self.minimum <= len(value) <= self.maximum:
                return tuple(self._items(value, path))
            raise BadRequestError(
                f"invalid value for {path}: {_shown(value)}",
                f"write a list of {self.minimum} to {self.maximum} strings",
            )
        if isinstance(value, float) and value % 1 == 0:
            value = int(value)  # in JSON, 2.0 is an integer
        return self._check(value, path, _shown(value))

    def _items(self, values: list[Any], path: str) -> Iterator[str]:
        item = self._replace(type="string")
        for index, value in enumerate(values):
            yield str(item.member(value, f"{path}[{index}]"))

    def _check(self, value: Value, path: str, shown: str) -> Value:
        hint = self.hint
        if self.type == "boolean":
            if isinstance(value, bool):
                return value
            hint = "write true or false"
        elif self.type == "integer":
            is_boolean = isinstance(value, bool)  # which Python counts among the integers
            if isinstance(value, int) and not is_boolean and self.minimum <= value <= self.maximum:
                return value
            hint = f"write a whole number from {self.minimum} to {self.maximum}"
        elif self.type == "time":
            with contextlib.suppress(ValueError):
                return seconds(str(value))
            hint = "write an RFC 3339 time such as 2026-11-20T13:45:00Z"
        elif self.choices:
            if value in self.choices:
                return value
            hint = f"write one of {', '.join(self.choices)}"
        elif isinstance(value, str) and re.fullmatch(self.pattern.strip("^$") or "(?s:.*)", value):
            return value
        raise BadRequestError(f"invalid value for {path}: {shown}", hint or "write a string")

    def schema(self) -> dict[str, object]:
        if self.type == "object":
            return {"description": self.description, **members_schema(self.members)}
        if self.type == "time":
            return {"type": "string", "format": "date-time"}
        if self.type == "array":
            items = self._replace(type="string").schema()
            return {"type": "array", "items": items, "minItems": self.minimum, "maxItems": self.maximum}
        schema: dict[str, object] = {"type": self.type}
        if self.type == "integer":
            schema.update(minimum=self.minimum, maximum=self.maximum)
        if self.choices:
            schema["enum"] = list(self.choices)
        if self.pattern:
            schema["pattern"] = self.pattern
        if self.default is not None:
            schema["default"] = self.default
        return schema


def members_schema(members: Iterable[Parameter]) -> dict[str, object]:
    """Return the JSON Schema of an object with these members."""
    properties: dict[str, object] = {}
    for member in members:
        properties[member.name] = {"description": member.description, **member.schema()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def query_arguments(query: str, parameters: Iterable[Parameter]) -> dict[str, Value]:
    """Return the value of every parameter of a query; raises BadRequestError."""
    from urllib.parse import parse_qsl  # 2 ms, which a client need not pay

    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=32)
    except ValueError:
        raise BadRequestError("the query cannot be parsed", "write it as name=value&name=value") from None
    values: dict[str, str] = {}
    for name, value in pairs:
        if name in values:
            raise BadRequestError(
                f"parameter {name[:_SHOWN_LENGTH]!r} is given twice", "give each parameter once"
            )
        values[name] = value
    by_name = {parameter.name: parameter for parameter in parameters}
    for name in values:
        if name not in by_name:
            raise _unknown("parameter", name, by_name)
    arguments: dict[str, Value] = {}
    for name, parameter in by_name.items():
        arguments[name] = parameter.value(values[name]) if name in values else parameter.default
    return arguments


def body_arguments(body: bytes, content_type: str, members: Iterable[Parameter]) -> dict[str, Value]:
    """Return the value of every member of a JSON body, which may be empty.

    Raises MediaTypeError if the body is not declared as JSON, and BadRequestError if it is invalid.
    """
    if not body:
        return members_of({}, members)
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        shown = repr(kind[:_SHOWN_LENGTH]) if kind else "not given"
        message = f"the body's content type is {shown}"
        raise MediaTypeError(message, "send the header Content-Type: application/json")
    return members_of(_parse(body), members)


def members_of(value: Any, members: Iterable[Parameter], path: str = "") -> dict[str, Value]:
    """Return the value of every member of an object at this path of a body; raises BadRequestError."""
    if not isinstance(value, dict):
        raise BadRequestError(
            f"{path or 'the body'} is not a JSON object: {_shown(value)}", "write a JSON object: {…}"
        )
    by_name = {member.name: member for member in members}
    prefix = f"{path}." if path else ""
    for name in value:
        if name not in by_name:
            raise _unknown("member", name, by_name, prefix)
    arguments: dict[str, Value] = {}
    for name, member in by_name.items():
        if name in value or member.type == "object":
            arguments[name] = member.member(value.get(name, {}), prefix + name)
        else:
            arguments[name] = member.default
    return arguments


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadRequestError("the body is nested too deeply", _EXAMPLE) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise BadRequestError(f"the body is not valid JSON: {place}", _EXAMPLE) from None
    except ValueError:  # it is not UTF-8, or has a number of thousands of digits
        raise BadRequestError("the body is not valid JSON in UTF-8", _EXAMPLE) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise BadRequestError(f"member {name[:_SHOWN_LENGTH]!r} is given twice", "give each member once")
        members[name] = value
    return members


def _refuse_constant(name: str) -> None:
    raise BadRequestError(f"{name} is not valid JSON", "write a number")


def _unknown(kind: str, name: str, allowed: Iterable[str], prefix: str = "") -> BadRequestError:
    from yunion_mps.config.document import nearest_key  # it imports a YAML parser, which only mistakes need

    near = nearest_key(name[:_SHOWN_LENGTH], allowed)
    guess = f" (did you mean {prefix}{near}?)" if near else ""
    names = ", ".join(sorted(allowed))
    hint = f"use one of these {kind}s: {names}" if names else f"omit it: this operation has no {kind}s"
    return BadRequestError(f"unknown {kind} {(prefix + name)[:_SHOWN_LENGTH]!r}{guess}", hint)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:_SHOWN_LENGTH]
