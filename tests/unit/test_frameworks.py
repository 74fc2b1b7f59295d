"""Caps on the frameworks' memory. The frameworks are stand-ins with the documented calls, not themselves."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from yunion_mps.core.errors import HostError
from yunion_mps.frameworks import cap_memory

GIB = 1 << 30


class DeviceProperties(NamedTuple):
    """PyTorch's, of a GPU."""

    total_memory: int


class LogicalDeviceConfiguration(NamedTuple):
    """TensorFlow's, in MiB."""

    memory_limit: int


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """PyTorch with two GPUs of 16 GiB; the fractions that were set, by GPU."""
    fractions: list[tuple[float, int]] = []
    module: Any = ModuleType("torch")
    module.cuda = ModuleType("torch.cuda")
    module.cuda.device_count = lambda: 2
    module.cuda.get_device_properties = lambda device: DeviceProperties(total_memory=16 * GIB)
    module.cuda.set_per_process_memory_fraction = lambda fraction, device: fractions.append(
        (fraction, device)
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return fractions


@pytest.fixture
def tensorflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TensorFlow with a GPU; its limits are in `limits`, and `started` makes it refuse, as documented."""
    module: Any = ModuleType("tensorflow")
    module.limits, module.started = {}, False

    def configure(gpu: str, devices: list[LogicalDeviceConfiguration]) -> None:
        if module.started:
            raise RuntimeError("Virtual devices cannot be modified after being initialized")
        module.limits[gpu] = [device.memory_limit for device in devices]

    module.config = ModuleType("tensorflow.config")
    module.config.list_physical_devices = lambda kind: [f"{kind}:0"]
    module.config.LogicalDeviceConfiguration = LogicalDeviceConfiguration
    module.config.set_logical_device_configuration = configure
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    return module


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YUNION_MPS_MEMORY_MIB", "4096")


def test_pytorch_gets_its_fraction_of_each_gpu(torch: list[tuple[float, int]]) -> None:
    assert cap_memory() == {"torch": 4096}
    assert torch == [(0.25, 0), (0.25, 1)]


def test_tensorflow_gets_a_logical_device_of_the_budget(tensorflow: Any) -> None:
    assert cap_memory() == {"tensorflow": 4096}
    assert tensorflow.limits == {"GPU:0": [4096]}


def test_a_budget_larger_than_a_gpu_is_all_of_it(
    torch: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YUNION_MPS_MEMORY_MIB", "99999")
    cap_memory("torch")
    assert torch == [(1.0, 0), (1.0, 1)]


def test_only_named_frameworks_are_capped(torch: list[tuple[float, int]], tensorflow: Any) -> None:
    assert cap_memory("tensorflow") == {"tensorflow": 4096}
    assert torch == []


def test_no_framework_is_imported_unless_it_is_named() -> None:
    assert cap_memory() == {}
    assert not {"torch", "tensorflow"} & sys.modules.keys()


def test_without_a_budget_nothing_is_capped(
    torch: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("YUNION_MPS_MEMORY_MIB")
    assert (cap_memory("torch"), torch) == ({}, [])


@pytest.mark.parametrize("value", ["", "0", "4 GiB", "9" * 5000, "\N{SUPERSCRIPT TWO}"], ids=len)
def test_a_budget_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("YUNION_MPS_MEMORY_MIB", value)
    with pytest.raises(HostError, match="not a number of MiB"):
        cap_memory()


def test_a_framework_that_has_started_says_when_to_call_this(tensorflow: Any) -> None:
    tensorflow.started = True
    with pytest.raises(HostError, match="tensorflow cannot be capped at 4096 MiB: Virtual dev") as caught:
        cap_memory()
    assert caught.value.hint.startswith("call cap_memory() before the first use of a GPU")


def test_a_framework_that_sees_no_gpu_is_not_capped(torch: list[tuple[float, int]], tensorflow: Any) -> None:
    sys.modules["torch"].cuda.device_count = lambda: 0
    tensorflow.config.list_physical_devices = lambda kind: []
    assert (cap_memory(), torch, tensorflow.limits) == ({}, [], {})


def test_a_framework_without_cuda_is_an_error(torch: list[tuple[float, int]]) -> None:
    def refuse(device: int) -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    sys.modules["torch"].cuda.get_device_properties = refuse
    with pytest.raises(HostError, match="torch cannot be capped at 4096 MiB: Torch not compiled"):
        cap_memory()
    del sys.modules["torch"].cuda
    with pytest.raises(HostError, match="torch cannot be capped at 4096 MiB: module"):
        cap_memory()


def test_a_value_that_the_framework_refuses_is_an_error(tensorflow: Any) -> None:
    """As TensorFlow does where it has set memory growth of the GPU before."""

    def refuse(*_: object) -> None:
        raise ValueError("Cannot set memory growth and virtual devices")

    tensorflow.config.set_logical_device_configuration = refuse
    with pytest.raises(HostError, match="tensorflow cannot be capped at 4096 MiB: Cannot set memory"):
        cap_memory()


def test_a_framework_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    with pytest.raises(HostError, match="torch cannot be capped at 4096 MiB"):
        cap_memory("torch")


def test_an_unknown_framework_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown framework 'jax': use torch or tensorflow"):
        cap_memory("mxnet", "torch", "jax")


@pytest.mark.parametrize("text", ["", "4GiB", "0", "-1", "٣٢"])
def test_an_invalid_budget_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YUNION_MPS_MEMORY_MIB", text)
    with pytest.raises(HostError, match="YUNION_MPS_MEMORY_MIB is"):
        cap_memory()
