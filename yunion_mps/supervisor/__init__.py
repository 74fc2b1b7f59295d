"""All domains of the host: brings the plan into force, keeps it, and puts back what it changed.

Like a domain it is told the time and never waits, so that one loop can drive it before the event loop is
loaded and another afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from yunion_mps.compute_modes import put_back, set_modes
from yunion_mps.errors import DriverError, HostError, YunionError
from yunion_mps.examination import Examination
from yunion_mps.models import DomainPlan, Gpu, Inventory, Snapshot
from yunion_mps.mps.adoption import Left, left_behind
from yunion_mps.mps.control import PROGRAM, find_control_program
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.states import READY, STOPPED
from yunion_mps.paths import Paths
from yunion_mps.planning import difference, enforces_budgets, make_plan, reason_against
from yunion_mps.store import Store

log = logging.getLogger(__name__)

RESTART = "restart yunion-mps-daemon to use it"
_AFTERWARDS = "the next start of yunion-mps-daemon then puts its GPUs' compute modes back"


class Supervisor:
    """Moves the host from what is to what the plan says, and tells what is."""

    def __init__(self, paths: Paths, examined: Examination) -> None:
        """`examined` is without problems; its NVML stays open for as long as this is used."""
        self._paths = paths
        self._config = examined.config
        self._machine_id = examined.machine_id
        self._nvml = examined.nvml
        self._plan = examined.plan
        gpus = tuple(self._judged(gpu) for gpu in examined.inventory.gpus)
        self._inventory = examined.inventory._replace(gpus=gpus)
        self._domains: list[Domain] = []
        self._store: Store | None = None
        self._version = 0
        self._past = ""
        self._snapshot: Snapshot | None = None

    def start(self, now_s: float) -> None:
        """Set the compute modes and begin to start the domains.

        Raises YunionError, with nothing changed, when nothing of it can work: there is no control program,
        every domain's place is taken, or a control daemon runs that the configuration knows no more.
        """
        self._settle_the_past()
        if not self._plan.domains:
            return
        program = find_control_program()
        self._make_domains(program)
        obstacles = [error for domain in self._domains if (error := domain.obstacle())]
        if len(obstacles) == len(self._domains):
            raise obstacles[0]
        self._set_modes()
        self._make_domains(program)
        for domain in self._domains:
            self._note(domain.plan)
            domain.start(now_s)
        self._changed()

    def tick(self, now_s: float) -> float | None:
        """Do what is due in every domain; return when to be called again at the latest."""
        times = [due_s for domain in self._domains if (due_s := domain.tick(now_s)) is not None]
        return min(times, default=None)

    def descriptors(self) -> list[int]:
        """What to watch for reading, to be asked for again after every tick."""
        return [descriptor for domain in self._domains for descriptor in domain.descriptors()]

    def stop(self, now_s: float, *, spare_found: bool = False) -> None:
        """Begin to stop every domain; `spare_found` leaves control daemons that were running before us."""
        for domain in self._domains:
            domain.stop(now_s, spare_found=spare_found)

    @property
    def started(self) -> bool:
        """Whether every domain is ready or has said why it is not."""
        return all(domain.state == READY or domain.error for domain in self._domains)

    @property
    def stopped(self) -> bool:
        """Whether every domain has stopped."""
        return all(domain.state == STOPPED for domain in self._domains)

    @property
    def serving(self) -> int:
        """The number of domains that serve."""
        return sum(domain.state == READY for domain in self._domains)

    def first_error(self) -> YunionError | None:
        """Why a domain does not serve, None where all do."""
        return next((domain.error for domain in self._domains if domain.error), None)

    def close(self) -> None:
        """Put the compute modes back to what they were before we first touched them.

        Where a control daemon of ours is left running, its GPUs' modes stay, and so do the notes of them:
        they are for the daemon that takes it over, or is started after its end.
        """
        if self._store is None:
            return
        left = self._left()
        put_back(self._nvml, self._store, spare={uuid for one in left.values() for uuid in one.gpu_uuids})
        for place, one in left.items():
            log.warning("a control daemon (PID %d) is left running in %s; %s", one.pid, place, _AFTERWARDS)
        self._store.close()
        self._store = None

    def _left(self) -> dict[str, Left]:
        """The control daemons of ours that run unwatched, by pipe directory; what has ended is forgotten."""
        left = {}
        watched = {d.plan.pipe_directory for d in self._domains if d.status().pid is not None}
        for place in self._open_store().domains():
            one = left_behind(place)
            if one is None and place not in watched:
                self._open_store().forget_domain(place)
            elif one and place not in watched:
                left[place] = one
        return left

    def rescan(self, inventory: Inventory) -> None:
        """Take note of what the GPUs are like now; one that only sysfs still lists stays who it was."""
        before = {gpu.pci_address: gpu for gpu in self._inventory.gpus}
        gpus = [
            before[gpu.pci_address]._replace(reason=gpu.reason)
            if gpu.uuid is None and gpu.pci_address in before
            else gpu
            for gpu in inventory.gpus
        ]
        inventory = inventory._replace(gpus=tuple(self._judged(gpu) for gpu in gpus))
        if inventory == self._inventory:
            return
        for gpu in inventory.gpus:
            reason = before[gpu.pci_address].reason if gpu.pci_address in before else "it was not there"
            if gpu.reason and gpu.reason != reason:
                log.error("GPU %s cannot be used: %s", gpu.address, gpu.reason)
            elif reason and not gpu.reason:
                log.info("GPU %s is back%s", gpu.address, self._unused(gpu))
        self._inventory = inventory
        self._changed()

    def _judged(self, gpu: Gpu) -> Gpu:
        """The GPU, with the reason where it serves devices and no longer can: MIG mode, say."""
        ours = {device.gpu_uuid for device in self._plan.devices}
        if gpu.uuid in ours or gpu.pci_address in self._plan.unavailable:
            return gpu._replace(reason=reason_against(gpu, self._config))
        return gpu

    def _unused(self, gpu: Gpu) -> str:
        return "; " + RESTART if gpu.pci_address in self._plan.unavailable else ""

    def lose_driver(self, error: DriverError) -> None:
        """Take note that the driver as a whole does not answer any more."""
        gpus = tuple(gpu._replace(reason=error.message) for gpu in self._inventory.gpus)
        self.rescan(self._inventory._replace(gpus=gpus))

    def snapshot(self) -> Snapshot:
        """What is now; the same object for as long as nothing changes."""
        if self._snapshot is None:
            self._version += 1
            domains = tuple(domain.status() for domain in self._domains)
            self._snapshot = Snapshot(
                self._version,
                time.time(),
                self._config.enable_cuda_mps,
                self._notice(),
                self._plan,
                self._inventory,
                domains,
            )
        return self._snapshot

    def _changed(self) -> None:
        self._snapshot = None

    def _notice(self) -> str:
        if not self._config.enable_cuda_mps:
            why = f"enable_cuda_mps is false in {self._paths.host_conf}: this host offers no MPS devices"
            return f"{why}; {self._past}" if self._past else why
        if not self._plan.domains:
            reasons = "; ".join(f"{address}: {why}" for address, why in self._plan.unavailable.items())
            why = f"no GPU of this host can serve MPS devices ({reasons or 'it has none'})"
            return f"{why}; {self._past}" if self._past else why
        return self._past

    def _placed(self, plan: DomainPlan) -> DomainPlan:
        """The domain with its directories below the root that everything of ours lies under."""
        return plan._replace(
            pipe_directory=self._paths.under(plan.pipe_directory),
            log_directory=self._paths.under(plan.log_directory),
        )

    def _set_modes(self) -> None:
        """Set every GPU's compute mode; one that refuses is planned anew, as unavailable for that reason."""
        assert self._nvml is not None
        changes = difference(self._plan, self._inventory, ()).compute_modes
        if not changes:
            return
        errors = set_modes(changes, self._nvml, self._open_store())
        after = {change.gpu_uuid: change.after for change in changes if change.gpu_uuid not in errors}
        self._inventory = _with_modes(self._inventory, after, {})
        if errors and len(errors) == len(self._plan.compute_modes):
            first = next(iter(errors.values()))
            raise DriverError(f"no GPU's compute mode can be set: {first.message}", first.hint)
        inventory = _with_modes(self._inventory, {}, errors)
        self._plan, _ = make_plan(self._config, inventory, self._machine_id)

    def _open_store(self) -> Store:
        if self._store is None:
            self._store = Store(self._paths)
        return self._store

    def _make_domains(self, program: str) -> None:
        self._domains = [Domain(self._placed(plan), program, self._changed) for plan in self._plan.domains]

    def _note(self, plan: DomainPlan) -> None:
        """Note where a control daemon is about to run, for the next daemon, should this one not end it."""
        try:
            self._open_store().remember_domain(plan.pipe_directory)
        except HostError as error:
            log.warning("domain %s is not noted: %s. %s", plan.name, error.message, error.hint)

    def _settle_the_past(self) -> None:
        """See to what an earlier daemon that was killed left behind, where the plan does not take it over.

        A control daemon that still runs may have jobs: it is not ended but reported, its GPUs' compute modes
        stay, and none of its GPUs gets a second control daemon. Other modes that are noted are put back.
        """
        if not Store.exists(self._paths):
            return
        planned = {self._placed(plan).pipe_directory: plan for plan in self._plan.domains}
        needed = {uuid for plan in planned.values() for uuid in plan.gpu_uuids}
        left = self._left()
        for place, one in left.items():
            if place in planned:
                continue
            what = f"a control daemon (PID {one.pid}) of an earlier daemon still serves {place}"
            hint = f"when its jobs are done: echo quit | CUDA_MPS_PIPE_DIRECTORY={place} {PROGRAM}"
            if needed & set(one.gpu_uuids):
                raise HostError(what, f"{hint}; {_AFTERWARDS}")
            log.error("%s. %s; %s", what, hint, _AFTERWARDS)
            self._past = f"{what}; {hint}; {_AFTERWARDS}"
        spare = {*self._plan.compute_modes, *(uuid for one in left.values() for uuid in one.gpu_uuids)}
        put_back(self._nvml, self._open_store(), spare=spare)


