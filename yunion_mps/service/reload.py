"""Reload and re-exec: bring a new configuration, or a new program, into effect while the daemon runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.containers.lookup import Containers
from yunion_mps.core.enums import ABOUT_MIG_LAYOUT
from yunion_mps.core.errors import (
    ConfigError,
    DriverError,
    HostError,
    NotConfirmedError,
    ShortageError,
    YunionError,
)
from yunion_mps.core.models import Event, Plan
from yunion_mps.core.paths import Paths
from yunion_mps.core.text import decode_line
from yunion_mps.core.units import rfc3339
from yunion_mps.core.waits import AT_ONCE, describe_servers
from yunion_mps.gpus.mig_layout import Losses, effect_of
from yunion_mps.gpus.reconciler import observe
from yunion_mps.host.proc import command_of, is_gone, process_name, started_s, user_name
from yunion_mps.host.process_info import uid_of
from yunion_mps.host.processes import outcome_of
from yunion_mps.host.threads import on_thread
from yunion_mps.leases.holders import describe_holder
from yunion_mps.leases.ledger import Ledger
from yunion_mps.mps.forced_end import LateClient, UnconfirmedClients
from yunion_mps.observe.clients import ClientService
from yunion_mps.service.reload_losses import (
    NO_LOSSES,
    Listings,
    ReloadLosses,
    client_name,
    losses_of_clients,
    refuse_unconfirmed,
    unconfirmed_error,
)
from yunion_mps.supervisor import Change, Supervisor
from yunion_mps.supervisor.changes import as_made, with_effects, with_layout_effects, without_refused
from yunion_mps.supervisor.fleet import FleetEndOrder
from yunion_mps.supervisor.layouts import LayoutForecast
from yunion_mps.supervisor.preflight import Preflight, run_preflight
from yunion_mps.views.reload_rows import pending_rows

if TYPE_CHECKING:
    from yunion_mps import answers

log = logging.getLogger(__name__)

#: How long a reload waits for control daemons that it started or changed.
_SETTLE_TIMEOUT_S = 15.0
#: How long the new program may take to check the configuration.
_CHECK_TIMEOUT_S = 90.0
_NO_SERVER_ENDED = "the configuration was reloaded, but no MPS server was ended"
_LAST_CLIENTS_UNKNOWN = (
    "clients that are not known (the control daemon's log does not show which attached last)"
)
#: The most jobs that an event names.
_MOST_NAMED = 5


async def _poll_nothing() -> None:
    """Do nothing, as without a monitor."""


class LoopControl(NamedTuple):
    """What services ask of the daemon's event loop."""

    #: The daemon's command, which `reexec` runs.
    program: Sequence[str]
    #: Set to make the monitor poll at once.
    poll_now: asyncio.Event
    #: Requests a tick of the supervisor soon.
    tick: Callable[[], None]
    #: Ends the loop for a re-exec.
    reexec: Callable[[], None]
    #: Has the monitor poll the GPUs at once; returns when it has.
    poll: Callable[[], Awaitable[None]] = _poll_nothing


class _Unconfirmed(NamedTuple):
    """What became of jobs whose end was not confirmed when MPS servers were to be ended."""

    #: The error if servers were not ended because of them.
    refusal: NotConfirmedError | None = None
    #: Which jobs have ended with their servers nevertheless.
    ended: Sequence[str] = ()


class _Foreseen(NamedTuple):
    """What a reload would do."""

    plan: Plan
    changes: list[Change]
    #: What MIG layouts remove, by GPU UUID.
    removed: Mapping[str, Losses]
    #: What all of it ends or removes.
    losses: ReloadLosses


