"""What changes the daemon while it runs: a reload, and the program run anew."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable
from typing import Any

from yunion_mps.daemon.handover import program
from yunion_mps.daemon.looking import Looking
from yunion_mps.errors import ConfigError, HostError, ShortageError, YunionError
from yunion_mps.escaping import decoded
from yunion_mps.host.processes import outcome_of
from yunion_mps.host.threads import on_thread
from yunion_mps.models import Event
from yunion_mps.mps.states import APPLYING, STARTING
from yunion_mps.paths import Paths
from yunion_mps.service.state import domain_names
from yunion_mps.supervisor import Change, Supervisor
from yunion_mps.supervisor.changes import FindLeaseWaits
from yunion_mps.supervisor.preflight import Preflight, run_preflight

log = logging.getLogger(__name__)

#: How long a reload waits for the control daemons that it has started or changed.
_SETTLE_S = 15.0
#: How long the new program may take to find the configuration right.
_CHECK_S = 90.0

Json = dict[str, Any]


class Changing:
    """Makes one change at a time; whoever asked and goes away does not undo it."""

    def __init__(
        self,
        paths: Paths,
        supervisor: Supervisor,
        looking: Looking,
        lock: asyncio.Lock,
        find_lease_waits: FindLeaseWaits,
        tick: Callable[[], None],
        anew: Callable[[], None],
    ) -> None:
        """`lock` is held while the plan changes, `tick` asks for a tick, and `anew` for the program anew."""
        self._paths = paths
        self._supervisor = supervisor
        self._looking = looking
        self._lock = lock
        self._find_lease_waits = find_lease_waits
        self._tick = tick
        self._run_anew = anew
        self._tasks: set[asyncio.Task[Any]] = set()

    async def plan(self) -> Json:
        """What a reload would change now; raises YunionError where it would be refused."""
        async with self._lock:
            examined = await self._examine()
            try:
                _, changes = self._supervisor.preview(examined, self._find_lease_waits)
            finally:
                self._close(examined)
        return self._answer(changes)

    async def reload(self, *, drain: bool, now: bool) -> Json:
        """Read the files again and bring them into force; raises YunionError, with nothing changed.

        With `drain` the servers that keep old limits get no new clients, and with `now` they are ended.
        """
        task = asyncio.ensure_future(self._reload("the API", drain=drain, now=now))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def reload_for(self, who: str) -> asyncio.Task[None]:
        """Reload, for somebody who hears nothing of it but what the log says."""

        async def work() -> None:
            try:
                await self._reload(who, drain=False, now=False)
            except YunionError:
                return  # it was logged

        return asyncio.create_task(work())

    async def reexec(self) -> Json:
        """Run the program anew in this process; raises HostError where the new one refuses to start."""
        async with self._lock:
            self._supervisor.refuse_if_unsafe()
            await self._check_the_new_program()
            self._supervisor.event_log.flush()
        self._supervisor.event_log.record(
            Event("info", "daemon", "yunion-mps-daemon", "run anew", "somebody asked for it", _NOTHING_ENDS)
        )
        asyncio.get_running_loop().call_later(0.02, self._run_anew)  # the answer goes first
        return {"pid": os.getpid()}

    async def _reload(self, who: str, *, drain: bool, now: bool) -> Json:
        async with self._lock:
            try:
                self._supervisor.refuse_if_unsafe()
                changes = await self._accept(await self._examine())
            except YunionError as error:
                self._refused(who, error)
                raise
            await self._looking.set_modes()
            self._supervisor.aim(asyncio.get_running_loop().time())
            self._tick()
            await self._settled()
            if drain or now:
                self._supervisor.fleet.drain(asyncio.get_running_loop().time(), force=now)
                self._tick()
        log.info("reloaded for %s: %d change%s", who, len(changes), "" if len(changes) == 1 else "s")
        self._looking.soon()
        return self._answer(changes)

    async def _accept(self, examined: Preflight) -> list[Change]:
        try:
            return self._supervisor.accept(examined, self._find_lease_waits)
        except YunionError:
            self._close(examined)
            raise

    async def _examine(self) -> Preflight:
        opened = self._supervisor.nvml
        try:
            return await on_thread(lambda: run_preflight(self._paths, opened))
        finally:
            # What YAML is read into refers to itself. Left to the collector, it would lie among what stays:
            # 500 reloads took 1 MiB for it, and take 0.3 MiB so (measured).
            gc.collect()

    def _close(self, examined: Preflight) -> None:
        if examined.nvml is not self._supervisor.nvml:
            examined.close()

    def _refused(self, who: str, error: YunionError) -> None:
        problems = error.problems if isinstance(error, ConfigError) else (error.message,)
        for problem in problems:
            log.error("not reloaded: %s", problem)
        means = "nothing was changed: what was in force stays in force"
        event = Event("error", "configuration", "reload", "refused", f"{who}: {error.message}", means)
        self._supervisor.event_log.record(event)

    async def _settled(self) -> None:
        """Wait until each control daemon serves or says why not."""
        end_s = asyncio.get_running_loop().time() + _SETTLE_S
        while not self._supervisor.fleet.started and asyncio.get_running_loop().time() < end_s:  # noqa: ASYNC110 - ticks bring it about
            await asyncio.sleep(0.005)

    def _answer(self, changes: list[Change]) -> Json:
        snapshot = self._supervisor.snapshot()
        pending: list[Json] = [
            {
                "domain": status.plan.name,
                "pending": status.pending or f"it is {status.state}: {status.reason}",
                "leases": [],
            }
            for status in snapshot.domains
            if status.pending or status.state in (STARTING, APPLYING)
        ]
        gpus = {gpu.uuid: gpu.address for gpu in snapshot.inventory.gpus}
        names = domain_names(snapshot.plan)
        for uuid, wait in self._find_lease_waits(snapshot.plan.devices).items():
            address = gpus.get(uuid, uuid)
            what = f"GPU {address}: {wait.devices} of its devices wait for {wait.description} to end"
            pending.append({"domain": names[uuid], "pending": what, "leases": [*wait.leases]})
        return {"changes": [change._asdict() for change in changes], "pending": pending}

    async def _check_the_new_program(self) -> None:
        """Let the program that would be run check the files; raises HostError with its words."""
        command = [*program(), "--check"]
        try:
            status, output = await on_thread(lambda: outcome_of(command, _CHECK_S, with_stderr=True))
        except OSError as error:
            raise ShortageError(f"{command[0]} cannot be run: {error.strerror}") from None
        if status is None:
            what = f"the new program does not answer within {_CHECK_S:g} s"
            raise HostError(what, "see: nvidia-smi")
        if status:
            lines = [decoded(line.lstrip(b"<0123456789>")) for line in output.splitlines()]
            what = "the new program would not start: " + "; ".join(lines[-4:])
            raise HostError(what, "correct that; this one goes on, and nothing was changed")


_NOTHING_ENDS = "no control daemon and no job ends"
