"""Where the unit lets the daemon write: the cases were measured with systemd 252 and 257."""

from __future__ import annotations

from pathlib import Path

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.host.sandbox import (
    INACCESSIBLE,
    PRIVATE,
    READ_ONLY,
    SETTINGS,
    SHIPPED,
    UNIT,
    Sandbox,
    parse_unit_settings,
    read_sandbox,
)

from simhost.environment import CHECKOUT

FULL, HOME = "ProtectSystem=full", "ProtectHome=read-only"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("home/mps", "home/linked", "usr/local/mps", "srv/x", "run/user", "var/lib"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "srv/link").symlink_to(tmp_path / "home/linked")
    return tmp_path


def mode(root: Path, path: str, *lines: str) -> int | None:
    rule = Sandbox(parse_unit_settings(["\n".join(lines)]), str(root)).rule_for(path)
    return rule and rule.mode


@pytest.mark.parametrize(
    ("target", "path", "expected"),
    [
        ("/home", "/srv/to/mps", "/home/mps"),
        ("../home", "/srv/to/new", "/home/new"),
        ("../../../../home", "/srv/to", "/home"),
        ("linked/..", "/srv/to", "/srv"),
        ("to", "/srv/to", "/srv/to"),  # a loop
    ],
)
def test_symlinks_are_resolved_below_the_root(root: Path, target: str, path: str, expected: str) -> None:
    (root / "srv/to").symlink_to(target)
    sandbox = Sandbox({}, str(root))
    assert sandbox.shown(sandbox.resolve(path)) == expected


@pytest.mark.parametrize(
    ("path", "lines", "expected"),
    [
        ("/home/mps", [FULL, HOME], READ_ONLY),
        ("/home/new/pipe", [FULL, HOME], READ_ONLY),
        ("/run/user/1", [HOME], READ_ONLY),
        ("/usr/local/mps", [FULL], READ_ONLY),
        ("/etc/mps", [FULL], READ_ONLY),
        ("/etc/mps", ["ProtectSystem=yes"], None),
        ("/srv/x", [FULL, HOME], None),
        ("/homes", [HOME], None),
        ("/home/mps", ["ProtectHome=no"], None),
        # Of equal paths, the strictest; of nested ones, the inner one.
        ("/home/mps/pipe", [HOME, "ReadWritePaths=/home/mps"], None),
        ("/home/mps", [HOME, "ReadWritePaths=/home"], READ_ONLY),
        ("/usr/local/mps", [FULL, "ReadWritePaths=/usr"], READ_ONLY),
        ("/srv/x", ["ReadOnlyPaths=/srv/x", "ReadWritePaths=/srv/x"], READ_ONLY),
        ("/home/new", [HOME, "ReadWritePaths=-/home/new"], READ_ONLY),  # it does not exist
        # Below what is inaccessible or replaced, nothing is permitted again.
        ("/home/mps", ["ProtectHome=yes", "ReadWritePaths=/home/mps"], INACCESSIBLE),
        ("/home/mps", ["ProtectHome=yes", "BindPaths=/home/mps"], INACCESSIBLE),
        ("/home/mps", ["ProtectHome=tmpfs", "ReadWritePaths=/home/mps"], PRIVATE),
        ("/home/mps", ["ProtectHome=tmpfs", "BindPaths=/home/mps"], None),
        ("/tmp/nvidia-mps/pipe", ["PrivateTmp=yes"], PRIVATE),
        ("/tmp/nvidia-mps/pipe", ["PrivateTmp=no"], None),
        ("/srv/x", ["ProtectSystem=strict"], READ_ONLY),
        ("/dev/shm/mps", ["ProtectSystem=strict"], None),
        ("/var/lib/yunion-mps", ["ProtectSystem=strict", "StateDirectory=yunion-mps"], None),
        ("/var/lib/yunion-mps", ["ProtectSystem=strict"], READ_ONLY),
        # Symlinks of both.
        ("/srv/link/pipe", [HOME], READ_ONLY),
        ("/srv/link/pipe", [HOME, "ReadWritePaths=/srv/link"], None),
        ("/home/linked", [HOME, "ReadWritePaths=/srv/link"], None),
    ],
)
def test_the_unit_permits_what_systemd_permits(
    root: Path, path: str, lines: list[str], expected: int | None
) -> None:
    assert mode(root, path, *lines) == expected


def test_lists_are_read_as_files_and_systemctl_show_write_them() -> None:
    shown = 'ReadWritePaths="/home/a b" -/home/c +/d\nBindPaths=/srv/x:/home/q:rbind\nLoadState=loaded\n'
    assert parse_unit_settings([shown]) == {
        "ReadWritePaths": ("/home/a b", "-/home/c", "+/d"),
        "BindPaths": ("/srv/x:/home/q:rbind",),
    }
    drop_ins = [
        "ReadWritePaths=/a\nReadWritePaths=/b\nProtectHome=yes\n",
        "ReadWritePaths=\nProtectHome=no\n",
    ]
    assert parse_unit_settings(drop_ins) == {"ReadWritePaths": (), "ProtectHome": ("no",)}
    assert parse_unit_settings(["ReadWritePaths=/c"], {"ReadWritePaths": ("/b",)}) == {
        "ReadWritePaths": ("/b", "/c")
    }


def test_without_an_installed_unit_the_shipped_one_counts() -> None:
    shipped = parse_unit_settings([(CHECKOUT / "systemd" / UNIT).read_text()])
    assert shipped == SHIPPED
    assert SHIPPED.keys() <= set(SETTINGS)


def test_drop_ins_change_the_unit_and_etc_comes_first(root: Path) -> None:
    def drop_in(directory: str, name: str, line: str) -> None:
        folder = root / directory / f"{UNIT}.d"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"[Service]\n{line}\n")

    def is_refused() -> bool:
        return read_sandbox(Paths(str(root))).rule_for("/home/mps") is not None

    assert is_refused()
    drop_in("usr/lib/systemd/system", "a.conf", "ProtectHome=no")
    assert not is_refused()
    drop_in("etc/systemd/system", "a.conf", "# nothing")
    assert is_refused()
    drop_in("etc/systemd/system", "b.conf", "ReadWritePaths=/home/mps")
    assert not is_refused()


def test_an_installed_unit_counts_instead_of_the_shipped_one(root: Path) -> None:
    unit = root / "etc/systemd/system" / UNIT
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/usr/bin/yunion-mps-daemon\n")
    assert read_sandbox(Paths(str(root))).rule_for("/home/mps") is None
