"""MIG instances as extended resources of their own."""

from __future__ import annotations

import pytest

from integration.daemon_host import Daemon, eventually
from kubernetes.kubelet import RESOURCE, Kubelet, KubeletPlugin

BIG, SMALL = "yunion.io/mig-3g.40gb", "yunion.io/mig-1g.10gb"


@pytest.fixture
def daemon_with_mig(daemon: Daemon) -> Daemon:
    daemon.host.divide("mig: [3g.40gb, 1g.10gb, 1g.10gb]", 2)
    daemon.configure(cuda_mps_scope="gpu")
    return daemon.start().wait_ready()


pytestmark = pytest.mark.gpus({"kind": "h100", "count": 2})


def healthy(kubelet: Kubelet, resource: str) -> list[str]:
    kubelet.resource = resource
    return kubelet.healthy if kubelet.lists else []


def options(daemon: Daemon, strategy: str) -> None:
    (daemon.host.root / "etc/yunion/kubelet-plugin.yml").write_text(f"migStrategy: {strategy}\n")


def test_with_mixed_each_profile_is_a_resource(daemon_with_mig: Daemon) -> None:
    options(daemon_with_mig, "mixed")
    host = daemon_with_mig.host
    with Kubelet(host, RESOURCE, BIG, SMALL) as kubelet, KubeletPlugin(host):
        kubelet.wait_registered(3)
        eventually(lambda: len(healthy(kubelet, RESOURCE)) == 2, "the shares of the other GPU")
        eventually(lambda: len(healthy(kubelet, SMALL)) == 2, "the small instances")
        eventually(lambda: len(healthy(kubelet, BIG)) == 1, "the big instance")
        pod = kubelet.run_pod("trainer", 1)
        (lease,) = daemon_with_mig.get("/v1/leases")[1]["leases"]
        assert lease["devices"] == [*pod.devices]
        (big,) = [one for one in host.gpus[0].mig_devices() if one.profile == "3g.40gb"]
        assert pod.devices == (f"00:06.0-g{big.gpu_instance}",)
        assert lease["environment"]["CUDA_VISIBLE_DEVICES"] == big.uuid


@pytest.mark.parametrize(("strategy", "other", "number"), [("single", "mig: all-3g.40gb", 5), ("none", 2, 2)])
def test_otherwise_instances_are_counted_like_other_devices_or_not(
    daemon_with_mig: Daemon, strategy: str, other: object, number: int
) -> None:
    daemon_with_mig.host.divide("mig: [3g.40gb, 1g.10gb, 1g.10gb]", other)
    assert daemon_with_mig.ask("POST", "/v1/reload")[0] == 200
    options(daemon_with_mig, strategy)
    with Kubelet(daemon_with_mig.host) as kubelet, KubeletPlugin(daemon_with_mig.host):
        assert len(kubelet.wait_healthy(number)) == number


def test_a_layout_that_changes_adds_a_resource_and_empties_another(daemon_with_mig: Daemon) -> None:
    options(daemon_with_mig, "mixed")
    host, more = daemon_with_mig.host, "yunion.io/mig-2g.20gb"
    with Kubelet(host, RESOURCE, BIG, SMALL, more) as kubelet, KubeletPlugin(host):
        eventually(lambda: len(healthy(kubelet, BIG)) == 1, "the big instance")
        host.divide("mig: all-2g.20gb", 2)
        assert daemon_with_mig.ask("POST", "/v1/reload")[0] == 200
        eventually(lambda: len(healthy(kubelet, more)) == 3, "the new instances")
        eventually(lambda: not healthy(kubelet, BIG), "the end of the big one")
