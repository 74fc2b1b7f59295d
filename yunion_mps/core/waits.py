"""What uses a GPU, so that a change of the GPU waits for it: leases, MPS servers and processes.

All texts use the same words: the reason why X has not happened is `X waits for A and B to end`, and the time
when it takes effect is `once A and B have ended`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from yunion_mps.core.reasons import LEASES_PENDING, Reason
from yunion_mps.core.text import list_of

AT_ONCE = "at once"
#: The most GPUs of a server that are named.
_MAX_NAMED = 3


class Servers(NamedTuple):
    """MPS servers of one control daemon."""

    pids: tuple[int, ...]
    #: The addresses of the control daemon's GPUs if it has several or other ones than the one that is used.
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = describe_servers(self.pids)
        if not self.gpus:
            return text
        if len(self.gpus) > _MAX_NAMED:
            return f"{text} of {len(self.gpus)} GPUs"
        if len(self.gpus) == 1:
            return f"{text} of GPU {self.gpus[0]}"
        return f"{text} of GPUs {', '.join(self.gpus)}"


class Users(NamedTuple):
    """What uses a GPU, MIG instance or control daemon now; false if nothing does."""

    #: Descriptions of some leases.
    leases: tuple[str, ...] = ()
    #: The number of the other leases.
    more_leases: int = 0
    servers: tuple[Servers, ...] = ()
    processes: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        users = list(self.leases)
        if self.more_leases:
            users.append(f"{self.more_leases} more")
        users.extend(map(str, self.servers))
        if self.processes:
            users.append(_with_pids("process", "processes", self.processes))
        return list_of(users)

    def includes(self, others: Users) -> bool:
        """Whether all the others are among them; leases that are only counted may be any."""
        unnamed = len({*others.leases} - {*self.leases}) + others.more_leases
        return (
            unnamed <= self.more_leases
            and {*others.servers} <= {*self.servers}
            and {*others.processes} <= {*self.processes}
        )

    @property
    def effect(self) -> str:
        """When a change that waits for them takes effect."""
        if not self:
            return AT_ONCE
        number = len(self.leases) + self.more_leases + len(self.processes)
        number += sum(len(servers.pids) for servers in self.servers)
        return f"once {self} have ended" if number > 1 else f"once {self} has ended"


NO_USERS = Users()


def all_of(users: Iterable[Users]) -> Users:
    """Return all of them together, each named once."""
    leases: dict[str, None] = {}
    servers: dict[Servers, None] = {}
    processes: dict[int, None] = {}
    more_leases = 0
    for part in users:
        leases.update(dict.fromkeys(part.leases))
        servers.update(dict.fromkeys(part.servers))
        processes.update(dict.fromkeys(part.processes))
        more_leases += part.more_leases
    return Users(tuple(leases), more_leases, tuple(servers), tuple(processes))


class Wait(Reason):
    """The reason why something has not happened yet, and the `users` that it waits for."""

    __slots__ = ("users",)
    users: Users

    def __new__(cls, text: str, code: str, users: Users = NO_USERS) -> Wait:  # noqa: PYI034
        wait = str.__new__(cls, text)
        wait.code = code
        wait.users = users
        return wait


def wait_reason(change: str, users: Users | str, code: str) -> Reason:
    """Return the reason why the change, a noun in the singular, has not happened yet.

    Instead of users that are known, their description may be given.
    """
    text = f"{change} waits for {users} to end"
    return Wait(text, code, users if isinstance(users, Users) else NO_USERS)


def users_awaited(reason: str) -> Users:
    """Return what the reason says that a change waits for; nothing if it is no wait."""
    return reason.users if isinstance(reason, Wait) else NO_USERS


class LeaseWait(NamedTuple):
    """Devices of a GPU that wait for the end of leases of a previous division."""

    #: The ids of the devices.
    pending: frozenset[str]
    #: The number of all devices of the GPU.
    total: int
    #: The ids of the leases.
    leases: tuple[str, ...]
    #: The leases as texts describe them.
    users: Users

    @property
    def reason(self) -> Reason:
        return wait_reason("the new division of the GPU", self.users, LEASES_PENDING)


def describe_servers(pids: Collection[int], verb: str = "") -> str:
    """Return the servers with their PIDs, and the verb in their number.

    verb: `has` or `is`; empty for none.
    """
    servers = _with_pids("MPS server", "MPS servers", pids)
    if not verb:
        return servers
    if len(pids) > 1:
        verb = {"has": "have", "is": "are"}[verb]
    return f"{servers} {verb}"


def _with_pids(name: str, names: str, pids: Collection[int]) -> str:
    listed = ", ".join(map(str, pids))
    if len(pids) > 1:
        return f"the {names} (PIDs {listed})"
    return f"the {name} (PID {listed})"
