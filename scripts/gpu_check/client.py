"""One CUDA client, in its own process so that it has its own environment: `gpu-check --client`.

It reads commands from standard input and writes events to standard output, one JSON object per line. Every
event has `t`, the machine's monotonic clock in seconds. The first event is `started`, the next `ready` or
`error`; each command gets a `reply`. The client exits at the end of its input.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from yunion_mps.doctor.cuda_client import (
    MIB,
    MPS_ENABLED,
    MULTIPROCESSOR_COUNT,
    WORK,
    CudaDriver,
    CudaError,
    CudaGpu,
)

from gpu_check.processes import die_with_parent

_PR_SET_DUMPABLE = 4
_MAX_LAUNCH_S = 0.002
_BEAT_S = 0.05
_WARM_S = 0.5  # an idle GPU's clocks are low, and take a while to rise

_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
#: Neither mapped nor mappable: the first page.
_BAD_ADDRESS = 0x10
#: Stores to an address that does not exist.
_FAULT = """
.visible .entry fault(.param .u64 address)
{
    .reg .u32 %one;
    .reg .u64 %place;

    ld.param.u64 %place, [address];
    mov.u32 %one, 1;
    st.global.u32 [%place], %one;
    ret;
}
"""


class TimedDriver(CudaDriver):
    """Records how long the startup calls took; raises CudaError."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.seconds = dict.fromkeys(("cuInit", "cuDevicePrimaryCtxRetain", "cuModuleLoadData"), 0.0)

    def call(self, name: str, *arguments: Any) -> None:
        """Make one call; raises CudaError unless it succeeds."""
        start_s = time.monotonic()
        super().call(name, *arguments)
        if name in self.seconds:
            self.seconds[name] = round(time.monotonic() - start_s, 4)


class CheckedGpu(CudaGpu):
    """The GPU, with the queries and the faulty kernel that the steps need."""

    def __init__(self, driver: TimedDriver, ordinal: int) -> None:
        super().__init__(driver, ordinal, WORK + _FAULT)
        self._seconds = driver.seconds
        self._fault = self.function("fault")

    def facts(self) -> dict[str, Any]:
        """What CUDA reports about the device to this client."""
        version, total, count = c_int(), c_size_t(), c_int()
        self.call("cuDriverGetVersion", byref(version))
        self.call("cuDeviceTotalMem_v2", byref(total), self.device)
        self.call("cuDeviceGetCount", byref(count))
        mps = self.attribute(MPS_ENABLED)
        return {
            "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
            "name": self.name(),
            "uuid": self._uuid(),
            "memory_mib": total.value // MIB,
            "multiprocessors": self.attribute(MULTIPROCESSOR_COUNT),
            "capability": f"{self.attribute(_CAPABILITY_MAJOR)}.{self.attribute(_CAPABILITY_MINOR)}",
            "mps": None if mps is None else bool(mps),
            "devices_seen": count.value,
            "ptx_target": self.target,
            "seconds": self._seconds,
        }

    def _uuid(self) -> str:
        raw = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid", raw, self.device)
        text = bytes(raw).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def fault(self) -> None:
        """Write to an invalid address; raises CudaError and makes this context unusable."""
        address = c_uint64(_BAD_ADDRESS)
        self.launch(self._fault, 1, 1, (c_void_p * 1)(ctypes.addressof(address)))
        self.call("cuCtxSynchronize")

    def close(self) -> None:
        """Release the context."""
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)


def main(arguments: Sequence[str]) -> int:
    """Run a client until its input ends; returns 3 if it cannot use a GPU."""
    options = _parse(arguments)
    die_with_parent()
    if options.uid is not None:
        _become(options.uid)
    _say("started", pid=os.getpid(), uid=os.getuid())
    try:
        gpu = CheckedGpu(TimedDriver(options.libcuda), options.device)
        gpu.work(1, 1)
        facts = gpu.facts()
    except CudaError as error:
        _say("error", **error.as_json())
        return 3
    _say("ready", **facts)
    Commands(gpu).serve()
    try:
        gpu.close()
    except CudaError as error:
        _say("error", **error.as_json())
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu-check --client")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--uid", type=int)
    parser.add_argument("--libcuda", default="libcuda.so.1")
    return parser.parse_args(arguments)


