"""What `reload --now` ends or removes, and whether the operator has confirmed all of it. No I/O."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core.errors import NotConfirmedError
from yunion_mps.core.models import DomainStatus
from yunion_mps.core.waits import describe_servers
from yunion_mps.observe.holdings import ID_LENGTH
from yunion_mps.observe.process_list import domain_of_failure
from yunion_mps.supervisor import Change

if TYPE_CHECKING:
    from yunion_mps.answers import ClientListJson, LossJson, MpsClientJson

_TOKEN_BYTES = 8
#: How many different listings are remembered.
_REMEMBERED = 64
#: How many losses an error names.
_NAMED = 5


class UnknownClients(NamedTuple):
    """Clients that an MPS server may have, although nothing lists them."""

    domain: str
    #: The server's PID.
    server: int
    why: str


class ReloadLosses(NamedTuple):
    """What is lost by `reload --now`."""

    #: Those whose MPS servers are ended.
    clients: Sequence[MpsClientJson] = ()
    #: Leased devices, and MIG instances of other programs.
    devices: Sequence[LossJson] = ()
    #: Where not all clients are known.
    unknown: Sequence[UnknownClients] = ()

    @property
    def errors(self) -> list[str]:
        """Why not all clients are known, each reason once."""
        return list(dict.fromkeys(unknown.why for unknown in self.unknown))

    def described(self) -> dict[str, str]:
        """Return a description of each loss by its name.

        A name tells what is lost from what may be in its place later: a PID with its start, a lease with its
        device, an instance with its profile, unknown clients by their server.
        """
        descriptions = {}
        for client in self.clients:
            if client["pid"] > 0:  # those of another PID namespace are among the unknown
                name = client_name(client["pid"], client["started"])
                descriptions[name] = f"PID {client['pid']} of {client['user']} ({client['command']})"
        for loss in self.devices:
            if loss["lease"]:
                short = loss["lease"][:ID_LENGTH]
                name = f"{loss['lease']} on {loss['subject']}"
                descriptions[name] = f"lease {short} on {loss['subject']} of {loss['holder']}"
            else:
                name = f"{loss['subject']} of {loss['holder']}"
                descriptions[name] = f"instance {loss['subject']} of {loss['holder']}"
        for unknown in self.unknown:
            name = f"unknown clients of {unknown.server}"
            whose = describe_servers([unknown.server])
            descriptions[name] = f"clients of {whose} that are not known ({unknown.why})"
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
    others = [text for name, text in losses.described().items() if name not in confirmed]
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
        if _is_changed(domain, delayed, addresses):
            changed.add(domain.plan.name)
        if domain.pending:
            waiting.add(domain.plan.name)
        servers.update(domain.waits_for)
    if not changed and not waiting:
        return NO_LOSSES
    lost = []
    for client in clients["clients"]:
        waited_for = client["domain"] in waiting and client["server"] in servers
        if client["mps"] is not False and (client["domain"] in changed or waited_for):
            lost.append(client)
    return ReloadLosses(clients=lost, unknown=_unknown_clients(clients, domains, changed))


def _is_changed(domain: DomainStatus, delayed: Collection[str], addresses: Mapping[str, str]) -> bool:
    """Return whether one of the `delayed` changes is of the domain or of one of its GPUs."""
    if domain.plan.name in delayed:
        return True
    return any(addresses.get(uuid, uuid) in delayed for uuid in domain.plan.gpu_uuids)


def _unknown_clients(
    clients: ClientListJson, domains: Iterable[DomainStatus], changed: Collection[str]
) -> list[UnknownClients]:
    """Return which servers in the way may have clients that nothing lists, and why.

    These are those that a pending change waits for, or all of a domain that is `changed`.
    """
    unknown: list[UnknownClients] = []
    for domain in domains:
        name = domain.plan.name
        reasons = [error for error in clients["errors"] if domain_of_failure(error) in ("", name)]
        if domain.orphans:
            verb = "has" if len(domain.orphans) == 1 else "have"
            text = f"{describe_servers(domain.orphans)} {verb} outlived the control daemon"
            reasons.append(f"domain {name}: {text}, so only the driver knows the clients")
        if any(client["domain"] == name and client["pid"] <= 0 for client in clients["clients"]):
            reasons.append(f"domain {name}: a client is in another PID namespace")
        in_the_way = set(domain.waits_for) if domain.pending else set()
        if name in changed:
            in_the_way.update(server["pid"] for server in clients["servers"] if server["domain"] == name)
        if reasons:
            for pid in sorted(in_the_way):
                unknown.append(UnknownClients(name, pid, "; ".join(reasons)))
    return unknown
