"""How the clients reach the daemon, and what outlasts its restart: retried requests, events and watches.

Queries are written once, as coroutines over a `Transport`. An AsyncClient awaits them in asyncio. A Client
runs them over a transport that blocks instead of suspending, so a coroutine finishes in its first step:
`run_blocking` takes that step, and needs no event loop.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from yunion_mps.core.enums import BUDGET_VARIABLES, JAX_VARIABLE, MEMORY_VARIABLE
from yunion_mps.core.errors import (
    BusyError,
    HostError,
    InfeasibleError,
    NothingFreeError,
    UnreachableError,
    YunionError,
)
from yunion_mps.core.reasons import CONTROL_DAEMON_SILENT
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import END_LEASE, GET_EVENTS, MAX_EVENTS, TAKE_LEASE
from yunion_mps.http.parameters import Value

if TYPE_CHECKING:
    from yunion_mps.answers import EventJson, LeaseRecordJson
    from yunion_mps.http.client import DaemonClient

T = TypeVar("T")
#: Called with a line of text whenever a request starts or stops waiting.
OnMessage = Callable[[str], None]
#: How long to retry while the daemon is unreachable, if the caller is willing to wait.
RECONNECT_TIMEOUT_S = 60.0
_RETRY_INTERVAL_S = 0.2
_A_DAY_S = 86_400
#: How long requests for new events, and for a changed answer, wait.
WAIT_S = 10
_CHANGE_WAIT_S = 60
#: How long an interrupted caller waits for each answer, in s.
_UNDO_S = 2.0
_PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
#: The directories that PrivateTmp= hides from other units (systemd.exec(5)).
_PRIVATE_PLACES = ("/tmp/", "/var/tmp/")


class Transport(Protocol):
    """How queries reach the daemon: the asyncio client, or a client that blocks."""

    async def call(self, operation: Operation[T], timeout_s: float | None = None, **arguments: Value) -> T:
        """Return the answer, as `DaemonClient.call` does; raises YunionError."""

    async def call_if_changed(self, operation: Operation[T], **arguments: Value) -> tuple[T | None, str]:
        """Return the answer and its ETag, as `DaemonClient.call_if_changed` does; raises YunionError."""

    async def sleep(self, delay_s: float) -> None: ...


class BlockingTransport:
    """A transport whose coroutines block the thread and never suspend."""

    def __init__(self, daemon: DaemonClient) -> None:
        self._daemon = daemon

    async def call(self, operation: Operation[T], timeout_s: float | None = None, **arguments: Value) -> T:
        return self._daemon.call(operation, timeout_s, until_closed=False, **arguments)

    async def call_if_changed(self, operation: Operation[T], **arguments: Value) -> tuple[T | None, str]:
        return self._daemon.call_if_changed(operation, **arguments)

    async def sleep(self, delay_s: float) -> None:
        time.sleep(delay_s)  # noqa: ASYNC251 - blocking is its purpose


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that uses a BlockingTransport; return its result.

    Raises what the coroutine raises, and AssertionError if it suspends, because it uses another transport.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise AssertionError("the transport has suspended instead of blocking")


def iterate_blocking(generator: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterate over an asynchronous generator that uses a BlockingTransport, and close it at the end.

    Raises what the generator raises.
    """
    try:
        while True:
            try:
                item = run_blocking(generator.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        run_blocking(generator.aclose())


class HolderMembers(TypedDict, total=False):
    """The member `holder` of a lease request, as http/operations describes it."""

    name: str
    ttl_s: int
    pid: int
    command: str
    uid: int


class RequestMembers(TypedDict, total=False):
    """The body of a lease request; values of None are left out."""

    count: int | None
    across: bool | None
    memory_mib: int | None
    memory_units: int | None
    thread_percentage: int | None
    devices: list[str] | None
    gpu: str | None
    placement: str | None
    allow_unlimited: bool | None
    reserved_for: str | None
    cdi: bool
    holder: HolderMembers
    idempotency_key: str


class Retrier:
    """Retries for `timeout_s` while the daemon is unreachable or busy; announces the outage once."""

    def __init__(self, transport: Transport, timeout_s: float, on_message: OnMessage) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._on_message = on_message
        self._deadline_s = 0.0

    async def wait(self, error: YunionError) -> None:
        """Wait until the next attempt after `error`; raises it once the deadline has passed."""
        now_s = time.monotonic()
        if not self._timeout_s:
            raise error
        if not self._deadline_s:
            self._deadline_s = now_s + self._timeout_s
            how_long = f" for up to {self._timeout_s:.0f} s" if self._timeout_s <= _A_DAY_S else ""
            self._on_message(f"{error.message}; retrying{how_long}")
        elif now_s > self._deadline_s:
            raise error
        await self._transport.sleep(_RETRY_INTERVAL_S)

    def reset(self) -> None:
        """Start over with a full timeout, because the daemon has answered."""
        if self._deadline_s:
            self._on_message("the daemon is responding again")
        self._deadline_s = 0.0

    async def call(self, operation: Operation[T], timeout_s: float | None = None, **arguments: Value) -> T:
        """Call the operation until the daemon answers; raises its error once the deadline has passed."""
        while True:
            try:
                answer = await self._transport.call(operation, timeout_s, **arguments)
            except (UnreachableError, BusyError) as error:
                await self.wait(error)
            else:
                self.reset()
                return answer


async def request_lease(
    transport: Transport, request: RequestMembers, wait_s: int, on_message: OnMessage
) -> LeaseRecordJson:
    """Take a lease; raises NothingFreeError if nothing is free in time, or another YunionError.

    A request that waits is retried if the daemon restarts or is busy: its idempotency key identifies its
    position in the queue, or the lease that was already granted. A caller that is interrupted or cancelled
    has no lease.

    wait_s: how long to wait for a device; 0 for not at all
    on_message: called with lines for the user, such as what the request waits for
    """
    request = {**request, "idempotency_key": os.urandom(16).hex()}
    end_s = time.monotonic() + wait_s
    unreachable = Retrier(transport, min(RECONNECT_TIMEOUT_S, wait_s), on_message)
    busy = Retrier(transport, wait_s, on_message)
    is_connected = False
    is_announced = False
    while True:
        left_s = max(0, round(end_s - time.monotonic()))
        try:
            if wait_s and not is_connected:
                reason = await _wait_reason(transport, request)
                unreachable.reset()
                is_connected = True
                if reason and not is_announced:
                    on_message(f"waiting: {reason}")
                    is_announced = True
            lease = await transport.call(TAKE_LEASE, **request, wait_s=left_s or None)
        except (UnreachableError, BusyError) as error:
            if time.monotonic() >= end_s:
                raise
            pause = busy if isinstance(error, BusyError) else unreachable
            await pause.wait(error)
            is_connected = False
        except (Exception, GeneratorExit):
            raise
        except BaseException:
            await _release_unconfirmed(transport, request)
            raise
        else:
            return lease


async def _release_unconfirmed(transport: Transport, request: RequestMembers) -> None:
    """Release the lease that may have been granted although the interrupted caller got no answer.

    A named lease is left to expire, because it may have existed before this request.
    """
    if "name" in request.get("holder", {}):
        return
    with contextlib.suppress(YunionError):
        lease = await transport.call(TAKE_LEASE, _UNDO_S, **request)
        await transport.call(END_LEASE, _UNDO_S, lease=lease["id"])


async def request_preview(transport: Transport, request: RequestMembers) -> LeaseRecordJson:
    """Return the lease that the request would get now, without taking it; raises as `request_lease` does."""
    return await transport.call(TAKE_LEASE, **request, dry_run=True)


async def _wait_reason(transport: Transport, request: RequestMembers) -> str:
    """Return why the request would have to wait, empty if it would not.

    Raises YunionError if waiting is useless.
    """
    try:
        await request_preview(transport, request)
    except InfeasibleError:
        raise
    except NothingFreeError as error:
        return error.message
    return ""


def with_devices(inherited: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited variables and those of `environment`, without those of other devices."""
    return {**without_devices(inherited, environment), **environment}


def without_devices(inherited: Mapping[str, str], environment: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the inherited variables without those of devices other than the ones of `environment`.

    Otherwise a process would have the budget, or use the control daemon, of the devices that its parent was
    started with.
    """
    dropped = set(BUDGET_VARIABLES)
    if MEMORY_VARIABLE in inherited:  # otherwise the user has set JAX's variable
        dropped.add(JAX_VARIABLE)
    if environment and _PIPE_DIRECTORY not in environment:  # a device that is shared without MPS
        dropped.update(name for name in inherited if name.startswith("CUDA_MPS_"))
    return {name: value for name, value in inherited.items() if name not in dropped}


def refuse_unreachable(environment: Mapping[str, str]) -> None:
    """Raise HostError if this user cannot reach the control daemon: CUDA would go on without limits.

    Devices that are shared without MPS have none.
    """
    if _PIPE_DIRECTORY not in environment:
        return
    path = environment[_PIPE_DIRECTORY]
    control = os.path.join(path, "control")
    if not os.access(control, os.W_OK, effective_ids=True):
        message = f"{control} cannot be reached by this user, so CUDA would run without limits"
        hint = "see: yunion-mps doctor"
        if path.startswith(_PRIVATE_PLACES) and not os.path.exists(path):  # for the daemon it is there
            hint = f"in a unit with PrivateTmp=yes, set BindPaths={path}; otherwise {hint}"
        raise HostError(message, hint, CONTROL_DAEMON_SILENT)


async def follow_events(
    transport: Transport, last: int, kind: str | None, on_message: OnMessage
) -> AsyncGenerator[list[EventJson], None]:
    """Yield new events forever; yield an empty list at each timeout.

    An empty list lets the caller check whether its own reader still exists.

    last: the highest id that is known
    kind: of which kind the events are to be; None for all
    on_message: called with lines for the user, such as that the daemon is unreachable

    Raises UnreachableError if the daemon stays unreachable.
    """
    retrier = Retrier(transport, RECONNECT_TIMEOUT_S, on_message)
    while True:
        try:
            answer = await transport.call(GET_EVENTS, after=last, limit=MAX_EVENTS, kind=kind, wait_s=WAIT_S)
        except UnreachableError as error:
            await retrier.wait(error)
            yield []
            continue
        retrier.reset()
        if answer["last"] < last:
            on_message("the event log was restarted")
            last = 0
            continue
        last = answer["last"]
        yield answer["events"]


async def watch(
    transport: Transport, operation: Operation[T], on_message: OnMessage, **arguments: Value
) -> AsyncGenerator[T, None]:
    """Yield the answer of a watched operation, and the new answer whenever it changes, without end.

    Raises UnreachableError if the daemon stays unreachable.
    """
    retrier = Retrier(transport, RECONNECT_TIMEOUT_S, on_message)
    condition: dict[str, Value] = {}
    while True:
        try:
            result = await transport.call_if_changed(operation, **arguments, **condition)
        except (UnreachableError, BusyError) as error:
            if not condition:
                raise
            await retrier.wait(error)
            continue
        retrier.reset()
        answer, etag = result
        condition = {"if_none_match": etag, "wait_s": _CHANGE_WAIT_S}
        if answer is not None:
            yield answer
