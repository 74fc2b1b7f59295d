"""`scripts/gpu-check`; its clients are this same program, `--client`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.dirname(here), *(path for path in sys.path if path != here)]
    if sys.argv[1:2] == ["--client"]:
        from gpu_check.client import main as client

        sys.exit(client(sys.argv[2:]))
    from gpu_check.cli import main

    sys.exit(main(sys.argv[1:]))
