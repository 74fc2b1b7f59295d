"""The program yunion-mps. Each command is one short file: parse, ask, show."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run one command.

    It ends within a moment, so the collector is left off: it would run through all imports, 2 ms a command.
    """
    gc.disable()
    from yunion_mps.cli.boundary import run

    sys.exit(run())
