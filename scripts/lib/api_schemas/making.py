"""Generate the JSON schemas of the API's responses by name, each with an example, with pydantic."""

from __future__ import annotations

import importlib
import json
import typing
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import typing_extensions

Schema = dict[str, Any]

#: What the package carries.
FILE = Path(__file__).parents[3] / "yunion_mps" / "http" / "schemas.json"
#: Values of the documentation's reference case, by type and field.
_EXAMPLES = Path(__file__).with_name("examples.json")
#: Types with this ending hold fields that others share, and are no answers themselves.
_SHARED = "FieldsJson"
#: The ending of the types' names that the API's schemas do not have.
_ENDING = "Json"
#: Types whose examples begin with those of others.
_DETAILS_OF = {"DeviceDetails": "Device", "LeaseDetails": "LeaseRecord"}


def content() -> str:
    """Return the contents of the file."""
    return json.dumps(schemas(), indent=1, ensure_ascii=False) + "\n"


def schemas() -> dict[str, Schema]:
    """Return the schemas by name, as components of an OpenAPI document."""
    from pydantic import ConfigDict, TypeAdapter

    answers = _answers()
    types = [one for name, one in vars(answers).items() if _is_answer(name, one)]
    for answer_type in types:
        answer_type.__pydantic_config__ = ConfigDict(extra="forbid")
        # Also for references to it, which pydantic makes of the qualified name.
        answer_type.__qualname__ = answer_type.__name__ = answer_type.__name__.removesuffix(_ENDING)
    adapters: list[Any] = []
    for answer_type in types:
        adapters.append((answer_type.__name__, "validation", TypeAdapter(answer_type)))
    _, made = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    found = {name: _plain(made["$defs"][name]) for name in sorted(made["$defs"])}
    examples = json.loads(_EXAMPLES.read_text())
    for name, schema in found.items():
        schema["examples"] = [_example(name, found, examples)]
    return found


def _answers() -> ModuleType:
    # pydantic needs typing_extensions' TypedDict before Python 3.12; the package does without it.
    with mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict):
        return importlib.import_module("yunion_mps.answers")


def _is_answer(name: str, value: object) -> bool:
    return typing_extensions.is_typeddict(value) and not name.endswith(_SHARED)


def _plain(schema: Schema) -> Schema:
    """Return the schema without titles, which repeat names, and with null as a type of nullable fields."""
    found = {name: value for name, value in schema.items() if name != "title"}
    if "properties" in found:
        found["properties"] = {name: _plain(value) for name, value in found["properties"].items()}
    if "items" in found:
        found["items"] = _plain(found["items"])
    either = [_plain(one) for one in found.pop("anyOf", [])]
    if len(either) == 2 and "type" in either[0]:
        return {**either[0], **found, "type": [either[0]["type"], "null"]}
    return {**found, "anyOf": either} if either else found


def _example(name: str, schemas: dict[str, Schema], examples: dict[str, Any]) -> Any:
    """Return an example of the type; a field without its own example gets that of its type."""
    own = {**examples.get(_DETAILS_OF.get(name, ""), {}), **examples.get(name, {})}

    def value(field: str, schema: Schema) -> Any:
        if field in own:
            return own[field]
        if "items" in schema:
            return [value(field, schema["items"])]
        refs = (one["$ref"] for one in (schema, *schema.get("anyOf", ())) if "$ref" in one)
        return _example(next(refs).rpartition("/")[2], schemas, examples)

    return {field: value(field, schema) for field, schema in schemas[name]["properties"].items()}
