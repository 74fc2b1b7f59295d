"""`scripts/gpu-check`; its clients are this same program, `--client`."""

from __future__ import annotations

import os
import sys
from types import ModuleType

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    scripts = os.path.dirname(here)
    # The clients use CUDA through the checkout's own yunion_mps, which does not have to be installed.
    sys.path[:] = [scripts, os.path.dirname(scripts), *(path for path in sys.path if path != here)]
    if sys.argv[1:2] == ["--client"]:
        # Only doctor's CUDA client is used, which needs no library; the package itself would import PyYAML.
        doctor = ModuleType("yunion_mps.doctor")
        doctor.__path__ = [os.path.join(os.path.dirname(scripts), "yunion_mps", "doctor")]
        sys.modules[doctor.__name__] = doctor
        from gpu_check.client import main as client

        sys.exit(client(sys.argv[2:]))
    from gpu_check.cli import main

    sys.exit(main(sys.argv[1:]))
