"""Which container a process is in, by the cgroup and by what engines leave on the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from yunion_mps.containers.lookup import Container, Containers, container_in
from yunion_mps.core.paths import Paths
from yunion_mps.host.control_groups import ControlGroup, parse_control_groups

from unit.as_user import needs_root

ID = "405a526b07491a09cc2239b9d6eafd71b261f8026051f98ff2dc016aac3a4d7f"
OTHER = "f" * 64
POD = "8c1f0e7a-8a52-4f0e-8b5e-3f9d2a6c1b44"


@pytest.mark.parametrize(
    ("cgroups", "engine", "pod"),
    [
        (f"0::/machine.slice/libpod-{ID}.scope/container", "libpod", ""),
        (f"9:name=systemd:/libpod_parent/libpod-{ID}\n8:pids:/libpod_parent/libpod-{ID}", "libpod", ""),
        (f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", "libpod", ""),
        (f"0::/system.slice/docker-{ID}.scope", "docker", ""),
        (f"4:memory:/docker/{ID}\n0::/", "", ""),
        (f"0::/system.slice/docker-{OTHER}.scope/docker/{ID}", "", ""),
        (f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope",
         "cri-containerd", POD),
        (f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{ID}.scope/container",
         "crio", POD),
        (f"3:cpu:/kubepods/besteffort/pod{POD}/{ID}", "", POD),
        (f"3:cpu:/system.slice/containerd.service/kubepods-pod{POD}.slice:cri-containerd:{ID}",
         "cri-containerd", POD),
    ],
)  # fmt: skip
def test_a_container_is_known_by_its_cgroup(cgroups: str, engine: str, pod: str) -> None:
    found = container_in(parse_control_groups(cgroups))
    assert found is not None
    assert (found.id, found.engine, found.pod) == (ID, engine, pod)


@pytest.mark.parametrize(
    "cgroups",
    ["", "0::/", "0::/user.slice/user-0.slice/session-1.scope", f"0::/machine.slice/libpod-conmon-{ID}.scope",
     f"0::/system.slice/{ID[:40]}.scope", "8:pids:/libpod_parent/conmon", f"0::/a{ID}"],
)  # fmt: skip
def test_a_process_outside_containers_is_recognised(cgroups: str) -> None:
    assert container_in(parse_control_groups(cgroups)) is None


def process(root: Path, cgroup: str, *ancestors: list[str]) -> int:
    """A process of a made-up /proc, with the command lines of its parents."""
    for number, words in enumerate([["job"], *ancestors]):
        folder = root / f"proc/{100 - number}"
        folder.mkdir(parents=True)
        (folder / "cgroup").write_text(f"{cgroup}\n")
        (folder / "stat").write_text(f"{100 - number} (a b) c) S {99 - number if ancestors else 1} 1 1")
        (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in words) + b"\0")
    return 100


def containers_of(root: Path) -> Containers:
    return Containers(Paths(str(root)), proc=str(root / "proc"))


def name_of(root: Path, pid: int) -> str:
    found = containers_of(root).of(pid)
    assert found is not None
    assert found.id == ID
    return found.name


_STORED = "var/lib/containers/storage/overlay-containers/containers.json"


def write(root: Path, path: str, value: object) -> None:
    """A text as it is, and anything else as JSON."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(value if isinstance(value, str) else json.dumps(value))


def test_a_name_without_end_is_cut(tmp_path: Path) -> None:
    """Any user may call a process of his conmon, and `who` of root shows what it says."""
    monitor = ["/tmp/conmon", "-c", ID, "-n", "x" * 100_000]
    assert name_of(tmp_path, process(tmp_path, f"0::/libpod-{ID}.scope", ["sh"], monitor)) == "x" * 100


def test_a_pod_is_named_by_its_uid(tmp_path: Path) -> None:
    assert name_of(tmp_path, process(tmp_path, f"0::/kubepods/pod{POD}/{ID}")) == f"pod {POD}/{ID[:12]}"


_TASK = f"containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json"
_CONTAINERD = {
    "io.kubernetes.cri.sandbox-namespace": "ml",
    "io.kubernetes.cri.sandbox-name": "trainer-0",
    "io.kubernetes.cri.container-name": "main",
}
_CRIO = {
    "io.kubernetes.pod.namespace": "ml",
    "io.kubernetes.pod.name": "trainer-0",
    "io.kubernetes.container.name": "main",
}


@pytest.mark.parametrize(
    ("path", "annotations"),
    [
        (f"run/{_TASK}", _CONTAINERD),
        (f"run/k3s/{_TASK}", _CONTAINERD),
        (f"run/containers/storage/overlay-containers/{ID}/userdata/config.json", _CRIO),
    ],
)
def test_a_pod_is_named_as_its_runtime_knows_it(
    tmp_path: Path, path: str, annotations: dict[str, str]
) -> None:
    pid = process(tmp_path, f"0::/kubepods/pod{POD}/{ID}")
    containers = containers_of(tmp_path)
    assert containers.of(pid) == Container(ID, f"pod {POD}/{ID[:12]}"), "the file may come later"
    write(tmp_path, path, {"annotations": {**annotations, "other": 7}})
    assert containers.of(pid) == Container(ID, "pod ml/trainer-0/main")
    (tmp_path / path).unlink()
    assert containers.of(pid) == Container(ID, "pod ml/trainer-0/main")


