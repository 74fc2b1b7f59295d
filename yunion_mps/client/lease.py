"""A lease that this program has, until it is given back."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn, TypeVar

from yunion_mps.client.request import LeaseArguments
from yunion_mps.client.taking import MAX_S, Patience, Say, refuse_unreachable, take
from yunion_mps.client.transport import Transport, finish
from yunion_mps.client.values import LeaseRecord
from yunion_mps.errors import HostError, NotFoundError, YunionError
from yunion_mps.http.operations import END_LEASE, GET_DEVICES, GET_LEASES, RENEW_LEASE
from yunion_mps.reasons import GPU_GONE, hint_of

if TYPE_CHECKING:
    from yunion_mps.http.client import DaemonClient

LeaseT = TypeVar("LeaseT", bound="HeldLease")

#: A lease of a name is renewed so many times within its time to live.
_RENEWALS = 3
#: How long until another try if a renewal has failed, in s.
_RETRY_S = 1.0


class HeldLease:
    """What a Lease and an AsyncLease have in common.

    One that is bound to this process ends with the process at the latest. One with a name is renewed by a
    thread of its own for as long as the process lives, and ends `ttl_s` after that.
    """

    def __init__(
        self, transport: Transport, daemon: DaemonClient, record: LeaseRecord, ttl_s: int | None, say: Say
    ) -> None:
        """The thread renews it by `daemon`, if `ttl_s` is not None; raises ShortageError if there is none."""
        #: What it was given with.
        self.record = record
        self.id = record.id
        self.name = record.name
        #: The addresses of its devices, and of their GPUs.
        self.devices = record.devices
        self.gpus = record.gpus
        #: The memory of each device.
        self.memory_mib = record.memory_mib
        self.thread_percentage = record.thread_percentage
        self.budget_enforced = record.budget_enforced
        #: The variables of a process that is to use the devices, without any others.
        self.environment: Mapping[str, str] = record.environment
        #: Why a lease with a name ended before it was given back, empty if it did not.
        self.lost = ""
        self._transport = transport
        self._daemon = daemon
        self._say = say
        self._pid = os.getpid()
        self._is_over = False
        #: Ends the renewals: set also if the daemon could not be told, so that it ends by its time.
        self._released = threading.Event()
        if ttl_s is not None:
            from yunion_mps.host import threads  # which a lease of a process need not wait for

            threads.start(lambda: self._renew(ttl_s), threads.ignore_outcome)

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a process that is to use them: `base`, or this process' own, and theirs."""
        return {**(os.environ if base is None else base), **self.environment}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {', '.join(self.devices)}>"

    def __reduce__(self) -> NoReturn:
        what = f"a {type(self).__name__} stays in its process: pass its record or its environment to others"
        raise TypeError(what)

    async def _release(self, patience_s: float = MAX_S) -> None:
        if self._is_over or os.getpid() != self._pid:
            return
        self._released.set()
        patience = Patience(self._transport, patience_s, self._say)
        with contextlib.suppress(NotFoundError):  # it ended by itself, or the answer to a first try was lost
            await patience.call(END_LEASE, lease=self.id)
        self._is_over = True

    async def _leave(self, error: BaseException | None) -> None:
        """Release it at the end of a `with` block; if that raised an error, nothing takes its place."""
        if error is None:
            await self._release()
            return
        try:
            await self._release(0)
        except YunionError as failure:
            self._say(f"the lease of {', '.join(self.devices)} could not be given back: {failure.message}")

    async def _check(self) -> None:
        leases = (await self._transport.call(GET_LEASES))["leases"]
        if all(one["id"] != self.id for one in leases):
            hint = "take a new one; see what ended it: yunion-mps events --kind lease"
            raise NotFoundError(f"the lease of {', '.join(self.devices)} has ended", hint)
        listed = (await self._transport.call(GET_DEVICES, limit=0))["isolated_devices"]
        reasons = {one["addr"]: (one["reason"], one["reason_code"], one["gpu_uuid"]) for one in listed}
        usable = {one["addr"] for one in listed if one["state"] != "unavailable"}
        for address in self.devices:
            if address not in usable:
                reason, code, gpu = reasons.get(address, ("its GPU is gone", GPU_GONE, "GPU"))
                raise HostError(f"device {address} is unavailable: {reason}", hint_of(code, gpu=gpu), code)

    def _renew(self, ttl_s: int) -> None:
        """Renew it until it is given back; the daemon is asked again if it is away or fails."""
        wait_s = ttl_s / _RENEWALS
        while not self._released.wait(wait_s):
            wait_s = ttl_s / _RENEWALS
            try:
                self._daemon.call(RENEW_LEASE, float(ttl_s), lease=self.id)
            except NotFoundError as error:
                if not self._released.is_set():
                    self.lost = error.message
                    self._say(f"the lease of {', '.join(self.devices)} is lost: {error.message}")
                return
            except YunionError:
                wait_s = min(_RETRY_S, wait_s)


class Lease(HeldLease):
    """Devices that are this program's until `release`, or the end of its `with` block."""

    def release(self) -> None:
        """Give the devices back; does nothing if that was done, and in a fork of the process that took them.

        Raises YunionError if the daemon cannot be told, which may be tried again: else it ends with this
        process, or by its time.
        """
        finish(self._release())

    def check(self) -> None:
        """Raise NotFoundError if it has ended, HostError with the reason's code if a device is unusable."""
        finish(self._check())

    def __enter__(self) -> Lease:  # noqa: PYI034 - typing.Self is not in 3.9
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        finish(self._leave(error))


class AsyncLease(HeldLease):
    """A Lease in asyncio: the same attributes, and methods that are awaited."""

    async def release(self) -> None:
        """Give the devices back, as `Lease.release` does."""
        await self._release()

    async def check(self) -> None:
        """Raise what `Lease.check` does."""
        await self._check()

    async def __aenter__(self) -> AsyncLease:  # noqa: PYI034 - as above
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self._leave(error)


async def hold(
    kind: type[LeaseT], transport: Transport, daemon: DaemonClient, request: LeaseArguments, say: Say
) -> LeaseT:
    """Take a lease that this process can use, and renews if it has a name; raises YunionError."""
    answer = await take(transport, request.members, request.wait_s, say)
    try:
        record = LeaseRecord.of(answer)
        refuse_unreachable(record.environment)
        return kind(transport, daemon, record, request.ttl_s, say)
    except YunionError:
        with contextlib.suppress(YunionError):  # it also ends with this process, or by its time
            await transport.call(END_LEASE, lease=answer["id"])
        raise
