"""NVIDIA's own specification: found where its toolkit puts it, and what of it is each GPU's."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.containers.spec import (
    VERSION,
    Edits,
    Nvidia,
    find_nvidia_spec,
    parse_nvidia_spec,
    read_nvidia_spec,
)
from yunion_mps.core.paths import Paths

from unit.http.snapshots import H100, P40

#: As `nvidia-ctk cdi generate` of the toolkit 1.13 to 1.17 prints it, cut short.
YAML = f"""\
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  hooks:
  - args: [nvidia-cdi-hook, update-ldcache, --folder, /usr/lib64]
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
  mounts:
  - containerPath: /usr/lib64/libcuda.so.535.261.03
    hostPath: /usr/lib64/libcuda.so.535.261.03
    options: [ro, nosuid, nodev, bind]
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/nvidia1
  name: all
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/dri/renderD128
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia5
  name: {H100.uuid}
"""


def read(folder: Path, text: str, name: str = "nvidia.yaml") -> Nvidia:
    (folder / name).write_text(text)
    return read_nvidia_spec(str(folder / name), [P40, H100])


def paths_of(edits: Edits) -> list[object]:
    return [node["path"] for node in edits.device_nodes]


def test_a_gpu_s_part_is_found_by_its_uuid_or_else_by_its_node(tmp_path: Path) -> None:
    found = read(tmp_path, YAML)
    assert found.version == (0, 5, 0)
    assert paths_of(found.common) == ["/dev/nvidiactl"]
    assert [str(mount["containerPath"])[:12] for mount in found.common.mounts] == ["/usr/lib64/l"]
    assert paths_of(found.by_gpu[str(P40.uuid)]) == ["/dev/nvidia0", "/dev/dri/renderD128"]
    assert paths_of(found.by_gpu[str(H100.uuid)]) == ["/dev/nvidia5"], "they know better"


def test_json_says_the_same(tmp_path: Path) -> None:
    import yaml

    assert read(tmp_path, json.dumps(yaml.safe_load(YAML)), "nvidia.json") == read(tmp_path, YAML)


def test_the_file_in_run_counts_before_the_one_in_etc(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    assert find_nvidia_spec(paths) is None
    for folder in ("etc/cdi", "run/cdi"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "nvidia.yaml").write_text(YAML)
        found = find_nvidia_spec(paths)
        assert found is not None
        assert found[0] == str(tmp_path / folder / "nvidia.yaml")
    (tmp_path / "run/cdi/nvidia.yaml").write_text(YAML + "\n")
    assert find_nvidia_spec(paths) != found, "it is another one now"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "kind"), ("[]", "kind"), ("kind: vendor.com/net", "kind"), ("a: [", "not YAML"),
        ("kind: nvidia.com/gpu\ncontainerEdits: 7", "containerEdits"),
        ("kind: nvidia.com/gpu\ncontainerEdits: {mounts: 7}", "containerEdits"),
        ("kind: nvidia.com/gpu\ndevices: [{name: 0, containerEdits: [7]}]", "containerEdits"),
        ("kind: nvidia.com/gpu\n" + "a: " + "[" * 3000, "not YAML"),
    ],
)  # fmt: skip
def test_an_unreadable_specification_is_reported(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("edits", "why"),
    [
        ("env: [2024-01-01]", "containerEdits"),
        ("env: [!!binary aGk=]", "containerEdits"),
        ("mounts: [{hostPath: 1, containerPath: /a}]", "containerEdits"),
        ("mounts: [{hostPath: /a}]", "containerEdits"),
        ("hooks: [{hookName: a, path: /b, args: c}]", "containerEdits"),
        ("deviceNodes: [{path: 7}]", "containerEdits"),
        ("env: [NO_VALUE]", "containerEdits"),
        ("env: [=value]", "containerEdits"),
        ("mounts: [{hostPath: /a, containerPath: /a, type: 7}]", "containerEdits"),
        ("hooks: [{hookName: whenever, path: /b}]", "containerEdits"),
        ("hooks: [{hookName: createContainer, path: /b, timeout: '3'}]", "containerEdits"),
        ("hooks: [{hookName: createContainer, path: /b, env: [A]}]", "containerEdits"),
        ("deviceNodes: [{path: /dev/a, type: file}]", "containerEdits"),
        ("deviceNodes: [{path: /dev/a, permissions: all}]", "containerEdits"),
        ("deviceNodes: [{path: /dev/a, fileMode: '0666'}]", "containerEdits"),
        ("deviceNodes: [{path: /dev/a, uid: -1}]", "containerEdits"),
        ("deviceNodes: [{path: /dev/a, major: true}]", "containerEdits"),
        ("additionalGids: [video]", "containerEdits"),
        ("additionalGids: 44", "containerEdits"),
        ("additionalGids: !!set {1}", "containerEdits"),
        ("mounts: [&a {hostPath: /a, containerPath: /a, options: [*a]}]", "containerEdits"),
    ],
)
def test_edits_that_would_break_our_cdi_file_are_refused(tmp_path: Path, edits: str, why: str) -> None:
    """Included, it makes a file that cannot be written, or that engines refuse as a whole."""
    common = f"kind: nvidia.com/gpu\ncontainerEdits: {{{edits}}}"
    with pytest.raises(ValueError, match=why):
        read(tmp_path, common)
    with pytest.raises(ValueError, match=why):
        read(tmp_path, f"kind: nvidia.com/gpu\ndevices: [{{name: a, containerEdits: {{{edits}}}}}]")


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_invalid_json_is_reported(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="it is not JSON"):
        read(tmp_path, text, "nvidia.json")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nvidia.yaml")
    with pytest.raises(ValueError, match="it is not a file"):
        read_nvidia_spec(str(tmp_path / "nvidia.yaml"), [P40])


def test_parts_and_fields_that_we_do_not_know_stay_behind(tmp_path: Path) -> None:
    """An engine refuses a file that has one, and with it every device of ours."""
    said = YAML.replace("containerEdits:", "containerEdits:\n  fancy: 7\n  intelRdt: {closID: a}", 1)
    said = said.replace("    options:", "    fancy: 7\n    type: null\n    options:", 1)
    assert said.count("fancy: 7") == 2
    assert read(tmp_path, said) == read(tmp_path, YAML)


def test_all_that_the_format_has_is_kept(tmp_path: Path) -> None:
    edits = {
        "env": ["A=b=c", "B="],
        "mounts": [{"hostPath": "/a", "containerPath": "/b", "type": "bind", "options": ["ro"]}],
        "hooks": [{"hookName": "poststop", "path": "/a", "args": ["a"], "env": ["A=b"], "timeout": 3}],
        "deviceNodes": [
            {
                "path": "/dev/a", "hostPath": "/dev/b", "type": "c", "major": 195, "minor": 0,
                "fileMode": 438, "permissions": "rwm", "uid": 0, "gid": 44,
            }
        ],
        "additionalGids": [44],
    }  # fmt: skip
    spec = {"kind": "nvidia.com/gpu", "devices": [{"name": H100.uuid, "containerEdits": edits}]}
    found = read(tmp_path, json.dumps(spec), "nvidia.json").by_gpu
    assert {uuid: parts.as_json() for uuid, parts in found.items()} == {H100.uuid: edits}


def test_a_small_file_with_many_aliases_is_refused(tmp_path: Path) -> None:
    long = "a" * 1000
    with pytest.raises(ValueError, match="containerEdits are larger than 8 MiB"):
        read(tmp_path, f"kind: nvidia.com/gpu\na: &a A={long}\ncontainerEdits: {{env: [{'*a,' * 10_000}]}}")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="larger than 8 MiB"):
        read(tmp_path, " " * (8 << 20) + YAML)


@pytest.mark.parametrize("version", ["", "1", "a.b.c", "0.5", "0.²5.0", "0.3.0", "0.5.7", "1.0.0", "99.0.0"])
def test_our_cdi_version_follows_from_the_fields_used(version: str) -> None:
    """Engines refuse a file of a version that they do not know, and with it every device of ours."""
    said: Any = {"kind": "nvidia.com/gpu", "cdiVersion": version, "containerEdits": {"env": ["A=b"]}}
    assert parse_nvidia_spec(said, [P40]) == Nvidia(VERSION, Edits(env=("A=b",)))
    said["devices"] = [{"name": P40.uuid, "containerEdits": {"additionalGids": [44]}}]
    assert parse_nvidia_spec(said, [P40]).version == (0, 7, 0)


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "containerEdits", "deviceNodes", "path", "env", "hooks", "mounts"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_any_specification_is_accepted_or_refused(devices: Any, edits: Any) -> None:
    found = {"kind": "nvidia.com/gpu", "devices": devices, "containerEdits": edits}
    with contextlib.suppress(ValueError):
        parse_nvidia_spec(found, [P40, H100])
