"""Claims with several devices and containers, and what happens to them when a program is killed or away."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.core.tasks import first_of
from yunion_mps.kubernetes.api.credentials import ApiServerError, Kubeconfig
from yunion_mps.kubernetes.api.server import ApiServer
from yunion_mps.kubernetes.dra.claims import ClaimLeases, is_claim_lease
from yunion_mps.kubernetes.dra.host_watch import DraHost, HostTimes
from yunion_mps.kubernetes.dra.slice_devices import DRIVER
from yunion_mps.kubernetes.metrics import Counts

from integration.daemon_host import PATIENCE_S, Daemon, eventually
from integration.gateway_host import free_port
from integration.lease_host import leases_of, needs_root, stranger, take
from kubernetes.cluster import Cluster
from kubernetes.dra_kubelet import CLAIMS, NAMESPACE, QUICK, Claim, DraKubelet, DraPlugin, DriverInThread
from kubernetes.test_metrics import scrape
from simhost.host import IN_UNITS

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]
NAMES = [f"00-06-0-{slot}" for slot in range(4)]
UID = "4f6a0c1e-58d3-4a39-9a5b-0d5d8c6f2b11"


def test_two_shares_of_one_gpu_are_one_budget(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon
) -> None:
    claim = dra_kubelet.allocate("trainer", NAMES[:2], requests=["main/large", "second"])
    assert "set cuda_mps_combine: 2" in dra_kubelet.refused(claim)
    ready_daemon.configure(cuda_mps_combine=2)
    assert ready_daemon.ask("POST", "/v1/reload")[0] == 200
    first, second = dra_kubelet.prepare(claim)[claim.name].devices
    assert [*first.request_names, *second.request_names] == ["main", "second", "second"]
    assert (len(first.cdi_device_ids), len(second.cdi_device_ids)) == (1, 0), "a container has it once"
    (lease,) = leases_of(ready_daemon)
    assert lease["environment"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"


def test_a_change_of_what_can_be_combined_is_noticed(ready_daemon: Daemon) -> None:
    host = DraHost(Paths(str(ready_daemon.host.root)), Counts(), HostTimes(reread_s=0.1))

    async def wait(number: int) -> None:
        while not host.offered or {one.combinable for one in host.offered} != {number}:
            await host.changed.wait()

    async def change() -> None:
        await wait(1)
        for number in (3, 2):  # the first change may be seen by the reading of what was there at the start
            ready_daemon.configure(cuda_mps_combine=number)
            assert ready_daemon.ask("POST", "/v1/reload")[0] == 200
            await wait(number)

    asyncio.run(asyncio.wait_for(first_of(host.run(), change()), PATIENCE_S))


@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_a_claim_can_have_two_gpus(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon
) -> None:
    claim = dra_kubelet.allocate("trainer", ["00-06-0-0", "00-07-0-0"])
    assert dra_kubelet.prepared(claim)
    (lease,) = leases_of(ready_daemon)
    assert lease["gpus"] == ["00:06.0", "00:07.0"]
    assert lease["environment"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M,1=4096M"


def test_memory_of_a_pool_is_leased_by_the_amount(daemon: Daemon, cluster: Cluster) -> None:
    host = daemon.host
    host.divide(IN_UNITS)
    daemon.start().wait_ready()
    with DraKubelet(host, cluster) as kubelet, DriverInThread(host, cluster):
        kubelet.register()
        (device,) = kubelet.wait_published(1)
        assert device["allowMultipleAllocations"]
        claims = [kubelet.allocate(f"claim-{number}", ["00-06-0"], {"memory": "6Gi"}) for number in range(3)]
        assert len({kubelet.prepared(claim) for claim in claims[:2]}) == 2
        assert [one["memory_mib"] for lease in leases_of(daemon) for one in lease["budgets"]] == [6144] * 2
        assert "4096 MiB free" in kubelet.refused(claims[2])
        assert kubelet.unprepare(claims[0]) == []
        assert kubelet.prepared(claims[2])


def test_memory_leased_on_the_host_is_no_capacity_of_a_pool(daemon: Daemon, cluster: Cluster) -> None:
    host = daemon.host
    host.divide(IN_UNITS)
    daemon.start().wait_ready()
    with DraKubelet(host, cluster) as kubelet, DriverInThread(host, cluster):
        kubelet.register()
        kubelet.wait_published(1)

        def wait_capacity(value: str, *taints: str) -> None:
            def is_published() -> bool:
                (device,) = kubelet.devices()
                found = [one["key"] for one in device.get("taints", ())]
                return (device["capacity"]["memory"]["value"], found) == (value, [*taints])

            eventually(is_published, f"a capacity of {value}")

        claim = kubelet.allocate("trainer", ["00-06-0"], {"memory": "2Gi"})
        kubelet.prepared(claim)
        jobs = [
            take(daemon, f"holder.name=job-{mib}&holder.ttl_s=0&memory_mib={mib}")["id"]
            for mib in (8192, 4096)
        ]
        wait_capacity("4Gi")
        assert cluster.requests["PUT"] <= 2, "the claim's lease changes nothing, and the jobs' few writes"
        for job in jobs:
            assert daemon.ask("DELETE", f"/v1/leases/{job}")[0] == 200
        wait_capacity("16Gi")
        assert kubelet.unprepare(claim) == []
        take(daemon, "holder.name=job&holder.ttl_s=0&memory_mib=16384")
        wait_capacity("1Gi", f"{DRIVER}/leased")


class RestartedDriver:
    """The driver, which is killed and started again at each step."""

    def __init__(self, driver: DraPlugin, kubelet: DraKubelet, daemon: Daemon) -> None:
        self._driver = driver
        self._kubelet = kubelet
        self._daemon = daemon

    def restart(self) -> None:
        self._driver.restart()
        self._kubelet.register()
        self._kubelet.wait_published(4)

    def kill_in_request(self, send: Callable[[Claim], None], claim: Claim) -> None:
        """Kill it while it waits for the daemon's answer to what it asks because of `send`."""
        self._daemon.signal(signal.SIGSTOP)
        before = self._daemon.pending_connections
        send(claim)
        eventually(lambda: self._daemon.pending_connections > before, "a request")
        self._driver.end()
        self._daemon.signal(signal.SIGCONT)
        self._driver.start()
        self._kubelet.register()


