"""The program yunion-mps-daemon: wiring, signals and the loop."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the daemon; exits 0 after a clean stop, and with the error's own code otherwise.

    The collector is off until the domains are started: it would run through every import, 2 ms of the start.
    """
    gc.disable()
    from yunion_mps.daemon.options import parse

    options = parse(sys.argv[1:])
    from yunion_mps.daemon.memory import give_back_early

    give_back_early()  # before modules are read, which takes large pieces
    from yunion_mps.daemon.run import run

    sys.exit(run(options))
