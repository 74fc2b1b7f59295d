"""The plugin in a container as the DaemonSet has it: its mounts, namespaces, rights and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import yaml

from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, leased_addresses
from kubernetes.conftest import StartContainer
from kubernetes.grpc_peers import PATIENCE_S
from kubernetes.kubelet import Kubelet, KubeletPlugin
from simhost import SimHost
from simhost.environment import CHECKOUT

pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpus({"kind": "v100"}),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount"),
]

MANIFESTS = CHECKOUT / "etc/kubernetes"
#: What the image has: a Python and the program. $1 is an empty directory, and the rest is the program's.
_CONTAINER = """\
set -e
root=$1 && shift
mount -t tmpfs tmpfs "$root"
{mounts}
for place in {image}; do
    mkdir -p "$root$place" && mount --bind -o ro "$place" "$root$place"
done
for link in /bin /lib /lib64; do
    if [ -L $link ]; then
        cp -P $link "$root$link"
    else
        mkdir "$root$link" && mount --bind $link "$root$link"
    fi
done
mkdir "$root/proc" && mount -t proc proc "$root/proc"
mount -o remount,ro "$root"
exec chroot "$root" setpriv --bounding-set=-all --inh-caps=-all --no-new-privs env -i NODE_NAME=node-1 "$@"
"""


class ContainedPlugin(KubeletPlugin):
    """The program with what the DaemonSet mounts of a simulated host."""

    def __init__(self, host: SimHost, folder: Path) -> None:
        self._folder = folder
        super().__init__(host)

    def start(self) -> None:
        root = self._folder / "root"
        root.mkdir(exist_ok=True)
        image = ("/usr", str(CHECKOUT), sys.prefix)
        script = _CONTAINER.format(image=" ".join(image), mounts="\n".join(self._mounts()))
        namespaces = ["--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts"]
        program = [sys.executable, str(Path(sys.executable).with_name("yunion-mps-kubelet-plugin"))]
        command = ["unshare", *namespaces, "sh", "-c", script, "sh", str(root), *program]
        with self._log.open("a") as log:
            self.process = self._host.popen(command, stdout=log, stderr=log)

    def _mounts(self) -> list[str]:
        pod = yaml.safe_load((MANIFESTS / "daemonset.yaml").read_text())["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        sources = {volume["name"]: self._source(volume) for volume in pod["volumes"]}
        lines = []
        for mount in container["volumeMounts"]:
            options = " -o ro" if mount.get("readOnly") else ""
            source, target = sources[mount["name"]], f'"$root{mount["mountPath"]}"'
            lines.append(f"mkdir -p {target} && mount --bind{options} {source} {target}")
        return lines

    def _source(self, volume: dict[str, dict[str, str]]) -> Path:
        """What is mounted: of the host, an empty directory, or the files of the ConfigMap."""
        if "hostPath" in volume:
            path = Path(f"{self._host.root}{volume['hostPath']['path']}")
            if volume["hostPath"]["type"] == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            return path
        folder = self._folder / str(volume["name"])
        folder.mkdir(exist_ok=True)
        if "configMap" in volume:
            shutil.copy(MANIFESTS / "kubelet-plugin.yml", folder)
        return folder

    def close(self) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)


def test_the_plugin_serves_from_the_container_of_the_daemonset(
    kubelet: Kubelet, ready_daemon: Daemon, start_container: StartContainer, tmp_path: Path
) -> None:
    with ContainedPlugin(ready_daemon.host, tmp_path) as plugin:
        assert kubelet.wait_healthy(4) == ADDRESSES, plugin.log
        pod = kubelet.run_pod("trainer", 1)
        assert start_container(pod).environment["YUNION_MPS_DEVICE"] == pod.devices[0]
        assert leased_addresses(ready_daemon) == list(pod.devices)
        ready_daemon.kill()
        kubelet.wait_healthy(0)
        ready_daemon.start().wait_ready()
        kubelet.wait_healthy(4)
        kubelet.restart()
        kubelet.wait_registered(2)
        assert kubelet.wait_healthy(4) == ADDRESSES


def test_the_container_ends_if_the_kubelet_s_directory_is_removed(
    kubelet: Kubelet, ready_daemon: Daemon, tmp_path: Path
) -> None:
    """The kubelet starts it again, with the new directory."""
    with ContainedPlugin(ready_daemon.host, tmp_path) as plugin:
        kubelet.wait_healthy(4)
        kubelet.stop()
        shutil.rmtree(ready_daemon.host.root / "var/lib/kubelet/device-plugins")
        with Kubelet(ready_daemon.host) as kubelet:
            assert plugin.process.wait(PATIENCE_S) == 1, plugin.log
            plugin.start()
            assert kubelet.wait_healthy(4) == ADDRESSES


def test_a_daemonset_s_plugin_serves_once_the_service_has_ended(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, tmp_path: Path
) -> None:
    kubelet.wait_healthy(4)
    with ContainedPlugin(ready_daemon.host, tmp_path) as contained:
        eventually(lambda: "another yunion-mps-kubelet-plugin serves this node" in contained.log, "a report")
        kubelet.restart()
        kubelet.wait_registered(2)
        assert plugin.end(signal.SIGTERM) == 0
        kubelet.wait_registered(3)
        assert kubelet.wait_healthy(4) == ADDRESSES
        registered = "registered yunion.io/mps with the kubelet"  # it is logged a moment later
        eventually(lambda: contained.log.count(registered) == 3, "the third registration in its log")
