"""How hypothesis looks for counterexamples here, the fixtures of `supervised`, and paths below a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from yunion_mps.core.paths import Paths

from unit.mig_host import mig_host
from unit.supervised import make_host, stand_ins, start_supervised, start_with_job, supervise

__all__ = ["make_host", "mig_host", "stand_ins", "start_supervised", "start_with_job", "supervise"]

# The same examples in every run, so that a change is blamed for what it broke; `search` looks for new ones.
settings.register_profile("unit", derandomize=True, database=None, deadline=None, max_examples=50)
settings.register_profile("search", database=None, deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unit"))


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(str(tmp_path))
