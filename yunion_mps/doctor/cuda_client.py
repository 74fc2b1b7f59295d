"""A small CUDA program, run by its path as a process of its own: it says on one line what it was given.

It imports nothing of ours, so that it starts under any user and in any environment. Its argument is a size
in MiB that it should not get; what it prints is JSON: what it has, or the `call`, `code` and `name` of what
failed.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

_MIB = 1 << 20
# Names of enum CUdevice_attribute in cuda.h.
_MULTIPROCESSOR_COUNT = 16
_MPS_ENABLED = 133
_OUT_OF_MEMORY = 2

_MOST_MULTIPROCESSORS = 1024
_BLOCKS = 2048
_THREADS = 128
_CYCLES = 200_000

#: PTX version and target: what compiles is settled by the driver.
_TARGETS = (("6.3", "sm_75"), ("6.0", "sm_70"), ("6.0", "sm_50"), ("8.0", "sm_90"))
#: Each block notes on which SM it runs, and stays for a while so that the others go elsewhere.
_KERNEL = """
.visible .entry work(.param .u64 marks, .param .u32 cycles)
{
    .reg .pred %again;
    .reg .u32 %sm, %one, %cycles;
    .reg .u64 %base, %place, %offset, %begin, %now, %span, %least;

    ld.param.u64 %base, [marks];
    ld.param.u32 %cycles, [cycles];
    cvt.u64.u32 %least, %cycles;
    cvta.to.global.u64 %base, %base;
    mov.u32 %sm, %smid;
    mul.wide.u32 %offset, %sm, 4;
    add.u64 %place, %base, %offset;
    mov.u32 %one, 1;
    st.global.u32 [%place], %one;
    mov.u64 %begin, %clock64;
LOOP:
    mov.u64 %now, %clock64;
    sub.u64 %span, %now, %begin;
    setp.lt.u64 %again, %span, %least;
    @%again bra LOOP;
    ret;
}
"""


class CudaError(Exception):
    """A call that failed, with CUDA's code (-1: no library, -2: it lacks the call) and its name."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.told = {"call": call, "code": code, "name": name}


class Cuda:
    """libcuda; raises CudaError where it cannot be loaded."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError("dlopen", -1, str(error)) from None

    def __call__(self, name: str, *arguments: object) -> None:
        """Make one call; raises CudaError unless it succeeds."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaError(name, -2, "missing in libcuda") from None
        code = function(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(c_int(code), byref(text))
            raise CudaError(name, code, text.value.decode() if text.value else f"error {code}")


def main(over_mib: int) -> dict[str, object]:
    """What a client has; raises CudaError."""
    cuda = Cuda()
    cuda("cuInit", c_uint(0))
    device, context, count = c_int(), c_void_p(), c_int()
    cuda("cuDeviceGetCount", byref(count))
    cuda("cuDeviceGet", byref(device), c_int(0))
    cuda("cuDevicePrimaryCtxRetain", byref(context), device)
    cuda("cuCtxSetCurrent", context)
    name = ctypes.create_string_buffer(256)
    cuda("cuDeviceGetName", name, c_int(len(name)), device)
    free, total = c_size_t(), c_size_t()
    cuda("cuMemGetInfo_v2", byref(free), byref(total))
    return {
        "name": name.value.decode(errors="replace"),
        "devices": count.value,
        "mps": _attribute(cuda, device, _MPS_ENABLED),
        "memory_mib": total.value // _MIB,
        "multiprocessors": _attribute(cuda, device, _MULTIPROCESSOR_COUNT),
        "used": _multiprocessors(cuda),
        "over_budget": _gets(cuda, over_mib * _MIB),
    }


def _attribute(cuda: Cuda, device: c_int, number: int) -> int | None:
    value = c_int()
    try:
        cuda("cuDeviceGetAttribute", byref(value), c_int(number), device)
    except CudaError:
        return None  # this driver does not know it
    return value.value


def _gets(cuda: Cuda, size: int) -> bool:
    """Whether a piece of memory of this size is to be had; it is given back at once."""
    address = c_uint64()
    try:
        cuda("cuMemAlloc_v2", byref(address), c_size_t(size))
    except CudaError as error:
        if error.told["code"] == _OUT_OF_MEMORY:
            return False
        raise
    cuda("cuMemFree_v2", address)
    return True


def _multiprocessors(cuda: Cuda) -> int:
    """On how many SMs the blocks of one launch ran."""
    function, marks = c_void_p(), c_uint64()
    cuda("cuModuleGetFunction", byref(function), _module(cuda), c_char_p(b"work"))
    cuda("cuMemAlloc_v2", byref(marks), c_size_t(_MOST_MULTIPROCESSORS * 4))
    cuda("cuMemsetD32_v2", marks, c_uint(0), c_size_t(_MOST_MULTIPROCESSORS))
    cycles = c_uint(_CYCLES)
    arguments = (c_void_p * 2)(ctypes.addressof(marks), ctypes.addressof(cycles))
    grid = [c_uint(number) for number in (_BLOCKS, 1, 1, _THREADS, 1, 1)]
    cuda("cuLaunchKernel", function, *grid, c_uint(0), c_void_p(), arguments, c_void_p())
    cuda("cuCtxSynchronize")
    found = (c_uint * _MOST_MULTIPROCESSORS)()
    cuda("cuMemcpyDtoH_v2", found, marks, c_size_t(ctypes.sizeof(found)))
    return sum(1 for mark in found if mark)


def _module(cuda: Cuda) -> c_void_p:
    module = c_void_p()
    first: CudaError | None = None
    for version, target in _TARGETS:
        text = f".version {version}\n.target {target}\n.address_size 64\n{_KERNEL}"
        try:
            cuda("cuModuleLoadData", byref(module), c_char_p(text.encode()))
        except CudaError as error:
            first = first or error
        else:
            return module
    assert first is not None
    raise first


if __name__ == "__main__":
    try:
        told = main(int(sys.argv[1]))
    except CudaError as error:
        told = error.told
    os.write(1, json.dumps(told).encode())
    os._exit(0)  # a driver that hangs at its end has nothing to add
