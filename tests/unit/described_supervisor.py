"""A supervisor that was not started, on a host that is given as a snapshot, and a driver that only lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from yunion_mps.core.models import Driver, Inventory, Plan, Snapshot
from yunion_mps.core.paths import Paths
from yunion_mps.core.settings import Config
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.mps.domain import Domain
from yunion_mps.supervisor import Supervisor
from yunion_mps.supervisor.domain_directories import DomainDirectories
from yunion_mps.supervisor.preflight import Preflight

from unit import builders

#: A host without GPUs.
NO_GPUS = Snapshot(1, enabled=True, plan=Plan(""), inventory=Inventory(Driver("", None), ()), domains=())


class ListingDriver(Nvml):
    """A driver without GPUs that lists what its two functions return; both may be replaced."""

    def __init__(
        self,
        list_processes: Callable[[], dict[str, dict[int, int | None]]] = dict,
        list_mps_clients: Callable[[], dict[str, set[int]]] = dict,
    ) -> None:
        # Without super().__init__(), which opens the driver.
        self.list_processes = list_processes
        self.list_mps_clients = list_mps_clients

    def processes(self) -> dict[str, dict[int, int | None]]:
        return self.list_processes()

    def mps_clients(self) -> dict[str, set[int]]:
        return self.list_mps_clients()


class DescribedSupervisor(Supervisor):
    """A supervisor that has this snapshot, configuration and domains; all may be replaced.

    Its event log and its state file are real, below the root of `paths`.
    """

    def __init__(
        self,
        described: Snapshot = NO_GPUS,
        *,
        paths: Paths = Paths("/nowhere"),  # noqa: B008 - it is frozen
        nvml: Nvml | None = None,
        domains: Sequence[Domain] = (),
    ) -> None:
        settings = builders.config()
        preflight = Preflight(
            config=settings,
            problems=(),
            inventory=described.inventory,
            plan=described.plan,
            machine_id=builders.MACHINE_ID,
            nvml=nvml,
            driver_error=None,
            directories=DomainDirectories(settings, paths, creates=False),
        )
        super().__init__(paths, preflight)
        self.described = described
        self.settings_read = settings
        self.described_domains = list(domains)

    def snapshot(self) -> Snapshot:
        if not self.described_domains:
            return self.described
        return self.described._replace(domains=tuple(domain.status() for domain in self.described_domains))

    @property
    def config(self) -> Config:
        return self.settings_read

    @property
    def domains(self) -> list[Domain]:
        return self.described_domains
