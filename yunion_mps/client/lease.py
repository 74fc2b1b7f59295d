"""Leases that a program in Python asks for, and holds until it releases them."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, NoReturn, TypeVar

from yunion_mps.client.values import LeaseRecord
from yunion_mps.core.addresses import gpu_of
from yunion_mps.core.enums import UNAVAILABLE
from yunion_mps.core.errors import HostError, NotFoundError, YunionError
from yunion_mps.core.reasons import GPU_GONE, INVALID_REQUEST, hint_of
from yunion_mps.core.units import mebibytes, total_mib
from yunion_mps.host import threads
from yunion_mps.http.operations import (
    END_LEASE,
    GET_DEVICES,
    GET_LEASES,
    HOLDER,
    MAX_WAIT_S,
    RENEW_LEASE,
    TAKE_LEASE,
)
from yunion_mps.http.parameters import BadRequestError
from yunion_mps.http.transport import (
    RECONNECT_TIMEOUT_S,
    OnMessage,
    RequestMembers,
    Retrier,
    Transport,
    refuse_unreachable,
    request_lease,
    run_blocking,
    with_devices,
)

if TYPE_CHECKING:
    from yunion_mps.http.client import DaemonClient

LeaseT = TypeVar("LeaseT", bound="BaseLease")
#: What `lease` returns.
TakenT = TypeVar("TakenT")

#: How often a named lease is renewed within its time to live.
_RENEWALS = 3
#: How long to wait after a failed renewal, in s.
_RETRY_S = 1.0
#: The default time to live of a named lease, in s.
TTL_S = 60
#: The API's parameters, which the arguments of the same names become.
_PARAMETERS = {parameter.name: parameter for parameter in (*TAKE_LEASE.members, *HOLDER)}
#: A client renews its lease; one that ends only when it is released is for other programs.
_PARAMETERS["ttl_s"] = _PARAMETERS["ttl_s"]._replace(minimum=1)


class LeaseArguments(NamedTuple):
    """What the arguments of `lease` ask for."""

    #: The body of the request, without `wait_s`.
    members: RequestMembers
    wait_s: int
    #: The time to live of a named lease.
    ttl_s: int | None


class LeaseMethod(Generic[TakenT]):
    """The method `lease` of both clients, which take the devices each in its own way."""

    def lease(
        self,
        *,
        memory: str | None = None,
        thread_percentage: int | None = None,
        count: int = 1,
        across: bool = False,
        devices: Sequence[str] = (),
        gpu: str | None = None,
        placement: str = "binpack",
        allow_unlimited: bool = False,
        wait_s: float = 0,
        name: str | None = None,
        ttl_s: int | None = None,
    ) -> TakenT:
        """Lease devices; they are released at the end of a `with` block, or when this process exits.

        With AsyncClient, await the result, or use it in `async with`. If the task is cancelled while it
        waits, the request leaves the queue and no lease is held.

        memory: the size of each device, as in "6GiB", on a GPU whose memory is handed out in units.
        thread_percentage: with `memory`, the part of the SM threads, if the GPU's entry has that key.
        count: the number of devices, which are all on one GPU.
        across: take each device from a different GPU.
        devices: exactly these devices (ids or addresses).
        gpu: only devices of this GPU (UUID or address).
        placement: "spread" prefers the GPU with the least memory leased, as a share of its total, "binpack"
            the one with the most.
        allow_unlimited: also GPUs that do not enforce budgets (time-sliced, or older than Volta).
        wait_s: how long to wait in the queue; `math.inf` for no limit.
        name: binds the lease to this name instead of this process: it is renewed while this process runs.
        ttl_s: how long a lease with a name is kept after that, in seconds (60).

        Raises NothingFreeError if nothing is free within that time, InfeasibleError if the request can never
        be satisfied, HostError if this user could not use the devices, and YunionError for wrong arguments.
        """
        if ttl_s is not None and name is None:
            raise _invalid("ttl_s: only a lease with a name has a time to live", "add a name, or omit ttl_s")
        if thread_percentage is not None and memory is None:
            raise _invalid("thread_percentage: requires memory", "add memory, or omit thread_percentage")
        if isinstance(devices, str):
            raise _invalid(
                f"devices: {devices!r} is not a list of devices", "write a list, such as ['00:06.0-1']"
            )
        given = {
            "count": count,
            "gpu": gpu,
            "placement": placement,
            "name": name,
            "ttl_s": ttl_s,
            "thread_percentage": thread_percentage,
        }
        for argument, value in given.items():
            if value is not None:
                _refuse_out_of_bounds(argument, value)
        members: RequestMembers = {
            "memory_mib": None if memory is None else _memory(memory),
            "thread_percentage": thread_percentage,
            "count": count if count != 1 else None,
            "across": across or None,
            "devices": list(devices) or None,
            "gpu": gpu,
            "placement": placement if placement != "binpack" else None,
            "allow_unlimited": allow_unlimited or None,
        }
        if name is not None:
            ttl_s = TTL_S if ttl_s is None else ttl_s
            members["holder"] = {"name": name, "ttl_s": ttl_s}
        return self._take(LeaseArguments(members, whole_seconds(wait_s), ttl_s))

    def _take(self, request: LeaseArguments) -> TakenT:
        raise NotImplementedError


def _refuse_out_of_bounds(argument: str, value: object) -> None:
    """Raise YunionError for a value that the API would refuse, in the words of the caller."""
    try:
        _PARAMETERS[argument].member(value, argument)
    except BadRequestError as error:
        raise _invalid(f"invalid value for {argument}: {value!r}", error.hint) from None


def _memory(amount: str) -> int:
    mib = mebibytes(amount) if isinstance(amount, str) else None
    if not mib:
        raise _invalid(
            f"memory: {amount!r} is not an amount of memory", "write a number of MiB or GiB, such as '6GiB'"
        )
    return mib


def whole_seconds(wait_s: float) -> int:
    """Return the time to wait in whole seconds, rounded up and at most the API's.

    Raises YunionError for what is no time.
    """
    if not isinstance(wait_s, (int, float)) or math.isnan(wait_s):
        raise _invalid(f"wait_s: {wait_s!r} is not a number", "write seconds, or math.inf")
    if wait_s < 0:
        raise _invalid(f"wait_s: {wait_s!r} is negative", "write seconds, or math.inf")
    return MAX_WAIT_S if wait_s >= MAX_WAIT_S else math.ceil(wait_s)


def _invalid(message: str, hint: str) -> YunionError:
    return YunionError(message, hint, INVALID_REQUEST)


def _unavailable(address: str, reason: str, code: str) -> HostError:
    hint = hint_of(code, gpu=gpu_of(address))
    return HostError(f"device {address} is unavailable: {reason}", hint, code)


class BaseLease:
    """The common base of Lease and AsyncLease.

    A lease that is bound to this process ends with the process at the latest. A named lease is renewed by a
    thread while the process runs, and expires `ttl_s` after that.
    """

    def __init__(
        self,
        transport: Transport,
        daemon: DaemonClient,
        record: LeaseRecord,
        ttl_s: int | None,
        on_message: OnMessage,
    ) -> None:
        """Start a thread that renews it, if it expires; raises ShortageError if that fails.

        ttl_s: after how many seconds without renewal it expires; None if it does not
        on_message: called with lines for the user, such as that the daemon is unreachable
        """
        self.record = record
        self.id = record.id
        self.name = record.name
        #: The addresses of its devices, and of their GPUs.
        self.devices = record.devices
        self.gpus = record.gpus
        #: The memory of all its devices, None if it is unknown; `record.budgets` has that of each.
        self.memory_mib = total_mib(budget.memory_mib for budget in record.budgets)
        self.thread_percentage = record.thread_percentage
        self.budget_enforced = record.budget_enforced
        #: The variables that a process needs to use the devices, and no others.
        self.environment: Mapping[str, str] = record.environment
        #: Why a named lease ended before it was released, empty if it did not.
        self.lost = ""
        self._transport = transport
        self._daemon = daemon
        self._on_message = on_message
        self._pid = os.getpid()
        self._is_released = False
        #: Stops the renewals, also if the daemon is unreachable: the lease then expires.
        self._stop_renewing = threading.Event()
        if ttl_s is not None:
            threads.start_thread(lambda: self._renew(ttl_s), threads.ignore_outcome)

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment for a process that uses the devices.

        base: the variables to start from; by default, those of this process.
        """
        return with_devices(os.environ if base is None else base, self.environment)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {', '.join(self.devices)}>"

    def __reduce__(self) -> NoReturn:
        text = (
            f"a {type(self).__name__} cannot be passed to another process: pass its record or its environment"
        )
        raise TypeError(text)

    async def _release(self, timeout_s: float = RECONNECT_TIMEOUT_S) -> None:
        if self._is_released or os.getpid() != self._pid:
            return
        self._stop_renewing.set()
        retrier = Retrier(self._transport, timeout_s, self._on_message)
        with contextlib.suppress(NotFoundError):  # it has expired, or an earlier answer was lost
            await retrier.call(END_LEASE, lease=self.id)
        self._is_released = True

    async def _release_on_exit(self, error: BaseException | None) -> None:
        """Release it at the end of a `with` block, without masking an exception from the block."""
        if error is None:
            await self._release()
            return
        try:
            await self._release(0)
        except YunionError as failure:
            self._on_message(
                f"the lease of {', '.join(self.devices)} could not be released: {failure.message}"
            )

    async def _check(self) -> None:
        leases = (await self._transport.call(GET_LEASES))["leases"]
        if self.id not in [lease["id"] for lease in leases]:
            hint = "take a new one; see what ended it: yunion-mps events --kind lease"
            raise NotFoundError(f"the lease of {', '.join(self.devices)} has ended", hint)
        listed = (await self._transport.call(GET_DEVICES, limit=0))["isolated_devices"]
        by_address = {device["addr"]: device for device in listed}
        for address in self.devices:
            device = by_address.get(address)
            if device is None:
                raise _unavailable(address, "its GPU is no longer present", GPU_GONE)
            if device["state"] == UNAVAILABLE:
                raise _unavailable(address, device["reason"], device["reason_code"])

    def _renew(self, ttl_s: int) -> None:
        wait_s = ttl_s / _RENEWALS
        while not self._stop_renewing.wait(wait_s):
            wait_s = ttl_s / _RENEWALS
            try:
                self._daemon.call(RENEW_LEASE, float(ttl_s), lease=self.id)
            except NotFoundError as error:
                if not self._stop_renewing.is_set():
                    self.lost = error.message
                    self._on_message(f"the lease of {', '.join(self.devices)} is lost: {error.message}")
                return
            except YunionError:
                wait_s = min(_RETRY_S, wait_s)


