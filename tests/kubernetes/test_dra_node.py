"""The DRA driver on a node whose labels, daemon or claims change: what it offers, and what it still ends."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.core.tasks import first_of
from yunion_mps.kubernetes.api.credentials import Kubeconfig
from yunion_mps.kubernetes.dra.driver import DraService, DriverTimes
from yunion_mps.kubernetes.dra.host_watch import HostTimes
from yunion_mps.kubernetes.metrics import Counts
from yunion_mps.kubernetes.selection import CONFIG_LABEL

from integration.daemon_host import PATIENCE_S, Daemon, eventually
from integration.lease_host import leases_of
from kubernetes.cluster import Cluster
from kubernetes.dra_kubelet import CLAIMS, NAMESPACE, NODE, QUICK, DraKubelet, DraPlugin, DriverInThread
from simhost.host import IN_UNITS

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]
NAMES = [f"00-06-0-{slot}" for slot in range(4)]


@pytest.mark.parametrize(
    ("options", "on", "off", "cause"),
    [
        (
            "dra: true\nonlyWithNodeLabel: on=yes\n",
            "on=yes",
            "on=no",
            "nothing is offered: the node does not have the label on=yes",
        ),
        (
            "configs: {claims: {dra: true}, plugin: {}}\n",
            f"{CONFIG_LABEL}=claims",
            f"{CONFIG_LABEL}=plugin",
            "configuration plugin",
        ),
    ],
    ids=["off", "device plugin"],
)
def test_claims_end_after_a_label_has_turned_the_driver_off(
    dra_kubelet: DraKubelet,
    ready_daemon: Daemon,
    cluster: Cluster,
    options: str,
    on: str,
    off: str,
    cause: str,
) -> None:
    labels = ready_daemon.host.root / "etc/labels"
    labels.write_text(on)
    with DraPlugin(ready_daemon.host, cluster, options, "--node-labels", str(labels)) as driver:
        dra_kubelet.register()
        dra_kubelet.wait_published(4)
        claims = [dra_kubelet.allocate(name, [NAMES[number]]) for number, name in enumerate("ab")]
        cdi = dra_kubelet.prepared(claims[0])
        labels.write_text(off)
        eventually(lambda: not dra_kubelet.devices(), "the end of the devices")
        driver.restart()
        dra_kubelet.register()
        assert dra_kubelet.prepared(claims[0]) == cdi, "as when the kubelet restarts"
        assert f"not prepared on this node: {cause}" in dra_kubelet.refused(claims[1])
        labels.write_text(on)
        dra_kubelet.wait_published(4)
        dra_kubelet.register()
        assert dra_kubelet.prepared(claims[1])
        labels.write_text(off)
        eventually(lambda: not dra_kubelet.devices(), "the end of the devices")
        dra_kubelet.register()
        assert dra_kubelet.unprepare(*claims) == []
        assert leases_of(ready_daemon) == []
        eventually(lambda: not Path(dra_kubelet.endpoint).exists(), "the end of the driver")


def test_a_driver_that_finds_no_daemon_withdraws_the_devices_and_says_why(
    dra_kubelet: DraKubelet, ready_daemon: Daemon, cluster: Cluster
) -> None:
    times = QUICK._replace(host=HostTimes(outage_s=0.2), restart_s=0.2)
    with DriverInThread(ready_daemon.host, cluster, times) as driver:
        dra_kubelet.wait_published(4)
        dra_kubelet.register()
        claim = dra_kubelet.allocate("trainer", [NAMES[0]])
        driver.end()
        assert ready_daemon.stop() == 0
        driver.start()
        dra_kubelet.register()
        for _ in range(2):
            error = dra_kubelet.refused(claim)
            assert "the daemon is not running" in error
            assert "start it: systemctl start yunion-mps-daemon" in error
            assert error.endswith("[daemon_unreachable]")
            eventually(lambda: not dra_kubelet.devices(), "the end of the devices")
        assert [error.endswith("[daemon_unreachable]") for error in dra_kubelet.unprepare(claim)] == [True]
        ready_daemon.start().wait_ready()
        dra_kubelet.wait_published(4)
        assert dra_kubelet.prepared(claim)


def test_claims_do_not_wait_for_each_other_while_the_daemon_is_away(
    dra_kubelet: DraKubelet, ready_daemon: Daemon, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "yunion_mps.kubernetes.daemon_watch")
    times = QUICK._replace(host=HostTimes(outage_s=PATIENCE_S), restart_s=PATIENCE_S)
    with DriverInThread(ready_daemon.host, cluster, times), ThreadPoolExecutor() as pool:
        dra_kubelet.wait_published(4)
        dra_kubelet.register()
        claims = [dra_kubelet.allocate(f"claim-{name}", [name]) for name in NAMES]
        for call, number_after in ((dra_kubelet.prepare, 4), (dra_kubelet.unprepare, 0)):
            caplog.clear()
            assert ready_daemon.stop() == 0
            answer = pool.submit(call, *claims)
            eventually(lambda: caplog.text.count("; retrying for up to ") >= 4, "four requests that wait")
            ready_daemon.start().wait_ready()
            answer.result(PATIENCE_S)
            assert len(leases_of(ready_daemon)) == number_after


def test_a_running_driver_releases_leases_without_a_claim(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, cluster: Cluster
) -> None:
    claim = dra_kubelet.allocate("trainer", [NAMES[0]])
    dra_kubelet.prepared(claim)
    driver.end()
    cluster.remove(CLAIMS, claim.name, NAMESPACE)
    root = ready_daemon.host.root
    credentials = Kubeconfig(str(root / "etc/kubeconfig"))

    async def wait_released() -> None:
        while leases_of(ready_daemon):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)

    service = DraService(credentials, NODE, Paths(str(root)), Counts(), times=DriverTimes(gone_s=0.0))
    asyncio.run(asyncio.wait_for(first_of(service.run(), wait_released()), PATIENCE_S))


def test_the_feature_file_also_says_what_the_driver_offers(daemon: Daemon, cluster: Cluster) -> None:
    file = daemon.host.root / "etc/features.d/yunion-mps"
    daemon.host.divide(IN_UNITS)
    daemon.start().wait_ready()
    options = "dra: true\nfeatureFile: /etc/features.d/yunion-mps\n"
    with DraPlugin(daemon.host, cluster, options) as driver:
        eventually(file.exists, "the labels")
        assert {"yunion.io/mps.gpus=1", "yunion.io/mps.devices=0"} <= set(file.read_text().splitlines())
        daemon.host.divide(4)
        assert daemon.ask("POST", "/v1/reload")[0] == 200
        eventually(lambda: "nvidia.com/gpu.replicas=4" in file.read_text(), "the new labels")
        assert driver.end(signal.SIGTERM) == 0
        assert not file.exists()