@pytest.fixture
def restarted(driver_process: DraPlugin, dra_kubelet: DraKubelet, ready_daemon: Daemon) -> RestartedDriver:
    dra_kubelet.wait_published(4)
    return RestartedDriver(driver_process, dra_kubelet, ready_daemon)


def test_a_driver_killed_at_any_step_of_a_preparation_loses_nothing(
    dra_kubelet: DraKubelet, restarted: RestartedDriver, ready_daemon: Daemon, cluster: Cluster
) -> None:
    claim = dra_kubelet.allocate("trainer", [NAMES[0]])
    restarted.restart()
    cluster.is_silent = True
    dra_kubelet.send_prepare(claim)
    request = f"GET /apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims/trainer"
    eventually(lambda: cluster.requests[request], "the request for the claim")
    cluster.is_silent = False
    restarted.restart()
    assert leases_of(ready_daemon) == []
    restarted.kill_in_request(dra_kubelet.send_prepare, claim)
    assert leases_of(ready_daemon) == []
    dra_kubelet.send_prepare(claim)
    eventually(lambda: leases_of(ready_daemon), "the lease")
    restarted.restart()
    cdi = dra_kubelet.prepared(claim)
    restarted.restart()
    assert dra_kubelet.prepared(claim) == cdi, "the kubelet may not have got the answer"
    assert len(leases_of(ready_daemon)) == 1


def test_a_driver_killed_at_any_step_of_an_unpreparation_leaks_nothing(
    dra_kubelet: DraKubelet, restarted: RestartedDriver, ready_daemon: Daemon
) -> None:
    claim = dra_kubelet.allocate("trainer", [NAMES[0]])
    dra_kubelet.prepared(claim)
    restarted.restart()
    restarted.kill_in_request(dra_kubelet.send_unprepare, claim)
    assert len(leases_of(ready_daemon)) == 1
    dra_kubelet.send_unprepare(claim)
    eventually(lambda: not leases_of(ready_daemon), "the end of the lease")
    restarted.restart()
    assert dra_kubelet.unprepare(claim) == []


def test_without_the_api_server_claims_are_refused_and_leases_remain(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, cluster: Cluster
) -> None:
    claims = [dra_kubelet.allocate(name, [NAMES[number]]) for number, name in enumerate("ab")]
    dra_kubelet.prepared(claims[0])
    cluster.stop()
    assert "[api_server_error]" in dra_kubelet.refused(claims[1])
    assert len(leases_of(ready_daemon)) == 1
    assert dra_kubelet.unprepare(claims[0]) == [], "which needs no API server"
    assert leases_of(ready_daemon) == []
    cluster.start()
    assert dra_kubelet.prepared(claims[1])


def test_a_daemon_that_restarts_keeps_the_leases_of_claims(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon
) -> None:
    claim = dra_kubelet.allocate("trainer", [NAMES[0]])
    cdi = dra_kubelet.prepared(claim)
    for end in (ready_daemon.kill, ready_daemon.stop):
        end()
        ready_daemon.start().wait_ready()
        assert dra_kubelet.prepared(claim) == cdi
    ready_daemon.reexec()
    assert dra_kubelet.prepared(claim) == cdi
    (lease,) = leases_of(ready_daemon)
    assert lease["expires"] is None


