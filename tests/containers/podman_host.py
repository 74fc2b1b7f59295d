"""The real podman on a simulated host: what it finds in /run/cdi is that host's.

Podman knows no other place for CDI than /etc/cdi and /var/run/cdi, and no other control group for containers
than /libpod_parent. So it runs in a mount namespace of its own, with an empty /run and /var/lib, and the
simulated host's /run/cdi, and in a cgroup namespace whose root is a control group of this host alone. So two
hosts share nothing.

It starts containers by runc, or by crun, its default on most hosts. crun refuses hosts that have cgroups v1
beside v2 ("cgroups in hybrid mode not supported"), so with it that namespace has v2 alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from containers.image import IMAGE, make_tree, write_layer
from control_groups import ControlGroup, has_only_version_2, hierarchies, unique_name
from integration.daemon_host import Daemon
from simhost import SimHost
from simhost.host import Closes

_PATIENCE_S = 60

_CONTAINERS_CONF = """\
[containers]
# A container may have the limits that we have, where we may not raise them.
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
# There may be no controllers in version 2 alone.
pids_limit = 0
netns = "none"
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
runtime = "{runtime}"
"""
_STORAGE_CONF = '[storage]\ndriver = "vfs"\ngraphroot = "{store}"\nrunroot = "/run/containers/storage"\n'
#: One user alone is mapped if there are no ranges of ids for it (subuid(5)).
_ROOTLESS_CONF = """\
[storage]
driver = "vfs"
graphroot = "{home}/store"
runroot = "{home}/run/containers"
[storage.options]
ignore_chown_errors = "true"
[storage.options.vfs]
ignore_chown_errors = "true"
"""
_NAMESPACE = """\
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mkdir /run/cdi
mount --bind {cdi} /run/cdi
{cgroups}
echo ready
exec cat
"""
_CGROUPS = "/sys/fs/cgroup"
_UNSHARE = ("unshare", "--mount", "--cgroup")
_ENTER = ("nsenter", "--mount", "--cgroup")
#: crun raises a resource limit to load its rules for devices, which root may not do everywhere.
_NEEDS = {"runc": (), "crun": ("--privileged",)}
_PODMAN = """\
#!/bin/sh
export CONTAINERS_CONF={folder}/{runtime}.conf CONTAINERS_STORAGE_CONF={folder}/storage.conf
unset LD_LIBRARY_PATH
exec {enter} --wd="$PWD" {podman} "$@"
"""


def _mounts(runtime: str) -> str:
    """The commands that mount what is below the root of the cgroup namespace."""
    if runtime == "crun":
        return f"umount --recursive {_CGROUPS}\nmount -t cgroup2 cgroup2 {_CGROUPS}"
    lines = []
    for hierarchy in hierarchies():
        options = f"-o {hierarchy.options}" if hierarchy.options else ""
        lines.append(f"umount {hierarchy.place}")
        lines.append(f"mount -t {hierarchy.kind} {options} cgroup {hierarchy.place}")
    return "\n".join(lines)


class Store:
    """Images for podman, made without a network out of programs of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "storage.conf").write_text(_STORAGE_CONF.format(store=folder / "store"))
        for runtime in _NEEDS:
            (folder / f"{runtime}.conf").write_text(_CONTAINERS_CONF.format(runtime=runtime))
        self.has_image = False

    def make_image(self, podman: Podman) -> None:
        if self.has_image:
            return
        tree = self.folder / "tree"
        make_tree(tree, podman.host)
        write_layer(tree, Path(f"{tree}.tar"))
        done = podman("import", f"{tree}.tar", IMAGE)
        assert done.returncode == 0, done.stderr
        self.has_image = True


