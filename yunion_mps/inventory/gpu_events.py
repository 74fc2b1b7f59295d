"""Events of the driver: Xids and lost GPUs, from NVML as they happen and from the kernel's log.

An Xid is the number of an error. Which ones are fatal follows NVIDIA's catalogue: those that need a GPU reset
or a reboot. Others end a job at most; an Xid that is not listed here is reported as not fatal.

Source: NVIDIA: Xid Errors (docs.nvidia.com/deploy/xid-errors), section "Analyzing Xid Errors with the Xid
Catalog".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Callable
from typing import Any

from yunion_mps.core.addresses import normalise_address
from yunion_mps.core.paths import Paths
from yunion_mps.host import threads
from yunion_mps.inventory.driver import pynvml
from yunion_mps.inventory.nvml import Nvml

_FATAL_XIDS = {
    48: "double bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU initialization failure",
}
_OTHER_XIDS = {
    13: "graphics engine exception, usually caused by a job",
    31: "GPU memory page fault, usually caused by a job",
    43: "GPU stopped processing",
    45: "preemptive cleanup after an earlier error",
    63: "row remapping pending until the next reset",
    68: "video processor exception",
    94: "contained memory error, which ends the job that caused it",
    109: "context switch timeout",
    154: "GPU recovery action changed (nvidia-smi -q)",
}

#: `NVRM: Xid (PCI:0000:c6:00): 31, pid=1234, name=python, ...`; the PID may be quoted or unknown.
_XID_RECORD = rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), pid='?(\d+)"
#: The kernel keeps a ring of records, each read separately.
_MAX_RECORDS = 20_000

#: The longest wait in the driver, and so for `renew` and the thread's end: each wait wakes a processor.
_WAIT_S = 3.0
#: GPUs are enumerated again after this many waits: a lost one may be back.
_WAITS_BEFORE_ENUMERATION = 20
#: The pause after a failure or while no GPU answers, so as not to flood the driver with calls.
_PAUSE_S = 5.0

#: Called with a PCI address and an Xid, or with None for a change that a scan of the GPUs shows.
OnEvent = Callable[["tuple[str, int] | None"], None]


class EventWatch:
    """A thread that waits for the driver's events until `stop` is called.

    NVML stays open from now on until the process ends.

    on_event: called on the thread.
    wait_s: within how long `renew` and `stop` take effect.

    Source: NVML API Reference, section "Event Handling Methods".
    """

    def __init__(self, nvml: Nvml, on_event: OnEvent, wait_s: float = _WAIT_S) -> None:
        nvml.keep_open()
        self._nvml = nvml
        self._wait_ms = round(wait_s * 1000)
        self._on_event = on_event
        self._stopped = threading.Event()
        self._renewed = threading.Event()
        self._ended = threading.Event()
        self._addresses: dict[int | None, str] = {}

    def start(self) -> None:
        """Start the thread.

        Raises ShortageError if that is impossible.
        """
        threads.start_thread(self._run, lambda _, __: self._ended.set())
        self._nvml.watch_started(self._ended)

    def renew(self) -> None:
        """Enumerate the GPUs again, because others answer than before."""
        self._renewed.set()

    def stop(self) -> None:
        """Tell the thread to end; `join` waits for that."""
        self._stopped.set()
        self._renewed.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end after `stop`; return whether it has ended."""
        return self._ended.wait(timeout_s)

    def _run(self) -> None:
        while True:
            is_renewed = self._renewed.is_set()
            self._renewed.clear()
            if self._stopped.is_set():
                return
            try:
                self._watch(is_renewed=is_renewed)
            except pynvml.NVMLError as error:
                if error.value in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                    return  # a driver without events: regular scans have to suffice
                self._on_event(None)
            else:
                if self._addresses:
                    continue
            self._renewed.wait(_PAUSE_S)

    def _watch(self, *, is_renewed: bool) -> None:
        """Wait with one set of GPUs until a GPU is lost, the driver fails, or `renew` is called."""
        events = pynvml.nvmlEventSetCreate()
        try:
            self._addresses = {}
            for index in range(pynvml.nvmlDeviceGetCount()):
                self._register(index, events)
            if is_renewed:
                self._on_event(None)  # because events before this are not reported
            for _ in range(_WAITS_BEFORE_ENUMERATION if self._addresses else 0):
                if self._renewed.is_set():
                    self._drain(events)
                    return
                with contextlib.suppress(pynvml.NVMLError_Timeout):
                    self._report(pynvml.nvmlEventSetWait_v2(events, self._wait_ms))
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _drain(self, events: Any) -> None:
        """Report the events already in the set, which the next set will not contain."""
        with contextlib.suppress(pynvml.NVMLError):
            while True:
                self._report(pynvml.nvmlEventSetWait_v2(events, 0))

    def _register(self, index: int, events: Any) -> None:
        """Watch a GPU if possible, and keep its address, which a lost GPU no longer reports."""
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            bus_id = pynvml.nvmlDeviceGetPciInfo(handle).busId
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            text = bus_id.decode(errors="replace") if isinstance(bus_id, bytes) else str(bus_id)
            self._addresses[_pointer(handle)] = normalise_address(text) or text

    def _report(self, data: Any) -> None:
        address = self._addresses.get(_pointer(data.device))
        self._on_event((address, int(data.eventData)) if address else None)


def _pointer(handle: Any) -> int | None:
    """Return the pointer in NVML's handle of a GPU: two handles of one GPU are different objects."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def xid_meaning(xid: int) -> tuple[bool, str]:
    """Return whether the Xid is fatal for the GPU, and its meaning."""
    if xid in _FATAL_XIDS:
        return True, _FATAL_XIDS[xid]
    return False, _OTHER_XIDS.get(xid, "see NVIDIA's catalogue of Xids, and: dmesg | grep -i xid")


def processes_of_xids(paths: Paths) -> list[tuple[str, int, int]]:
    """Return (PCI address, Xid, PID) of each Xid in the kernel's log that names a process, oldest first.

    Empty if the log cannot be read, as in a container.
    """
    xids = []
    for record in kernel_records(paths.kernel_log) or []:
        for bus, xid, pid in re.findall(_XID_RECORD, record):
            bus_id = bus.decode()
            address = normalise_address(bus_id if "." in bus_id else f"{bus_id}.0")
            if address:
                xids.append((address, int(xid), int(pid)))
    return xids


def kernel_records(path: str) -> list[bytes] | None:
    """Return the log's records, oldest first; None if it cannot be read.

    Source: Linux, Documentation/ABI/testing/dev-kmsg.
    """
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    records: list[bytes] = []
    try:
        while len(records) < _MAX_RECORDS:
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:  # it was overwritten while we read; the next one is available
                continue
            except OSError:
                break
            if not record:
                break
            records.append(record)
    finally:
        os.close(log)
    return records
