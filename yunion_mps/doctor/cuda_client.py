"""CUDA's driver API through ctypes, and a small program that uses it: `python3 cuda_client.py OVER_MIB`.

The program prints a line of JSON: what it was given, or the `call`, `code` and `name` of a failure. Its
argument is a size in MiB that it should not get. It runs by its path, as a separate process of any user in
any environment, so it imports nothing of ours. `scripts/gpu-check` uses the same classes.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, TypedDict, final

MIB = 1 << 20
# Names of enum CUdevice_attribute in cuda.h.
MULTIPROCESSOR_COUNT = 16
MPS_ENABLED = 133
_OUT_OF_MEMORY = 2
#: Our own codes: there is no library, or it lacks the call.
NO_LIBRARY = -1
NO_CALL = -2

#: More SMs than any GPU has; the kernel writes one word for each.
_MAX_MULTIPROCESSORS = 1024
_THREADS = 256
#: The program's launch: more blocks than any GPU runs at a time, for a few milliseconds at most.
_BLOCKS = 2048
_ITERATIONS = 4096

#: PTX version and target, tried in this order: the driver decides which one compiles. sm_75 needs PTX 6.3.
_TARGETS = (("6.3", "sm_75"), ("6.0", "sm_70"), ("6.0", "sm_50"), ("8.0", "sm_90"))
#: PTX text, which every driver compiles for its GPU. `work` keeps four independent chains of multiply-adds
#: busy in every thread, so that blocks spread over all SMs, and records the SM of each block.
_WORK = """
.visible .entry work(.param .u64 marks, .param .u32 iterations)
{
    .reg .pred %again, %never, %first;
    .reg .f32 %a, %b, %c, %d, %m, %n;
    .reg .u32 %i, %end, %thread, %sm, %one;
    .reg .u64 %base, %place, %offset;

    ld.param.u64 %base, [marks];
    ld.param.u32 %end, [iterations];
    cvta.to.global.u64 %base, %base;
    mov.u32 %thread, %tid.x;
    cvt.rn.f32.u32 %a, %thread;
    add.f32 %b, %a, 0f3F800000;
    add.f32 %c, %a, 0f40000000;
    add.f32 %d, %a, 0f40400000;
    mov.f32 %m, 0f3F7FF972;
    mov.f32 %n, 0f3A83126F;
    mov.u32 %i, 0;
    mov.u32 %one, 1;
LOOP:
    fma.rn.f32 %a, %a, %m, %n;
    fma.rn.f32 %b, %b, %m, %n;
    fma.rn.f32 %c, %c, %m, %n;
    fma.rn.f32 %d, %d, %m, %n;
    fma.rn.f32 %a, %a, %m, %n;
    fma.rn.f32 %b, %b, %m, %n;
    fma.rn.f32 %c, %c, %m, %n;
    fma.rn.f32 %d, %d, %m, %n;
    add.u32 %i, %i, 1;
    setp.lt.u32 %again, %i, %end;
    @%again bra LOOP;
    add.f32 %a, %a, %b;
    add.f32 %c, %c, %d;
    add.f32 %a, %a, %c;
    setp.lt.f32 %never, %a, 0fFF000000;
    @%never st.global.f32 [%base], %a;
    setp.eq.u32 %first, %thread, 0;
    mov.u32 %sm, %smid;
    mul.wide.u32 %offset, %sm, 4;
    add.u64 %place, %base, %offset;
    @%first st.global.u32 [%place], %one;
    ret;
}
"""


@final
class Failure(TypedDict):
    """A failed call, as the program prints it."""

    call: str
    code: int
    name: str


@final
class DeviceProbe(TypedDict):
    """What the program was given: memory in MiB, the GPU's SMs and those that its kernel ran on."""

    name: str
    mps: int | None
    memory_mib: int
    multiprocessors: int | None
    used: int
    over_budget: bool


