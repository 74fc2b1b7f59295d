"""What `reload --now` ends or removes, and whether the operator has confirmed all of it. No I/O."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core.errors import NotConfirmedError
from yunion_mps.core.models import DomainStatus
from yunion_mps.observe.holdings import ID_LENGTH
from yunion_mps.supervisor import Change

if TYPE_CHECKING:
    from yunion_mps.answers import ClientListJson, LossJson, MpsClientJson

#: The name of the loss if the control daemons do not list all clients.
_UNKNOWN_CLIENTS = "unknown clients"
_TOKEN_BYTES = 8
#: How many different listings are remembered.
_REMEMBERED = 64
#: How many losses an error names.
_NAMED = 5


class ReloadLosses(NamedTuple):
    """What is lost by `reload --now`."""

    #: Those whose MPS servers are ended.
    clients: Sequence[MpsClientJson] = ()
    #: Leased devices, and MIG instances of other programs.
    devices: Sequence[LossJson] = ()
    #: Why not all clients are known.
    errors: Sequence[str] = ()

    def described(self) -> dict[str, str]:
        """Return a description of each loss by its name.

        The name is a PID with its start, a lease's id, or an instance's address.
        """
        descriptions = {}
        for client in self.clients:
            name = client_name(client["pid"], client["started"])
            descriptions[name] = f"PID {client['pid']} of {client['user']} ({client['command']})"
        for loss in self.devices:
            if loss["lease"]:
                short = loss["lease"][:ID_LENGTH]
                descriptions[loss["lease"]] = f"lease {short} on {loss['subject']} of {loss['holder']}"
            else:
                descriptions[loss["subject"]] = f"instance {loss['subject']} of {loss['holder']}"
        if self.errors:
            descriptions[_UNKNOWN_CLIENTS] = f"clients that are not known ({'; '.join(self.errors)})"
        return descriptions


NO_LOSSES = ReloadLosses()


def client_name(pid: int, started: str | None) -> str:
    """Return the name of a client as a loss; `started` is an RFC 3339 time, None if it is unknown."""
    return f"PID {pid} since {started}"


class Listings:
    """What was listed for an operator, who confirms it by its token. The last ones are remembered."""

    def __init__(self) -> None:
        #: The names of the losses that each token confirms, in the order in which they were listed.
        self._listed: dict[str, frozenset[str]] = {}

    def remember(self, losses: ReloadLosses) -> str:
        """Remember that these losses were listed; return the token that confirms them, empty for none."""
        names = frozenset(losses.described())
        if not names:
            return ""
        token = self._known_token(names) or os.urandom(_TOKEN_BYTES).hex()
        self._listed.pop(token, None)
        self._listed[token] = names
        if len(self._listed) > _REMEMBERED:
            oldest = next(iter(self._listed))
            del self._listed[oldest]
        return token

    def _known_token(self, names: frozenset[str]) -> str:
        for token, listed in self._listed.items():
            if listed == names:
                return token
        return ""

    def confirmed_by(self, token: str) -> frozenset[str]:
        """Return the names of the losses that this token confirms; empty if it is no longer known."""
        return self._listed.get(token, frozenset())


def refuse_unconfirmed(losses: ReloadLosses, confirmed: Collection[str], result: str) -> None:
    """Raise NotConfirmedError if something would be lost whose name is not confirmed.

    `result` says what the reload has done so far.
    """
    others = [what for name, what in losses.described().items() if name not in confirmed]
    if others:
        raise unconfirmed_error(others, result)


def unconfirmed_error(losses: Sequence[str], result: str) -> NotConfirmedError:
    """Return the error for losses that are not confirmed; `result` says what the reload has done so far."""
    named = "; ".join(losses[:_NAMED])
    if len(losses) > _NAMED:
        named += f"; and {len(losses) - _NAMED} more"
    return NotConfirmedError(f"{result}, because the reload would also end or remove: {named}")


def losses_of_clients(
    clients: ClientListJson,
    changes: Iterable[Change],
    domains: Sequence[DomainStatus],
    addresses: Mapping[str, str],
) -> ReloadLosses:
    """Return the clients whose MPS servers delay a change; `addresses` are those of GPUs (UUIDs).

    A change that is yet to be made waits for all servers of its domain or its GPUs, and a pending one for
    those that its domain names.
    """
    delayed = {change.subject for change in changes if not change.at_once}
    changed: set[str] = set()
    waiting: set[str] = set()
    servers: set[int | None] = {None}  # a client whose server is unknown could use any of them
    for domain in domains:
        name = domain.plan.name
        if name in delayed:
            changed.add(name)
        for uuid in domain.plan.gpu_uuids:
            if addresses.get(uuid, uuid) in delayed:
                changed.add(name)
        if domain.pending:
            waiting.add(name)
        servers.update(domain.waits_for)
    if not changed and not waiting:
        return NO_LOSSES
    lost = []
    for client in clients["clients"]:
        waited_for = client["domain"] in waiting and client["server"] in servers
        if client["mps"] is not False and (client["domain"] in changed or waited_for):
            lost.append(client)
    return ReloadLosses(clients=lost, errors=clients["errors"])
