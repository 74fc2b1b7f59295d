"""Docker on a booted machine: Debian's own, started only where a test asks for it, and without a network."""

from __future__ import annotations

import json
from typing import Any

from packages.machine import Done, Machine

IMAGE = "tools:1"
#: What containers need of the kernel, and systemd-nspawn forbids unless it is asked: a session keyring, and
#: the program that says which device nodes they may open (cgroups v2).
CALLS = ("@keyring", "bpf")
_CONFIG = "/etc/docker/daemon.json"
_PROGRAMS = " ".join(f"/usr/bin/{name}" for name in ("sh", "cat", "env", "sleep", "nvidia-cuda-mps-control"))
#: Programs of the machine with their libraries, as one layer.
_IMPORT = f"""\
files=$(ldd {_PROGRAMS} | grep -o ' /[^ ]*\\|^\\s/lib[^ ]*' | sort -u)
tar --create --dereference --absolute-names {_PROGRAMS} $files | docker import - {IMAGE}
"""


class Docker:
    """The engine of one machine; `docker(...)` runs its command line."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._reads_cdi: bool | None = None

    def __call__(self, *words: str, check: bool = True) -> Done:
        return self.machine.run("docker", *words, check=check)

    def start(self, *, reads_cdi: bool) -> None:
        """Have its daemon run, with CDI switched on as an operator does, or left off as docker 26 comes."""
        if reads_cdi == self._reads_cdi:
            return
        config: dict[str, Any] = {
            "storage-driver": "vfs",
            "bridge": "none",
            "iptables": False,
            "ip6tables": False,
        }
        if reads_cdi:
            config["features"] = {"cdi": True}
        self.machine.write(_CONFIG, json.dumps(config))
        self.machine.run("systemctl", "restart", "docker.service")
        self._reads_cdi = reads_cdi

    def make_image(self) -> None:
        self.machine.shell(_IMPORT)

    def run(self, *words: str, check: bool = True) -> Done:
        return self("run", "--rm", *words, check=check)

    def told(self, container: str, template: str) -> str:
        return self("inspect", "--format", template, container).stdout.strip()

    def remove(self, *containers: str) -> None:
        self("rm", "--force", *containers)

    def remove_all(self) -> None:
        left = self("ps", "--all", "--quiet").stdout.split()
        if left:
            self.remove(*left)
