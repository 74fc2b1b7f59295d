"""The real containerd on a simulated host, called as the kubelet calls it, by the plugin's own gRPC client.

with Containerd(host, image) as containerd:
    container = containerd.run(kubelet.run_pod("trainer", 1))      # the pod's sandbox, and its container

It runs in a mount namespace of its own with an empty /run, where shims have their sockets, and finds the
simulated host's /run/cdi. Pods use the network of the machine. What it starts is in one cgroup.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
from yunion_mps.kubernetes.kubelet import grpc
from yunion_mps.kubernetes.kubelet.grpc import AnswerT, RequestT, Rpc
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import DeviceSpec

from containers import cri_api, cri_pb2
from containers.image import IMAGE
from control_groups import ControlGroup, unique_name
from integration.daemon_host import PATIENCE_S, eventually, is_running
from kubernetes.kubelet import Pod
from simhost import SimHost
from simhost.environment import CHECKOUT
from simhost.host import Closes

#: The first version that reads CDI files.
_OLDEST = (1, 7)
_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
_UNPACKED = CHECKOUT / ".containerd/usr/bin"
_CONFIG = """\
version = 2
root = "{folder}/root"
state = "{state}"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  enable_cdi = true
  cdi_spec_dirs = ["{cdi}"]
  sandbox_image = "{image}"
  # Where root may not lower the score, as in most containers.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{folder}"
    conf_dir = "{folder}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
"""
#: A CNI plugin that connects nothing: pods that do not use the machine's network have none.
_NETWORK = '{"cniVersion": "0.3.1", "name": "test", "type": "nothing"}'
_NETWORK_PLUGIN = """\
#!/bin/sh
echo '{"cniVersion": "0.3.1", "interfaces": [{"name": "eth0", "sandbox": "/"}],
       "ips": [{"version": "4", "address": "192.0.2.1/24", "interface": 0}]}'
"""
_NAMESPACE = "mount -t tmpfs tmpfs /run && echo ready && exec cat"
_ON_THE_NODE = cri_pb2.NamespaceOption(network=cri_pb2.NODE, pid=cri_pb2.CONTAINER)


def write_network(folder: Path) -> None:
    """Write the CNI plugins and their configuration."""
    (folder / "test.conf").write_text(_NETWORK)
    for name in ("nothing", "loopback"):
        (folder / name).write_text(_NETWORK_PLUGIN)
        (folder / name).chmod(0o755)


def programs() -> Path:
    """Where containerd is: unpacked by scripts/setup if the machine has none; skips if it is too old."""
    machine = shutil.which(_PROGRAMS[0])
    folder = Path(machine).parent if machine and not _UNPACKED.exists() else _UNPACKED
    if not all((folder / name).exists() for name in _PROGRAMS):
        pytest.fail("containerd is not installed: run scripts/setup containers")
    done = subprocess.run([folder / _PROGRAMS[0], "--version"], capture_output=True, text=True)
    version = re.search(r" v?(\d+)\.(\d+)\.", done.stdout)
    if version is None or tuple(map(int, version.groups())) < _OLDEST:
        pytest.skip(f"needs containerd 1.7 or later: {done.stdout or done.stderr}")
    return folder


class Container(NamedTuple):
    """A container that was started; `pid` is that of its first process."""

    id: str
    pid: int

    @property
    def environment(self) -> dict[str, str]:
        variables = Path(f"/proc/{self.pid}/environ").read_text().split("\0")
        return dict(variable.partition("=")[::2] for variable in variables if variable)

    @property
    def root(self) -> Path:
        """Its file system, as it sees it."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def is_running(self) -> bool:
        return is_running(self.pid)