def test_a_daemon_that_hangs_taints_its_devices_until_it_continues(
    dra_kubelet: DraKubelet, ready_daemon: Daemon, cluster: Cluster
) -> None:
    times = QUICK._replace(host=HostTimes(probe_s=0.1, hang_s=0.5))
    with DriverInThread(ready_daemon.host, cluster, times):
        dra_kubelet.wait_published(4)
        ready_daemon.signal(signal.SIGSTOP)
        try:
            dra_kubelet.wait_published(0)
        finally:
            ready_daemon.signal(signal.SIGCONT)
        dra_kubelet.wait_published(4)


def test_a_gpu_is_published_although_a_claim_has_the_one_that_it_replaced(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon
) -> None:
    assert dra_kubelet.prepared(dra_kubelet.allocate("trainer", [NAMES[0]]))
    new = f"GPU-{UID}"
    ready_daemon.stop()
    ready_daemon.host.gpus[0].replace(new)
    ready_daemon.start().wait_ready()
    assert ready_daemon.ask("POST", "/v1/reload")[0] == 200  # the operator confirms the card

    def published() -> list[str]:
        return [one["attributes"]["uuid"]["string"] for one in dra_kubelet.devices() if not one.get("taints")]

    eventually(lambda: published() == [new] * 4, "the devices of the new GPU")


def test_sockets_that_are_removed_are_created_again(dra_kubelet: DraKubelet, driver: DriverInThread) -> None:
    root = driver.host.root / "var/lib/kubelet"
    for path in ("plugins_registry/mps.yunion.io-reg.sock", "plugins/mps.yunion.io/dra.sock"):
        (root / path).unlink()
        eventually((root / path).exists, "the socket")
        dra_kubelet.register()


@needs_root
def test_only_root_takes_a_lease_that_does_not_expire(ready_daemon: Daemon) -> None:
    with stranger(ready_daemon) as connection:
        status, answer = connection.ask("POST", "/v1/leases", "holder.name=a&holder.ttl_s=0")
    assert (status, answer["code"]) == (403, "not_allowed")
    assert take(ready_daemon, "holder.name=a&holder.ttl_s=0")["expires"] is None


class Reconciler:
    """What the driver does from time to time, without waiting for that time."""

    def __init__(self, daemon: Daemon, cluster: Cluster, gone_s: float = 0.0) -> None:
        server = ApiServer(Kubeconfig(str(cluster.write_kubeconfig(daemon.host.root / "etc/kubeconfig"))))
        self._daemon = daemon
        self._claims = ClaimLeases(server, Paths(str(daemon.host.root)), gone_s)

    def run(self) -> list[str]:
        """The names of the leases that remain."""
        asyncio.run(self._claims.reconcile())
        return [lease["name"].partition("@")[0].partition(":")[2] for lease in leases_of(self._daemon)]


def test_leases_without_claim_and_pod_are_released(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, cluster: Cluster
) -> None:
    claims = [dra_kubelet.allocate(name, [NAMES[number]]) for number, name in enumerate("abcd")]
    for claim in claims:
        dra_kubelet.prepared(claim)
    every = [f"{NAMESPACE}/{name}" for name in "abcd"]
    assert Reconciler(ready_daemon, cluster).run() == every, "their claims are reserved for pods"
    for claim in claims[:2]:
        cluster.remove(CLAIMS, claim.name, NAMESPACE)
    cluster.replace(CLAIMS, {**cluster.get(CLAIMS, "c", NAMESPACE), "status": {}})
    dra_kubelet.listed = ["a"]
    assert Reconciler(ready_daemon, cluster, gone_s=3600.0).run() == every, "it may still be prepared"
    cluster.refusals = {"GET": [500]}
    with pytest.raises(ApiServerError):
        Reconciler(ready_daemon, cluster).run()
    assert len(leases_of(ready_daemon)) == 4, "the API server does not say that a claim is gone"
    assert Reconciler(ready_daemon, cluster).run() == [f"{NAMESPACE}/a", f"{NAMESPACE}/d"]
    dra_kubelet.listed = []
    assert Reconciler(ready_daemon, cluster).run() == [f"{NAMESPACE}/d"]


def test_a_claim_that_cannot_be_read_keeps_only_its_own_lease(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, cluster: Cluster
) -> None:
    for number, name in enumerate("ab"):
        dra_kubelet.prepared(dra_kubelet.allocate(name, [NAMES[number]]))
    cluster.replace(CLAIMS, {**cluster.get(CLAIMS, "a", NAMESPACE), "status": 7})
    cluster.remove(CLAIMS, "b", NAMESPACE)
    assert Reconciler(ready_daemon, cluster).run() == [f"{NAMESPACE}/a"]


