"""What the schemas are put together from: each part carries its own example."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(about: str, example: str | None, **limits: Any) -> Schema:
    """A string."""
    return {"type": "string", "description": about, "examples": [example], **limits}


def number(about: str, example: float | None, kind: str = "integer", **limits: Any) -> Schema:
    """A number that is not negative."""
    return {"type": kind, "description": about, "examples": [example], "minimum": 0, **limits}


def truth(about: str, *, example: bool) -> Schema:
    """True or false."""
    return {"type": "boolean", "description": about, "examples": [example]}


def list_of(about: str, items: Schema, example: list[Any] | None = None) -> Schema:
    """A list; without an example of its own, one item's example is all of it."""
    found: Schema = {"type": "array", "description": about, "items": items}
    return found if example is None else {**found, "examples": [example]}


def or_null(schema: Schema) -> Schema:
    """The same, or null where the driver or the system does not tell it."""
    return {**schema, "type": [schema["type"], "null"]}


def object_of(about: str, properties: Schema) -> Schema:
    """An object that has just these properties."""
    return {
        "type": "object",
        "description": about,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def ref(name: str, kind: str = "schemas") -> Schema:
    """A reference to one of the document's components."""
    return {"$ref": f"#/components/{kind}/{name}"}
