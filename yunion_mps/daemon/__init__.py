"""The program yunion-mps-daemon: wiring, signals and the loop."""

from __future__ import annotations

import gc
import sys

#: How long another thread, such as one that formats metrics, may keep the event loop waiting.
_SWITCH_S = 0.001


def main() -> None:
    """Run the daemon; exits 0 after a clean stop, and with the error's own code otherwise.

    The collector is off until the domains are started: it would run through every import, 2 ms of the start.
    """
    gc.disable()
    from yunion_mps.daemon.options import parse

    options = parse(sys.argv[1:])
    from yunion_mps.host.malloc import tune_malloc

    tune_malloc()  # before modules are read, which takes large pieces
    sys.setswitchinterval(_SWITCH_S)
    from yunion_mps.daemon.run import run

    sys.exit(run(options))
