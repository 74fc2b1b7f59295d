"""The real podman on a simulated host: what it finds in /run/cdi is that host's.

Podman knows no other place for CDI than /etc/cdi and /var/run/cdi. So it runs in a mount namespace of its
own, with an empty /run and /var/lib, and the simulated host's /run/cdi; nothing of the machine changes.

It starts containers by runc, or by crun, its default on most hosts. crun refuses hosts that have cgroups v1
beside v2 ("cgroups in hybrid mode not supported"), so with it that namespace has v2 alone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from containers.image import IMAGE, make_tree, write_layer
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
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/lib && mkdir -p /run/cdi &&
    mount --bind {cdi} /run/cdi && {cgroups} && echo ready && exec cat
"""
_VERSION_2_ALONE = "mount -t cgroup2 cgroup2 /sys/fs/cgroup"
#: For the rules of device nodes crun raises a limit, which root may not everywhere.
_NEEDS = {"runc": (), "crun": ("--privileged",)}
_PODMAN = """\
#!/bin/sh
export CONTAINERS_CONF={folder}/{runtime}.conf CONTAINERS_STORAGE_CONF={folder}/storage.conf
unset LD_LIBRARY_PATH
exec {nsenter} --target {pid} --mount --wd="$PWD" {podman} "$@"
"""


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
                pytest.fail(f"{needed} is not there: run scripts/setup")
        self.host = host
        #: What `podman run` has to be told for the runtime to start a container here.
        self.needs = _NEEDS[runtime]
        #: Where its containers and images are.
        self.storage = store.folder / "store"
        self._store = store
        cdi = host.root / "run/cdi"
        cdi.mkdir(exist_ok=True)
        cgroups = _VERSION_2_ALONE if runtime == "crun" else "true"
        namespace = _NAMESPACE.format(cdi=shlex.quote(str(cdi)), cgroups=cgroups)
        command = ["unshare", "--mount", "sh", "-c", namespace]
        self._namespace = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
        assert self._namespace.stdout is not None
        assert self._namespace.stdout.readline() == "ready\n"
        program = host.root / "bin/podman"
        program.write_text(
            _PODMAN.format(
                folder=store.folder,
                runtime=runtime,
                nsenter=shutil.which("nsenter"),
                pid=self._namespace.pid,
                podman=shutil.which("podman"),
            )
        )
        program.chmod(0o755)
        store.make_image(self)

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
        inside = ["nsenter", "--target", self._namespace.pid, "--mount", f"--wd={home}"]
        variables = [f"{name}={value}" for name, value in environment.items()]
        return self.host.run([*inside, *become, *variables, *words], timeout=_PATIENCE_S)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self("run", "--rm", *words)

    def good(self, *words: str) -> str:
        done = self(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def pid_of(self, container: str) -> int:
        return int(self.good("inspect", "--format", "{{.State.Pid}}", container))

    def close(self) -> None:
        """Remove the containers, and what podman leaves in the machine's cgroups."""
        self("rm", "--all", "--force", "--time", "0")
        for pause in self.host.root.glob("home/*/run/libpod/tmp/pause.pid"):  # what rootless podman leaves
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pause.read_text()), signal.SIGKILL)
        self._namespace.communicate()
        for path, folders, _ in os.walk("/sys/fs/cgroup"):  # which passes over what ends meanwhile
            if path.endswith("/libpod_parent"):
                for folder in (*(os.path.join(path, name) for name in folders), path):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)


def mps(name: str) -> tuple[str, str]:
    """The option that gives a container this device."""
    return "--device", f"yunion.io/mps={name}"


def reloads(daemon: Daemon) -> None:
    """What makes the daemon look at everything at once, and not within 10 s."""
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    daemon.get("/v1/status")
