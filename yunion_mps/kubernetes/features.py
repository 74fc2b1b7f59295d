"""Node labels without the API server: a feature file that Node Feature Discovery reads.

The format is `NAME=VALUE` on each line. The names of nvidia.com are those of NVIDIA's GPU Feature Discovery,
so its node selectors also match ours. A file whose first line is not our own label belongs to another
program: it is not overwritten or removed.

Source: Node Feature Discovery, Customization guide, section "Local feature source"; for the names, NVIDIA's
k8s-device-plugin, docs/gpu-feature-discovery/README.md, section "Generated Labels".
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from yunion_mps.core.enums import MPS
from yunion_mps.core.tasks import first_of
from yunion_mps.host.files import read_text, write_atomically
from yunion_mps.host.log import Failures
from yunion_mps.kubernetes.options import MIXED, NONE, mig_name

log = logging.getLogger(__name__)

_RETRY_S = 60.0
#: The first label of the file, which shows that it is ours.
_FIRST = "yunion.io/mps.gpus"
#: GPU Feature Discovery's name for everything without a resource of its own.
_GPU = "nvidia.com/gpu"


def is_foreign_feature_file(path: str) -> bool:
    """Return whether something exists at `path` that is not a feature file of this plugin."""
    if not os.path.isfile(path):
        return os.path.lexists(path)
    return not read_text(path).startswith(f"{_FIRST}=")


class GpuKind(NamedTuple):
    """A GPU or MIG instance, and one way in which it is shared."""

    #: Its UUID.
    gpu: str
    sharing: str
    #: The profile of a MIG instance; None for a GPU.
    mig_profile: str | None = None


def labels_of(
    devices: Mapping[GpuKind, int],
    pools: Collection[str],
    memory_units: int | None = None,
    mig_strategy: str = NONE,
) -> dict[str, str]:
    """Return the node's labels, which do not depend on the health of what is offered; none if nothing is.

    devices: the number of devices of each GPU
    pools: the GPUs whose memory is offered
    memory_units: how many units of memory are offered; None if memory is not counted in units
    mig_strategy: the option `migStrategy`, as of NVIDIA's device plugin
    """
    if not devices and not pools:
        return {}
    gpus = {kind.gpu for kind in devices}.union(pools)
    has_mps = bool(pools) or any(kind.sharing == MPS for kind in devices)
    labels = {
        _FIRST: str(len(gpus)),
        "nvidia.com/mps.capable": "true" if has_mps else "false",
        "yunion.io/mps.devices": str(sum(devices.values())),
    }
    if memory_units is not None:
        labels["yunion.io/mps.memory-units"] = str(memory_units)
    if mig_strategy != NONE:
        labels["nvidia.com/mig.strategy"] = mig_strategy
    numbers: dict[str, Counter[str]] = {}
    ways: dict[str, set[str]] = {_GPU: {MPS}} if pools else {}
    for kind, number in devices.items():
        resource = _GPU
        if kind.mig_profile is not None and mig_strategy == MIXED:
            resource = f"nvidia.com/{mig_name(kind.mig_profile)}"
        numbers.setdefault(resource, Counter())[kind.gpu] += number
        ways.setdefault(resource, set()).add(kind.sharing)
    for resource, sharing in ways.items():
        by_gpu = numbers.get(resource, Counter())
        if resource != _GPU:
            labels[f"{resource}.count"] = str(len(by_gpu))
        labels.update(_common(f"{resource}.sharing-strategy", sharing))
        labels.update(_common(f"{resource}.replicas", by_gpu.values()))
    return labels


def _common(label: str, values: Iterable[object]) -> dict[str, str]:
    """Return the label if there is one value, which is true of all GPUs."""
    different = set(values)
    if len(different) != 1:
        return {}
    return {label: str(different.pop())}


class FeatureFile:
    """Keeps the file current, and removes it at the end: labels of a node that offers nothing are wrong."""

    def __init__(
        self, path: str, labels: Callable[[], dict[str, str]], changes: Callable[[], Iterable[asyncio.Event]]
    ) -> None:
        """`changes` returns the events that are set when the result of `labels` may have changed."""
        self._path = path
        self._labels = labels
        self._changes = changes

    async def run(self) -> None:
        """Write the file whenever the labels change, without end; then remove it."""
        written: dict[str, str] = {}
        failures = Failures(log)
        try:
            while True:
                changes = self._changes()
                labels = self._labels()
                try:
                    self._write(labels, written)
                    written = labels
                    failures.clear()
                except OSError as error:
                    failures.report(f"featureFile {self._path} cannot be written: {error.strerror}")
                ends: list[Awaitable[object]] = [changed.wait() for changed in changes]
                if failures.cause:
                    ends.append(asyncio.sleep(_RETRY_S))
                await first_of(*ends)
        finally:
            self._remove()

    def _write(self, labels: dict[str, str], written: dict[str, str]) -> None:
        if not labels:
            self._remove()
        elif labels != written:
            if is_foreign_feature_file(self._path):
                raise FileExistsError(errno.EEXIST, "the file there is not this plugin's")
            text = "".join(f"{name}={value}\n" for name, value in labels.items())
            # NFD reads every file in the directory that is not hidden
            write_atomically(self._path, text, hidden=True)
            log.info("%s: wrote %s node labels", self._path, len(labels))

    def _remove(self) -> None:
        if not is_foreign_feature_file(self._path):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
