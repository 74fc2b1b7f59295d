"""The words that stand in no program: `*.yml` beside this module."""

from __future__ import annotations

import os
from typing import Any

import yaml


def texts(name: str) -> Any:
    """What the file of this name holds."""
    with open(os.path.join(os.path.dirname(__file__), f"{name}.yml"), encoding="utf-8") as file:
        return yaml.safe_load(file)
