"""The kinds of settings that the daemon brings into effect, in the order in which it does so."""

from __future__ import annotations

from yunion_mps.gpus.compute_mode import COMPUTE_MODE
from yunion_mps.gpus.kind import Kind
from yunion_mps.gpus.time_slice import TIME_SLICE

KINDS: list[Kind] = [COMPUTE_MODE, TIME_SLICE]
