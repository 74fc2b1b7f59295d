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
import sqlite3
import subprocess
from pathlib import Path

from cluster.control_plane import FEATURES, KUBELET, NODE, ControlPlane, Object, Program
from cluster.kubelet import HIDE_SETTINGS, kubelet_config
from cluster.objects import EXAMPLE_IMAGE, NodeObjects
from containers.containerd import Container, Containerd
from integration.daemon_host import Daemon, control_daemons
from kubernetes.kubelet import KubeletPlugin
from simhost.host import Closes

_SERVICE_ACCOUNT = "/api/v1/namespaces/yunion-mps/serviceaccounts/kubelet-plugin"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = f"""\
set -e
for place in /var/lib /var/log; do mount -t tmpfs tmpfs $place; done
mkdir /var/lib/kubelet
mount --bind "$1" /var/lib/kubelet
settings=/var/lib/sys
{HIDE_SETTINGS}
"""


class Node(NodeObjects, Closes):
    """A node and its pods; nothing of them is left at the end. A context manager."""

    def __init__(self, cluster: ControlPlane, daemon: Daemon, image: Path) -> None:
        super().__init__(cluster)
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
        self._stack.callback(self.forget)
        self.containerd = self._stack.enter_context(Containerd(self.daemon.host, image))
        self.containerd.tag(EXAMPLE_IMAGE)
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
        self.wait_ready(trouble=lambda: self.kubelet.log)

    def _write_config(self) -> Path:
        path = self._root / "etc/kubelet.yaml"
        config = kubelet_config(
            str(self.containerd.socket),
            cgroupRoot=f"/{self.containerd.cgroup}",
            volumePluginDir=f"{self._root}/var/lib/volume-plugins",
        )
        path.write_text(config)
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
        self.daemon.host.reboot()
        boot_id = _BOOT_ID.read_text().strip()
        with contextlib.closing(sqlite3.connect(self._root / "var/lib/yunion-mps/state.db")) as store, store:
            store.execute("UPDATE lease SET value = replace(value, ?, 'an earlier one')", [boot_id])

    def boot(self) -> None:
        """Start everything again, the kubelet last, so that the plugin waits for it."""
        self.daemon.start().wait_ready()
        self._plugin.start()
        self.containerd.start()
        self.kubelet.start()

    # -- its pods

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
        return [self.containerd.container(one) for one in self.wait_containers(name, without)]

    def move(self, pid: int, container: Container) -> None:
        """Move a process into the cgroups of a container."""
        for cgroup in self.containerd.cgroups_of(container):
            (cgroup / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        self._stack.close()
