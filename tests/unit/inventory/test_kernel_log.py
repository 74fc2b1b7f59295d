"""The kernel's log names the process of an XID."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from yunion_mps.inventory.events import processes_of_xids
from yunion_mps.paths import Paths


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    (tmp_path / "dev").mkdir()
    return Paths(str(tmp_path))


def test_each_xid_that_names_a_process_is_found_with_its_gpu(paths: Paths) -> None:
    Path(paths.kernel_log).write_text(
        "4,100,1,-;NVRM: Xid (PCI:0000:c6:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off\n"
        "4,101,2,-;NVRM: Xid (PCI:0000:06:00): 31, pid=4711, name=train.py, Ch 00000008\n"
        "4,102,3,-;NVRM: Xid (PCI:0001:C6:00): 13, pid='4712', name=python3\n"
        "6,103,4,-;nvidia-uvm: Loaded the UVM driver\n"
    )
    assert processes_of_xids(paths) == [("0000:06:00.0", 31, 4711), ("0001:c6:00.0", 13, 4712)]


def test_without_a_log_nobody_is_named(paths: Paths) -> None:
    assert processes_of_xids(paths) == []


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's log may not be read here")
def test_this_kernel_s_own_log_can_be_read_to_its_end_without_waiting() -> None:
    assert isinstance(processes_of_xids(Paths()), list)