class Reloader:
    """Carries out reloads and re-execs, one at a time; HTTP and the monitor call it."""

    def __init__(
        self,
        paths: Paths,
        supervisor: Supervisor,
        ledger: Ledger,
        containers: Containers,
        clients: ClientService,
        control: LoopControl,
    ) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._ledger = ledger
        self._containers = containers
        self._clients = clients
        self._control = control
        self._listings = Listings()
        #: Held while the plan, settings of GPUs or MIG layouts change.
        self.lock = asyncio.Lock()
        #: Held from a scan of the GPUs until it is used, so that no older one replaces it. No step of a
        #: setting is made meanwhile by its holder: polls would wait for it.
        self.scan_lock = asyncio.Lock()

    async def plan(self) -> answers.ChangeListJson:
        """Return what a reload would change now; raises YunionError if it would be refused."""
        async with self.lock:
            preflight = await self._run_preflight()
            try:
                foreseen = await self._foresee(preflight)
                corrections = await self._corrections(preflight)
            finally:
                self._close(preflight)
        changes = _with(foreseen.changes, corrections)
        return self._answer(changes, foreseen.plan, foreseen.losses)

    async def reload(
        self,
        requester: str = "a client",
        *,
        drain: bool = False,
        now: bool = False,
        confirmation: str = "",
    ) -> answers.ChangeListJson:
        """Read the files again and bring them into effect; return what was changed.

        `requester` is named in the log and in events. With `drain` the servers that keep old limits get no
        new clients. With `now` they are ended, and MIG layouts do not wait for leases. What is lost by this
        must have been listed by the plan with this `confirmation`.

        Raises YunionError, with nothing changed: NotConfirmedError if more would be lost than is confirmed.
        That is also raised if a job has begun before the servers could be ended: then all else is in effect,
        and the servers are not ended.
        """
        async with self.lock:
            try:
                await self._supervisor.store().until_unlocked()
                self._supervisor.refuse_if_unsafe()
                confirmed = self._listings.confirmed_by(confirmation)
                async with self.scan_lock:
                    preflight = await self._run_preflight(creates_directories=True)
                    foreseen = await self._confirmed(preflight, confirmed) if now else None
                    changes = self._accept(preflight)
            except YunionError as error:
                self._record_refusal(requester, error)
                raise
            self._supervisor.layouts.confirm(foreseen.removed if foreseen else {})
            if foreseen:
                self._record_losses(requester, foreseen.losses)
            # First, because a control daemon relies on the compute mode, and a lease on the time slice.
            gpu_changes = await self._supervisor.reconciliation.set_values(self._supervisor.nvml)
            self._supervisor.apply(asyncio.get_running_loop().time())
            self._control.tick()
            await self._settle()
            unconfirmed = await self._end_servers(confirmed) if now else _Unconfirmed()
            if drain:
                self._supervisor.fleet.drain(asyncio.get_running_loop().time())
                self._control.tick()
            gpu_changes += await self.bring_about()  # also of GPUs whose control daemons have ended meanwhile
            changes = _with(self._as_made(changes), gpu_changes)
        log.info(
            "reload requested by %s: %d change%s", requester, len(changes), "" if len(changes) == 1 else "s"
        )
        self._control.poll_now.set()
        if unconfirmed.refusal:
            log.warning("%s", unconfirmed.refusal.message)
            raise unconfirmed.refusal
        answer = self._answer(changes, self._supervisor.desired.plan)
        answer["errors"] += unconfirmed.ended
        return answer

    def _as_made(self, changes: Sequence[Change]) -> list[Change]:
        """Return the changes without those that were refused, and when each takes effect."""
        supervisor = self._supervisor
        planned = supervisor.desired.target_domains()
        accepted = without_refused(
            changes,
            plan=supervisor.desired.plan,
            domains=planned,
            gpus=supervisor.snapshot().inventory.gpus,
            settings=supervisor.settings.refused(),
        )
        listed = as_made(accepted, planned, supervisor.domains, supervisor.layouts.in_effect())
        waits: dict[str, str] = {}
        for condition in supervisor.snapshot().conditions:
            if condition.kind == ABOUT_MIG_LAYOUT:
                waits[condition.subject] = effect_of(condition.reason)
        return with_effects(with_layout_effects(listed, waits), supervisor.settings.effects())

    async def bring_about(self) -> list[Change]:
        """Bring settings of GPUs and MIG layouts that are due into effect; the caller holds the lock.

        Returns what was done.
        """
        supervisor = self._supervisor
        changes = await supervisor.reconciliation.bring_about(supervisor.nvml, self._tick_and_settle)
        supervisor.record_conditions(is_settled=True)
        return changes

    async def _tick_and_settle(self) -> None:
        self._control.tick()
        await self._settle()

    async def reexec(self, *, requires_driver: bool = False) -> answers.ReexecJson:
        """Run the program again in this process; raises HostError if the new one refuses to start.

        The new one must be able to use the driver if this one can, or with `requires_driver`. Otherwise it
        waits for the driver, as this one does.
        """
        async with self.lock:
            await self._supervisor.store().until_unlocked()
            self._supervisor.refuse_if_unsafe()
            await self._check_new_program(
                requires_driver=requires_driver or not self._supervisor.lacks_driver
            )
            self._supervisor.event_log.flush()
        event = Event(
            severity="info",
            kind="daemon",
            subject="yunion-mps-daemon",
            what="re-executing",
            cause="requested by a client",
            consequence="control daemons and jobs keep running",
        )
        self._supervisor.event_log.record(event)
        asyncio.get_running_loop().call_later(0.02, self._control.reexec)  # after the answer was sent
        return {"pid": os.getpid()}

    async def _run_preflight(self, *, creates_directories: bool = False) -> Preflight:
        opened = self._supervisor.nvml
        self._supervisor.keep_record()  # which the new plan is based on
        try:
            return await on_thread(
                lambda: run_preflight(
                    self._paths,
                    opened,
                    confirms_replacements=True,
                    creates_directories=creates_directories,
                )
            )
        finally:
            # Parsed YAML has reference cycles. Freed later, they would fragment the heap: 500 reloads took
            # 1 MiB instead of 0.3 MiB (measured).
            gc.collect()

    def _accept(self, preflight: Preflight) -> list[Change]:
        try:
            return self._supervisor.accept(preflight)
        except YunionError:
            self._close(preflight)
            raise

    def _close(self, preflight: Preflight) -> None:
        if preflight.nvml is not self._supervisor.nvml:
            preflight.close()

    def _record_refusal(self, requester: str, error: YunionError) -> None:
        problems = error.problems if isinstance(error, ConfigError) else (error.message,)
        for problem in problems:
            log.error("not reloaded: %s", problem)
        event = Event(
            severity="error",
            kind="configuration",
            subject="reload",
            what=f"refused (requested by {requester})",
            cause=error.message,
            consequence="nothing was changed: the previous configuration stays in effect",
            code=error.code,
        )
        self._supervisor.event_log.record(event)

    async def _settle(self) -> None:
        """Wait until each control daemon serves or says why not, or has ended if it has to."""
        end_s = asyncio.get_running_loop().time() + _SETTLE_TIMEOUT_S
        while not self._supervisor.fleet.settled and asyncio.get_running_loop().time() < end_s:  # noqa: ASYNC110 - ticks bring it about
            await asyncio.sleep(0.005)

    async def _corrections(self, preflight: Preflight) -> list[Change]:
        """Return the settings of GPUs that another program has changed, and that a reload sets again."""
        settings = self._supervisor.settings
        gpus = preflight.inventory.gpus
        looks = settings.looks_in_effect()
        observed = await on_thread(lambda: observe(looks, preflight.nvml))
        addresses = {gpu.uuid: gpu.address for gpu in gpus}
        changes: list[Change] = []
        for kind, uuid, step in settings.corrections(gpus, observed):
            address = addresses.get(uuid, uuid)
            changes.append(Change(kind.label, address, step.actual, step.target, AT_ONCE))
        return changes

    async def _foresee(self, preflight: Preflight) -> _Foreseen:
        """Return what a reload would change and, with `now`, what would be lost."""
        await self._note_processes(preflight)
        plan, changes = self._supervisor.plan_for(preflight)
        forecast = await self._forecast(plan, preflight)
        changes = with_layout_effects(changes, forecast.effects)
        losses = await self._losses_of_clients(changes)
        losses = losses._replace(devices=self._rows_of(forecast.losses, preflight))
        return _Foreseen(plan, changes, forecast.losses, losses)

    async def _note_processes(self, preflight: Preflight) -> None:
        """Note which processes use the GPUs now, because settings may wait for them."""
        nvml = preflight.nvml
        if nvml:
            with contextlib.suppress(DriverError, ShortageError):  # then those of the last poll count
                self._supervisor.settings.note_processes(await on_thread(nvml.processes))

    async def _confirmed(self, preflight: Preflight, confirmed: Collection[str]) -> _Foreseen:
        """Return what a reload will change, and may remove later.

        Raises NotConfirmedError if more would be lost than is `confirmed`.
        """
        try:
            foreseen = await self._foresee(preflight)
            refuse_unconfirmed(foreseen.losses, confirmed, "nothing was changed")
        except YunionError:
            self._close(preflight)
            raise
        return foreseen

    async def _end_servers(self, confirmed: Collection[str]) -> _Unconfirmed:
        """End the servers that delay a change; return what became of jobs that are not confirmed.

        Servers whose clients have all ended are not forced to end: a job that attaches just now continues,
        and the change waits for it. So does one that attaches to a server whose clients are confirmed, which
        are listed once more right before the end (`ForcedEnd` says which job may end nevertheless).
        Only where the end of unknown clients is confirmed, nothing is listed again.
        """
        left = await self._losses_of_clients(())
        try:
            refuse_unconfirmed(left, confirmed, _NO_SERVER_ENDED)
        except NotConfirmedError as error:
            return _Unconfirmed(error)
        fleet = self._supervisor.fleet
        loop = asyncio.get_running_loop()
        order = FleetEndOrder(
            with_all_clients={unknown.server for unknown in left.unknown},
            with_clients={client["domain"] for client in left.clients},
            may_end=confirmed_client(confirmed),
        )
        fleet.end_servers(loop.time(), order)
        self._control.tick()
        while fleet.is_forcing(loop.time()):  # noqa: ASYNC110 - ticks bring it about
            await asyncio.sleep(0.005)
        still_running: list[UnconfirmedClients] = []
        ended: list[str] = []
        for clients in fleet.take_unconfirmed():
            if clients.has_ended:
                ended.append(self._record_unconfirmed_end(clients))
            else:
                still_running.append(clients)
        return _Unconfirmed(_not_forced(still_running) if still_running else None, ended)

    def _record_unconfirmed_end(self, clients: UnconfirmedClients) -> str:
        """Record that clients may have ended with their MPS servers, which was not confirmed; return that."""
        jobs = ", ".join([_describe_client(client) for client in clients.clients[:_MOST_NAMED]])
        if len(clients.clients) > _MOST_NAMED:
            jobs += f" and {len(clients.clients) - _MOST_NAMED} more"
        jobs = jobs or _LAST_CLIENTS_UNKNOWN
        servers = describe_servers(clients.servers)
        event = Event(
            severity="error",
            kind="configuration",
            subject="reload",
            what=f"{jobs} may have ended with {servers} without a confirmation",
            cause="attached after the clients were listed for the last time",
            consequence="a job that has failed needs to be started again",
        )
        self._supervisor.event_log.record(event)
        text = f"{event.what}: {event.cause}"
        log.error("%s", text)
        return text

    def _record_losses(self, requester: str, losses: ReloadLosses) -> None:
        """Record what the operator has agreed to lose, because its holders will ask."""
        for loss in losses.described().values():
            cause = f"confirmed with reload --now (requested by {requester})"
            event = Event("info", "configuration", "reload", f"ends or removes {loss}", cause)
            self._supervisor.event_log.record(event)

    async def _losses_of_clients(self, changes: Sequence[Change]) -> ReloadLosses:
        """Return the clients whose servers delay these changes, or those that are pending already."""
        domains = self._supervisor.snapshot().domains
        if all(change.at_once for change in changes) and not any(status.pending for status in domains):
            return NO_LOSSES
        clients = await self._clients.clients()
        snapshot = self._supervisor.snapshot()
        addresses = {str(gpu.uuid): gpu.address for gpu in snapshot.inventory.gpus}
        return losses_of_clients(clients, changes, snapshot.domains, addresses)

    async def _forecast(self, plan: Plan, preflight: Preflight) -> LayoutForecast:
        """Return what the MIG layouts of a plan would remove, and when they take effect."""
        layouts, nvml = self._supervisor.layouts, preflight.nvml
        due = layouts.looks_for(plan, preflight.inventory)
        if nvml is None or not due.looks:
            return LayoutForecast()
        observed = await on_thread(lambda: layouts.observe(due, nvml))
        return layouts.forecast(plan, due, observed)

    def _rows_of(self, removed: Mapping[str, Losses], preflight: Preflight) -> list[answers.LossJson]:
        """Return the leased devices and the instances of other programs that layouts remove."""
        lost: set[str] = set()
        for losses in removed.values():
            lost |= losses.uuids
        rows: list[answers.LossJson] = []
        for lease in self._ledger.leases.values():
            for device in lease.devices:
                if device.gpu_uuid in lost:
                    holder = describe_holder(lease.holder, self._containers)
                    rows.append({"subject": device.addr, "lease": lease.id, "holder": holder})
        addresses = {gpu.uuid: gpu.address for gpu in preflight.inventory.gpus}
        for uuid, losses in removed.items():
            for instance in losses.others:
                name = f"{addresses[uuid]}-g{instance.id}"
                holder = f"another program ({instance.profile})"
                rows.append({"subject": name, "lease": None, "holder": holder})
        return rows

    def _answer(
        self, changes: Sequence[Change], plan: Plan, losses: ReloadLosses = NO_LOSSES
    ) -> answers.ChangeListJson:
        pending = pending_rows(
            snapshot=self._supervisor.snapshot(),
            plan=plan,
            lease_waits=self._ledger.lease_waits(self._supervisor.snapshot().plan.devices),
            shared_as_before=self._supervisor.desired.plan.pending.keys(),
            leases_on=self._ledger.leases_on,
        )
        return {
            "changes": [_change_json(change) for change in changes],
            "pending": pending,
            "losses": [*losses.devices],
            "clients": [*losses.clients],
            "errors": [*losses.errors],
            "confirmation": self._listings.remember(losses),
        }

    async def _check_new_program(self, *, requires_driver: bool) -> None:
        """Run the new program's --check; raises HostError with its output if it fails."""
        command = [*self._control.program, "--check"]
        if requires_driver:
            command.append("--require-driver")
        try:
            status, output = await on_thread(lambda: outcome_of(command, _CHECK_TIMEOUT_S, with_stderr=True))
        except OSError as error:
            raise ShortageError(f"{command[0]} cannot be run: {error.strerror}") from None
        if status is None:
            message = f"the new program did not finish its check within {_CHECK_TIMEOUT_S:g} s"
            raise HostError(message, "see: nvidia-smi")
        if status:
            lines = [decode_line(line.lstrip(b"<0123456789>")) for line in output.splitlines()]
            message = "the new program cannot start: " + "; ".join(lines[-4:])
            raise HostError(message, "correct this; the running daemon continues unchanged")


