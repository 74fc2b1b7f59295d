"""The services of a daemon, made once; HTTP, the metrics and the monitor call them."""

from __future__ import annotations

import asyncio
import os
from functools import lru_cache, partial
from typing import NamedTuple

from yunion_mps.containers.lookup import Containers
from yunion_mps.core.paths import Paths
from yunion_mps.leases.holders import short_holder_label
from yunion_mps.observe.clients import ClientService
from yunion_mps.observe.observer import Observer
from yunion_mps.observe.usage import ProcessDevices, UsageSampler
from yunion_mps.service.budgets import BudgetEnforcer
from yunion_mps.service.events import EventService
from yunion_mps.service.instances import InstanceCheck
from yunion_mps.service.lease_terminator import LeaseTerminator
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.publisher import CdiPublisher
from yunion_mps.service.queries import Queries
from yunion_mps.service.reload import LoopControl, Reloader
from yunion_mps.service.server_users import ServerUsers
from yunion_mps.service.status import StatusService
from yunion_mps.service.terminate import Terminator
from yunion_mps.supervisor import Supervisor


class Services(NamedTuple):
    """What the daemon does for its callers, each service with what it needs."""

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
        publisher: CdiPublisher,
        control: LoopControl,
        *,
        started_s: float,
    ) -> Services:
        """Return all services; raises HostError if the state file cannot be used.

        started_s: when the daemon started, in s since 1970
        """
        containers = Containers(paths)
        queries = Queries(
            supervisor.snapshot,
            started_s,
            os.getpid(),
            ledger=supervisor.ledger,
            # Cached, because devices are listed again after each change: a container keeps its first name.
            name_holder=lru_cache(4096)(partial(short_holder_label, containers=containers)),
        )
        conversation = asyncio.Lock()
        users = ServerUsers(supervisor, queries, conversation, control.tick)
        leases = LeaseService(
            supervisor,
            queries,
            ledger=supervisor.ledger,
            containers=containers,
            cdi=publisher,
            users=users,
            instances=InstanceCheck(supervisor, queries, control.poll),
        )
        devices = ProcessDevices(supervisor, supervisor.ledger)
        observer = Observer(paths, supervisor, devices, queries.usage, supervisor.ledger)
        clients = ClientService(observer, conversation)
        terminator = Terminator(supervisor, clients)
        reloader = Reloader(
            paths,
            supervisor,
            ledger=supervisor.ledger,
            containers=containers,
            clients=clients,
            control=control,
        )
        return cls(
            supervisor=supervisor,
            queries=queries,
            users=users,
            leases=leases,
            observer=observer,
            clients=clients,
            terminator=terminator,
            lease_terminator=LeaseTerminator(leases, terminator),
            budgets=BudgetEnforcer(supervisor, queries, leases, observer, terminator),
            status=StatusService(queries, leases, clients),
            events=EventService(supervisor.event_log),
            usage=UsageSampler(supervisor, devices, queries.usage, leases.peaks),
            reloader=reloader,
        )