class CudaError(Exception):
    """A call of CUDA's driver API failed, with the `code` of this `name` (CUresult in cuda.h)."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call = call
        self.code = code
        self.name = name

    def as_json(self) -> Failure:
        """Return the failure as the program prints it."""
        return {"call": self.call, "code": self.code, "name": self.name}


class CudaDriver:
    """libcuda; the constructor raises CudaError if it cannot be loaded."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise CudaError("dlopen", NO_LIBRARY, str(error)) from None

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library.

        Raises CudaError if it fails, or is missing.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaError(name, NO_CALL, "missing in libcuda") from None
        code = function(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(c_int(code), byref(text))
            raise CudaError(name, code, text.value.decode() if text.value else f"error {code}")


class CudaGpu:
    """The first device with its primary context current and the kernel loaded; methods raise CudaError."""

    def __init__(self, driver: CudaDriver) -> None:
        self._call = driver.call
        self._allocations: list[int] = []
        self._device = c_int()
        self._context = c_void_p()
        self._module = c_void_p()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGet", byref(self._device), c_int(0))
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        self._load()
        self._work = c_void_p()
        self._call("cuModuleGetFunction", byref(self._work), self._module, c_char_p(b"work"))
        #: The address to which the kernel writes.
        self.marks = c_uint64(self._allocate(_MAX_MULTIPROCESSORS * 4))

    def _load(self) -> None:
        first: CudaError | None = None
        for version, target in _TARGETS:
            text = f".version {version}\n.target {target}\n.address_size 64\n{_WORK}"
            try:
                self._call("cuModuleLoadData", byref(self._module), c_char_p(text.encode()))
            except CudaError as error:
                first = first or error
            else:
                return
        assert first is not None
        raise first

    def name(self) -> str:
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, c_int(len(name)), self._device)
        return name.value.decode(errors="replace")

    def attribute(self, number: int) -> int | None:
        """Return an attribute of the device; None if this driver does not know it."""
        value = c_int()
        try:
            self._call("cuDeviceGetAttribute", byref(value), c_int(number), self._device)
        except CudaError:
            return None
        return value.value

    def memory_mib(self) -> tuple[float, float]:
        """Return free and total memory in MiB, as this client sees it."""
        free = c_size_t()
        total = c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value / MIB, total.value / MIB

    def _allocate(self, size: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def allocate(self, mib: int) -> None:
        """Allocate memory of the device, until `release`."""
        self._allocations.append(self._allocate(mib * MIB))

    def release(self) -> None:
        """Free what `allocate` has allocated."""
        while self._allocations:
            self._call("cuMemFree_v2", c_uint64(self._allocations.pop()))

    def work(self, blocks: int, iterations: int) -> None:
        """Run the computing kernel and wait for its end."""
        marks = self.marks
        count = c_uint(iterations)
        arguments = (c_void_p * 2)(ctypes.addressof(marks), ctypes.addressof(count))
        grid = [c_uint(number) for number in (blocks, 1, 1, _THREADS, 1, 1)]
        launch: list[Any] = [
            "cuLaunchKernel",
            self._work,
            *grid,
            c_uint(0),
            c_void_p(),
            arguments,
            c_void_p(),
        ]
        self._call(*launch)
        self._call("cuCtxSynchronize")

    def multiprocessors_used(self, blocks: int, iterations: int) -> int:
        """Return how many SMs the blocks of one launch ran on."""
        marks = (c_uint * _MAX_MULTIPROCESSORS)()
        self._call("cuMemsetD32_v2", self.marks, c_uint(0), c_size_t(len(marks)))
        self.work(blocks, iterations)
        self._call("cuMemcpyDtoH_v2", marks, self.marks, c_size_t(ctypes.sizeof(marks)))
        return len(list(filter(None, marks)))


def _can_allocate(gpu: CudaGpu, mib: int) -> bool:
    try:
        gpu.allocate(mib)
    except CudaError as error:
        if error.code == _OUT_OF_MEMORY:
            return False
        raise
    gpu.release()
    return True


def main(over_mib: int) -> DeviceProbe:
    """Return what a client is given.

    Raises CudaError if a call fails.
    """
    gpu = CudaGpu(CudaDriver())
    return {
        "name": gpu.name(),
        "mps": gpu.attribute(MPS_ENABLED),
        "memory_mib": int(gpu.memory_mib()[1]),
        "multiprocessors": gpu.attribute(MULTIPROCESSOR_COUNT),
        "used": gpu.multiprocessors_used(_BLOCKS, _ITERATIONS),
        "over_budget": _can_allocate(gpu, over_mib),
    }


if __name__ == "__main__":
    answer: DeviceProbe | Failure
    try:
        answer = main(int(sys.argv[1]))
    except CudaError as error:
        answer = error.as_json()
    os.write(1, json.dumps(answer).encode())
    os._exit(0)  # a driver that hangs at exit has nothing to add
