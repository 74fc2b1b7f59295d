"""A node of the cluster: the real kubelet and containerd on a simulated host, with the daemon and the plugin.

with Node(cluster, daemon, image) as node:
    node.create_pod("trainer", devices=1)
    node.wait_running("trainer")

The kubelet runs in containerd's mount namespace, where its directories are those of the simulated host, and
where it finds the kernel settings that it would otherwise change for the whole machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import yaml

from cluster.control_plane import FEATURES, KUBELET, NODE, ControlPlane, Object, Program
from integration.daemon_host import Daemon, control_daemons, eventually
from integration.gateway_host import free_port
from integration.image import IMAGE
from kubernetes.containerd import Container, Containerd
from kubernetes.kubelet import RESOURCE, KubeletPlugin
from simhost.environment import CHECKOUT
from simhost.host import Closes

_NODE = f"/api/v1/nodes/{NODE}"
_PODS = "/api/v1/namespaces/default/pods"
_EVENTS = "/api/v1/namespaces/default/events"
_DRA = "/apis/resource.k8s.io/v1"
_CLAIMS, _TEMPLATES = (f"{_DRA}/namespaces/default/resourceclaim{end}" for end in ("s", "templates"))
_EXAMPLES = CHECKOUT / "etc/kubernetes/examples"
#: The image of the examples.
_DEBIAN = "docker.io/library/debian:13-slim"
_SERVICE_ACCOUNT = "/api/v1/namespaces/yunion-mps/serviceaccounts/kubelet-plugin"
_MOUNTS = """\
set -e
for place in /var/lib /var/log; do mount -t tmpfs tmpfs $place; done
mkdir /var/lib/kubelet
mount --bind "$1" /var/lib/kubelet
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000
do
    mkdir -p "/var/lib/sys/${setting%/*}"
    echo "${setting#*=}" >"/var/lib/sys/${setting%=*}"
    mount --bind "/var/lib/sys/${setting%=*}" "/proc/sys/${setting%=*}"
