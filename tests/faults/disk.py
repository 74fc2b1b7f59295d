"""A small disk in the place of a directory of a host, for the daemon and what it starts.

It is mounted in a mount namespace of its own (unshare(1), nsenter(1)), which a process of ours holds: no
other sees it, and it is gone with them. The test reaches it through /proc/PID/root of the holder.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

from faults.scene import Scene
from simhost.host import Closes

_SIZE_KIB = 512


class FullDisk(Closes):
    """A tmpfs for each directory, that can be filled; a context manager, for before the daemon's start."""

    def __init__(self, scene: Scene, *directories: str) -> None:
        places = [scene.host.root / directory for directory in directories]
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
        mounts = [
            f"mount -t tmpfs -o size={_SIZE_KIB}k,mode=755 faults {shlex.quote(str(p))}" for p in places
        ]
        script = " && ".join([*mounts, "echo mounted", "exec sleep infinity"])
        self._holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"mounted\n", "root may mount in a namespace of its own"
        space = f"/proc/{self._holder.pid}"
        self._inside = [Path(f"{space}/root{place}") for place in places]
        scene.daemon.namespace = f"{space}/root"
        program = shutil.which("yunion-mps-daemon", path=scene.daemon.env["PATH"])
        wrapper = scene.stand_ins.folder / "yunion-mps-daemon"
        wrapper.write_text(f'#!/bin/sh\nexec nsenter --mount={space}/ns/mnt {program} "$@"\n')
        wrapper.chmod(0o755)

    def fill(self) -> None:
        for place in self._inside:
            with (place / "filling").open("wb", buffering=0) as file:
                size = 65536
                while size:
                    try:
                        file.write(bytes(size))
                    except OSError:
                        size //= 2

    def make_room(self) -> None:
        for place in self._inside:
            (place / "filling").unlink()

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()