@pytest.mark.parametrize(
    ("name", "changed", "is_one"),
    [
        (f"claim:team/job@{UID}", {}, True),
        (f"claim:team/job@{UID}", {"expires": "2026-11-23T12:00:00Z"}, False),
        (f"claim:team/job@{UID}", {"binding": "process"}, False),
        ("claim:team/job@1", {}, False),
        (f"team/job@{UID}", {}, False),
        ("team/job@1", {}, False),
        (None, {}, False),
    ],
)
def test_only_a_lease_that_the_driver_could_have_taken_is_of_a_claim(
    name: str | None, changed: dict[str, str], is_one: bool
) -> None:
    lease: Any = {"name": name, "binding": "name", "expires": None, **changed}
    assert is_claim_lease(lease) is is_one


def test_a_lease_that_is_not_of_a_claim_is_neither_released_nor_ours(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, cluster: Cluster
) -> None:
    name = "claim:team/job@1"
    take(ready_daemon, f"holder.name={name}&holder.ttl_s=0&devices=00:06.0-0")
    assert [device["name"] for device in dra_kubelet.wait_published(3)] == NAMES[1:]
    assert dra_kubelet.devices()[0]["taints"][0]["key"] == f"{DRIVER}/leased"
    Reconciler(ready_daemon, cluster).run()
    assert [lease["name"] for lease in leases_of(ready_daemon)] == [name]


def test_a_claim_of_the_same_name_does_not_keep_the_old_lease(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, cluster: Cluster
) -> None:
    old = dra_kubelet.allocate("trainer", [NAMES[0]])
    dra_kubelet.prepared(old)
    cluster.remove(CLAIMS, "trainer", NAMESPACE)
    new: Claim = dra_kubelet.allocate("trainer", [NAMES[1]])
    dra_kubelet.prepared(new)
    assert len(leases_of(ready_daemon)) == 2
    Reconciler(ready_daemon, cluster).run()
    assert [lease["name"] for lease in leases_of(ready_daemon)] == [f"claim:{NAMESPACE}/trainer@{new.uid}"]


def test_the_lease_of_a_claim_with_the_longest_name_is_released(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, cluster: Cluster
) -> None:
    name = ".".join(["a" * 63] * 3 + ["b" * 61])
    claim = dra_kubelet.allocate(name, [NAMES[0]])
    dra_kubelet.prepared(claim)
    assert Reconciler(ready_daemon, cluster).run() == [f"{NAMESPACE}/{name}"]
    cluster.remove(CLAIMS, name, NAMESPACE)
    assert Reconciler(ready_daemon, cluster).run() == []


def test_prepared_claims_and_errors_are_counted(
    dra_kubelet: DraKubelet, ready_daemon: Daemon, cluster: Cluster
) -> None:
    address = f"127.0.0.1:{free_port()}"
    with DraPlugin(ready_daemon.host, cluster, f"dra: true\nmetricsAddress: {address}\n"):
        dra_kubelet.register()
        claim = dra_kubelet.allocate("trainer", [NAMES[0]])
        dra_kubelet.prepared(claim)
        cluster.stop()
        dra_kubelet.refused(claim)
        before = scrape(address)
        cluster.start()
        ready_daemon.host.gpus[0].lose()
        eventually(
            lambda: ready_daemon.polls() and scrape(address)["devices", DRIVER, "unhealthy"] == 4, "the loss"
        )
        ready_daemon.kill()
        eventually(lambda: scrape(address)["errors_total", "daemon"], "a failed request")
        values = scrape(address)
    assert before["errors_total", "api_server"] >= 1
    assert (before["devices", DRIVER, "healthy"], before["health_changes_total", DRIVER, "healthy"]) == (4, 4)
    assert values["devices", DRIVER, "healthy"] == 0
    assert values["health_changes_total", DRIVER, "unhealthy"] == 4
    assert values["registrations_total", DRIVER, "done"] >= 1
    assert (values["starts_total", DRIVER, "done"], values["starts_total", DRIVER, "refused"]) == (1, 1)
    assert values["start_duration_seconds_count", DRIVER] == 2


def test_dra_without_credentials_for_the_api_server_is_refused(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    (host.root / "etc/yunion/kubelet-plugin.yml").write_text("dra: true\n")
    done = host.run(["yunion-mps-kubelet-plugin"])
    assert done.returncode == 6
    assert "dra is set, but there are no credentials for the API server: kubeconfig is not set" in done.stderr
