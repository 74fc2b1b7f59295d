"""How soon the plugin notices what nothing announces, by clocks of the test, and what it does without one."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from google.protobuf.message import Message
from yunion_mps.core.errors import NotFoundError, UnreachableError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import DAEMON_UNREACHABLE
from yunion_mps.core.tasks import first_of
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import GET_CLIENTS
from yunion_mps.kubernetes.api.credentials import ApiServerError, Kubeconfig
from yunion_mps.kubernetes.api.objects import Resource
from yunion_mps.kubernetes.api.server import TIMEOUT_S, ApiServer, MissingObjectError
from yunion_mps.kubernetes.daemon_watch import DaemonWatch
from yunion_mps.kubernetes.device_plugin.container_leases import ContainerLeases
from yunion_mps.kubernetes.device_plugin.node_resources import NodeResources, OfferWatch
from yunion_mps.kubernetes.device_plugin.plugin import DevicePlugin
from yunion_mps.kubernetes.device_plugin.registration import Registration
from yunion_mps.kubernetes.device_plugin.resources import DeviceResource
from yunion_mps.kubernetes.dra.claims import ClaimLeases, ClaimName
from yunion_mps.kubernetes.dra.driver import DraDriver
from yunion_mps.kubernetes.dra.host_watch import DraHost
from yunion_mps.kubernetes.dra.resource_objects import AllocatedDevice
from yunion_mps.kubernetes.dra.slices import SLICES, SlicePublisher
from yunion_mps.kubernetes.kubelet import dra_api
from yunion_mps.kubernetes.kubelet.directory import DirectoryWatch
from yunion_mps.kubernetes.kubelet.grpc import Method, Rpc
from yunion_mps.kubernetes.kubelet.protos.dra_health_pb2 import NodeWatchResourcesRequest
from yunion_mps.kubernetes.kubelet.protos.dra_pb2 import (
    Claim,
    NodePrepareResourcesRequest,
    NodeUnprepareResourcesRequest,
)
from yunion_mps.kubernetes.metrics import Counts
from yunion_mps.kubernetes.node_lock import NodeLock, run_alone
from yunion_mps.kubernetes.options import read_options
from yunion_mps.kubernetes.pod_deletions import PodDeletionWatch

from clocks import SkippingLoop, StoppedLoop
from integration.daemon_host import eventually
from kubernetes.grpc_peers import their_server
from kubernetes.offered_devices import share, shares

T = TypeVar("T")
#: By when the kubelet has to be told of a change, and after which it takes DRA devices for unhealthy, in s.
NOTICED_S, DRA_HEALTH_TIMEOUT_S = 1.0, 30.0
#: By when slices are current once the API server is back (docs/kubernetes-dra.md): a timeout and a delay.
PUBLISHED_S = 90.0
HOUR_S, WATCH_S = 3600.0, 300.0
#: The pauses between attempts grow to 30 s and more.
ATTEMPTS_IN_AN_HOUR = 10 + HOUR_S / 30
#: An outage of the daemon that is not reported: a re-exec, in s.
REEXEC_S = 0.5
#: How long the daemon has for an answer on a busy host, and when one that hangs is noticed, in s.
ANSWER_S, HUNG_S = 5.0, 7.0
CLAIM_REFUSED_S = 10.0  # the kubelet waits for 45 s, in which the API server is asked, too


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory in which sockets can be; pytest's own are too long."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def unhealthy_share_s(paths: Paths) -> float:
    """When the device plugin, whose daemon does not answer, has told the kubelet that nothing is healthy."""
    daemon, resources = AsyncDaemonClient(paths), NodeResources(read_options(paths))
    resources.update([share(0, 0)], [], [])
    (devices,) = resources.all
    changed = devices.changed
    watch = OfferWatch(daemon, resources, ContainerLeases(daemon, paths), Counts())
    await first_of(watch.run(), changed.wait())
    assert all(offer.cause for offer in devices.offers.values())
    return now_s()


async def tainted_share_s(paths: Paths) -> float:
    """The same of the DRA driver."""
    host = DraHost(paths, Counts())
    host.offered = shares(1, 1)
    await first_of(host.run(), host.changed.wait())
    assert [(one.taint, one.is_healthy) for one in host.offered] == [(DAEMON_UNREACHABLE, False)]
    return now_s()


def test_only_an_outage_longer_than_a_reexec_makes_devices_unhealthy(tmp_path: Path) -> None:
    assert REEXEC_S <= run(SkippingLoop(), unhealthy_share_s(Paths(str(tmp_path)))) <= NOTICED_S


def test_the_plugin_registers_as_soon_as_the_kubelet_starts(short_path: Path) -> None:
    """It does not even wait for the next regular check, neither at first nor when the kubelet restarts."""
    paths = Paths(str(short_path))
    folder = Path(paths.device_plugins)
    folder.mkdir(parents=True)
    resource = DeviceResource("yunion.io/mps", read_options(paths))

    def restart_kubelet(registration: Registration) -> None:
        eventually(lambda: "cannot register" in registration.status, "the first attempt")
        for _ in range(2):
            requests: list[bytes] = []

            def register(data: bytes, _: object, requests: list[bytes] = requests) -> bytes:
                requests.append(data)
                return b""

            with their_server("v1beta1.Registration", {"Register": register}, folder / "new"):
                (folder / "new").rename(folder / "kubelet.sock")  # one that listens
                eventually(lambda requests=requests: requests, "the registration")  # type: ignore[misc]

    async def serve() -> None:
        leases = ContainerLeases(AsyncDaemonClient(paths), paths)
        plugin = DevicePlugin(resource, leases, read_options(paths), Counts())
        watch = DirectoryWatch(paths.device_plugins)
        registration = Registration(plugin, paths, watch, asyncio.Event())
        kubelet = asyncio.get_running_loop().run_in_executor(None, restart_kubelet, registration)
        await first_of(watch.run(), registration.run(), kubelet)

    run(StoppedLoop(), serve())


def test_the_directory_of_the_kubelet_is_also_checked_regularly(tmp_path: Path) -> None:
    async def checked_s() -> float:
        watch = DirectoryWatch(str(tmp_path))

        async def second_check() -> None:
            for _ in range(2):
                await watch.changed.wait()

        await first_of(second_check(), watch.run())
        return now_s()

    assert 0 < run(SkippingLoop(), checked_s()) <= NOTICED_S


def test_a_plugin_takes_the_place_of_another_one_within_a_second(tmp_path: Path) -> None:
    async def serving_s() -> float:
        other = NodeLock(str(tmp_path))
        assert other.take()
        asyncio.get_running_loop().call_later(0.1, other.release)
        await run_alone(str(tmp_path), "another serves the node", lambda _: None, lambda: asyncio.sleep(0))
        return now_s()

    assert 0 < run(SkippingLoop(), serving_s()) <= 0.1 + NOTICED_S


class BrieflyLeased:
    """A daemon whose answer changes back as soon as it has been read."""

    content = "leased"

    async def call(self, *_: Any) -> Any:
        return {}

    async def call_if_changed(self, *_: Any, **__: Any) -> Any:
        read, self.content = self.content, "free"
        return {"pools": [read]}, read

    async def wait_for_change(self, *_: Any, if_none_match: str, **__: Any) -> str:
        if self.content == if_none_match:
            await asyncio.sleep(HOUR_S)
        return self.content


def test_a_change_that_is_undone_at_once_is_noticed() -> None:
    pools: list[Any] = []

    async def followed() -> None:
        done = asyncio.Event()

        async def read() -> None:
            pools.extend(await watch.pools())
            if len(pools) == 2:
                done.set()

        daemon: Any = BrieflyLeased()
        watch = DaemonWatch(daemon, Counts(), read, lambda _: None, REEXEC_S)
        await first_of(watch.run(), done.wait(), asyncio.sleep(HOUR_S))

    run(SkippingLoop(), followed())
    assert pools == ["leased", "free"]


@pytest.fixture
def hanging(short_path: Path) -> Iterator[Paths]:
    """Where a daemon accepts connections and never answers."""
    paths = Paths(str(short_path))
    with socket.socket(socket.AF_UNIX) as listening:
        path = Path(paths.socket)
        path.parent.mkdir(parents=True)
        listening.bind(str(path))
        listening.listen(8)
        yield paths


@pytest.mark.parametrize("unhealthy_s", [unhealthy_share_s, tainted_share_s])
def test_a_daemon_that_hangs_is_noticed_long_before_its_requests_time_out(
    hanging: Paths, unhealthy_s: Callable[[Paths], Coroutine[Any, Any, float]]
) -> None:
    assert ANSWER_S <= run(SkippingLoop(), unhealthy_s(hanging)) <= HUNG_S


async def refused_claim_s(paths: Paths, why: str) -> float:
    """When a claim is refused because a driver that has just started does not know the devices."""
    host = DraHost(paths, Counts())
    with pytest.raises(UnreachableError, match=why):
        await first_of(host.run(), host.known())
    return now_s()


def test_a_claim_is_refused_in_time_without_an_answer(hanging: Paths, tmp_path: Path) -> None:
    absent = Paths(str(tmp_path))
    for paths, why in ((hanging, "the daemon did not answer"), (absent, "the daemon is not running")):
        assert run(SkippingLoop(), refused_claim_s(paths, why)) <= CLAIM_REFUSED_S


class UnreachableServer(ApiServer):
    """An API server in memory. While it `is_unreachable`, it refuses calls or, if `is_silent`, hangs."""

    def __init__(self, *, is_silent: bool) -> None:
        super().__init__(Kubeconfig("/nonexistent"))
        self.is_unreachable, self._is_silent = True, is_silent
        self.attempts_s: list[float] = []
        self.stored: dict[str, Any] = {}

    async def call(
        self,
        method: str,
        resource: Resource[Any],
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
    ) -> Any:
        self.attempts_s.append(now_s())
        if self.is_unreachable:
            if self._is_silent:
                await asyncio.sleep(TIMEOUT_S)
            raise ApiServerError("away")
        return self._answer(method, resource, path, body)

    def _answer(self, method: str, resource: Resource[Any], path: str, body: object) -> Any:
        if path == resource.path():
            return {"kind": "TheList", "metadata": {"resourceVersion": "1"}, "items": [*self.stored.values()]}
        try:
            return self.stored[path.rpartition("/")[2]]
        except KeyError:
            raise MissingObjectError("not found", 404) from None

    async def events(
        self, resource: Resource[Any], query: Mapping[str, str]
    ) -> AsyncGenerator[tuple[str, Any], None]:
        await asyncio.sleep(WATCH_S)
        if self.is_unreachable:
            raise ApiServerError("away")
        events: list[tuple[str, Any]] = []
        for event in events:
            yield event


class SliceServer(UnreachableServer):
    """It stores slices, and permits nothing else."""

    stored_s = 0.0

    def _answer(self, method: str, resource: Resource[Any], path: str, body: object) -> Any:
        if resource is not SLICES:
            raise ApiServerError("no rights", 403)
        if method == "GET":
            return super()._answer(method, resource, path, body)
        made = cast("dict[str, Any]", body)
        made = {**made, "metadata": {**made["metadata"], "uid": "1", "resourceVersion": str(now_s())}}
        self.stored[made["metadata"]["name"]], self.stored_s = made, now_s()
        return made


def method_of(driver: DraDriver, rpc: Rpc[Any, Any]) -> Method:
    return next(method for method in driver.methods() if method.rpc is rpc)


def test_an_unexpected_error_with_one_claim_is_only_the_claims(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))

    class Claims(ClaimLeases):
        async def allocated(self, claim: ClaimName) -> Sequence[AllocatedDevice]:
            raise OverflowError(claim.name) if claim.name == "wrong" else NotFoundError("none allocated")

        async def release(self, uid: str) -> None:
            if uid == "1":
                raise OverflowError(uid)

    async def answer(rpc: Rpc[Any, Any], request: Message) -> Any:
        claims = Claims(ApiServer(cast(Kubeconfig, None)), paths)
        driver = DraDriver(DraHost(paths, Counts()), claims, "node", Counts())
        return await method_of(driver, rpc).answers(request).__anext__()

    claims = [Claim(namespace="team", uid="1", name="wrong"), Claim(namespace="team", uid="2", name="good")]
    request = NodePrepareResourcesRequest(claims=claims)
    prepared = asyncio.run(answer(dra_api.PREPARE, request)).claims
    assert prepared["1"].error.endswith(" [failed]")
    assert prepared["2"].error == "none allocated [not_found]"
    unprepared = asyncio.run(answer(dra_api.UNPREPARE, NodeUnprepareResourcesRequest(claims=claims))).claims
    assert {uid: claim.error.rpartition(" ")[2] for uid, claim in unprepared.items()} == {
        "1": "[failed]",
        "2": "",
    }


@pytest.mark.parametrize("is_silent", [False, True])
def test_slices_are_current_soon_after_an_hour_without_the_api_server(is_silent: bool) -> None:
    """The interval between retries grows up to that bound, also in a second outage of an hour."""
    server = SliceServer(is_silent=is_silent)
    publisher = SlicePublisher(server, "node-1", Counts(), sleep=asyncio.sleep)

    def published() -> int:
        return sum(len(one["spec"]["devices"]) for one in server.stored.values())

    async def returned() -> None:
        for number in (4, 3):
            server.is_unreachable, began_s = True, now_s()
            server.attempts_s.clear()
            publisher.offer(shares(1, number))
            await asyncio.sleep(HOUR_S)
            attempts_s = [*server.attempts_s, now_s()]
            gaps_s = [after - before for before, after in zip(attempts_s, attempts_s[1:])]
            assert max(gaps_s) <= PUBLISHED_S
            assert len(attempts_s) <= 2 * ATTEMPTS_IN_AN_HOUR, "two loops retry"
            assert attempts_s[0] - began_s <= PUBLISHED_S
            server.is_unreachable, back_s = False, now_s()
            while published() != number:  # noqa: ASYNC110 - an event of the test would not be its clock
                await asyncio.sleep(1)
            assert server.stored_s - back_s <= PUBLISHED_S

    run(SkippingLoop(), first_of(publisher.run(), returned()))


class TerminatingDaemon:
    """A daemon with a client of each container, whose PID is the container's name; it terminates them."""

    def __init__(self, *pids: int) -> None:
        self.pids = {*pids}
        #: When each client was terminated.
        self.ended_s: dict[int, float] = {}

    async def call(self, operation: Operation[Any], *, pid: int = 0) -> Any:
        if operation is GET_CLIENTS:
            clients = [{"pid": pid, "server": True, "container_id": str(pid)} for pid in sorted(self.pids)]
            return {"clients": clients}
        self.pids.remove(pid)
        self.ended_s[pid] = now_s()
        return {"how": "it was disconnected"}


