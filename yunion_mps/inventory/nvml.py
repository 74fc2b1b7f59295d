"""NVML: the GPUs, their processes, load and compute modes.

Source: NVML API Reference, sections "Device Queries" and "Device Commands".
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from yunion_mps.core import reasons
from yunion_mps.core.addresses import normalise_address
from yunion_mps.core.errors import DriverError, UnsupportedError
from yunion_mps.core.models import DEFAULT, EXCLUSIVE_PROCESS, PROHIBITED, Driver, Gpu
from yunion_mps.core.reasons import NO_REASON, Reason, hint_of
from yunion_mps.core.text import printable
from yunion_mps.inventory.driver import (
    MIB,
    TIMEOUT_S,
    Deadline,
    bounded,
    call_driver,
    driver_error,
    optional,
    printable_text,
    pynvml,
    reason_of,
    refuse_if_abandoned,
)
from yunion_mps.inventory.running import MPS_CLIENTS, running_processes

T = TypeVar("T")

#: Compute modes by NVML's number (NVML API Reference, nvmlComputeMode_t), with nvidia-smi's names.
COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: DEFAULT,
    pynvml.NVML_COMPUTEMODE_PROHIBITED: PROHIBITED,
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: EXCLUSIVE_PROCESS,
}
_MODE_NUMBERS = {name: number for number, name in COMPUTE_MODES.items()}


#: How long a new initialisation waits for other calls to end; if they do not, it is tried later.
ALONE_WITHIN_S = 2.0
#: How long it waits for the thread that watches for events, which has been told to stop.
_WATCH_ENDS_WITHIN_S = 10.0


class GpuLoad(NamedTuple):
    """The load of one GPU; None for values that the driver does not report."""

    #: The percentage of time in which any kernel ran, over the driver's last sample period of up to a second
    #: (NVML API Reference, nvmlUtilization_t).
    utilization: int | None = None
    memory_used_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


class Load(NamedTuple):
    """The load of the GPUs and processes."""

    #: The load of each GPU that answers, by UUID.
    gpus: Mapping[str, GpuLoad] = {}
    #: The SM utilization in percent by GPU UUID and PID. Processes without a sample are missing: the driver
    #: only samples those that have run kernels (NVML API Reference, nvmlDeviceGetProcessUtilization).
    processes: Mapping[str, Mapping[int, int]] = {}

    def with_idle(self, processes: Mapping[str, Iterable[int]]) -> Load:
        """Return the load with 0 % for those `processes` (by GPU UUID) on idle GPUs that have no sample."""
        samples = dict(self.processes)
        for uuid, pids in processes.items():
            if self.gpus.get(uuid, GpuLoad()).utilization == 0:
                samples[uuid] = {**dict.fromkeys(pids, 0), **samples.get(uuid, {})}
        return self._replace(processes=samples)


class Nvml:
    """An initialised NVML, as a context manager.

    timeout_s: how long a call may take.
    deadline: that of an earlier attempt, so that no call is made while the attempt still hangs.

    Opening it raises DriverError without a working driver.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, deadline: Deadline | None = None) -> None:
        self.deadline = deadline or Deadline(timeout_s)
        #: Set once the thread has ended that was last started to wait in NVML for events.
        self._watch_ended = threading.Event()
        self._watch_ended.set()
        self._is_kept = False
        self._is_initialised = False
        self.deadline.call(self._initialise)

    def _initialise(self) -> None:
        call_driver(pynvml.nvmlInit)
        self._is_initialised = True

    def ensure_initialised(self) -> None:
        """Initialise NVML if `initialise_again` has failed.

        Raises DriverError if the driver does not work.
        """
        if not self._is_initialised:
            self.deadline.call(self._initialise)

    def watch_started(self, ended: threading.Event) -> None:
        """Note that a thread waits in NVML for events, which sets `ended` when it ends."""
        self._watch_ended = ended

    def initialise_again(self) -> bool:
        """Have NVML find the GPUs that have come since it was initialised; return whether that was possible.

        NVML fixes its list of GPUs at the first initialisation (measured). No other call is in progress
        meanwhile, and an `EventWatch` must have been stopped. Raises DriverError if the driver does not work
        anymore: then NVML is not initialised, and this can be repeated.
        """
        if not self._watch_ended.wait(_WATCH_ENDS_WITHIN_S):
            return False

        def work() -> None:
            if self._is_initialised:
                call_driver(pynvml.nvmlShutdown)
                self._is_initialised = False
            self._initialise()

        return self.deadline.call_alone(work, ALONE_WITHIN_S)

    def close(self) -> None:
        """Shut NVML down, unless it is kept open."""
        if self._is_kept or not self._is_initialised:
            return
        with contextlib.suppress(DriverError):
            self.deadline.call(lambda: call_driver(pynvml.nvmlShutdown))

    def keep_open(self) -> None:
        """Leave NVML initialised until the process ends, because a thread may be waiting in it."""
        self._is_kept = True

    def __enter__(self) -> Nvml:  # noqa: PYI034 - typing.Self is not in Python 3.9
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @bounded
    def driver(self) -> Driver:
        """Return the versions of the driver and its CUDA driver API, e.g. 535.261.03 and 12.2.

        Source: NVML API Reference, section "System Queries": 12020 is CUDA 12.2.
        """
        cuda = optional(pynvml.nvmlSystemGetCudaDriverVersion)
        version = printable_text(call_driver(pynvml.nvmlSystemGetDriverVersion))
        return Driver(version, f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None)

    @bounded
    def gpus(self, known: Mapping[str, Gpu] = {}) -> tuple[list[Gpu], list[DriverError]]:
        """Return the GPUs that answer, with NVML's data, and the errors of those that do not.

        For GPUs `known` by UUID, only what can change is read.
        """
        gpus: list[Gpu] = []
        silent: list[DriverError] = []
        for index in range(call_driver(pynvml.nvmlDeviceGetCount)):
            try:
                gpus.append(self._gpu(index, known))
            except DriverError as error:
                silent.append(error)
        return gpus, silent

    @bounded
    def reason_at(self, pci_address: str) -> Reason:
        """Return why NVML offers no GPU at this address; empty if it does."""
        try:
            call_driver(pynvml.nvmlDeviceGetHandleByPciBusId, pci_address.encode())
        except DriverError as error:
            return reason_of(error)
        return NO_REASON

    @bounded
    def processes(self) -> dict[str, dict[int, int | None]]:
        """Return the memory in MiB (None if unknown) of each process, by GPU UUID and PID.

        GPUs that do not answer are missing.

        Source: NVML API Reference, nvmlDeviceGetComputeRunningProcesses and nvmlProcessInfo_t.
        """
        memory_mib: dict[str, dict[int, int | None]] = {}
        for uuid, processes in _of_each_gpu(running_processes).items():
            memory_mib[uuid] = {process.pid: process.memory_mib for process in processes}
        return memory_mib

    @bounded
    def compute_modes(self) -> dict[str, str]:
        """Return the compute mode of each GPU, by UUID; GPUs that do not answer are missing."""
        return _of_each_gpu(_mode, whole=True)

    @bounded
    def mps_clients(self) -> dict[str, set[int]]:
        """Return the PIDs of the MPS clients on each GPU, by UUID; GPUs that do not answer are missing."""
        pids: dict[str, set[int]] = {}
        for uuid, clients in _of_each_gpu(lambda handle: running_processes(handle, MPS_CLIENTS)).items():
            pids[uuid] = {client.pid for client in clients}
        return pids

    @bounded
    def load(self, busy: Collection[str], since_s: float) -> Load:
        """Return the load of all GPUs, and of processes on the `busy` ones since `since_s` (s since 1970).

        This wakes no GPU: the driver also answers for one in low power.
        """
        processes = {uuid: _sm_utilization(uuid, since_s) for uuid in busy}
        return Load(_of_each_gpu(_load, whole=True), processes)

    @bounded
    def set_compute_mode(self, uuid: str, mode: str) -> None:
        """Set the GPU's compute mode and read it back; raises DriverError if it is not in effect.

        Source: NVML API Reference, nvmlDeviceSetComputeMode: at once, and until the next reboot.
        """
        _set_mode(handle_of(uuid), mode)

    def compute_mode_of(self, uuid: str) -> str:
        """Return the GPU's compute mode; raises DriverError.

        If no thread can be started, a call that may hang is better than a mode that is not restored.
        """
        return self.deadline.call(lambda: _mode(handle_of(uuid)), may_hang=True)

    def restore_compute_mode(self, uuid: str, mode: str) -> None:
        """Set the GPU's original compute mode and read it back; raises DriverError.

        If no thread can be started, a call that may hang is better than a mode that is not restored.

        Raises DriverError if the mode is not in effect; its code is MIG_ENABLED if the mode is impossible
        until MIG mode is switched off.
        """
        self.deadline.call(lambda: _set_mode(handle_of(uuid), mode), may_hang=True)

    def _gpu(self, index: int, known: Mapping[str, Gpu]) -> Gpu:
        handle = call_driver(pynvml.nvmlDeviceGetHandleByIndex, index)
        pci = call_driver(pynvml.nvmlDeviceGetPciInfo, handle)
        bus_id = printable_text(pci.busId)
        address = normalise_address(bus_id)
        if address is None:
            raise DriverError(
                f"NVML reports an invalid PCI address: {bus_id!r}", "report this with the driver's version"
            )
        number = pci.pciDeviceId  # with the vendor in its lower half
        gpu = Gpu(address, nvml_index=index, vendor_device_id=f"{number & 0xFFFF:04x}:{number >> 16:04x}")
        try:
            gpu = gpu._replace(uuid=printable_text(call_driver(pynvml.nvmlDeviceGetUUID, handle)))
            before = known.get(gpu.uuid or "")
            if before and before.pci_address == address:
                return self._update(before._replace(nvml_index=index), handle)
            return self._update(self._identify(gpu, handle), handle)
        except DriverError as error:
            return gpu._replace(reason=reason_of(error))

    def _identify(self, gpu: Gpu, handle: Any) -> Gpu:
        name = optional(pynvml.nvmlDeviceGetName, handle)
        capability = optional(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        return gpu._replace(
            name=None if name is None else printable_text(name),
            compute_capability=None if capability is None else (capability[0], capability[1]),
            minor=optional(pynvml.nvmlDeviceGetMinorNumber, handle),
        )

    def _update(self, gpu: Gpu, handle: Any) -> Gpu:
        """Update what can change while the driver runs, such as the memory by a reset that switches ECC."""
        memory_mib = _memory_mib(handle)
        mode = optional(pynvml.nvmlDeviceGetComputeMode, handle)
        mig = optional(pynvml.nvmlDeviceGetMigMode, handle)
        return gpu._replace(
            memory_mib=memory_mib,
            compute_mode=None if mode is None else COMPUTE_MODES.get(mode, str(mode)),
            mode_is_fixed=mode is None,  # what cannot be read back is not set
            mig_enabled=None if mig is None else mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
            mig_pending=None if mig is None else mig[1] == pynvml.NVML_DEVICE_MIG_ENABLE,
        )


def _memory_mib(handle: Any) -> int | None:
    """Return the GPU's memory; None for one that shares the host's; raises DriverError for a lost GPU."""
    memory = optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        # The driver answers the other calls for a lost GPU from what it keeps in memory.
        optional(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        return None
    return memory.total // MIB or None  # 0: it does not know


def _of_each_gpu(function: Callable[[Any], T], *, whole: bool = False) -> dict[str, T]:
    """Return the call's result for each GPU and MIG device that answers, by UUID.

    A GPU with MIG devices is left out, unless `whole`, because NVML adds up what is theirs.

    Source: NVML API Reference, nvmlDeviceGetComputeRunningProcesses, on MIG mode.
    """
    results: dict[str, T] = {}
    for index in range(call_driver(pynvml.nvmlDeviceGetCount)):
        with contextlib.suppress(DriverError):
            gpu = call_driver(pynvml.nvmlDeviceGetHandleByIndex, index)
            devices = list(mig_devices(gpu))
            handles = [gpu, *devices] if whole or not devices else devices
            for handle in handles:
                uuid = printable_text(call_driver(pynvml.nvmlDeviceGetUUID, handle))
                results[uuid] = call_driver(function, handle)
    return results


def mig_devices(handle: Any) -> Iterator[Any]:
    """Yield the handles of a GPU's MIG devices; none if it is not in MIG mode.

    Source: NVML API Reference, nvmlDeviceGetMaxMigDeviceCount and nvmlDeviceGetMigDeviceHandleByIndex.
    """
    absent = (
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
    )
    for index in range(optional(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        device = call_driver(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index, ignored=absent)
        if device is not None:
            yield device


def handle_of(uuid: str) -> Any:
    """Return NVML's handle of a GPU or MIG device.

    Raises DriverError, with the code GPU_GONE if there is no such GPU.
    """
    absent = (pynvml.NVML_ERROR_NOT_FOUND,)
    handle = call_driver(pynvml.nvmlDeviceGetHandleByUUID, uuid.encode(), ignored=absent)
    if handle is None:
        message = "the driver no longer reports this GPU"
        raise DriverError(message, reasons.hint_of(reasons.GPU_GONE), reasons.GPU_GONE)
    return handle


def _load(handle: Any) -> GpuLoad:
    rates = optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
    # Without the memory that the driver reserves (nvmlMemory_v2_t), like nvidia-smi; before 510 there is only
    # version 1.
    memory = optional(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is None:
        memory = optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
    power_mw = optional(pynvml.nvmlDeviceGetPowerUsage, handle)
    limit_mw = optional(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return GpuLoad(
        utilization=None if rates is None else rates.gpu,
        memory_used_mib=None if memory is None else memory.used // MIB,
        temperature_c=optional(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        power_w=None if power_mw is None else power_mw / 1000,
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
    )


def _sm_utilization(uuid: str, since_s: float) -> dict[int, int]:
    """Return each process's newest sample since `since_s`; empty if the driver has or reports none."""
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle_of(uuid), int(since_s * 1_000_000))
    except (DriverError, pynvml.NVMLError):  # lost; NOT_FOUND: no samples; or more processes than just now
        return {}
    newest = sorted(samples, key=lambda sample: sample.timeStamp)
    utilization: dict[int, int] = {}
    for sample in newest:
        if sample.smUtil <= 100:  # drivers have reported 2147483632 % (github.com/NVIDIA/DCGM/issues/83)
            utilization[sample.pid] = sample.smUtil
    return utilization


def _mode(handle: Any) -> str:
    number = call_driver(pynvml.nvmlDeviceGetComputeMode, handle)
    return COMPUTE_MODES.get(number, str(number))


def _refuse_in_mig_mode(handle: Any, mode: str) -> None:
    current = optional(pynvml.nvmlDeviceGetMigMode, handle)
    if mode == EXCLUSIVE_PROCESS and current and current[0]:
        message = f"the driver does not support {mode} in MIG mode"
        hint = "once MIG mode is off, run: yunion-mps-daemon --restore"
        raise DriverError(message, hint, reasons.MIG_ENABLED)


def _set_mode(handle: Any, mode: str) -> None:
    """Set the mode and read it back; the error's code says whether the driver supports no change of it."""
    _refuse_in_mig_mode(handle, mode)
    refuse_if_abandoned()
    if mode not in _MODE_NUMBERS:
        raise DriverError(f"the compute mode {printable(mode)} is not known to this version")
    try:
        pynvml.nvmlDeviceSetComputeMode(handle, _MODE_NUMBERS[mode])
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise driver_error(error) from None
        code = reasons.COMPUTE_MODE_UNSUPPORTED
        message = "the driver does not support changing the compute mode of this GPU"
        raise UnsupportedError(message, hint_of(code), code) from None
    actual = _mode(handle)
    if actual != mode:
        raise DriverError(
            f"the GPU is in compute mode {actual} after it was set to {mode}",
            "find what else sets compute modes on this host, or set cuda_mps_compute_mode: keep",
            reasons.COMPUTE_MODE_REFUSED,
        )
