"""Which devices a process has: those that its environment names, or else those of its leases.

Asked for the last hour's use and for the metrics, so that both lay the same memory to the same device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from yunion_mps.host.proc import variable_of
from yunion_mps.leases.ledger import Ledger
from yunion_mps.planning import DEVICE_VARIABLE
from yunion_mps.service.usage import Budget
from yunion_mps.supervisor import Supervisor

#: So long are the names of all devices that a lease may have, at most.
_LONGEST = 4096


class Known(NamedTuple):
    """The devices there are, by address, and the addresses of those that a process (PID) was given."""

    budgets: Mapping[str, Budget]
    given: Mapping[int, tuple[str, ...]]


class ProcessDevices:
    """Knows of every process that runs which devices it names, so that its environment is read once."""

    def __init__(self, supervisor: Supervisor, ledger: Ledger) -> None:
        self._supervisor = supervisor
        self._ledger = ledger
        self._named: dict[tuple[int, int], str] = {}

    def known(self) -> Known:
        """What is known now; for the event loop, on which leases and the plan change."""
        leases = self._ledger.leases.values()
        given: dict[int, tuple[str, ...]] = {}
        for lease in leases:
            if lease.holder.pid is not None:
                before = given.get(lease.holder.pid, ())
                given[lease.holder.pid] = (*before, *(device.addr for device in lease.devices))
        made = (device for lease in leases for device in lease.devices)
        there = (*self._supervisor.snapshot().plan.devices, *made)
        budgets = {device.addr: Budget(device.gpu_uuid, device.memory_limit_mib) for device in there}
        return Known(budgets, given)

    def of(self, started: Mapping[int, int], known: Known) -> dict[int, tuple[str, ...]]:
        """The addresses of the devices that each process has, of those that there are; for any thread.

        `started` are the processes by PID, with their start in clock ticks. What is remembered of others is
        forgotten.
        """
        before = self._named
        now = {one: before[one] if one in before else _named_by(one[0]) for one in started.items()}
        # Whole: where two threads ask at a time, some environments are read twice. And without those that
        # could not be read, as while a program is being started: they are read again at the next look.
        self._named = {one: names for one, names in now.items() if names is not None}
        return {pid: _known(names, known) or known.given.get(pid, ()) for (pid, _), names in now.items()}


def _named_by(pid: int) -> str | None:
    """What its environment says, which is whatever its user likes: no more of it is kept than makes sense."""
    names = variable_of(pid, DEVICE_VARIABLE)
    return None if names is None else names[:_LONGEST]


def _known(names: str | None, known: Known) -> tuple[str, ...]:
    own = dict.fromkeys(name.strip() for name in (names or "").split(","))  # twice, it is the same device
    return tuple(name for name in own if name in known.budgets)