class Containerd(Closes):
    """One containerd on a host; it can be killed and started again. A context manager."""

    def __init__(self, host: SimHost, image: Path) -> None:
        self._programs = programs()
        self._root = host.root
        self._folder = host.root / "var/lib/containerd"
        self._folder.mkdir()
        cdi = host.root / "run/cdi"
        cdi.mkdir(exist_ok=True)
        config = _CONFIG.format(folder=self._folder, state=host.root / "run/containerd", cdi=cdi, image=IMAGE)
        (self._folder / "config.toml").write_text(config)
        write_network(self._folder)
        self.socket = self._folder / "containerd.sock"
        self._group = ControlGroup(unique_name())
        #: Each pod's sandbox, and how often its container was started.
        self._sandboxes: dict[str, tuple[str, cri_pb2.PodSandboxConfig]] = {}
        self._attempts: dict[str, int] = {}
        command = ["unshare", "--mount", "sh", "-c", _NAMESPACE]
        self._namespace = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._namespace.stdout is not None
        assert self._namespace.stdout.readline() == "ready\n"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
            self._import(image)
        except BaseException:
            self.close()
            raise

    @property
    def cgroup(self) -> str:
        """The name of the cgroup of all pods."""
        return self._group.name

    # -- its life

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            command = self.command(self._programs / "containerd", "--config", self._folder / "config.toml")
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env
            )
        eventually(self._answers, "containerd", trouble=lambda: self.log)

    def kill(self) -> None:
        """SIGKILL: its containers and their shims go on."""
        if self._process:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def restart(self) -> None:
        self.kill()
        self.start()

    def signal(self, number: int) -> None:
        assert self._process, "it was started"
        self._process.send_signal(number)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def command(self, *words: object) -> list[str]:
        """A command in its mount namespace."""
        return ["nsenter", f"--target={self._namespace.pid}", "--mount", *map(str, words)]

    def _answers(self) -> bool:
        with contextlib.suppress(grpc.RpcError):
            self.call(cri_api.VERSION, cri_pb2.Empty())
            return True
        assert self._process, "it was started"
        assert self._process.poll() is None, self.log
        return False

    def _import(self, image: Path) -> None:
        self._ctr("import", "--local", "--snapshotter", "native", image)

    def tag(self, name: str) -> None:
        """Give the image another name."""
        self._ctr("tag", IMAGE, name)

    def _ctr(self, *words: object) -> None:
        program = self._programs / "ctr", "--address", self.socket, "--namespace", "k8s.io"
        command = self.command(*program, "image", *words)
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr

    # -- what the kubelet does with it

    def call(self, rpc: Rpc[RequestT, AnswerT], request: RequestT) -> AnswerT:
        """Call a method; raises grpc.RpcError."""
        return asyncio.run(grpc.call_rpc(str(self.socket), rpc, request, PATIENCE_S))

    def run(self, pod: Pod) -> Container:
        """Start the container of a pod, in a new sandbox unless it has one; raises grpc.RpcError."""
        return self.start_container(self.create_container(pod))

    def run_sandbox(self, pod: Pod) -> None:
        uid = str(uuid.uuid4())
        config = cri_pb2.PodSandboxConfig(
            metadata=cri_pb2.PodSandboxMetadata(name=pod.name, uid=uid, namespace="default"),
            linux=cri_pb2.LinuxPodSandboxConfig(
                cgroup_parent=f"/{self.cgroup}/pod{uid}",
                security_context=cri_pb2.LinuxSandboxSecurityContext(namespace_options=_ON_THE_NODE),
            ),
        )
        answer = self.call(cri_api.RUN_POD_SANDBOX, cri_pb2.RunPodSandboxRequest(config=config))
        self._sandboxes[pod.name] = answer.pod_sandbox_id, config

    def create_container(self, pod: Pod) -> str:
        """The id of a container that is not started yet; its pod's sandbox is started if there is none."""
        if pod.name not in self._sandboxes:
            self.run_sandbox(pod)
        sandbox, sandbox_config = self._sandboxes[pod.name]
        attempt = self._attempts[pod.name] = self._attempts.get(pod.name, -1) + 1
        security = cri_pb2.LinuxContainerSecurityContext(namespace_options=_ON_THE_NODE)
        config = cri_pb2.ContainerConfig(
            metadata=cri_pb2.ContainerMetadata(name="main", attempt=attempt),
            image=cri_pb2.ImageSpec(image=IMAGE),
            envs=[cri_pb2.KeyValue(key=name, value=value) for name, value in pod.answer.envs.items()],
            devices=[self._below_root(device) for device in pod.answer.devices],
            linux=cri_pb2.LinuxContainerConfig(security_context=security),
            CDI_devices=[cri_pb2.CDIDevice(name=device.name) for device in pod.answer.cdi_devices],
        )
        for mount in pod.answer.mounts:
            config.mounts.add(container_path=mount.container_path, host_path=mount.host_path)
        request = cri_pb2.CreateContainerRequest(
            pod_sandbox_id=sandbox, config=config, sandbox_config=sandbox_config
        )
        return self.call(cri_api.CREATE_CONTAINER, request).container_id

    def _below_root(self, device: DeviceSpec) -> cri_pb2.Device:
        return cri_pb2.Device(
            container_path=device.container_path,
            host_path=f"{self._root}{device.host_path}",
            permissions=device.permissions,
        )

    def start_container(self, container: str) -> Container:
        self.call(cri_api.START_CONTAINER, cri_pb2.ContainerId(container_id=container))
        return self.container(container)

    def container(self, container: str) -> Container:
        """The container of this id, which has been started."""
        request = cri_pb2.ContainerStatusRequest(container_id=container, verbose=True)
        info = self.call(cri_api.CONTAINER_STATUS, request).info
        pid = json.loads(info["info"])["pid"]
        command = Path(f"/proc/{pid}/cmdline")
        eventually(lambda: command.read_bytes().startswith(b"sleep"), "the container's program, after runc's")
        return Container(container, pid)

    def inside(self, container: Container, *command: str) -> str:
        """What a command in the container prints."""
        request = cri_pb2.ExecSyncRequest(container_id=container.id, cmd=command, timeout=int(PATIENCE_S))
        done = self.call(cri_api.EXEC_SYNC, request)
        assert done.exit_code == 0, done.stderr
        return done.stdout.decode()

    def stop_container(self, container: Container) -> None:
        self.call(cri_api.STOP_CONTAINER, cri_pb2.ContainerId(container_id=container.id))

    def remove_pod(self, pod: Pod) -> None:
        """End its containers, and remove them with its sandbox."""
        sandbox = cri_pb2.PodSandboxId(pod_sandbox_id=self._sandboxes.pop(pod.name)[0])
        self.call(cri_api.STOP_POD_SANDBOX, sandbox)
        self.call(cri_api.REMOVE_POD_SANDBOX, sandbox)

    def state(self, container: Container) -> int:
        """A ContainerState."""
        request = cri_pb2.ContainerStatusRequest(container_id=container.id)
        return self.call(cri_api.CONTAINER_STATUS, request).status.state

    # -- its end

    def close(self) -> None:
        """End it and everything that it has started."""
        self.cut_power()
        self._namespace.communicate()
        self._group.close()

    def cut_power(self) -> None:
        """End it, its containers and their shims at once; pods need new sandboxes then."""
        self.kill()
        own = os.readlink(f"/proc/{self._namespace.pid}/ns/mnt")
        for pid in {*self._group.pids(), *_pids_with_mounts(own)} - {self._namespace.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not self._group.pids(), "the end of all containers")
        self._sandboxes.clear()

    def make_cgroup(self) -> None:
        """Create the cgroup of all pods before the kubelet looks for it."""
        self._group.make()

    def cgroups_of(self, container: Container) -> list[Path]:
        found = []
        for folder in self._group.folders:
            for path, _, _ in os.walk(folder):
                if container.id in path:
                    found.append(Path(path))
        return found

    @property
    def _env(self) -> dict[str, str]:
        return {"PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}"}


def _pids_with_mounts(namespace: str) -> set[int]:
    """The processes in this mount namespace."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{entry}/ns/mnt") == namespace:
                found.add(int(entry))
    return found
