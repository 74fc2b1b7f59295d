"""How a command reaches the daemon: single calls, and taking a lease."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from yunion_mps.cli.output import print_notice
from yunion_mps.core.addresses import is_on_instance
from yunion_mps.core.enums import WHY_UNENFORCED
from yunion_mps.core.errors import YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import BUDGET_NOT_ENFORCED, INFEASIBLE, INVALID_REQUEST, NOT_FREE
from yunion_mps.core.text import gpus_that_are
from yunion_mps.http import transport
from yunion_mps.http.client import DaemonClient
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import GET_DEVICES, GET_EVENTS
from yunion_mps.http.parameters import Value
from yunion_mps.http.transport import BlockingTransport, RequestMembers

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceJson, EventListJson, LeaseRecordJson

T = TypeVar("T")


def _daemon() -> DaemonClient:
    return DaemonClient(Paths.from_environment())


def blocking_transport() -> BlockingTransport:
    """Return a transport for requests that survive a restart of the daemon."""
    return BlockingTransport(_daemon())


def call_daemon(
    operation: Operation[T], timeout_s: float | None = None, *, until_closed: bool = False, **arguments: Value
) -> T:
    """Call the daemon and return its answer.

    timeout_s: by default, the operation's.
    until_closed: return once the answering program has been replaced by the next.
    Raises YunionError.
    """
    return _daemon().call(operation, timeout_s, until_closed=until_closed, **arguments)


def shares_pid_namespace(timeout_s: float) -> bool:
    """Return whether the daemon's PIDs are also ours; raises YunionError."""
    return _daemon().is_visible(timeout_s)


def listed_devices() -> list[DeviceJson]:
    """Return all devices of the host; raises YunionError."""
    return call_daemon(GET_DEVICES, limit=0)["isolated_devices"]


def newest_events(
    limit: int, *, since: str | None = None, kind: str | None = None, severe_first: bool = False
) -> EventListJson:
    """Return the newest events, also from an earlier daemon during an upgrade; raises YunionError.

    limit: how many there are at most
    since: only events since this RFC 3339 time
    kind: only events of this kind
    severe_first: choose by rank which are in the list, unless an earlier daemon does not know this parameter
    """
    if severe_first:
        try:
            return call_daemon(GET_EVENTS, limit=limit, since=since, kind=kind, severe_first=True)
        except YunionError as error:
            if error.code != INVALID_REQUEST:
                raise
    return call_daemon(GET_EVENTS, limit=limit, since=since, kind=kind)


def obtain_lease(request: RequestMembers, wait_s: int) -> LeaseRecordJson:
    """Take a lease; raises YunionError, for example NothingFreeError if there is none within `wait_s`."""
    with add_option_hints(request, wait_s):
        coroutine = transport.request_lease(blocking_transport(), request, wait_s, print_notice)
        return transport.run_blocking(coroutine)


def obtain_preview(request: RequestMembers) -> LeaseRecordJson:
    """Return the lease that the request would get now; raises YunionError."""
    return transport.run_blocking(transport.request_preview(blocking_transport(), request))


@contextlib.contextmanager
def add_option_hints(request: RequestMembers, wait_s: int = 0) -> Iterator[None]:
    """Extend the hint of a refusal with the options that would help; the daemon does not know them.

    Raises the YunionError of the block.
    """
    try:
        yield
    except YunionError as error:
        if error.code == BUDGET_NOT_ENFORCED:
            error.replace_hint("use it anyway: --allow-unlimited")
        elif error.code in NOT_FREE:
            hints = [error.hint]
            if not wait_s:
                hints.insert(0, "wait for it: --wait")
            if not request.get("allow_unlimited") and _is_free({**request, "allow_unlimited": True}):
                hints.append("use a GPU that does not enforce budgets: --allow-unlimited")
            error.replace_hint("; ".join(hints))
        elif error.code == INFEASIBLE and _may_be_spread(request):
            error.replace_hint(f"{error.hint}; for different GPUs: --across")
        raise


def _may_be_spread(request: RequestMembers) -> bool:
    return bool(request.get("count")) and not request.get("gpu") and not request.get("across")


def _is_free(request: RequestMembers) -> bool:
    with contextlib.suppress(YunionError):
        return bool(obtain_preview(request))
    return False


def print_warnings(lease: LeaseRecordJson) -> None:
    """Print a notice if some of the GPUs do not enforce budgets, or if one process cannot use all devices."""
    warn_unenforced(lease["unenforced_gpus"], lease["sharing"])
    instances = [gpu for gpu in lease["gpus"] if is_on_instance(gpu)]
    if len(instances) > 1:
        print_notice(f"a CUDA process can use only one MIG instance, by default the first: {instances[0]}")
        print_notice("start one process per instance, each with its UUID in CUDA_VISIBLE_DEVICES")


def warn_unenforced(gpus: Sequence[str], sharing: str) -> None:
    """Print a notice if there are GPUs, which share in this way, that do not enforce budgets."""
    if gpus:
        described_gpus = gpus_that_are(WHY_UNENFORCED[sharing], gpus)
        whose = "its" if len(gpus) == 1 else "their"
        print_notice(f"budgets are not enforced on {described_gpus}: a job can use all of {whose} memory")