def _with(changes: Sequence[Change], others: Iterable[Change]) -> list[Change]:
    """Return the changes and those `others` that concern something else."""
    listed = {(change.kind, change.subject) for change in changes}
    return [*changes, *(other for other in others if (other.kind, other.subject) not in listed)]


def _change_json(change: Change) -> answers.ChangeJson:
    return {
        "kind": change.kind,
        "subject": change.subject,
        "before": change.before,
        "after": change.after,
        "effect": change.effect,
        "at_once": change.at_once,
    }


def confirmed_client(confirmed: Collection[str]) -> Callable[[int], bool]:
    """Return the function that says whether a client (PID) may be ended.

    It may if its end is confirmed, or if it has ended by itself.
    """

    def may_end(pid: int) -> bool:
        if pid <= 0:  # any of another PID namespace
            return False
        if is_gone(pid):
            return True
        begun_s = started_s(pid)
        started = None if begun_s is None else rfc3339(begun_s)
        return client_name(pid, started) in confirmed

    return may_end


def _not_forced(refusals: Iterable[UnconfirmedClients]) -> NotConfirmedError:
    """Return the error for servers that were not ended by force, because of their clients."""
    servers: list[int] = []
    clients: dict[str, None] = {}  # each once, in this order
    for refusal in refusals:
        servers += refusal.servers
        for client in refusal.clients:
            clients[_describe_client(client)] = None
        if not refusal.clients:
            clients[_LAST_CLIENTS_UNKNOWN] = None
    ends = "ends only after its jobs" if len(servers) == 1 else "end only after their jobs"
    result = f"the configuration was reloaded, but {describe_servers(servers)} {ends}"
    return unconfirmed_error(list(clients), result)


def _describe_client(client: LateClient) -> str:
    pid = client.pid
    uid = uid_of(pid)
    if uid is None:
        return f"PID {pid}" if client.uid is None else f"PID {pid} of {user_name(client.uid)}"
    return f"PID {pid} of {user_name(uid)} ({command_of(pid) or process_name(pid)})"