def _become(uid: int) -> None:
    """Switch to another user, after importing what that user may not be able to read."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    # Its new user cannot inspect a process that has changed its user, but can inspect a real client.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    die_with_parent()


def _say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, "t": time.monotonic(), **values}), flush=True)


class Commands:
    """The client's commands, each a method of that name."""

    def __init__(self, gpu: CheckedGpu) -> None:
        self._gpu = gpu
        self._input = b""
        self._ended = False

    def serve(self) -> None:
        """Execute commands until the input ends."""
        while (line := self._line(None)) is not None:
            request = json.loads(line)
            name = request.pop("do")
            if name == "quit":
                return
            command: Callable[..., dict[str, Any]] = getattr(self, name)
            try:
                reply = {"ok": True, **command(**request)}
            except CudaError as error:
                reply = {"ok": False, "error": error.as_json()}
            _say("reply", to=name, **reply)

    def _line(self, timeout_s: float | None) -> bytes | None:
        """Return the next line; None at the end of the input, b"" at the timeout."""
        while b"\n" not in self._input:
            if self._ended:
                return None
            if not select.select([0], [], [], timeout_s)[0]:
                return b""
            part = os.read(0, 65536)
            self._ended = not part
            self._input += part
        line, _, self._input = self._input.partition(b"\n")
        return line

    def memory(self) -> dict[str, Any]:
        """Free and total memory as seen by this client."""
        free, total = self._gpu.memory_mib()
        return {"free_mib": round(free, 1), "total_mib": round(total, 1)}

    def allocate(self, mib: int) -> dict[str, Any]:
        """Allocate one block, and free it at once."""
        try:
            self._gpu.allocate(mib)
        finally:
            self._gpu.release()
        return {"mib": mib}

    def fill(self, cap_mib: int) -> dict[str, Any]:
        """Allocate ever smaller blocks until allocation fails or `cap_mib` is reached; then free all.

        The last blocks have 2 MiB, the driver's unit of allocation.
        """
        taken = 0
        last: CudaError | None = None
        for piece in (1024, 128, 16, 2):
            while taken + piece <= cap_mib:
                try:
                    self._gpu.allocate(piece)
                except CudaError as error:
                    last = error
                    break
                taken += piece
        self._gpu.release()
        return {
            "mib": taken,
            "capped": taken + 2 > cap_mib,
            "refusal": last.as_json() if last else None,
        }

    def calibrate(self, blocks: int) -> dict[str, Any]:
        """Return how many iterations one launch takes to run for about a millisecond, alone on the GPU."""
        iterations = 1 << 12
        seconds = 0.0
        self.work(0.0, _WARM_S, blocks, iterations)
        while iterations < 1 << 24:
            start_s = time.monotonic()
            self._gpu.work(blocks, iterations)
            seconds = time.monotonic() - start_s
            if seconds > _MAX_LAUNCH_S:
                break
            iterations *= 2
        return {"iterations": max(1, int(iterations * 0.001 / max(seconds, 1e-6)))}

    def work(
        self, start: float, seconds: float, blocks: int, iterations: int, batch: int = 4
    ) -> dict[str, Any]:
        """Launch kernels for some seconds, beginning at `start` (monotonic seconds)."""
        time.sleep(max(0.0, start - time.monotonic()))  # all clients begin at the same moment
        launches = 0
        begin_s = time.monotonic()
        end_s = begin_s + seconds
        while (now_s := time.monotonic()) < end_s:
            self._gpu.work(blocks, iterations, batch)
            launches += batch
        now_s = time.monotonic()
        return {"launches": launches, "seconds": now_s - begin_s, "per_s": launches / (now_s - begin_s)}

    def multiprocessors(self, blocks: int, iterations: int) -> dict[str, Any]:
        """How many SMs the blocks of one launch ran on."""
        return {"used": self._gpu.multiprocessors_used(blocks, iterations)}

    def beat(self, blocks: int, iterations: int) -> dict[str, Any]:
        """Launch one kernel after another until a line arrives; report a `beat` every 50 ms.

        `gap` is the duration of the longest launch since the last event.
        """
        launches, gap = 0, 0.0
        last_s = told_s = time.monotonic()
        while self._line(0) == b"":
            try:
                self._gpu.work(blocks, iterations)
            except CudaError as error:
                _say("error", launches=launches, **error.as_json())
                self._line(None)
                raise
            launches += 1
            now_s = time.monotonic()
            gap, last_s = max(gap, now_s - last_s), now_s
            if now_s - told_s >= _BEAT_S:
                _say("beat", launches=launches, gap=round(gap, 4))
                told_s, gap = now_s, 0.0
        return {"launches": launches}

    def fault(self) -> dict[str, Any]:
        """Write to an invalid address; the reply has the error."""
        self._gpu.fault()
        return {}
