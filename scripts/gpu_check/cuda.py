"""CUDA's driver API through ctypes: as little of it as the clients need, and every error with its name."""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from gpu_check import ptx

MIB = 1 << 20

# Names of enum CUdevice_attribute in cuda.h.
_MULTIPROCESSOR_COUNT = 16
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_MPS_ENABLED = 133

#: Neither mapped nor mappable: the first page.
BAD_ADDRESS = 0x10


class CudaError(Exception):
    """A call that failed: its name, CUDA's code (-1: the call or library is missing) and the code's name."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call = call
        self.code = code
        self.name = name

    def as_json(self) -> dict[str, Any]:
        """The error as clients report it, `t` being the monotonic clock that all processes share."""
        return {"call": self.call, "code": self.code, "name": self.name, "t": time.monotonic()}


class Driver:
    """libcuda; raises CudaError where it cannot be loaded."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise CudaError("dlopen", -1, str(error)) from None

    def call(self, name: str, *arguments: Any) -> None:
        """Make one call; raises CudaError unless it succeeds."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaError(name, -1, "missing in libcuda") from None
        code = function(*arguments)
        if code:
            raise CudaError(name, code, self.name_of(code))

    def name_of(self, code: int) -> str:
        """CUDA's own name of an error code."""
        text = c_char_p()
        self._library.cuGetErrorName(c_int(code), byref(text))
        return text.value.decode() if text.value else f"error {code}"

    def version(self) -> str:
        """CUDA's version that the driver offers, e.g. 13.0."""
        number = c_int()
        self.call("cuDriverGetVersion", byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"


class Gpu:
    """One device with its primary context current and the kernels loaded; raises CudaError."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._call = driver.call
        self._driver = driver
        self.seconds: dict[str, float] = {}
        self._allocations: list[int] = []
        self._timed("cuInit", c_uint(0))
        self._device = c_int()
        self._call("cuDeviceGet", byref(self._device), c_int(ordinal))
        self._context = c_void_p()
        self._timed("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        self.target = self._load()
        self._work = self._function("work")
        self._fault = self._function("fault")
        self._marks = c_uint64(self._allocate(ptx.MOST_MULTIPROCESSORS * 4))

    def _timed(self, name: str, *arguments: Any) -> None:
        start_s = time.monotonic()
        self._call(name, *arguments)
        self.seconds[name] = round(time.monotonic() - start_s, 4)

    def _load(self) -> str:
        self._module = c_void_p()
        start_s = time.monotonic()
        first: CudaError | None = None
        for version, target in ptx.TARGETS:
            try:
                self._call("cuModuleLoadData", byref(self._module), c_char_p(ptx.module(version, target)))
            except CudaError as error:
                first = first or error
            else:
                self.seconds["cuModuleLoadData"] = round(time.monotonic() - start_s, 4)
                return target
        assert first is not None
        raise first

    def _function(self, name: str) -> c_void_p:
        function = c_void_p()
        self._call("cuModuleGetFunction", byref(function), self._module, c_char_p(name.encode()))
        return function

    def facts(self) -> dict[str, Any]:
        """What the device says of itself, as it looks from this client."""
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, c_int(len(name)), self._device)
        total = c_size_t()
        self._call("cuDeviceTotalMem_v2", byref(total), self._device)
        major, minor = self._attribute(_CAPABILITY_MAJOR), self._attribute(_CAPABILITY_MINOR)
        mps = self._attribute(_MPS_ENABLED)
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return {
            "cuda": self._driver.version(),
            "name": name.value.decode(errors="replace"),
            "uuid": self._uuid(),
            "memory_mib": total.value // MIB,
            "multiprocessors": self._attribute(_MULTIPROCESSOR_COUNT),
            "capability": f"{major}.{minor}",
            "mps": None if mps is None else bool(mps),
            "devices_seen": count.value,
            "ptx_target": self.target,
            "seconds": self.seconds,
        }

    def _attribute(self, number: int) -> int | None:
        value = c_int()
        try:
            self._call("cuDeviceGetAttribute", byref(value), c_int(number), self._device)
        except CudaError:
            return None  # this driver does not know it
        return value.value

    def _uuid(self) -> str:
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid", raw, self._device)
        text = bytes(raw).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def memory_mib(self) -> tuple[float, float]:
        """Free and total memory in MiB, as this client may see it."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value / MIB, total.value / MIB

    def _allocate(self, size: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def allocate(self, mib: int) -> None:
        """Take one piece of memory until `release`."""
        self._allocations.append(self._allocate(mib * MIB))

    def release(self) -> None:
        """Give back all that `allocate` took."""
        while self._allocations:
            self._call("cuMemFree_v2", c_uint64(self._allocations.pop()))

    def work(self, blocks: int, iterations: int, launches: int = 1) -> None:
        """Run the kernel that computes, and wait for its end."""
        marks, count = self._marks, c_uint(iterations)
        arguments = (c_void_p * 2)(ctypes.addressof(marks), ctypes.addressof(count))
        for _ in range(launches):
            self._launch(self._work, blocks, ptx.THREADS, arguments)
        self._call("cuCtxSynchronize")

    def fault(self) -> None:
        """Store to an address that is not there; raises CudaError, and this context is lost after it."""
        address = c_uint64(BAD_ADDRESS)
        self._launch(self._fault, 1, 1, (c_void_p * 1)(ctypes.addressof(address)))
        self._call("cuCtxSynchronize")

    def _launch(self, function: c_void_p, blocks: int, threads: int, arguments: Any) -> None:
        grid = [c_uint(number) for number in (blocks, 1, 1, threads, 1, 1)]
        self._call("cuLaunchKernel", function, *grid, c_uint(0), c_void_p(), arguments, c_void_p())

    def multiprocessors_used(self, blocks: int, iterations: int) -> int:
        """On how many SMs the blocks of one launch ran."""
        words = ptx.MOST_MULTIPROCESSORS
        self._call("cuMemsetD32_v2", self._marks, c_uint(0), c_size_t(words))
        self.work(blocks, iterations)
        marks = (c_uint * words)()
        self._call("cuMemcpyDtoH_v2", marks, self._marks, c_size_t(words * 4))
        return sum(1 for mark in marks if mark)

    def close(self) -> None:
        """Give the context back."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)
