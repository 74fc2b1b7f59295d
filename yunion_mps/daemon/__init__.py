"""The program yunion-mps-daemon: wiring, signals and the loop."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the daemon; exits 0 after a clean stop, and with the error's own code otherwise."""
    from yunion_mps.daemon.options import parse

    options = parse(sys.argv[1:])
    from yunion_mps.daemon.run import run

    sys.exit(run(options))
