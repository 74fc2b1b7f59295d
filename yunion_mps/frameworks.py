"""Caps PyTorch and TensorFlow at the memory of this process's device, where nothing else does.

A device of a time-sliced GPU, or of one older than Volta, has a budget that nothing enforces. It is in the
environment of the process, from which JAX takes its part by itself (XLA_PYTHON_CLIENT_MEM_FRACTION).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from yunion_mps.core.enums import MEMORY_VARIABLE
from yunion_mps.core.errors import HostError
from yunion_mps.core.text import parse_number

_MIB = 1 << 20


def cap_memory(*frameworks: str) -> dict[str, int]:
    """Cap the frameworks, `torch` or `tensorflow`, and return the MiB of each GPU by framework.

    Those that are named are imported. If none is named, those are capped that the program has imported
    already, and none is imported. Without a budget in the environment, nothing is capped, and neither is a
    framework that sees no GPU. Call it before the first use of a GPU, and in each process that uses one.

    Raises ValueError for another framework, and HostError if one cannot be capped.
    """
    unknown = set(frameworks) - _CAPS.keys()
    if unknown:
        raise ValueError(f"unknown framework {min(unknown)!r}: use {' or '.join(_CAPS)}")
    memory_mib = _budget_mib(os.environ)
    if memory_mib is None:
        return {}
    if not frameworks:
        frameworks = tuple(name for name in _CAPS if name in sys.modules)
    capped = {}
    for name in frameworks:
        try:
            if _CAPS[name](import_module(name), memory_mib):
                capped[name] = memory_mib
        except (AssertionError, AttributeError, ImportError, RuntimeError, ValueError) as error:
            hint = "call cap_memory() before the first use of a GPU, with the framework installed"
            raise HostError(f"{name} cannot be capped at {memory_mib} MiB: {error}", hint) from error
    return capped


def _budget_mib(environment: Mapping[str, str]) -> int | None:
    """Return the budget on each GPU, None if there is none; raises HostError if it is invalid."""
    text = environment.get(MEMORY_VARIABLE)
    if text is None:
        return None
    memory_mib = parse_number(text)
    if not memory_mib:
        raise HostError(f"{MEMORY_VARIABLE} is {text!r}, not a number of MiB", "let yunion-mps run set it")
    return memory_mib


def _cap_torch(torch: Any, memory_mib: int) -> int:
    """Return the number of GPUs that are capped now."""
    # https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.set_per_process_memory_fraction.html
    gpus: int = torch.cuda.device_count()
    for device in range(gpus):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_mib * _MIB / total), device)
    return gpus


def _cap_tensorflow(tensorflow: Any, memory_mib: int) -> int:
    """Return the number of GPUs that are capped now."""
    # https://www.tensorflow.org/guide/gpu#limiting_gpu_memory_growth
    config = tensorflow.config
    gpus = config.list_physical_devices("GPU")
    for gpu in gpus:
        limited = config.LogicalDeviceConfiguration(memory_limit=memory_mib)
        config.set_logical_device_configuration(gpu, [limited])
    return len(gpus)


_CAPS: dict[str, Callable[[Any, int], int]] = {"torch": _cap_torch, "tensorflow": _cap_tensorflow}
