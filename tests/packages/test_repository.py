"""The repository that scripts/package writes, used as docs/install.md says, without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_build.repository import write_repository

from packages.family import Family
from packages.machine import Machine
from packages.operator import Operator
from packages.versions import Packages
from simhost.environment import CHECKOUT

pytestmark = pytest.mark.parametrize(
    "family", ["bookworm-deb", "trixie-deb", "bookworm-rpm"], indirect=True, scope="class"
)

KEY = "test@yunion.example"
EPOCH_S = 1_700_000_000
TOOLS = {"deb": "apt-get", "rpm": "dnf"}
UPGRADES = {
    "deb": "apt-get update && apt-get install --yes --only-upgrade yunion-mps-daemon",
    "rpm": "dnf upgrade -y --refresh yunion-mps-daemon",
}
REFRESHES = {"deb": "apt-get update --error-on=any", "rpm": "dnf makecache --refresh"}
#: Where the tests publish it on the machine, in place of a web server.
PUBLISHED = "/srv/repository"
_SECTION = re.compile(r"^### From a repository\n(.*?)^## ", re.MULTILINE | re.DOTALL)


def documented(tool: str) -> str:
    """What docs/install.md has an operator type who uses apt-get or dnf."""
    section = _SECTION.search((CHECKOUT / "docs/install.md").read_text())
    assert section
    (block,) = [
        text for text in re.findall(r"```sh\n(.*?)```", section[1], re.DOTALL) if f"{tool} install" in text
    ]
    unattended: str = block.replace(f"{tool} install", f"{tool} install -y")
    return unattended.replace("https://HOST", f"file://{PUBLISHED}")


class Publisher:
    """Signs repositories with a key of its own, and copies them to machines."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        (folder / "gnupg").mkdir(mode=0o700)
        monkeypatch.setenv("GNUPGHOME", str(folder / "gnupg"))
        new_key = [
            "gpg",
            "--batch",
            "--quiet",
            "--passphrase",
            "",
            "--quick-generate-key",
            KEY,
            "rsa3072",
            "sign",
        ]
        subprocess.run(new_key, check=True)

    def publish(self, packages: Packages, machine: Machine) -> None:
        """Put the repository of a version on the machine, in place of the one that was there."""
        files = [str(path) for path in packages.deb.parent.iterdir() if path.suffix in (".deb", ".rpm")]
        made = self._folder / packages.version
        write_repository(files, str(made), EPOCH_S, str(CHECKOUT / ".packager"), KEY)
        target = machine.root / PUBLISHED.lstrip("/")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(made, target)


@pytest.fixture(scope="class")
def publisher() -> Iterator[Publisher]:
    with tempfile.TemporaryDirectory(prefix="repository.") as folder, pytest.MonkeyPatch.context() as patch:
        yield Publisher(Path(folder), patch)
        subprocess.run(["gpgconf", "--kill", "all"], check=True)


@pytest.fixture(scope="class")
def host(family: Family, operator: Operator, publisher: Publisher, previous: Packages) -> Operator:
    """A host that got the previous version from the repository, and serves."""
    publisher.publish(previous, family.machine)
    family.machine.run("mkdir", "-p", "/etc/apt/keyrings", "/etc/yum.repos.d")
    family.machine.shell(documented(TOOLS[family.name]))
    operator.configure()
    operator.start()
    return operator


class TestRepository:
    def test_the_documented_lines_install_the_daemon(
        self, host: Operator, family: Family, previous: Packages
    ) -> None:
        assert family.version() == previous.version
        assert host.ask("devices?unused=true")["total"] == 4

    def test_the_python_of_the_distribution_finds_the_client(self, host: Operator, family: Family) -> None:
        if family.name == "rpm":
            pytest.skip("Debian's Python does not look where those of rpm systems do")
        code = "from yunion_mps import Client; print(len(Client().devices()))"
        assert family.machine.run("python3", "-c", code).stdout == "4\n"
        added = family.machine.shell("cd /usr/lib/yunion-mps/client && ls")
        assert added.split() == ["h11", "yunion_mps"], "and nothing else of ours is on its path"

    def test_an_upgrade_from_the_repository_ends_no_job(
        self, host: Operator, family: Family, publisher: Publisher, current: Packages
    ) -> None:
        pid = host.begin_job("steady")
        control, daemon = host.control_daemon(), host.daemon()
        publisher.publish(current, family.machine)
        family.machine.shell(UPGRADES[family.name])
        assert family.version() == current.version
        assert host.ask("status")["version"] == current.version
        assert (host.control_daemon(), host.daemon()) == (control, daemon)
        assert host.is_at_work("steady")
        host.end_job("steady", pid)

    def test_lists_that_were_changed_are_refused(self, host: Operator, family: Family) -> None:
        lists = "deb/dists/stable/InRelease" if family.name == "deb" else "rpm/repodata/repomd.xml"
        changed = family.machine.root / PUBLISHED.lstrip("/") / lists
        changed.write_bytes(
            changed.read_bytes().replace(b"yunion-mps", b"yunion-mqs").replace(b"primary", b"Primary")
        )
        result = family.machine.run("sh", "-c", REFRESHES[family.name], check=False)
        assert "signature" in result.stdout + result.stderr  # dnf continues without the repository
