"""Which process and lease has which device, and what is wrong, joined from the daemon's answers.

`status`, `who`, `top` and the web page all use it. It never queries the daemon itself.
"""

from __future__ import annotations


def count(number: int, name: str, names: str = "") -> str:
    """Return `1 GPU`, `2 GPUs`; `names` is the plural if it does not end in s."""
    return f"{number} {name if number == 1 else names or name + 's'}"
