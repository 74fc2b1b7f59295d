"""The plugin's metrics: they count what the kubelet asks for, and are served on this host only."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from yunion_mps.kubernetes.selection import CONFIG_LABEL

from integration.daemon_host import Daemon, eventually
from integration.gateway_host import free_port
from kubernetes.cluster import Cluster
from kubernetes.kubelet import MEMORY, RESOURCE, Kubelet, KubeletPlugin

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]

PREFIX = "yunion_mps_kubelet_plugin_"
LABELS = ("resource", "result", "health", "program", "le")


@pytest.fixture
def address(ready_daemon: Daemon) -> str:
    found = f"127.0.0.1:{free_port()}"
    (ready_daemon.host.root / "etc/yunion/kubelet-plugin.yml").write_text(f"metricsAddress: {found}\n")
    return found


def scrape(address: str) -> dict[tuple[str, ...], float]:
    """The values by the metric's name without its prefix and the values of its labels."""

    def read() -> str:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                return str(answer.read().decode())
        except (OSError, http.client.HTTPException):  # not served yet, or being replaced
            return ""

    text: str = eventually(read, "the metrics")
    return {
        (
            sample.name.replace(PREFIX, ""),
            *(sample.labels[label] for label in LABELS if label in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_registrations_allocations_starts_and_health_are_counted(ready_daemon: Daemon, address: str) -> None:
    with Kubelet(ready_daemon.host) as kubelet, KubeletPlugin(ready_daemon.host):
        kubelet.wait_healthy(4)
        pod = kubelet.run_pod("trainer", 1)
        with pytest.raises(grpc.RpcError):
            kubelet.admit("refused", ("00:99.0-1",))
        values = scrape(address)
        assert values["devices", RESOURCE, "healthy"] == 4
        assert values["health_changes_total", RESOURCE, "healthy"] == 4
        assert values["registrations_total", RESOURCE, "done"] == 1
        assert values["allocations_total", RESOURCE, "done"] == 1
        assert values["allocations_total", RESOURCE, "refused"] == 1
        assert values["starts_total", RESOURCE, "done"] == 1
        assert values["start_duration_seconds_count", RESOURCE] == 1
        assert values["start_duration_seconds_sum", RESOURCE] > 0
        assert values["errors_total", "daemon"] == 0
        assert values["process_resident_memory_bytes",] > 0
        ready_daemon.kill()
        kubelet.wait_healthy(0)
        kubelet.restart()
        kubelet.wait_registered(2)
        values = scrape(address)
        assert values["devices", RESOURCE, "unhealthy"] == 4
        assert values["health_changes_total", RESOURCE, "unhealthy"] == 4
        assert values["registrations_total", RESOURCE, "done"] == 2
        assert values["errors_total", "daemon"] > 0
        assert pod.name == "trainer"


def test_a_refused_registration_is_counted(ready_daemon: Daemon, address: str) -> None:
    with Kubelet(ready_daemon.host, MEMORY), KubeletPlugin(ready_daemon.host):
        eventually(
            lambda: scrape(address).get(("registrations_total", RESOURCE, "refused")),
            "a refused registration",
        )
        assert scrape(address)["errors_total", "kubelet"] > 0


def test_a_failed_request_to_the_api_server_is_counted(ready_daemon: Daemon, address: str) -> None:
    etc = ready_daemon.host.root / "etc"
    with Cluster() as cluster:
        cluster.refusals["GET"] = [503]
        kubeconfig = cluster.write_kubeconfig(etc / "kubeconfig")
        (etc / "yunion/kubelet-plugin.yml").write_text(
            f"metricsAddress: {address}\nkubeconfig: {kubeconfig}\n"
        )
        with KubeletPlugin(ready_daemon.host):
            eventually(lambda: scrape(address)["errors_total", "api_server"] == 1, "the failed request")


def test_the_metrics_are_not_served_under_other_names(ready_daemon: Daemon, address: str) -> None:
    """Those of a pod are, under its addresses, as Prometheus asks for them."""
    with KubeletPlugin(ready_daemon.host):
        scrape(address)
        for host in ("10.244.1.7:9436", "[fd00::7]:9436"):
            request = urllib.request.Request(f"http://{address}/metrics", headers={"Host": host})
            urllib.request.urlopen(request, timeout=60).close()
        for host, path, status in (("evil.example", "metrics", 421), ("localhost", "", 404)):
            request = urllib.request.Request(f"http://{address}/{path}", headers={"Host": host})
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=60)
            assert caught.value.code == status
            caught.value.close()


def test_the_plugin_works_while_its_metrics_port_is_in_use(ready_daemon: Daemon, address: str) -> None:
    host = ready_daemon.host
    port = int(address.rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)) as other,
        Kubelet(host) as kubelet,
        KubeletPlugin(host) as plugin,
    ):
        kubelet.wait_healthy(4)
        eventually(lambda: "cannot listen on" in plugin.log, "the report")
        other.close()
        assert scrape(address)["devices", RESOURCE, "healthy"] == 4


def test_the_metrics_follow_the_configuration_that_a_label_chooses(
    ready_daemon: Daemon, address: str
) -> None:
    labels = ready_daemon.host.root / "labels"
    labels.write_text("")
    (ready_daemon.host.root / "etc/yunion/kubelet-plugin.yml").write_text(
        f"metricsAddress: {address}\nconfigs: {{default: {{}}, large: {{resource: example.com/large}}}}\n"
    )
    with KubeletPlugin(ready_daemon.host, "--node-labels", str(labels)):
        for resource, chosen in (
            (RESOURCE, "default"),
            ("example.com/large", "large"),
            (RESOURCE, "default"),
        ):
            labels.write_text(f"{CONFIG_LABEL}={chosen}\n")
            eventually(
                lambda resource=resource: ("devices", resource, "healthy") in scrape(address),  # type: ignore[misc]
                f"metrics of {chosen}",
            )
