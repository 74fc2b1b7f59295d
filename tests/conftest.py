"""What holds for all tests: a time zone far from UTC, and where hypothesis keeps what it keeps."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hypothesis.configuration import set_hypothesis_home_dir

# One that no host is in: what tells a host's time from its own, or from UTC, only by luck fails everywhere.
os.environ.setdefault("TZ", "HERE-5:45")
time.tzset()

set_hypothesis_home_dir(Path(__file__).resolve().parent.parent / ".cache/hypothesis")
