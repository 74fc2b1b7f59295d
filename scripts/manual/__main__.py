"""`scripts/generate`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.dirname(here), *(path for path in sys.path if path != here)]
    from manual.writing import main

    sys.exit(main(sys.argv[1], os.environ["SOURCE_DATE_EPOCH"]))
