"""How hypothesis looks for counterexamples here, and the fixtures of `supervised`."""

from __future__ import annotations

import os

from hypothesis import settings

from unit.supervised import begin, make_host, put_to_work, stand_ins, supervise

__all__ = ["begin", "make_host", "put_to_work", "stand_ins", "supervise"]

# The same examples in every run, so that a change is blamed for what it broke; `search` looks for new ones.
settings.register_profile("unit", derandomize=True, database=None, deadline=None, max_examples=50)
settings.register_profile("search", database=None, deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unit"))
