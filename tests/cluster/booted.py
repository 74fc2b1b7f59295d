"""A node that is a booted machine: its systemd starts containerd, the kubelet, the daemon and the plugin.

with BootedNode(cluster, packages, image) as node:
    node.boot()
    node.run(pod("trainer"))
    node.machine.reboot()
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from cluster.control_plane import FEATURES, KUBELET, NODE, ControlPlane, Object
from cluster.kubelet import HIDE_SETTINGS, kubelet_config
from cluster.objects import EXAMPLE_IMAGE, NodeObjects
from containers.containerd import programs, write_network
from containers.image import IMAGE, make_image
from packages.docker import CALLS
from packages.family import Deb
from packages.images import image
from packages.machine import UNIT, Machine
from packages.operator import Operator
from packages.versions import Packages
from simhost.host import Closes

#: The first Debian whose containerd reads CDI.
_RELEASE = "trixie"
_CGROUPS = Path("/sys/fs/cgroup")
PLUGIN = "yunion-mps-kubelet-plugin.service"
_CTR = "ctr", "--namespace=k8s.io"
_CONTAINERD = f"""\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  enable_cdi = true
  sandbox_image = "{IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni"
    conf_dir = "/opt/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
"""
#: As in the packages of Kubernetes, with other options.
_KUBELET = f"""\
[Unit]
Wants=network-online.target
After=network-online.target
[Service]
ExecStart=/usr/bin/kubelet --config=/etc/kubernetes/kubelet.yaml --kubeconfig=/etc/kubernetes/kubelet.conf \
    --hostname-override={NODE} {FEATURES}
Restart=always
StartLimitInterval=0
RestartSec=10
[Install]
WantedBy=multi-user.target
"""
#: What a node has and a machine in systemd-nspawn has not: cgroups (of version 1) that can be written.
_PREPARE = f"""\
#!/bin/sh
set -e
for kind in {_CGROUPS}/*/tasks; do
    mount -o remount,bind,rw "${{kind%/*}}"
done
settings=/run/settings
{HIDE_SETTINGS}
"""
_PREPARE_UNIT = """\
[Unit]
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=oneshot
ExecStart=/usr/local/sbin/prepare-node
[Install]
WantedBy=sysinit.target
"""
#: A container whose first process ignores SIGTERM would delay each reboot by the default of 90 s.
_IMPATIENT = "[Manager]\nDefaultTimeoutStopSec=5s\n"


class NodeMachine(Machine):
    """A machine in which containerd and the kubelet can run, on the network of this one."""

    is_unified = (_CGROUPS / "cgroup.procs").exists()

    def __init__(self, kubelet: Path) -> None:
        self._kubelet = kubelet
        super().__init__(image(_RELEASE), NODE, [{"kind": "v100", "pci": "0000:00:06.0"}], CALLS)

    def _hierarchies(self) -> list[Path]:
        """Those that have controllers, too."""
        if self.is_unified:
            return super()._hierarchies()
        return [path for path in _CGROUPS.iterdir() if (path / "cgroup.procs").exists()]

    def _command(self) -> list[str]:
        return [
            *(word for word in super()._command() if word != "--private-network"),
            "--capability=CAP_SYSLOG",  # the kubelet reads the kernel's log
            "--bind=/dev/kmsg",
            f"--bind-ro={self._kubelet}:/usr/bin/kubelet",
            # Words for systemd, which takes version 1 of cgroups only if it has to.
            *([] if self.is_unified else ["systemd.unified_cgroup_hierarchy=0"]),
            *([] if self.is_unified else ["SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1"]),
        ]


class BootedNode(NodeObjects, Closes):
    """A node and its pods; nothing of them is left at the end. A context manager."""

    def __init__(self, cluster: ControlPlane, packages: Packages, folder: Path) -> None:
        """Boot it with everything installed and running; `folder` is for the image of its pods."""
        super().__init__(cluster)
        self._stack = contextlib.ExitStack()
        try:
            self._stack.callback(self.forget)
            self.machine = self._stack.enter_context(NodeMachine(cluster.assets / "kubelet"))
            self.operator = Operator(self.machine)
            self._write_files()
            archive = make_image(folder, self.machine.driver.host)
            self.machine.boot()
            self._install(packages, archive)
        except BaseException:
            self.close()
            raise

    def _write_files(self) -> None:
        root, write = self.machine.root, self.machine.write
        for name in ("containerd-shim-runc-v2", "ctr"):  # which the image leaves out
            shutil.copy(programs() / name, root / "usr/bin")
        write("/etc/containerd/config.toml", _CONTAINERD)
        (root / "opt/cni").mkdir()
        write_network(root / "opt/cni")
        write("/etc/systemd/system.conf.d/impatient.conf", _IMPATIENT)
        write("/etc/systemd/system/kubelet.service", _KUBELET)
        write("/etc/systemd/system/prepare-node.service", _PREPARE_UNIT)
        write("/usr/local/sbin/prepare-node", _PREPARE)
        (root / "usr/local/sbin/prepare-node").chmod(0o755)
        write("/etc/kubernetes/kubelet.yaml", kubelet_config("/run/containerd/containerd.sock"))
        self.cluster.write_kubeconfig(root / "etc/kubernetes/kubelet.conf", KUBELET)

    def _install(self, packages: Packages, archive: Path) -> None:
        run = self.machine.run
        run("systemctl", "enable", "--now", "prepare-node")
        Deb(self.machine).install(packages, plugin=True)
        self.operator.configure()
        self.configure_plugin()
        run("systemctl", "enable", "--now", "containerd")
        image = self.machine.install_file(archive)
        run(*_CTR, "image", "import", "--local", "--snapshotter=native", image)
        run(*_CTR, "image", "tag", IMAGE, EXAMPLE_IMAGE)
        run("systemctl", "enable", "--now", UNIT, PLUGIN, "kubelet")
        self.wait_ready(trouble=lambda: self.machine.journal("kubelet"))

    def configure_plugin(self, **options: object) -> None:
        """Write the plugin's file with these keys; they apply when it starts."""
        keys = {"kubeconfig": "/etc/kubernetes/kubelet.conf", "nodeName": NODE, **options}
        self.machine.write("/etc/yunion/kubelet-plugin.yml", json.dumps(keys))

    def run(self, made: Object) -> str:
        """Create a pod; returns the id of its container once it runs."""
        self.create(made)
        (container,) = self.wait_containers(made["metadata"]["name"])
        return container

    def wait_restarted(self, name: str, before: str) -> str:
        """The id of the container that has replaced another one."""
        (container,) = self.wait_containers(name, without=before)
        return container

    @property
    def boot_id(self) -> str:
        return self.machine.run("cat", "/proc/sys/kernel/random/boot_id").stdout

    def leases(self) -> dict[str, list[str]]:
        """The devices of each lease, by its id."""
        return {lease["id"]: lease["devices"] for lease in self.operator.ask("leases")["leases"]}

    def lease_of(self, container: str) -> str:
        """The id of the lease that a running container finds in its environment."""
        tasks = self.machine.run(*_CTR, "task", "list").stdout.splitlines()
        (pid,) = (line.split()[1] for line in tasks if container in line)
        variables = self.machine.run("cat", f"/proc/{pid}/environ").stdout.split("\0")
        return dict(variable.partition("=")[::2] for variable in variables)["YUNION_MPS_LEASE"]

    def close(self) -> None:
        self._stack.close()
