"""`yunion-mps ray`: which devices a node offers, and what becomes of the options of `ray start`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.cli import ray

from unit.cli.conftest import Cli
from unit.http import snapshots
from unit.http.server_host import ServerHost

RESOURCES = {"yunion_mps": 48}


def device(**fields: Any) -> Any:
    common = {"gpu_uuid": "GPU-1", "state": "free", "reserved_for": None, "budget_enforced": True}
    return {**common, **fields}


def pool(**fields: Any) -> Any:
    return device(**{"gpu_uuid": "GPU-2", "state": "available", "memory_mib": 16384, **fields})


def test_the_resources_are_the_devices_and_the_memory_of_the_pools() -> None:
    devices = [device(), device(state="leased"), device(gpu_uuid="GPU-2"), device(gpu_uuid="GPU-2")]
    assert ray.resources_of(devices, []) == {"yunion_mps": 4}
    assert ray.resources_of(devices, [pool()]) == {"yunion_mps": 2, "yunion_mps_memory": 16384}
    assert ray.resources_of([], [pool(), pool()]) == {"yunion_mps_memory": 32768}


@pytest.mark.parametrize(
    "fields", [{"state": "unavailable"}, {"reserved_for": "slurm"}, {"budget_enforced": False}]
)
def test_devices_that_ray_workers_cannot_lease_are_not_offered(fields: dict[str, object]) -> None:
    assert ray.resources_of([device(**fields)], [pool(**fields)]) == {}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Cli]:
    """A host with 48 devices, and with a program `ray` that prints its arguments and a variable."""
    program = tmp_path / "ray"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$RAY_num_workers_soft_limit"\n')
    program.chmod(0o755)
    with ServerHost(snapshots.large(48)) as host:
        cli = Cli(host.paths.root, host)
        cli.env["PATH"] = f"{tmp_path}:{cli.env['PATH']}"
        yield cli


def started(node: Cli, *options: str) -> list[str]:
    done = node.process("ray", "start", *options)
    assert (done.code, done.err) == (0, "")
    return done.out.splitlines()


def test_the_resources_are_printed_as_json(node: Cli) -> None:
    assert json.loads(node.good("ray", "resources")) == RESOURCES


def test_a_node_is_started_with_the_resources_and_all_options(node: Cli) -> None:
    resources = f"--resources={json.dumps(RESOURCES)}"
    assert started(node) == ["start", resources, "0"]
    options = ["--address=head:6379", "--num-gpus", "0", "--help-me", "-v", "word"]
    assert started(node, *options) == ["start", resources, *options, "0"]


@pytest.mark.parametrize("option", [["--resources={}"], ["--resources", "{}"]], ids=["joined", "apart"])
def test_resources_given_by_option_are_added_and_take_precedence(node: Cli, option: list[str]) -> None:
    words = [word.replace("{}", '{"yunion_mps": 2, "special": 1}') for word in option]
    found = started(node, "--head", *words, "--block")
    assert found == ["start", '--resources={"yunion_mps": 2, "special": 1}', "--head", "--block", "0"]


def test_the_limit_of_idle_workers_can_be_set(node: Cli) -> None:
    node.env["RAY_num_workers_soft_limit"] = "-1"
    assert started(node)[-1] == "-1"


@pytest.mark.parametrize("text", ["", "4", "[]", "{", '"special"'])
def test_resources_that_are_no_json_object_are_refused(node: Cli, text: str) -> None:
    done = node("ray", "start", "--resources", text)
    assert done.code == 2
    assert f'--resources: {text!r} is not a JSON object such as {{"special": 1}}' in done.err


def test_without_ray_the_command_says_how_to_get_it(node: Cli) -> None:
    node.env["PATH"] = "/nonexistent"
    done = node.process("ray", "start")
    assert done.code == 1
    assert "ray: cannot be started: No such file or directory" in done.err
    assert "install Ray, or run this in its virtual environment: pip install ray" in done.err


def test_a_host_without_devices_for_ray_starts_no_node(cli: Cli) -> None:
    done = cli("ray", "start", "--head")  # its GPU is older than Volta
    assert (done.code, done.out) == (1, "")
    assert "this host has no devices for Ray" in done.err