def running_pod(pid: int) -> Any:
    """A pod with one container, in which this process is a client."""
    metadata = {"name": f"pod-{pid}", "namespace": "default", "uid": f"uid-{pid}", "resourceVersion": "1"}
    status = {"phase": "Running", "containerStatuses": [{"containerID": f"containerd://{pid}"}]}
    return {"metadata": metadata, "status": status}


def ending_pod(pid: int, ends_s: float, grace_s: int) -> Any:
    """The same pod after its deletion, `ends_s` after 1970."""
    made = running_pod(pid)
    ends = datetime.fromtimestamp(ends_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    made["metadata"].update(deletionTimestamp=ends, deletionGracePeriodSeconds=grace_s)
    return made


@pytest.mark.parametrize("is_silent", [False, True])
def test_deleted_pods_are_safe_in_an_hour_without_the_api_server(
    is_silent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Known deletions are in time, missed ones soon after it, and no running pod is touched."""
    stays, known, gone, ending, no_pods = 1, 2, 3, 4, 5
    server = UnreachableServer(is_silent=is_silent)
    server.is_unreachable = False
    pods, daemon = server.stored, TerminatingDaemon(stays, known, gone, ending, no_pods)
    watch = PodDeletionWatch(server, "node-1", cast(Any, daemon), Counts(), now_s)
    grace_s = int(HOUR_S / 2)

    async def hour() -> None:
        for pid in (stays, gone, ending):
            pods[f"pod-{pid}"] = running_pod(pid)
        pods[f"pod-{known}"] = ending_pod(known, grace_s, grace_s)
        await asyncio.sleep(1)
        tasks = len(asyncio.all_tasks())
        server.is_unreachable = True
        server.attempts_s.clear()
        caplog.clear()
        for _ in range(60):
            await asyncio.sleep(HOUR_S / 60)
            assert len(asyncio.all_tasks()) <= tasks
        assert len(server.attempts_s) <= ATTEMPTS_IN_AN_HOUR
        assert list(daemon.ended_s) == [known]
        assert grace_s - 4 <= daemon.ended_s[known] < grace_s
        assert len(caplog.records) == 2, "the termination, and the outage once"

        del pods[f"pod-{known}"], pods[f"pod-{gone}"]
        pods[f"pod-{ending}"] = ending_pod(ending, now_s() - 60, 30)
        server.is_unreachable, back_s = False, now_s()
        await asyncio.sleep(HOUR_S)
        assert daemon.pids == {stays, no_pods}
        assert "watching the pods of node node-1 again" in caplog.text
        assert max(daemon.ended_s[gone], daemon.ended_s[ending]) - back_s <= PUBLISHED_S
        assert len(asyncio.all_tasks()) <= tasks

    with caplog.at_level("INFO", "yunion_mps.kubernetes.pod_deletions"):
        run(SkippingLoop(), first_of(watch.run(), hour()))


def test_the_health_of_dra_devices_is_repeated_before_it_expires(tmp_path: Path) -> None:
    async def times_s() -> list[float]:
        host = DraHost(Paths(str(tmp_path)), Counts())
        host.offered = shares(1, 1)
        claims = ClaimLeases(ApiServer(Kubeconfig("/nonexistent")), Paths(str(tmp_path)))
        driver = DraDriver(host, claims, "node-1", Counts())
        answers = method_of(driver, dra_api.WATCH_HEALTH).answers(NodeWatchResourcesRequest())
        return [now_s() for _ in range(2) if await answers.__anext__()]

    first_s, second_s = run(SkippingLoop(), times_s())
    assert 0 < second_s - first_s < DRA_HEALTH_TIMEOUT_S / 2
