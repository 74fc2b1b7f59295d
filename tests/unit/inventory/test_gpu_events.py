"""What the driver reports by itself arrives at once, and the kernel's log names the process of an Xid."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Optional

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.inventory.gpu_events import EventWatch, processes_of_xids, xid_meaning

from unit.inventory.conftest import OpenedHost, OpenHost

Heard = queue.Queue[Optional[tuple[str, int]]]
Listen = Callable[[OpenedHost], Heard]
PATIENCE_S = 30.0
TWO = [{"kind": "v100"}, {"kind": "a100"}]


@pytest.fixture
def listen() -> Iterator[Listen]:
    with ExitStack() as stack:

        def make(host: OpenedHost) -> Heard:
            heard: Heard = queue.Queue()
            watch = EventWatch(host.nvml, heard.put, wait_s=0.1)
            watch.start()
            stack.callback(watch.join)
            stack.callback(watch.stop)
            return heard

        yield make


def until(host: OpenedHost, heard: Heard, gpu: int, xid: int) -> tuple[str, int]:
    """Report it until it is heard: the watch may not have begun to listen yet."""
    for _ in range(100):
        host.sim.gpus[gpu].xid(xid)
        try:
            found = heard.get(timeout=PATIENCE_S / 100)
        except queue.Empty:
            continue
        if found:
            return found
    raise AssertionError("nothing was heard")


def test_an_xid_is_reported_with_its_gpu(open_host: OpenHost, listen: Listen) -> None:
    host = open_host(TWO)
    assert until(host, listen(host), 1, 48) == ("0000:00:07.0", 48)


def test_a_lost_gpu_is_reported_by_its_xid_or_as_a_change(open_host: OpenHost, listen: Listen) -> None:
    """The driver may refuse to wait on before it gives the Xid."""
    host = open_host(TWO)
    heard = listen(host)
    until(host, heard, 0, 13)
    host.sim.gpus[1].lose()
    while (found := heard.get(timeout=PATIENCE_S)) == ("0000:00:06.0", 13):
        pass
    assert found in (("0000:00:07.0", 79), None)


def test_a_driver_that_fails_is_reported_as_a_reason_to_poll(open_host: OpenHost, listen: Listen) -> None:
    host = open_host(TWO)
    host.sim.fail("nvmlEventSetCreate", "unknown")
    assert listen(host).get(timeout=PATIENCE_S) is None


@pytest.mark.parametrize(
    ("xid", "fatal", "words"),
    [
        (79, True, "GPU has fallen off the bus"),
        (13, False, "graphics engine exception, usually caused by a job"),
        (9999, False, "see NVIDIA's catalogue of Xids, and: dmesg | grep -i xid"),
    ],
)
def test_an_xid_means_a_fault_of_the_gpu_or_only_of_a_job(xid: int, fatal: bool, words: str) -> None:
    assert xid_meaning(xid) == (fatal, words)


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


def test_without_a_log_no_process_is_named(paths: Paths) -> None:
    assert processes_of_xids(paths) == []


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's log may not be read here")
def test_this_kernel_s_own_log_can_be_read_to_its_end_without_waiting() -> None:
    assert isinstance(processes_of_xids(Paths()), list)
