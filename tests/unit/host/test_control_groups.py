"""Which control groups a process is in, and which of them root has made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from yunion_mps.host.control_groups import (
    ControlGroup,
    control_groups_of,
    is_made_by_root,
    parse_control_groups,
)

from unit.as_user import needs_root

USER = 2000


def test_a_process_has_a_group_in_each_hierarchy() -> None:
    text = "4:cpu,cpuacct:/a:b\n9:name=systemd:/c\n0::/\ndamaged\n"
    assert parse_control_groups(text) == (
        ControlGroup("cpu,cpuacct", "/a:b"),
        ControlGroup("name=systemd", "/c"),
        ControlGroup("", "/"),
    )


def test_a_process_that_has_ended_is_in_no_group(tmp_path: Path) -> None:
    assert control_groups_of(4260, str(tmp_path)) == ()


@pytest.mark.parametrize(
    ("group", "is_inside"),
    [
        (ControlGroup("", "/a/b"), True),
        (ControlGroup("", "/a/b/c"), True),
        (ControlGroup("", "/a/bc"), False),
        (ControlGroup("", "/a"), False),
        (ControlGroup("", "/x/a/b"), False),
        (ControlGroup("memory", "/a/b"), False),
    ],
)
def test_a_group_contains_those_below_it_by_path_not_by_name(group: ControlGroup, is_inside: bool) -> None:
    assert ControlGroup("", "/a/b").contains([ControlGroup("pids", "/"), group]) is is_inside


def make_group(mounts: Path, path: str, owner: int = 0) -> None:
    """Make a group, and those above it that are missing; only the last one is the owner's."""
    (mounts / path).mkdir(parents=True)
    os.chown(mounts / path, owner, owner)


@needs_root
@pytest.mark.parametrize(
    ("path", "is_roots"),
    [
        ("/system.slice/docker.scope", True),
        ("/", True),
        ("/delegated", False),
        ("/delegated/docker.scope", False),
        ("/user.slice/docker.scope", False),
        ("/machine.slice/user@2000.service/docker.scope", False),
        ("/system.slice/gone.scope", None),
        ("/../system.slice/docker.scope", None),
    ],
)
def test_a_group_is_root_s_only_if_all_above_it_are(tmp_path: Path, path: str, is_roots: bool | None) -> None:
    make_group(tmp_path, "system.slice/docker.scope")
    make_group(tmp_path, "user.slice/docker.scope")
    make_group(tmp_path, "machine.slice/user@2000.service/docker.scope")
    make_group(tmp_path, "delegated", USER)
    make_group(tmp_path, "delegated/docker.scope")
    assert is_made_by_root(ControlGroup("", path), str(tmp_path)) is is_roots


@needs_root
def test_a_group_of_each_version_is_found_where_that_is_mounted(tmp_path: Path) -> None:
    for hierarchy, mount in (("cpu,cpuacct", "cpu"), ("name=systemd", "systemd"), ("", "unified")):
        make_group(tmp_path, f"{mount}/job")
        assert is_made_by_root(ControlGroup(hierarchy, "/job"), str(tmp_path)) is True
    assert is_made_by_root(ControlGroup("memory", "/job"), str(tmp_path)) is None