@pytest.mark.parametrize(
    "config",
    [
        "{",
        [],
        {"annotations": 7},
        {"annotations": {**_CONTAINERD, "io.kubernetes.cri.sandbox-name": 7}},
        {"annotations": dict(list(_CONTAINERD.items())[:2])},
    ],
)
def test_a_pod_whose_runtime_does_not_tell_is_named_by_its_uid(tmp_path: Path, config: object) -> None:
    write(tmp_path, f"run/{_TASK}", config)
    assert name_of(tmp_path, process(tmp_path, f"0::/kubepods/pod{POD}/{ID}")) == f"pod {POD}/{ID[:12]}"


@pytest.mark.parametrize(
    "text", ["", "{", "[7]", '{"Name": 7}', json.dumps([{"id": ID}]), "[[[[[", "[" * 100_000]
)
def test_a_container_whose_name_cannot_be_read_goes_by_its_id(tmp_path: Path, text: str) -> None:
    for path in (_STORED, f"var/lib/docker/containers/{ID}/config.v2.json"):
        write(tmp_path, path, text)
    assert name_of(tmp_path, process(tmp_path, f"0::/libpod-{ID}.scope")) in (ID[:12], "7")


def test_a_name_outlives_the_file_that_had_it(tmp_path: Path) -> None:
    write(tmp_path, _STORED, [{"id": ID, "names": ["trainer"]}])
    pid = process(tmp_path, f"0::/libpod-{ID}.scope")
    containers = containers_of(tmp_path)
    assert containers.of(pid) == Container(ID, "trainer")
    (tmp_path / _STORED).unlink()
    assert containers.of(pid) == Container(ID, "trainer")


def test_a_renamed_podman_container_has_its_new_name_not_its_monitors(tmp_path: Path) -> None:
    pid = process(tmp_path, f"0::/libpod-{ID}.scope", ["conmon", "-c", ID, "-n", "trainer"])
    containers = containers_of(tmp_path)
    assert containers.of(pid) == Container(ID, "trainer")
    for name in ("another", "trainer", "third"):
        write(tmp_path, _STORED, [{"id": OTHER, "names": ["x"]}, {"id": ID, "names": [name]}])
        assert containers.of(pid) == Container(ID, name)


def test_a_renamed_container_of_docker_goes_by_its_new_name(tmp_path: Path) -> None:
    pid = process(tmp_path, f"0::/system.slice/docker-{ID}.scope")
    containers = containers_of(tmp_path)
    assert containers.of(pid) == Container(ID, ID[:12])
    for name in ("trainer", "another", "trainer"):
        write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"ID": ID, "Name": f"/{name}"})
        assert containers.of(pid) == Container(ID, name)


def test_a_file_of_names_is_read_only_when_it_is_another(tmp_path: Path) -> None:
    write(tmp_path, _STORED, [{"id": ID, "names": ["trainer"]}])
    pid = process(tmp_path, f"0::/libpod-{ID}.scope")
    containers = containers_of(tmp_path)
    assert containers.of(pid) == Container(ID, "trainer")
    about = (tmp_path / _STORED).stat()
    write(tmp_path, _STORED, [{"id": ID, "names": ["another"]}])
    os.utime(tmp_path / _STORED, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert containers.of(pid) == Container(ID, "trainer"), "nothing tells that it is"


@pytest.mark.parametrize("group", [f"docker-{ID}.scope", f"libpod-{ID}.scope", f"kubepods-pod{POD}/{ID}"])
def test_a_group_that_a_user_made_has_no_name_of_root_s_files(tmp_path: Path, group: str) -> None:
    """Any user may call a group of theirs like a container of root's, whose name they must not see."""
    write(tmp_path, _STORED, [{"id": ID, "names": ["secret"]}])
    write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"ID": ID, "Name": "/secret"})
    write(tmp_path, f"run/{_TASK}", {"annotations": _CONTAINERD})
    pid = process(tmp_path, f"0::/user.slice/user-2000.slice/user@2000.service/{group}")
    containers = containers_of(tmp_path)
    assert containers.of(pid) == Container(ID, ID[:12])
    (tmp_path / f"proc/{pid}/cgroup").write_text(f"0::/system.slice/docker-{ID}.scope\n")
    assert containers.of(pid) == Container(ID, "secret"), "that one is root's"


@needs_root
def test_a_group_that_root_made_comes_before_one_that_a_user_made(tmp_path: Path) -> None:
    """With version 1, a process is in a group of each hierarchy, and a user may own only some."""
    mounts = tmp_path / "cgroup"
    for path, owner in ((f"unified/docker-{OTHER}.scope", 2000), (f"memory/docker/{ID}", 0)):
        (mounts / path).mkdir(parents=True)
        os.chown(mounts / path, owner, owner)
    pid = process(tmp_path, f"0::/docker-{OTHER}.scope\n4:memory:/docker/{ID}/inner")
    containers = Containers(Paths(str(tmp_path)), proc=str(tmp_path / "proc"), mounts=str(mounts))
    found = containers.group_of(pid)
    assert found is not None
    assert (found.id, found.is_made_by_root) == (ID, True)
    assert found.group == ControlGroup("memory", f"/docker/{ID}")


def test_a_process_of_the_host_and_one_that_is_gone_are_in_no_container(tmp_path: Path) -> None:
    containers = containers_of(tmp_path)
    assert containers.of(process(tmp_path, "0::/user.slice")) is None
    assert containers.of(os.getpid()) is None
