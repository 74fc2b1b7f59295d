"""`scripts/generate`; with a Python that has the project's packages, this file itself can be run."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    scripts = os.path.dirname(here)
    # Prefer the checkout's sources to an installed yunion_mps, because the output describes them.
    sys.path[:] = [scripts, os.path.dirname(scripts), *(path for path in sys.path if path != here)]
    from manual.writing import main

    sys.exit(main(sys.argv[1], os.environ.get("SOURCE_DATE_EPOCH", "")))
