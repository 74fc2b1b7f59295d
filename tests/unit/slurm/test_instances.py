"""Steps get the present MIG instances of their job."""

from __future__ import annotations

from pathlib import Path

import pytest
from yunion_mps.errors import HostError
from yunion_mps.paths import Paths
from yunion_mps.reasons import MIG_INSTANCE_GONE
from yunion_mps.slurm.instances import present_environment, write_instances

from unit.slurm.rows import device, lease


def test_a_step_has_the_instance_that_was_created_again(tmp_path: Path) -> None:
    def environment(uuids: str, addresses: str, pipe: str, lease: str = "7c1f") -> dict[str, str]:
        return {
            "CUDA_VISIBLE_DEVICES": uuids,
            "YUNION_MPS_DEVICE": addresses,
            "CUDA_MPS_PIPE_DIRECTORY": pipe,
            "YUNION_MPS_LEASE": lease,
        }

    paths = Paths(str(tmp_path))
    leased = environment("MIG-a,MIG-b", "00:09.0-g1-0,00:09.0-g2-0", "/p")
    one = environment("MIG-b", "00:09.0-g2-0", "/p/MIG-b")
    assert present_environment(paths, "17", one, leased) == one, "nothing has happened"
    now = environment("MIG-a,MIG-c", "00:09.0-g1-0,00:09.0-g3-0", "/p")
    write_instances(paths, [lease("slurm:17", environment=now)], [])
    assert present_environment(paths, "17", leased, leased) == now
    assert present_environment(paths, "17", one, leased) == environment("MIG-c", "00:09.0-g3-0", "/p/MIG-c")
    requeued = {**one, "YUNION_MPS_LEASE": "9d02"}
    assert present_environment(paths, "17", requeued, requeued) == requeued, "it is of the former lease"
    gone = {"addr": "00:09.0-g3-0", "reason": "it is gone", "reason_code": MIG_INSTANCE_GONE}
    held = lease("slurm:17", ("00:09.0-g1-0", "00:09.0-g3-0"), environment=now)
    write_instances(paths, [held], [device("x", reason="", reason_code="") | gone])
    first = environment("MIG-a", "00:09.0-g1-0", "/p")
    assert present_environment(paths, "17", first, leased) == first, "the other instance is there"
    with pytest.raises(HostError, match=r"device 00:09\.0-g3-0 is unavailable: it is gone"):
        present_environment(paths, "17", one, leased)