class Podman(Closes):
    """Podman on a host; `podman(...)` runs it. A context manager: no container is left at its end."""

    def __init__(self, host: SimHost, store: Store, runtime: str = "runc") -> None:
        for needed in ("podman", runtime):
            if not shutil.which(needed):
                pytest.fail(f"{needed} is not installed: run scripts/setup containers")
        self.host = host
        #: What `podman run` has to be told for the runtime to start a container here.
        self.needs = _NEEDS[runtime]
        #: Where its containers and images are.
        self.storage = store.folder / "store"
        self._store = store
        self._cdi = host.root / "run/cdi"
        self._cdi.mkdir(exist_ok=True)
        self._group = ControlGroup(unique_name())
        self._namespace: subprocess.Popen[str] | None = None
        try:
            self._group.make().enable_controllers()
            self._start(runtime)
            store.make_image(self)
        except BaseException:
            self.close()
            raise

    def _start(self, runtime: str) -> None:
        """Make the namespaces, and the program that runs podman in them."""
        # The host's group becomes the namespace's root. Then the processes move into "engine", because in
        # version 2 a group with processes cannot enable controllers for its subgroups.
        engine = self._group.below("engine")
        script = _NAMESPACE.format(cdi=shlex.quote(str(self._cdi)), cgroups=_mounts(runtime))
        in_engine = engine.command_in("sh", "-ec", script)
        command = self._group.command_in(*_UNSHARE, *in_engine)
        self._namespace = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._namespace.stdout is not None
        assert self._namespace.stdout.readline() == "ready\n"
        program = self.host.root / "bin/podman"
        text = _PODMAN.format(
            folder=self._store.folder,
            runtime=runtime,
            enter=shlex.join(engine.command_in(*self._enter())),
            podman=shutil.which("podman"),
        )
        program.write_text(text)
        program.chmod(0o755)

    def _enter(self) -> list[str]:
        """The beginning of a command that is run in its namespaces."""
        assert self._namespace is not None
        return [*_ENTER, "--target", str(self._namespace.pid)]

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.host.run(["podman", *words], timeout=_PATIENCE_S)

    def as_user(self, uid: int, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of another user, whose podman is rootless: with images and containers of its own."""
        home = self.host.root / f"home/{uid}"
        if not home.exists():
            (home / "run").mkdir(parents=True)
            (home / "storage.conf").write_text(_ROOTLESS_CONF.format(home=home))
            shutil.copy(self._store.folder / "runc.conf", home)
            shutil.copy(self._store.folder / "tree.tar", home)
            for path in (home, *home.iterdir()):
                os.chown(path, uid, uid)
            imported = self.as_user(uid, "podman", "import", f"{home}/tree.tar", IMAGE)
            assert imported.returncode == 0, imported.stderr
        ours = str(self.host.root / "bin")
        programs = [one for one in self.host.env["PATH"].split(os.pathsep) if one != ours]
        environment = {
            "PATH": os.pathsep.join(programs),
            "HOME": home,
            "XDG_RUNTIME_DIR": home / "run",
            "CONTAINERS_CONF": home / "runc.conf",
            "CONTAINERS_STORAGE_CONF": home / "storage.conf",
            "YUNION_MPS_ROOT": self.host.root,
        }
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "env", "-i"]
        inside = self._user_group(uid).command_in(*self._enter(), f"--wd={home}")
        variables = [f"{name}={value}" for name, value in environment.items()]
        return self.host.run([*inside, *become, *variables, *words], timeout=_PATIENCE_S)

    def _user_group(self, uid: int) -> ControlGroup:
        """Where a user's podman runs; in version 2, runc makes the groups of its containers beside that."""
        group = self._group.below(f"user-{uid}")
        if has_only_version_2():
            group.delegate(uid)
        return group.below("engine")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self("run", "--rm", *words)

    def good(self, *words: str) -> str:
        done = self(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def pid_of(self, container: str) -> int:
        return int(self.good("inspect", "--format", "{{.State.Pid}}", container))

    def close(self) -> None:
        """Remove the containers, and end everything else that was started by podman."""
        try:
            if (self.host.root / "bin/podman").exists():
                self("rm", "--all", "--force", "--time", "0")
        finally:
            self._group.close()
            if self._namespace is not None:
                self._namespace.communicate()


def mps(name: str) -> tuple[str, str]:
    """The option that gives a container this device."""
    return "--device", f"yunion.io/mps={name}"


def reloads(daemon: Daemon) -> None:
    """What makes the daemon look at everything at once, and not within 10 s."""
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    daemon.get("/v1/status")
