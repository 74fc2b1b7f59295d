"""Bodies of POST in a line: `count=2&holder.name=job&holder.ttl_s=600` is sent as the object that it says."""

from __future__ import annotations

import json
from typing import Any

_HEADER = "Idempotency-Key"
_LISTS = ("devices",)


def request_body(words: str) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a request with these members; a word of another letter case is a header."""
    body: dict[str, Any] = {}
    headers = {"Content-Type": "application/json"}
    for word in filter(None, words.split("&")):
        name, _, text = word.partition("=")
        if name == _HEADER:
            headers[name] = text
            continue
        place = body
        *holders, last = name.split(".")
        for one in holders:
            place = place.setdefault(one, {})
        assert last not in place, f"{name} is given twice, but JSON has each member once"
        place[last] = text.split(",") if last in _LISTS else _value(text)
    return json.dumps(body).encode(), headers


def _value(text: str) -> Any:
    try:
        return json.loads(text) if not text.startswith(("{", "[", '"')) else text
    except ValueError:
        return text
