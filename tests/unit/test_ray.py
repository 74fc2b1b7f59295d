"""What `@ray.remote` takes for a task with a device. It is made without Ray."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from yunion_mps import ray
from yunion_mps.client import YunionError

KEEP = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def test_a_task_requires_a_device_and_leases_it_as_its_worker_starts() -> None:
    assert ray.options() == {
        "resources": {"yunion_mps": 1},
        "runtime_env": {"py_executable": "yunion-mps run --wait -- python", "env_vars": KEEP},
    }
    assert ray.options()["runtime_env"] == ray.runtime_env()
    assert "ray" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "resources", "words"),
    [
        ({"memory": "6GiB"}, {"yunion_mps_memory": 6144}, "--gpu-mem=6144MiB"),
        ({"count": 2}, {"yunion_mps": 2}, "--count=2"),
        ({"memory": "512MiB", "count": 2}, {"yunion_mps_memory": 1024}, "--gpu-mem=512MiB --count=2"),
    ],
)
def test_the_required_resources_match_the_lease(
    arguments: dict[str, Any], resources: dict[str, int], words: str
) -> None:
    found = ray.options(**arguments)
    assert found["resources"] == resources
    assert found["runtime_env"]["py_executable"] == f"yunion-mps run --wait {words} -- python"


def test_other_keys_of_the_runtime_environment_are_kept() -> None:
    others: dict[str, Any] = {"pip": ["torch"], "py_executable": "uv run python", "env_vars": {"A": "1"}}
    expected = {
        "pip": ["torch"],
        "py_executable": "yunion-mps run --wait -- uv run python",
        "env_vars": {**KEEP, "A": "1"},
    }
    assert ray.runtime_env(**others) == expected
    assert ray.options(runtime_env=others)["runtime_env"] == expected
    assert others["env_vars"] == {"A": "1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "6"}, "memory: '6' is not an amount of memory"),
        ({"count": 0}, "invalid value for count: 0"),
    ],
)
def test_wrong_arguments_are_refused_in_the_driver(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(YunionError, match=message):
        ray.options(**arguments)
