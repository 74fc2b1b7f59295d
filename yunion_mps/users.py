"""What uses a GPU, so that a change of the GPU waits for it: leases, MPS servers and processes.

All texts use the same words: the reason why X has not happened is `X waits for A and B to end`, and the time
when it takes effect is `once A and B have ended`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from yunion_mps.reasons import LEASES_PENDING, Reason

AT_ONCE = "at once"
#: The most GPUs of a server that are named.
_MAX_NAMED = 3


class Servers(NamedTuple):
    """MPS servers of one control daemon, and its GPUs (addresses) if it has several or other ones."""

    pids: tuple[int, ...]
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = f"GPU{'s' if len(self.gpus) > 1 else ''} {', '.join(self.gpus)}"
        of = named if len(self.gpus) <= _MAX_NAMED else f"{len(self.gpus)} GPUs"
        return f"{describe_servers(self.pids)}{f' of {of}' if self.gpus else ''}"


class Users(NamedTuple):
    """What uses a GPU, MIG instance or control daemon now; false if nothing does.

    `leases` has the descriptions of some leases, and `more_leases` counts the others.
    """

    leases: tuple[str, ...] = ()
    more_leases: int = 0
    servers: tuple[Servers, ...] = ()
    processes: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        more = [f"{self.more_leases} more"] if self.more_leases else []
        processes = [_with_pids("process", "processes", self.processes)] if self.processes else []
        *others, last = [*self.leases, *more, *map(str, self.servers), *processes] or [""]
        return f"{', '.join(others)} and {last}" if others else last

    @property
    def effect(self) -> str:
        """When a change that waits for them takes effect."""
        pids = [pid for servers in self.servers for pid in servers.pids]
        number = len(self.leases) + self.more_leases + len(pids) + len(self.processes)
        return f"once {self} {'have' if number > 1 else 'has'} ended" if self else AT_ONCE


NO_USERS = Users()


def all_of(users: Iterable[Users]) -> Users:
    """Return all of them together, each named once."""
    some = list(users)
    return Users(
        tuple(dict.fromkeys(lease for one in some for lease in one.leases)),
        sum(one.more_leases for one in some),
        tuple(dict.fromkeys(servers for one in some for servers in one.servers)),
        tuple(dict.fromkeys(pid for one in some for pid in one.processes)),
    )


def wait_reason(what: str, users: Users | str, code: str) -> Reason:
    """Return the reason why `what`, a noun in the singular, has not happened yet."""
    return Reason(f"{what} waits for {users} to end", code)


class LeaseWait(NamedTuple):
    """Devices of a GPU that wait for the end of leases of a previous division.

    `pending` has their ids, `total` counts all of the GPU's devices, `leases` has the ids of the leases, and
    `users` describes them.
    """

    pending: frozenset[str]
    total: int
    leases: tuple[str, ...]
    users: Users

    @property
    def reason(self) -> Reason:
        return wait_reason("the new division of the GPU", self.users, LEASES_PENDING)


def describe_servers(pids: Collection[int], verb: str = "") -> str:
    """The servers with their PIDs, and the `verb` (has or is) in their number."""
    verb = {"has": " have", "is": " are"}[verb] if verb and len(pids) > 1 else f" {verb}".rstrip()
    return f"{_with_pids('MPS server', 'MPS servers', pids)}{verb}"


def _with_pids(name: str, names: str, pids: Collection[int]) -> str:
    plural = len(pids) > 1
    return f"the {names if plural else name} (PID{'s' if plural else ''} {', '.join(map(str, pids))})"
