"""The program yunion-mps-daemon: wiring, signals and the loop."""

from __future__ import annotations

import sys

from yunion_mps.daemon.options import parse_options
from yunion_mps.host.malloc import tune_malloc

#: How long another thread, such as one that formats metrics, may keep the event loop waiting.
_SWITCH_S = 0.001


def main() -> None:
    """Run the daemon; exit with 0 after a clean stop, and with the error's own code otherwise."""
    options = parse_options(sys.argv[1:])
    tune_malloc()
    sys.setswitchinterval(_SWITCH_S)
    from yunion_mps.daemon.run import run_daemon  # after malloc is tuned: reading modules takes large pieces

    sys.exit(run_daemon(options))
