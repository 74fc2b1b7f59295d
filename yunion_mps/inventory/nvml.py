"""NVML: the GPUs, their processes, load and compute modes. Only this package uses `pynvml`.

With a broken GPU, a driver call may hang forever, so every call has a deadline.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from yunion_mps import reasons
from yunion_mps.errors import DriverError, ShortageError
from yunion_mps.host import threads
from yunion_mps.inventory.sysfs import normalise_address
from yunion_mps.models import DEFAULT, EXCLUSIVE_PROCESS, PROHIBITED, Driver, Gpu
from yunion_mps.reasons import NO_REASON, Reason, hint_of
from yunion_mps.text import decode_line, printable

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _import_pynvml() -> Any:
    """Import pynvml without `ctypes.util`: 4 ms of imports for a function that it never calls.

    If a later release does call it, it gets the real one.
    """

    def find_library(name: str) -> str | None:
        return importlib.import_module("ctypes.util").find_library(name)  # type: ignore[no-any-return]

    stand_in = ModuleType("ctypes.util")
    stand_in.find_library = find_library  # type: ignore[attr-defined]
    present = sys.modules.setdefault("ctypes.util", stand_in)
    try:
        return importlib.import_module("pynvml")
    finally:
        if present is stand_in:
            del sys.modules["ctypes.util"]


pynvml = _import_pynvml()

#: Compute modes by NVML's number, with nvidia-smi's names.
COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: DEFAULT,
    pynvml.NVML_COMPUTEMODE_PROHIBITED: PROHIBITED,
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: EXCLUSIVE_PROCESS,
}
_MODE_NUMBERS = {name: number for number, name in COMPUTE_MODES.items()}


def _with_hint(message: str, code: str = reasons.DRIVER_ERROR) -> tuple[str, str, str]:
    return message, hint_of(code), code


#: The message, hint and reason code of NVML errors.
_MEANINGS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: _with_hint(
        "no NVIDIA driver: its library libnvidia-ml.so.1 is not installed", reasons.DRIVER_MISSING
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: _with_hint(
        "the NVIDIA driver's kernel module is not loaded", reasons.DRIVER_NOT_LOADED
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: _with_hint(
        "the NVIDIA driver's library and its kernel module have different versions", reasons.DRIVER_MISMATCH
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: _with_hint(
        "the GPU has fallen off the bus or is otherwise inaccessible (GPU is lost)", reasons.GPU_LOST
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "NVML: permission denied",
        "run as root: systemctl start yunion-mps-daemon",
        reasons.DRIVER_ERROR,
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: (
        "the driver does not support this on the GPU",
        "if this is about the compute mode, set cuda_mps_compute_mode: keep in host.conf",
        reasons.DRIVER_ERROR,
    ),
}

#: Errors that mean a field is unknown, not that the GPU is broken.
_UNKNOWN_FIELD = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
)

_MIB = 1 << 20


#: A driver that has to wake many GPUs takes tens of seconds for the first call.
TIMEOUT_S = 60.0


def reason_of(error: DriverError) -> Reason:
    return Reason(error.message, reasons.GPU_ERROR if error.code == reasons.DRIVER_ERROR else error.code)


def _call(function: Callable[..., Any], *arguments: Any, ignored: Collection[int] = ()) -> Any:
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in ignored:
            return None
        raise DriverError(
            *_MEANINGS.get(error.value) or _with_hint(f"NVML error: {printable(str(error))}")
        ) from None


def _optional(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, None if the driver does not know the field; raises DriverError."""
    return _call(function, *arguments, ignored=_UNKNOWN_FIELD)


def _mib(size: int | None) -> int | None:
    return None if size is None else size // _MIB


def _text(value: Any) -> str:
    return decode_line(value) if isinstance(value, bytes) else printable(str(value))


