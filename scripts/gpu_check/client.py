"""One CUDA client in a process of its own: `gpu-check --client MODE LIBCUDA NUMBER`.

It prints events, one JSON object a line, each with `t`, the machine's monotonic clock in seconds: first
`ready` or `error`, then what its mode says. An error ends it, and so does the end of its input.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Sequence
from typing import Any

from yunion_mps.doctor.cuda_client import (
    MPS_ENABLED,
    MULTIPROCESSOR_COUNT,
    CudaDriver,
    CudaError,
    CudaGpu,
)

#: A kernel of about one millisecond that leaves most of the GPU to others.
_SMALL = (8, 100_000)
#: Blocks for each SM of a kernel that fills the GPU, and its iterations: some milliseconds on the whole GPU.
_LARGE = (32, 10_000)
_BEAT_S = 0.05
_WARM_S = 0.4  # an idle GPU's clocks are low, and take a while to rise
_MEASURED_S = 1.0

#: Neither mapped nor mappable: the first page.
_BAD_ADDRESS = 0x10


class FaultingGpu(CudaGpu):
    """The doctor's CUDA client, which can also write to an invalid address."""

    def fault(self) -> None:
        """Launch a kernel that does so; raises CudaError, and the context cannot be used afterwards."""
        self.marks.value = _BAD_ADDRESS
        self.work(1, 1)


def main(arguments: Sequence[str]) -> int:
    """Run a client; returns 3 if a call of CUDA failed."""
    mode, libcuda, number = arguments
    try:
        begun_s = time.monotonic()
        gpu = FaultingGpu(CudaDriver(libcuda))
        gpu.work(1, 1)
        _say(
            "ready",
            cuda_s=round(time.monotonic() - begun_s, 4),
            name=gpu.name(),
            mps=gpu.attribute(MPS_ENABLED),
            multiprocessors=gpu.attribute(MULTIPROCESSOR_COUNT),
        )
        MODES[mode](gpu, int(number))
    except CudaError as error:
        _say("error", **error.as_json())
        return 3
    return 0


def _say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, "t": time.monotonic(), **values}), flush=True)


def _hold(_: CudaGpu, __: int) -> None:
    """Stay attached."""
    sys.stdin.readline()


def _beat(gpu: CudaGpu, mib: int) -> None:
    """Allocate `mib`, then launch small kernels; tell every 50 ms how many, and the longest pause."""
    if mib:
        gpu.allocate(mib)
    launches = 0
    longest_s = 0.0
    last_s = told_s = time.monotonic()
    while not select.select([0], [], [], 0)[0]:  # no line has come, and no end
        gpu.work(*_SMALL)
        launches += 1
        now_s = time.monotonic()
        longest_s = max(longest_s, now_s - last_s)
        last_s = now_s
        if now_s - told_s >= _BEAT_S:
            _say("beat", launches=launches, longest_s=round(longest_s, 4))
            told_s = now_s
            longest_s = 0.0


def _fault(gpu: FaultingGpu, _: int) -> None:
    """Fault once told to."""
    sys.stdin.readline()
    gpu.fault()


def _memory(gpu: CudaGpu, limit_mib: int) -> None:
    """Measure how much can be allocated if the limit should be `limit_mib`, in one block and in many."""
    free_mib, total_mib = gpu.memory_mib()
    taken_mib = 0
    refusal = ""
    # The last blocks have 2 MiB, CUDA's unit of allocation. 2 GiB above the limit there is obviously none.
    for block_mib in (1024, 128, 16, 2):
        while taken_mib + block_mib <= limit_mib + 2048:
            try:
                gpu.allocate(block_mib)
            except CudaError as error:
                refusal = str(error)
                break
            taken_mib += block_mib
    gpu.release()
    _say(
        "result",
        limit_mib=limit_mib,
        free_mib=round(free_mib),
        total_mib=round(total_mib),
        taken_mib=taken_mib,
        refusal=refusal,
        block_below=_can_allocate(gpu, max(2, min(taken_mib, limit_mib) - 64)),
        block_above=_can_allocate(gpu, limit_mib + 2),
    )


def _can_allocate(gpu: CudaGpu, mib: int) -> bool:
    try:
        gpu.allocate(mib)
    except CudaError:
        return False
    gpu.release()
    return True


def _throughput(gpu: CudaGpu, multiprocessors: int) -> None:
    """Measure kernels that fill the GPU, which has so many SMs: the SMs used and, once told to, the rate."""
    per_sm, iterations = _LARGE
    blocks = per_sm * multiprocessors
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + _WARM_S:
        gpu.work(blocks, iterations)
    used = gpu.multiprocessors_used(blocks, iterations)
    _say("warm")
    sys.stdin.readline()
    launches = 0
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + _MEASURED_S:
        gpu.work(blocks, iterations)
        launches += 1
    _say("result", per_s=launches / (time.monotonic() - begun_s), used=used)


MODES = {"hold": _hold, "beat": _beat, "fault": _fault, "memory": _memory, "throughput": _throughput}
