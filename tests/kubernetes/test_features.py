"""The node's labels for Node Feature Discovery."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import cast

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.kubernetes.device_plugin.node_resources import NodeResources
from yunion_mps.kubernetes.features import GpuKind, labels_of
from yunion_mps.kubernetes.offered import KnownDevice
from yunion_mps.kubernetes.options import read_options

from integration.daemon_host import Daemon, eventually
from kubernetes.kubelet import KubeletPlugin
from kubernetes.offered_devices import instance, share
from simhost.host import IN_UNITS

FILE = "etc/features.d/yunion-mps"


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_the_labels_follow_the_division_until_the_plugin_stops(daemon: Daemon) -> None:
    root = daemon.host.root
    (root / "etc/yunion/kubelet-plugin.yml").write_text(f"featureFile: /{FILE}\n")
    daemon.host.divide(4, IN_UNITS)
    with KubeletPlugin(daemon.host) as plugin:
        daemon.start().wait_ready()
        eventually((root / FILE).exists, "the labels")
        labels = (root / FILE).read_text().splitlines()
        assert sorted(labels) == [
            "nvidia.com/gpu.replicas=4",
            "nvidia.com/gpu.sharing-strategy=mps",
            "nvidia.com/mig.strategy=single",
            "nvidia.com/mps.capable=true",
            "yunion.io/mps.devices=4",
            "yunion.io/mps.gpus=2",
            "yunion.io/mps.memory-units=16",
        ]
        daemon.host.divide(2)
        assert daemon.ask("POST", "/v1/reload")[0] == 200
        eventually(lambda: "yunion.io/mps.devices=2" in (root / FILE).read_text(), "the new labels")
        assert [path.name for path in (root / FILE).parent.iterdir()] == ["yunion-mps"]
        assert plugin.end(signal.SIGTERM) == 0
        assert not (root / FILE).exists()


def test_replicas_are_a_label_only_if_all_gpus_have_the_same_number() -> None:
    a, b = GpuKind("a", "mps"), GpuKind("b", "mps")
    assert labels_of({a: 2, b: 2}, ())["nvidia.com/gpu.replicas"] == "2"
    assert "nvidia.com/gpu.replicas" not in labels_of({a: 2, b: 1}, {"c"})
    assert labels_of({}, ()) == {}


#: A node with MPS beside time-slicing beside MIG instances, some of which are shared.
MANY = {
    GpuKind("a", "mps"): 4,
    GpuKind("b", "time-slicing"): 4,
    GpuKind("c", "none", "1g.10gb"): 1,
    GpuKind("d", "none", "1g.10gb"): 1,
    GpuKind("e", "mps", "3g.40gb"): 2,
}
COMMON = {"yunion.io/mps.gpus": "5", "yunion.io/mps.devices": "12", "nvidia.com/mps.capable": "true"}


def test_with_mixed_gpus_and_profiles_have_labels_of_their_own() -> None:
    """Those that are not true of all of them are missing."""
    assert labels_of(MANY, (), mig_strategy="mixed") == {
        **COMMON,
        "nvidia.com/mig.strategy": "mixed",
        "nvidia.com/gpu.replicas": "4",
        "nvidia.com/mig-1g.10gb.count": "2",
        "nvidia.com/mig-1g.10gb.replicas": "1",
        "nvidia.com/mig-1g.10gb.sharing-strategy": "none",
        "nvidia.com/mig-3g.40gb.count": "1",
        "nvidia.com/mig-3g.40gb.replicas": "2",
        "nvidia.com/mig-3g.40gb.sharing-strategy": "mps",
    }


def test_with_single_instances_count_as_gpus() -> None:
    assert labels_of(MANY, (), mig_strategy="single") == {**COMMON, "nvidia.com/mig.strategy": "single"}
    instances = {GpuKind("c", "none", "1g.10gb"): 1, GpuKind("d", "none", "1g.10gb"): 1}
    labels = labels_of(instances, (), mig_strategy="single")
    assert labels["nvidia.com/gpu.sharing-strategy"] == "none"
    assert (labels["nvidia.com/gpu.replicas"], labels["nvidia.com/mps.capable"]) == ("1", "false")


def test_the_memory_of_a_gpu_is_shared_through_mps() -> None:
    sliced = {GpuKind("a", "time-slicing"): 3}
    assert labels_of(sliced, ())["nvidia.com/gpu.sharing-strategy"] == "time-slicing"
    labels = labels_of(sliced, {"b"}, 16)
    assert "nvidia.com/gpu.sharing-strategy" not in labels
    assert (labels["nvidia.com/mps.capable"], labels["nvidia.com/gpu.replicas"]) == ("true", "3")
    assert labels_of({}, {"b"}, 16)["nvidia.com/gpu.sharing-strategy"] == "mps"


def test_the_devices_of_each_gpu_are_counted_again_each_time(tmp_path: Path) -> None:
    resources = NodeResources(read_options(Paths(str(tmp_path))))
    two, other = [share(1, 0), share(1, 1)], instance(2, 3, "1g.10gb", mig_profile="1g.10gb")
    for devices, counts in (([*two, other], [2, 1]), (two, [2])):
        resources.update(cast("list[KnownDevice]", devices), (), ())
        assert [*resources.devices.values()] == counts
    assert [*resources.devices] == [GpuKind(two[0]["gpu_uuid"], "mps", None)]


@pytest.mark.processes
def test_a_feature_file_that_cannot_be_written_is_reported(daemon: Daemon) -> None:
    root = daemon.host.root
    (root / "etc/file").write_text("")
    (root / "etc/yunion/kubelet-plugin.yml").write_text("featureFile: /etc/file/yunion-mps\n")
    daemon.start().wait_ready()
    with KubeletPlugin(daemon.host) as plugin:
        eventually(lambda: "yunion-mps cannot be written: " in plugin.log, "the report")
        assert plugin.process.poll() is None


@pytest.mark.processes
def test_a_file_of_another_program_is_neither_replaced_nor_removed(daemon: Daemon) -> None:
    options = daemon.host.root / "etc/yunion/kubelet-plugin.yml"
    file = daemon.host.root / FILE
    options.write_text(f"configs: {{default: {{featureFile: /{FILE}}}}}\n")
    file.parent.mkdir(parents=True)
    file.write_text("another=label\n")
    daemon.start().wait_ready()
    with KubeletPlugin(daemon.host) as plugin:
        eventually(lambda: "cannot be written: the file there is not this plugin's" in plugin.log, "a report")
        assert plugin.end(signal.SIGTERM) == 0
    assert file.read_text() == "another=label\n"


@pytest.mark.processes
def test_a_feature_file_that_would_replace_a_file_is_refused(daemon: Daemon) -> None:
    options = daemon.host.root / "etc/yunion/kubelet-plugin.yml"
    options.write_text("featureFile: /etc/yunion/kubelet-plugin.yml\n")
    for arguments in (["--check"], []):
        with KubeletPlugin(daemon.host, *arguments) as plugin:
            assert plugin.process.wait(60) == 6
            assert "which exists and is not a feature file of this plugin" in plugin.log
    assert options.exists()