class Deadline:
    """Makes one call at a time, on a thread that must return within `timeout_s`."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        #: Gets the outcome of a call that took too long.
        self._hanging: SimpleQueue[Any] | None = None

    def call(self, work: Callable[[], T], *, may_hang: bool = False) -> T:
        """Return the result of `work` or raise its error; raises DriverError if it takes too long.

        While an earlier call hangs, no other is made. If no thread can be started, raises ShortageError, or
        with `may_hang` makes the call on the caller's thread without a deadline.
        """
        if self._hanging and self._hanging.empty():
            what = "the NVIDIA driver still does not answer an earlier call"
            raise DriverError(*_with_hint(what, reasons.DRIVER_HUNG))
        outcome: SimpleQueue[tuple[T, BaseException | None]] = SimpleQueue()
        try:
            threads.start(work, lambda *given: outcome.put(given))
        except ShortageError:
            if not may_hang:
                raise
            return work()
        try:
            result, error = outcome.get(timeout=self._timeout_s)
        except Empty:
            self._hanging = outcome
            what = f"the NVIDIA driver did not answer within {self._timeout_s:g} s"
            raise DriverError(*_with_hint(what, reasons.DRIVER_HUNG)) from None
        if error:
            raise error
        return result


def bounded(method: F) -> F:
    @functools.wraps(method)
    def wrapper(self: Any, *arguments: Any) -> Any:
        return self.deadline.call(lambda: method(self, *arguments))

    return wrapper  # type: ignore[return-value]


class GpuLoad(NamedTuple):
    """The load of one GPU; None for values that the driver does not report.

    `utilization` is the percentage of time in which any kernel ran, over the driver's last sample period of
    up to a second.
    """

    utilization: int | None = None
    memory_used_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


class Load(NamedTuple):
    """The load of each GPU that answers, by UUID, and the SM utilization in % by GPU UUID and PID.

    Processes without a sample are missing: the driver only samples those that have run kernels.
    """

    gpus: Mapping[str, GpuLoad] = {}
    processes: Mapping[str, Mapping[int, int]] = {}


class Nvml:
    """An initialised NVML, as a context manager. Opening raises DriverError without a working driver."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.deadline = Deadline(timeout_s)
        self._is_kept = False
        self.deadline.call(lambda: _call(pynvml.nvmlInit))

    def close(self) -> None:
        if self._is_kept:
            return
        with contextlib.suppress(DriverError):
            self.deadline.call(lambda: _call(pynvml.nvmlShutdown))

    def keep_open(self) -> None:
        """Leave NVML initialised until the process ends, because a thread may be waiting in it."""
        self._is_kept = True

    def __enter__(self) -> Nvml:  # noqa: PYI034 - typing.Self is not in Python 3.9
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @bounded
    def driver(self) -> Driver:
        """Return the versions of the driver and its CUDA driver API, e.g. 535.261.03 and 12.2."""
        cuda = _optional(pynvml.nvmlSystemGetCudaDriverVersion)
        version = _text(_call(pynvml.nvmlSystemGetDriverVersion))
        return Driver(version, f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None)

    @bounded
    def gpus(self, known: Mapping[str, Gpu] = {}) -> tuple[list[Gpu], list[DriverError]]:
        """Return the GPUs that answer, with NVML's data, and the errors of those that do not.

        For GPUs `known` by UUID, only what can change is read.
        """
        gpus: list[Gpu] = []
        silent: list[DriverError] = []
        for index in range(_call(pynvml.nvmlDeviceGetCount)):
            try:
                gpus.append(self._gpu(index, known))
            except DriverError as error:
                silent.append(error)
        return gpus, silent

    @bounded
    def reason_at(self, pci_address: str) -> Reason:
        """Return why NVML offers no GPU at this address; empty if it does."""
        try:
            _call(pynvml.nvmlDeviceGetHandleByPciBusId, pci_address.encode())
        except DriverError as error:
            return reason_of(error)
        return NO_REASON

    @bounded
    def processes(self) -> dict[str, dict[int, int | None]]:
        """Return the memory in MiB (None if unknown) of each process, by GPU UUID and PID.

        GPUs that do not answer are missing.
        """
        listed = _of_each_gpu(pynvml.nvmlDeviceGetComputeRunningProcesses)
        return {
            uuid: {process.pid: _mib(process.usedGpuMemory) for process in jobs}
            for uuid, jobs in listed.items()
        }

    @bounded
    def mps_clients(self) -> dict[str, set[int]]:
        """Return the PIDs of the MPS clients on each GPU, by UUID; GPUs that do not answer are missing."""
        listed = _of_each_gpu(pynvml.nvmlDeviceGetMPSComputeRunningProcesses)
        return {uuid: {client.pid for client in clients} for uuid, clients in listed.items()}

    @bounded
    def load(self, busy: Collection[str], since_s: float) -> Load:
        """Return the load of all GPUs, and of processes on the `busy` ones since `since_s` (s since 1970).

        This wakes no GPU: the driver also answers for one in low power.
        """
        return Load(_of_each_gpu(_load), {uuid: _sm_utilization(uuid, since_s) for uuid in busy})

    @bounded
    def set_compute_mode(self, uuid: str, mode: str) -> None:
        """Set the GPU's compute mode and read it back; raises DriverError if it is not in effect."""
        _set_mode(_handle_of(uuid), mode)

    def restore_compute_mode(self, uuid: str, mode: str) -> bool:
        """Like `set_compute_mode`, but only if the mode differs; return whether it did.

        If no thread can be started, a call that may hang is better than a mode that is not restored.
        """

        def restore() -> bool:
            handle = _handle_of(uuid)
            differs = _mode(handle) != mode
            if differs:
                _set_mode(handle, mode)
            return differs

        return self.deadline.call(restore, may_hang=True)

    def _gpu(self, index: int, known: Mapping[str, Gpu]) -> Gpu:
        handle = _call(pynvml.nvmlDeviceGetHandleByIndex, index)
        pci = _call(pynvml.nvmlDeviceGetPciInfo, handle)
        bus_id = _text(pci.busId)
        address = normalise_address(bus_id)
        if address is None:
            raise DriverError(
                f"NVML reports an invalid PCI address: {bus_id!r}", "report this with the driver's version"
            )
        number = pci.pciDeviceId  # with the vendor in its lower half
        gpu = Gpu(address, nvml_index=index, vendor_device_id=f"{number & 0xFFFF:04x}:{number >> 16:04x}")
        try:
            gpu = gpu._replace(uuid=_text(_call(pynvml.nvmlDeviceGetUUID, handle)))
            before = known.get(gpu.uuid or "")
            if before and before.pci_address == address:
                return self._update(before._replace(nvml_index=index), handle)
            return self._update(self._identify(gpu, handle), handle)
        except DriverError as error:
            return gpu._replace(reason=reason_of(error))

    def _identify(self, gpu: Gpu, handle: Any) -> Gpu:
        name = _optional(pynvml.nvmlDeviceGetName, handle)
        capability = _optional(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        return gpu._replace(
            name=None if name is None else _text(name),
            compute_capability=None if capability is None else (capability[0], capability[1]),
            minor=_optional(pynvml.nvmlDeviceGetMinorNumber, handle),
        )

    def _update(self, gpu: Gpu, handle: Any) -> Gpu:
        """Update what can change while the driver runs, such as the memory by a reset that switches ECC."""
        memory = _optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
        mode = _optional(pynvml.nvmlDeviceGetComputeMode, handle)
        mig = _optional(pynvml.nvmlDeviceGetMigMode, handle)
        return gpu._replace(
            memory_mib=memory and memory.total // _MIB,
            compute_mode=None if mode is None else COMPUTE_MODES.get(mode, str(mode)),
            mig_enabled=None if mig is None else mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        )


def _of_each_gpu(function: Callable[[Any], T]) -> dict[str, T]:
    """Return the call's result for each GPU that answers, by UUID."""
    results: dict[str, T] = {}
    for index in range(_call(pynvml.nvmlDeviceGetCount)):
        with contextlib.suppress(DriverError):
            handle = _call(pynvml.nvmlDeviceGetHandleByIndex, index)
            results[_text(_call(pynvml.nvmlDeviceGetUUID, handle))] = _call(function, handle)
    return results


def _handle_of(uuid: str) -> Any:
    return _call(pynvml.nvmlDeviceGetHandleByUUID, uuid.encode())


def _load(handle: Any) -> GpuLoad:
    rates = _optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
    # Without the memory that the driver reserves, like nvidia-smi; before 510 there is only version 1.
    memory = _optional(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    memory = memory or _optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
    power_mw = _optional(pynvml.nvmlDeviceGetPowerUsage, handle)
    limit_mw = _optional(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return GpuLoad(
        rates and rates.gpu,
        memory and memory.used // _MIB,
        _optional(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        None if power_mw is None else power_mw / 1000,
        None if limit_mw is None else limit_mw / 1000,
    )


def _sm_utilization(uuid: str, since_s: float) -> dict[int, int]:
    """Return each process's newest sample since `since_s`; empty if the driver has or reports none."""
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(_handle_of(uuid), int(since_s * 1_000_000))
    except (DriverError, pynvml.NVMLError):  # lost; NOT_FOUND: no samples; or more processes than just now
        return {}
    newest = sorted(samples, key=lambda sample: sample.timeStamp)
    # Drivers have reported 2147483632 % (https://github.com/NVIDIA/DCGM/issues/83).
    return {sample.pid: sample.smUtil for sample in newest if sample.smUtil <= 100}


def _mode(handle: Any) -> str:
    number = _call(pynvml.nvmlDeviceGetComputeMode, handle)
    return COMPUTE_MODES.get(number, str(number))


def _set_mode(handle: Any, mode: str) -> None:
    _call(pynvml.nvmlDeviceSetComputeMode, handle, _MODE_NUMBERS[mode])
    actual = _mode(handle)
    if actual != mode:
        raise DriverError(
            f"the GPU is in compute mode {actual} after it was set to {mode}",
            "find what else sets compute modes on this host, or set cuda_mps_compute_mode: keep",
            reasons.COMPUTE_MODE_REFUSED,
        )