def _with_modes(inventory: Inventory, modes: dict[str, str], errors: dict[str, DriverError]) -> Inventory:
    """The inventory after compute modes were set, and with the reason where that failed."""
    gpus = []
    for gpu in inventory.gpus:
        uuid = gpu.uuid or ""
        if uuid in errors:
            gpu = gpu._replace(reason=f"its compute mode cannot be set: {errors[uuid].message}")
        elif uuid in modes:
            gpu = gpu._replace(compute_mode=modes[uuid])
        gpus.append(gpu)
    return inventory._replace(gpus=tuple(gpus))


def warnings(snapshot: Snapshot) -> Sequence[str]:
    """What an operator must know although everything runs: budgets not enforced, modes that differ."""
    found = []
    for gpu in snapshot.inventory.gpus:
        served = any(gpu.uuid in domain.plan.gpu_uuids for domain in snapshot.domains)
        if served and not gpu.reason and not enforces_budgets(gpu):
            found.append(
                f"GPU {gpu.address} ({gpu.name}): budgets are not enforced, for it is older than Volta; "
                "its clients can use all of its memory and threads"
            )
        wanted = snapshot.plan.compute_modes.get(gpu.uuid or "")
        if wanted and not gpu.reason and gpu.compute_mode != wanted:
            found.append(
                f"GPU {gpu.address} ({gpu.name}): its compute mode is {gpu.compute_mode}, not {wanted}; "
                "a process that misses the control daemon would use it without limits"
            )
    return found
