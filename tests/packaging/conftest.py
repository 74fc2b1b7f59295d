"""The packages, built once; what is in them; and their scripts' functions, called by themselves."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest

from packages.versions import DEB_ARCHITECTURE, build

ROOT = Path(__file__).resolve().parents[2]
SCRIPTLETS = ROOT / "packaging/scriptlets"


class File(NamedTuple):
    """A file as a package installs it."""

    mode: str
    owner: str
    sha256: str


DAEMON, KUBELET_PLUGIN = "yunion-mps-daemon", "yunion-mps-kubelet-plugin"
#: The processors that packages are built for: as debs name them, and as rpms do.
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}


class Built:
    """What scripts/package wrote into a directory, with one of the packages for one kind of processor."""

    def __init__(self, directory: Path, package: str = DAEMON, architecture: str = DEB_ARCHITECTURE) -> None:
        self.directory = directory
        self.package = package
        self.architecture = architecture
        self.deb = self._one(f"{package}_*_{architecture}.deb")
        self.rpm = self._one(f"{package}-*.{ARCHITECTURES[architecture]}.rpm")
        self.sbom = self._one(f"{package}-*.cdx.json")
        self.wheel = self._one("*.whl")
        self.sdist = self._one("*.tar.gz")

    def _one(self, pattern: str) -> Path:
        (path,) = self.directory.glob(pattern)
        return path

    def deb_files(self) -> dict[str, File]:
        done = subprocess.run(["dpkg-deb", "--fsys-tarfile", self.deb], check=True, stdout=subprocess.PIPE)
        found = {}
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for member in archive:
                data = archive.extractfile(member)
                if data is not None:
                    mode = stat.filemode(stat.S_IFREG | member.mode)
                    owner = (
                        "root/root" if (member.uid, member.gid) == (0, 0) else f"{member.uid}/{member.gid}"
                    )
                    digest = hashlib.sha256(data.read()).hexdigest()
                    found[member.name[1:]] = File(mode, owner, digest)
        return found

    def rpm_files(self) -> dict[str, File]:
        each = "%{FILENAMES} %{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME} %{FILEDIGESTS}\n"
        rows = [line.split(" ") for line in self.asked_rpm(f"[{each}]").splitlines()]
        return {name: File(*rest) for name, *rest in rows if rest[0].startswith("-")}

    def asked_rpm(self, form: str) -> str:
        return run("rpm", "-qp", "--qf", form, self.rpm)


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The packages of this checkout: one process of pytest's builds them, and another one waits for them."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with open(shared / "dist.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "dist").exists():
            build(ROOT, shared / "dist")
    return Built(shared / "dist")


@pytest.fixture(
    scope="session",
    params=[
        (package, architecture) for package in (DAEMON, KUBELET_PLUGIN) for architecture in ARCHITECTURES
    ],
    ids="-".join,
)
def each(request: pytest.FixtureRequest, built: Built) -> Built:
    """Both packages, for each kind of processor."""
    return Built(built.directory, *request.param)


@pytest.fixture(scope="session")
def plugin(built: Built) -> Built:
    """The package of the kubelet plugin."""
    return Built(built.directory, KUBELET_PLUGIN)


@pytest.fixture(scope="session")
def unpacked(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of both debs, in a root of their own."""
    root = tmp_path_factory.mktemp("root")
    for package in (DAEMON, KUBELET_PLUGIN):
        run("dpkg-deb", "-x", Built(built.directory, package).deb, root)
    return root


class Host:
    """A host's directories, and programs that do nothing, for the functions of the packages' scripts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.called = root / "called"
        for name in ("etc", "run", "usr", "bin", "examples", "proc"):
            (root / name).mkdir()
        for name in ("systemctl", "nsenter", "yunion-mps", "yunion-mps-daemon"):
            self.program(name, "")
        self.program("getent", "exit 2")  # there is no group of ours

    def program(self, name: str, body: str) -> None:
        """A program that writes down how it was called, and then does `body`."""
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.called}\n{body}\n')
        path.chmod(0o755)

    def control_daemon(self, pid: int, arguments: str, root: str = "/", **variables: str) -> Path:
        """A process that runs NVIDIA's control program, as the kernel shows it; returns its directory."""
        process = self.root / "proc" / str(pid)
        process.mkdir()
        (process / "exe").symlink_to("/usr/bin/nvidia-cuda-mps-control")
        (process / "root").symlink_to(root)
        (process / "cmdline").write_text(f"nvidia-cuda-mps-control\0{arguments}")
        (process / "environ").write_text("".join(f"{name}={value}\0" for name, value in variables.items()))
        return process

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call a function of the scripts, as they do: under `set -e`."""
        setting = f"""
            set -e
            . {SCRIPTLETS}/names.sh
            configuration={self.root}/etc examples={self.root}/examples state={self.root}/state
            made=$state/made-by-package before={self.root}/run/cloudpods library={self.root}/usr
            recorded=$state/directories running={self.root}/run/yunion-mps processes={self.root}/proc
            devices={self.root}/run/cdi programs={self.bin}
            adopted=$running/adopted.json
            . {SCRIPTLETS}/before.sh
            . {SCRIPTLETS}/keys.sh
            . {SCRIPTLETS}/purge.sh
            boot_directory={self.root}/nvidia-mps
            set -- nothing
            . {SCRIPTLETS}/maintain.sh
        """
        path = f"{self.bin}:{os.environ['PATH']}"
        return subprocess.run(
            ["sh", "-c", f"{setting}\n{' '.join(words)}"],
            env={"PATH": path}, check=False, capture_output=True, text=True,
        )  # fmt: skip

    def good(self, *words: str) -> list[str]:
        done = self.call(*words)
        assert done.returncode == 0, done.stderr
        return done.stderr.splitlines()

    def calls(self) -> list[str]:
        return self.called.read_text().splitlines() if self.called.exists() else []


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)
