"""The services of a daemon, made once; HTTP, the metrics and the monitor call them."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from yunion_mps.paths import Paths
from yunion_mps.service.budgets import BudgetEnforcer
from yunion_mps.service.clients import ClientService
from yunion_mps.service.events import EventService
from yunion_mps.service.lease_terminator import LeaseTerminator
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.observer import Observer
from yunion_mps.service.publisher import CdiPublisher
from yunion_mps.service.queries import Queries
from yunion_mps.service.reload import LoopControl, Reloader
from yunion_mps.service.server_users import ServerUsers
from yunion_mps.service.status import StatusService
from yunion_mps.service.terminate import Terminator
from yunion_mps.service.usage import ProcessDevices, UsageSampler
from yunion_mps.supervisor import Supervisor


class Services(NamedTuple):
    supervisor: Supervisor
    queries: Queries
    users: ServerUsers
    leases: LeaseService
    observer: Observer
    clients: ClientService
    terminator: Terminator
    lease_terminator: LeaseTerminator
    budgets: BudgetEnforcer
    status: StatusService
    events: EventService
    usage: UsageSampler
    reloader: Reloader

    @classmethod
    def of(
        cls,
        paths: Paths,
        supervisor: Supervisor,
        queries: Queries,
        publisher: CdiPublisher,
        control: LoopControl,
    ) -> Services:
        """All services; raises HostError if the state file cannot be used."""
        conversation = asyncio.Lock()
        users = ServerUsers(supervisor, queries, conversation, control.tick)
        leases = LeaseService(paths, supervisor, queries, publisher, users)
        devices = ProcessDevices(supervisor, leases.ledger)
        observer = Observer(paths, supervisor, devices, queries.usage, leases.ledger)
        clients = ClientService(observer, conversation)
        terminator = Terminator(supervisor, clients)
        return cls(
            supervisor,
            queries,
            users,
            leases,
            observer,
            clients,
            terminator,
            LeaseTerminator(leases, terminator),
            BudgetEnforcer(supervisor, queries, leases, observer, terminator),
            StatusService(queries, leases, clients),
            EventService(supervisor.event_log),
            UsageSampler(supervisor, devices, queries.usage, leases.peaks),
            Reloader(paths, supervisor, leases.ledger, leases.containers, clients, control),
        )
