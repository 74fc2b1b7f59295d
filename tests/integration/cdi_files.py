"""The files in a simulated host's /run/cdi, by which container engines find its devices."""

from __future__ import annotations

import json
import os
from typing import Any

from simhost import SimHost


def spec_of(host: SimHost, name: str = "yunion-mps.json") -> dict[str, Any]:
    """What a file of ours says, empty if it does not exist."""
    try:
        return dict(json.loads((host.root / "run/cdi" / name).read_text()))
    except FileNotFoundError:
        return {}


def files_of(host: SimHost) -> list[str]:
    return sorted(os.listdir(host.root / "run/cdi"))
