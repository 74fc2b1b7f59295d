"""`scripts/gpu-check`; the CUDA clients that it starts are this same program with `--client`."""

from __future__ import annotations

import glob
import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    scripts = os.path.dirname(here)
    checkout = os.path.dirname(scripts)
    sys.path[:0] = [scripts, checkout]
    # Of another Python, perhaps, but most modules there run with any.
    sys.path.extend(glob.glob(f"{checkout}/.venv/lib/python3*/site-packages"))
    if sys.argv[1:2] == ["--client"]:
        from gpu_check.client import main as client

        sys.exit(client(sys.argv[2:]))
    from gpu_check.cli import main

    sys.exit(main(sys.argv[1:]))
