"""Which process and lease has which device, and what is wrong, joined from the daemon's answers.

`status`, `who`, `top` and the web page show the same. Nothing here asks the daemon: the answers are given.
"""

from __future__ import annotations


def count(number: int, name: str, names: str = "") -> str:
    """`1 GPU`, `2 GPUs`; `names` is the plural if it is not formed by an s."""
    return f"{number} {name if number == 1 else names or name + 's'}"
