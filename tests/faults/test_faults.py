"""Every fault, injected for real: nothing is lost that need not be, and it recovers or says what to do."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from faults import connections, control_daemon, files_and_disks, gpus, jobs, own_death, sharing
from faults import fault_table as table
from faults.fault_table import FAULTS, Fault, Row

#: Each has registered its faults when it was imported.
SCENARIOS = (control_daemon, jobs, own_death, files_and_disks, gpus, sharing, connections)

#: Those that take no time of their own first, while the others wait.
_PLAYED = sorted(FAULTS, key=lambda fault: fault.takes_s)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, other users and compute modes need root")


@as_root
@pytest.mark.parametrize("fault", _PLAYED, ids=[fault.play.__name__ for fault in _PLAYED])
def test_each_fault_is_survived_as_the_page_says(fault: Fault, row: Callable[[Fault], Row]) -> None:
    assert row(fault).fault == fault.name


@as_root
def test_the_page_tells_what_was_seen(rows: list[Row]) -> None:
    if len(rows) < len(FAULTS):
        pytest.skip("not every fault was played")
    if os.environ.get(table.WRITE_VARIABLE):
        table.write(rows)
    told = table.fixed(table.on_page())
    assert told == table.fixed(table.render(rows)), f"rewrite it with {table.WRITE_VARIABLE}=1"
