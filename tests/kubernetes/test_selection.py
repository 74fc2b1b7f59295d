"""Which of several configurations a node has, and labels that turn a node on and off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.core.errors import ConfigError
from yunion_mps.kubernetes.selection import CONFIG_LABEL, choose, parse_labels

from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES
from kubernetes.cluster import Cluster
from kubernetes.conftest import Read, RunProgram
from kubernetes.kubelet import RESOURCE, Kubelet, KubeletPlugin

FILE = """\
configs:
  inference:
    models: ["Tesla T4", "NVIDIA A10*"]
    preferred: spread
  large: {resource: example.com/large}
  default: {failRequestsGreaterThanOne: true}
gpuResource: example.com/mig
"""
SWITCHED = "onlyWithNodeLabel: ack.node.gpu.schedule=mps\n"
NAMED = "configs:\n  large: {resource: example.com/large}\n"


@pytest.mark.parametrize(
    ("name", "labels", "models", "cause"),
    [
        ("large", {CONFIG_LABEL: "default"}, ["Tesla T4"], "configuration large"),
        ("", {CONFIG_LABEL: "large"}, ["Tesla T4"], "configuration large"),
        ("", {}, ["NVIDIA A100-SXM4"], "configuration inference, because of GPU model NVIDIA A100-SXM4"),
        ("", {}, ["Tesla V100"], "configuration default"),
    ],
)
def test_name_label_model_and_default_choose_in_this_order(
    read: Read, name: str, labels: dict[str, str], models: list[str], cause: str
) -> None:
    assert choose(read(FILE), name, labels, models).cause == cause


def test_a_configuration_has_the_file_s_other_keys(read: Read) -> None:
    options = read(FILE)
    named = {one.name: one.options for one in options.configs}
    names = {"resource": "example.com/large", "timeSlicedResource": "example.com/gpu.shared"}
    assert {**names, "gpuResource": "example.com/mig"}.items() <= named["large"].resources.items()
    assert named["inference"].preferred == "spread"
    assert (options.preferred, options.fail_requests_greater_than_one) == ("binpack", False)
    assert choose(read("preferred: spread\n"), "", {}, []).options == read("preferred: spread\n")
    only = "configs: {a: {models: [x]}}\n"
    assert choose(read(only), "", {}, ["y"]).options == read(only)


def test_a_label_that_names_no_configuration_offers_nothing(read: Read) -> None:
    choice = choose(read(FILE), "", {CONFIG_LABEL: "largest"}, [])
    which = "inference, large, default"
    told = f"nothing is offered: {CONFIG_LABEL} is largest, but the configurations are {which}"
    assert choice == (None, told)


@pytest.mark.parametrize(
    ("selector", "labels", "is_on"),
    [
        ("a/b=mps", {"a/b": "mps"}, True),
        ("a/b=mps", {"a/b": "share"}, False),
        ("a/b=mps", {}, False),
        ("a/b", {"a/b": "x"}, True),
        ("a/b=", {"a/b": ""}, True),
        ("a/b=", {"a/b": "x"}, False),
    ],
)
def test_a_node_without_the_label_offers_nothing(
    read: Read, selector: str, labels: dict[str, str], is_on: bool
) -> None:
    assert bool(choose(read(f"onlyWithNodeLabel: {selector}\n"), "", labels, []).options) is is_on


def test_labels_are_read_from_lines_with_and_without_quotes() -> None:
    assert parse_labels('a=b\nx.y/z="mps"\n\nno label\n c = \n') == {"a": "b", "x.y/z": "mps", "c": ""}


def test_all_problems_of_named_configurations_are_reported(tmp_path: Path, read: Read) -> None:
    with pytest.raises(ConfigError) as caught:
        read(
            "onlyWithNodeLabel: =mps\nconfigs:\n  a: {prefered: spread, memoryUnit: 2GiB}\n  a b: {}\n"
            "  c: 1\n  d: {models: T4, kubeconfig: /k}\n  a: {preferred: spread}\n"
            "  e: {memoryResource: yunion.io/mps}\n"
        )
    lines = caught.value.message.replace(f"{tmp_path}/etc/yunion/kubelet-plugin.yml:", "").splitlines()
    beginnings = (
        '1: onlyWithNodeLabel is "=mps", not a label: ',
        "3: unknown key prefered (did you mean preferred?)",
        '3: memoryUnit is "2GiB", but must be 1GiB or 128MiB',
        '4: "a b" is not the name of a configuration: ',
        "5: configuration c is 1, not a mapping: ",
        '6: models is "T4", not a list of one or more model names: ',
        "6: unknown key kubeconfig: remove it; ",
        "7: duplicate configuration a: ",
        "8: resource and memoryResource are both yunion.io/mps: ",
    )
    assert len(lines) == len(beginnings)
    for line, beginning in zip(lines, beginnings):
        assert line.startswith(beginning)


@pytest.mark.parametrize(
    ("text", "arguments", "status", "told"),
    [
        (NAMED, ["--config", "small"], 2, "there is no configuration small: the configurations are large"),
        ("", ["--config", "small"], 2, "there is no configuration small: configs is not set"),
        (SWITCHED, [], 6, "onlyWithNodeLabel is set, but the node's labels cannot be read"),
        ("dra: true\n", [], 6, "dra is set, but there are no credentials for the API server"),
        ("configs: {a: {dra: true}}\n", ["--config", "a"], 6, "dra is set, but there are no credentials"),
    ],
)
def test_the_check_refuses_what_the_start_refuses(
    read: Read, run_program: RunProgram, text: str, arguments: list[str], status: int, told: str
) -> None:
    read(text)
    at_start = run_program(*arguments)
    assert (at_start[0], told in at_start[1][0]) == (status, True)
    assert run_program(*arguments, "--check") == at_start


# -- the program


class Node:
    """A node with a daemon and a kubelet, whose plugin can be started with other options."""

    def __init__(self, daemon: Daemon, stack: ExitStack) -> None:
        self._stack = stack
        self.host = daemon.host
        self.labels = daemon.host.root / "labels"
        self.kubelet = stack.enter_context(Kubelet(daemon.host, RESOURCE, "example.com/large"))

    def start(self, text: str, *arguments: str) -> KubeletPlugin:
        (self.host.root / "etc/yunion/kubelet-plugin.yml").write_text(text)
        return self._stack.enter_context(KubeletPlugin(self.host, *arguments))


@pytest.fixture
def node(ready_daemon: Daemon) -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(ready_daemon, stack)


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_a_label_in_a_file_turns_the_node_on_and_off(node: Node) -> None:
    node.labels.write_text("")
    plugin = node.start(SWITCHED, "--node-labels", str(node.labels))
    node.labels.write_text("ack.node.gpu.schedule=mps\n")
    node.kubelet.wait_healthy(4)
    node.labels.write_text("ack.node.gpu.schedule=share\n")
    eventually(lambda: not node.kubelet.lists, "the end of the offer")
    node.labels.write_text("ack.node.gpu.schedule=mps\n")
    node.kubelet.wait_healthy(4)
    off = "nothing is offered: the node does not have the label ack.node.gpu.schedule=mps"
    assert plugin.log.count(off) == 1


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_the_node_s_label_in_the_cluster_chooses_at_once(node: Node, tmp_path: Path) -> None:
    with Cluster() as cluster:
        made: dict[str, Any] = {"metadata": {"name": "gpu-7", "labels": {}}}
        cluster.add("/api/v1/nodes", made)
        kubeconfig = cluster.write_kubeconfig(tmp_path / "kubeconfig")
        node.start(f"kubeconfig: {kubeconfig}\nnodeName: gpu-7\n{NAMED}")
        node.kubelet.wait_healthy(4)
        labelled = cluster.get("/api/v1/nodes", "gpu-7")
        labelled["metadata"]["labels"] = {CONFIG_LABEL: "large"}
        cluster.replace("/api/v1/nodes", labelled)
        node.kubelet.resource = "example.com/large"
        node.kubelet.wait_healthy(4)
        cluster.stop()  # what was known stays valid
        node.kubelet.restart()
        node.kubelet.wait_healthy(4)


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
@pytest.mark.parametrize("text", ["", NAMED], ids=["pods", "labels"])
def test_a_wrong_node_name_is_reported(node: Node, tmp_path: Path, text: str) -> None:
    with Cluster() as cluster:
        cluster.add("/api/v1/nodes", {"metadata": {"name": "gpu-7"}})
        kubeconfig = cluster.write_kubeconfig(tmp_path / "kubeconfig")
        plugin = node.start(f"kubeconfig: {kubeconfig}\nnodeName: gpu-8\n{text}")
        missing = (
            "the cluster has no node gpu-8: correct nodeName, unless the kubelet has yet to register the node"
        )
        missing = f"{missing}; trying again" if text else f"pod deletions cannot be seen: {missing}"
        eventually(lambda: missing in plugin.log, "the report", trouble=lambda: plugin.log)


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_the_log_says_that_an_unreadable_label_is_ignored(node: Node) -> None:
    plugin = node.start(NAMED)
    node.kubelet.wait_healthy(4)
    told = f"the node's label {CONFIG_LABEL} is not read: set kubeconfig, or start with --node-labels"
    assert plugin.log.count(told) == 1


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_a_running_pods_device_is_unhealthy_under_another_resource_name(node: Node) -> None:
    node.labels.write_text("other=label\n")
    node.start(NAMED, "--node-labels", str(node.labels))
    node.kubelet.wait_healthy(4)
    pod = node.kubelet.run_pod("trainer", 1)
    node.labels.write_text(f"{CONFIG_LABEL}=large\n")
    node.kubelet.resource = "example.com/large"
    assert node.kubelet.wait_healthy(3) == sorted(set(ADDRESSES) - set(pod.devices))
    node.labels.write_text("other=label\n")
    node.kubelet.resource = RESOURCE
    node.kubelet.wait_healthy(4)


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_the_model_of_the_gpus_chooses_once_the_daemon_names_it(node: Node) -> None:
    node.start('configs:\n  large: {resource: example.com/large, models: ["Tesla V100*"]}\n')
    node.kubelet.resource = "example.com/large"
    node.kubelet.wait_healthy(4)


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_the_command_line_chooses_without_labels(node: Node) -> None:
    node.start(NAMED, "--config", "large")
    node.kubelet.resource = "example.com/large"
    node.kubelet.wait_healthy(4)


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_a_label_that_chooses_what_the_host_lacks_does_not_end_it(node: Node) -> None:
    node.labels.write_text(f"{CONFIG_LABEL}=claims\n")
    plugin = node.start("configs: {default: {}, claims: {dra: true}}\n", "--node-labels", str(node.labels))
    eventually(lambda: "nothing is offered: " in plugin.log, "the reason")
    assert "dra is set, but there are no credentials for the API server" in plugin.log
    node.labels.write_text("")
    node.kubelet.wait_healthy(4)
