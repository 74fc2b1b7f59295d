"""Numbers with their nouns."""

from __future__ import annotations


def count(number: int, name: str, names: str = "") -> str:
    """`1 GPU`, `2 GPUs`; `names` where they are called otherwise than with an s."""
    return f"{number} {name if number == 1 else names or name + 's'}"