class HeldLease(BaseLease):
    """Devices that this process holds until `release`, or until the end of its `with` block."""

    def release(self) -> None:
        """Release the devices; does nothing if they are released, or in a fork of the process that took them.

        Raises YunionError if the daemon cannot be reached; retry it, or the lease ends only with this process
        or by expiry.
        """
        run_blocking(self._release())

    def check(self) -> None:
        """Raise NotFoundError if the lease has ended, HostError if a device is unusable."""
        run_blocking(self._check())

    def __enter__(self) -> HeldLease:  # noqa: PYI034 - typing.Self is not in 3.9
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        run_blocking(self._release_on_exit(error))


class AsyncHeldLease(BaseLease):
    """The same attributes and methods as Lease; the methods are coroutines."""

    async def release(self) -> None:
        """Release the devices, as `Lease.release` does."""
        await self._release()

    async def check(self) -> None:
        """Raise what `Lease.check` does."""
        await self._check()

    async def __aenter__(self) -> AsyncHeldLease:  # noqa: PYI034 - as above
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self._release_on_exit(error)


async def acquire(
    kind: type[LeaseT],
    transport: Transport,
    daemon: DaemonClient,
    request: LeaseArguments,
    on_message: OnMessage,
) -> LeaseT:
    """Take a lease that this process can use; raises YunionError."""
    answer = await request_lease(transport, request.members, request.wait_s, on_message)
    try:
        record = LeaseRecord.of(answer)
        refuse_unreachable(record.environment)
        return kind(transport, daemon, record, request.ttl_s, on_message)
    except YunionError:
        with contextlib.suppress(YunionError):  # otherwise it ends with this process, or expires
            await transport.call(END_LEASE, lease=answer["id"])
        raise