done
"""


class Node(Closes):
    """A node and its pods; nothing of them is left at the end. A context manager."""

    def __init__(self, cluster: ControlPlane, daemon: Daemon, image: Path) -> None:
        self.cluster = cluster
        self.daemon = daemon
        self._root = daemon.host.root
        self._stack = contextlib.ExitStack()
        try:
            self._start(image)
        except BaseException:
            self.close()
            raise

    def _start(self, image: Path) -> None:
        folder = self._root / "var/lib/kubelet"
        folder.mkdir(parents=True, exist_ok=True)
        self._stack.callback(self._forget)
        self.containerd = self._stack.enter_context(Containerd(self.daemon.host, image))
        self.containerd.tag(_DEBIAN)
        self.containerd.make_cgroup()
        subprocess.run(self.containerd.command("sh", "-c", _MOUNTS, "sh", folder), check=True)
        self.kubelet = self._stack.enter_context(
            Program(
                self._root / "var/log/kubelet",
                self.containerd.command(
                    self.cluster.assets / "kubelet",
                    f"--config={self._write_config()}",
                    f"--kubeconfig={self.cluster.write_kubeconfig(self._root / 'etc/kubelet.conf', KUBELET)}",
                    f"--hostname-override={NODE}",
                    FEATURES,
                ),
            )
        )
        self.wait_ready()

    def _write_config(self) -> Path:
        path = self._root / "etc/kubelet.yaml"
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": free_port(),
            "healthzPort": 0,
            "authentication": {"webhook": {"enabled": False}, "anonymous": {"enabled": True}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self.containerd.socket}",
            "cgroupRoot": f"/{self.containerd.cgroup}",
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "evictionHard": {},
            "imageGCHighThresholdPercent": 100,
            "volumePluginDir": f"{self._root}/var/lib/volume-plugins",
            "resolvConf": "",
            "oomScoreAdj": 0,
            "syncFrequency": "5s",
            "nodeStatusUpdateFrequency": "1s",
        }
        path.write_text(json.dumps(config))
        return path

    def _write_kubeconfig(self) -> Path:
        """A kubeconfig of the DaemonSet's service account, bound to this node."""
        where = {"kind": "Node", "apiVersion": "v1", "name": NODE}
        request = {"spec": {"boundObjectRef": where, "audiences": [], "expirationSeconds": 3600}}
        self.token = self.cluster.create(f"{_SERVICE_ACCOUNT}/token", request)["status"]["token"]
        return self.cluster.write_kubeconfig(self._root / "etc/plugin.conf", self.token)

    def start_plugin(self, **options: object) -> KubeletPlugin:
        """Start the plugin with these keys in its file."""
        keys = {"kubeconfig": str(self._write_kubeconfig()), "nodeName": NODE, **options}
        (self._root / "etc/yunion/kubelet-plugin.yml").write_text(json.dumps(keys))
        self._plugin = self._stack.enter_context(KubeletPlugin(self.daemon.host))
        return self._plugin

    # -- the node

    def wait_ready(self) -> None:
        eventually(self._is_ready, "the node", trouble=lambda: self.kubelet.log)

    def _is_ready(self) -> bool:
        nodes = self.cluster.get("/api/v1/nodes")["items"]
        conditions = [one for node in nodes for one in node["status"].get("conditions", ())]
        return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)

    def allocatable(self, resource: str = RESOURCE) -> int:
        return int(self.cluster.get(_NODE)["status"]["allocatable"].get(resource, -1))

    def wait_allocatable(self, number: int, resource: str = RESOURCE) -> None:
        eventually(lambda: self.allocatable(resource) == number, f"{number} of {resource}")

    def devices(self) -> list[Object]:
        """The devices of all slices."""
        slices = self.cluster.get(f"{_DRA}/resourceslices")["items"]
        return [device for one in slices for device in one["spec"].get("devices") or ()]

    def published(self) -> int:
        """How many devices without a taint are published."""
        return sum("taints" not in device for device in self.devices())

    def wait_published(self, number: int) -> None:
        eventually(lambda: self.published() == number, f"{number} devices in slices")

    def label(self, **labels: str | None) -> None:
        self.cluster.patch(_NODE, {"metadata": {"labels": labels}})

    def cut_power(self) -> None:
        """End everything on the node at once."""
        self.kubelet.kill()
        self._plugin.end()
        self.daemon.kill()
        self.containerd.cut_power()
        for pid in control_daemons(self._root):
            os.kill(pid, signal.SIGKILL)
        for path in (self._root / "run").iterdir():  # which is in memory
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def boot(self) -> None:
        """Start everything again, the kubelet last, so that the plugin waits for it."""
        self.daemon.start().wait_ready()
        self._plugin.start()
        self.containerd.start()
        self.kubelet.start()

    # -- its pods

    def create(self, made: Object) -> None:
        self.cluster.create(_PODS, made)

    def create_example(self, file: str) -> Object:
        """Create what a file of the examples has besides its pod; returns that pod."""
        *others, made = yaml.safe_load_all((_EXAMPLES / f"{file}.yaml").read_text())
        for one in others:
            self.cluster.create(_TEMPLATES if one["kind"].endswith("Template") else _CLAIMS, one)
        made["spec"]["terminationGracePeriodSeconds"] = 1
        return dict(made)

    def claims(self) -> int:
        return len(self.cluster.get(_CLAIMS)["items"])

    def pod(self, name: str) -> Object:
        return self.cluster.get(f"{_PODS}/{name}")

    def run(self, made: Object) -> Container:
        """Create a pod; returns its first container once it runs."""
        self.create(made)
        return self.wait_running(made["metadata"]["name"])

    def wait_running(self, name: str) -> Container:
        return self.wait_all_running(name)[0]

    def wait_restarted(self, name: str, before: Container) -> Container:
        """The container that has replaced another one."""
        (found,) = self.wait_all_running(name, without=before.id)
        return found

    def wait_all_running(self, name: str, without: str = "-") -> list[Container]:
        """The containers of a pod, which all run; `without` is the id of one that is not to be there."""

        def ids() -> list[str]:
            found = self.pod(name)["status"].get("containerStatuses", [])
            running = [one["containerID"] for one in found if "running" in one["state"]]
            return running if len(running) == len(found) and without not in "".join(running) else []

        found = eventually(ids, f"pod {name}", trouble=lambda: self.why(name))
        return [self.containerd.container(one.rpartition("/")[2]) for one in found]

    def wait_pending(self, name: str, reason: str) -> None:
        """Wait until the status or the events of a pod give this reason."""
        eventually(lambda: reason in self.why(name), reason, trouble=lambda: self.why(name))

    def why(self, name: str) -> str:
        """Why a pod does not run: its status and its events."""
        events = self.cluster.get(
            f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={name}"
        )
        return "\n".join([json.dumps(self.pod(name)["status"]), *(one["message"] for one in events["items"])])

    def phase(self, name: str) -> str:
        return str(self.pod(name)["status"]["phase"])

    def delete(self, name: str, *, wait: bool = True, **query: int) -> None:
        """Delete a pod; as kubectl does, wait until it is gone."""
        self.cluster.delete(f"{_PODS}/{name}", **query)
        if wait:
            self.wait_gone(name)

    def wait_gone(self, name: str) -> None:
        eventually(lambda: name not in self.names(), f"the end of pod {name}", trouble=lambda: self.why(name))

    def move(self, pid: int, container: Container) -> None:
        """Move a process into the cgroups of a container."""
        for cgroup in self.containerd.cgroups_of(container):
            (cgroup / "cgroup.procs").write_text(str(pid))

    def names(self) -> set[str]:
        return {one["metadata"]["name"] for one in self.cluster.get(_PODS)["items"]}

    # -- its end

    def _forget(self) -> None:
        """Delete the node, all pods, claims and slices."""
        self.cluster.delete(_NODE)
        for name in self.names():
            self.cluster.delete(f"{_PODS}/{name}", gracePeriodSeconds=0)
        for collection in (_TEMPLATES, _CLAIMS, f"{_DRA}/resourceslices"):
            self.cluster.delete(collection)
        eventually(lambda: not self.claims(), "the end of all claims")

    def close(self) -> None:
        self._stack.close()


def named(made: Object, name: str) -> Object:
    """The same pod with another name."""
    return {**made, "metadata": {"name": name}}


def pod(name: str, devices: int = 1, *, resource: str = RESOURCE, **spec: Any) -> Object:
    """A pod of one container with so many devices; `spec` are other members."""
    container = {"name": "main", "image": IMAGE, "resources": {"limits": {resource: devices}}}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1, **spec},
    }
