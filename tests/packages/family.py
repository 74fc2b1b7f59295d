"""How an operator of each family installs, upgrades, goes back and removes: without a network."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path

from packages.machine import Done, Machine
from packages.versions import Packages, kubelet_plugin, stub_rpm
from simhost.environment import CHECKOUT

NAME = "yunion-mps-daemon"
#: What the family's package `filesystem` has, and Debian has not.
_FOLDERS = ("/etc/sysconfig", "/usr/share/zsh/site-functions", "/usr/share/fish/vendor_completions.d")
_INSTALL = CHECKOUT / "docs/install.md"


class Family(ABC):
    """What both can do; the machine is the operator's."""

    name: str
    #: The file with the daemon's environment.
    environment: str

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def prepare(self, folder: Path) -> None:  # noqa: B027 - there may be nothing to do
        """Make the machine as one of the family is."""

    @abstractmethod
    def install(self, packages: Packages, *, check: bool = True, plugin: bool = False) -> Done:
        """Install the version, whichever was there before, also of the kubelet plugin if `plugin` is set."""

    @abstractmethod
    def remove(self, name: str = NAME) -> Done:
        """Remove a package, and keep what is configured."""

    @abstractmethod
    def purge(self) -> None:
        """Remove what `remove` keeps."""

    @abstractmethod
    def version(self, name: str = NAME) -> str:
        """The version that is installed of a package, empty where none is."""


class Deb(Family):
    """Debian and Ubuntu."""

    name = "deb"
    environment = "/etc/default/yunion-mps-daemon"

    def install(self, packages: Packages, *, check: bool = True, plugin: bool = False) -> Done:
        files = [packages.deb, kubelet_plugin(packages.deb)][: 1 + plugin]
        options = ["--yes", "--no-install-recommends", "--allow-downgrades"]
        return self.machine.run(
            "apt-get", "install", *options, *map(self.machine.install_file, files), check=check
        )

    def remove(self, name: str = NAME) -> Done:
        return self.machine.run("apt-get", "remove", "--yes", name)

    def purge(self) -> None:
        self.machine.run("apt-get", "purge", "--yes", NAME)

    def version(self, name: str = NAME) -> str:
        done = self.machine.run(
            "dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", name, check=False
        )
        state, _, version = done.stdout.partition(" ")
        return version.rpartition(":")[2] if state == "installed" else ""


class Rpm(Family):
    """RHEL and its kin: rpm's own database, in a root in which everything else came otherwise."""

    name = "rpm"
    environment = "/etc/sysconfig/yunion-mps-daemon"

    def prepare(self, folder: Path) -> None:
        """Begin the database with what Debian's packages provide."""
        here = self.machine.run(
            "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"
        ).stdout.strip()
        provides = [f"python(abi) = {here}", "glibc = 2.31", "/bin/sh"]
        provides += ["coreutils", "sed", "grep", "findutils", "systemd", "util-linux"]
        self.machine.run("mkdir", "-p", *_FOLDERS)
        self._rpm("--initdb")
        self._rpm("--install", self.machine.install_file(stub_rpm(folder, provides)))

    def install(self, packages: Packages, *, check: bool = True, plugin: bool = False) -> Done:
        files = [packages.rpm, kubelet_plugin(packages.rpm)][: 1 + plugin]
        return self._rpm("--upgrade", "--oldpackage", *map(self.machine.install_file, files), check=check)

    def remove(self, name: str = NAME) -> Done:
        return self._rpm("--erase", name)

    def purge(self) -> None:
        """Do what docs/install.md says, because RPM has no purge."""
        self.remove()
        said = re.search(r"RPM has no purge.*?\n# (.+?)\n", _INSTALL.read_text(), re.DOTALL)
        assert said, f"{_INSTALL} does not say how to remove everything"
        self.machine.shell(said[1])

    def version(self, name: str = NAME) -> str:
        done = self._rpm("--query", "--queryformat", "%{VERSION}", name, check=False)
        return done.stdout if done.returncode == 0 else ""

    def _rpm(self, *arguments: str, check: bool = True) -> Done:
        return self.machine.run("rpm", *arguments, check=check)


FAMILIES: dict[str, type[Family]] = {"deb": Deb, "rpm": Rpm}
