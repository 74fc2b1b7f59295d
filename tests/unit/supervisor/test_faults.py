"""Faults of GPUs that NVML does not show: kept until the end of the boot."""

from __future__ import annotations

import pytest

from unit.supervised import MakeHost, Supervise


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000], ids=len)
def test_a_file_of_faults_that_cannot_be_understood_counts_as_empty(
    make_host: MakeHost, supervise: Supervise, text: str
) -> None:
    host = make_host([{"kind": "v100"}])
    file = host.root / "run/yunion-mps/gpu-faults.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    assert supervise(host).snapshot.inventory.gpus[0].reason == ""
