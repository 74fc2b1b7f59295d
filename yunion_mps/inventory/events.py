"""What the driver reports by itself, the moment it happens: XIDs, and GPUs that are lost."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

from yunion_mps.host import threads
from yunion_mps.inventory.nvml import Nvml, pynvml
from yunion_mps.inventory.pci import normal_address

#: How long one wait of the driver takes at most; what the thread's end may wait for.
_WAIT_MS = 1000
#: After so many, the GPUs are looked up anew: one may be back that was lost.
_WAITS_A_SET = 60
#: The pause after a failure and while no GPU answers, so that the driver is not asked without end.
_PAUSE_S = 5.0

#: Called with a PCI address and an XID, or with None where something happened that a look at the GPUs shows.
OnEvent = Callable[["tuple[str, int] | None"], None]


class EventWatch:
    """A thread that waits for the driver's events until `stop` is called."""

    def __init__(self, nvml: Nvml, on_event: OnEvent) -> None:
        """`on_event` is called on the thread. From now on NVML stays open until the process ends."""
        nvml.keep_open()
        self._on_event = on_event
        self._stopped = threading.Event()
        self._renewed = threading.Event()
        self._ended = threading.Event()
        self._addresses: dict[int | None, str] = {}

    def start(self) -> None:
        """Begin to wait; raises ShortageError."""
        threads.start(self._run, lambda _, __: self._ended.set())

    def renew(self) -> None:
        """Look the GPUs up again, within a second: others answer than before."""
        self._renewed.set()

    def stop(self) -> None:
        """Wait no more; the thread ends within a second, and nobody waits for it."""
        self._stopped.set()
        self._renewed.set()

    def join(self) -> None:
        """Wait for the thread's end, within a second after `stop`; for tests, that leave nothing behind."""
        self._ended.wait()

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
                    return  # a driver without events: the regular look at the GPUs has to do
                self._on_event(None)
            else:
                if self._addresses:
                    continue
            self._renewed.wait(_PAUSE_S)

    def _watch(self, *, is_renewed: bool) -> None:
        """Wait with one set of GPUs, until one of them is lost, the driver fails, or it is to be renewed."""
        events = pynvml.nvmlEventSetCreate()
        try:
            self._addresses = {}
            for index in range(pynvml.nvmlDeviceGetCount()):
                self._register(index, events)
            if is_renewed:
                self._on_event(None)  # because what happened before this is not reported
            for _ in range(_WAITS_A_SET if self._addresses else 0):
                if self._renewed.is_set():
                    self._tell_what_waits(events)
                    return
                with contextlib.suppress(_timeout()):
                    self._tell(pynvml.nvmlEventSetWait_v2(events, _WAIT_MS))
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _tell_what_waits(self, events: Any) -> None:
        """Tell of what the set has already: nothing of it is in the next one."""
        with contextlib.suppress(pynvml.NVMLError):
            while True:
                self._tell(pynvml.nvmlEventSetWait_v2(events, 0))

    def _register(self, index: int, events: Any) -> None:
        """Watch one GPU, if it can be; its address is noted, for a lost one does not tell it any more."""
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            bus_id = pynvml.nvmlDeviceGetPciInfo(handle).busId
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            text = bus_id.decode(errors="replace") if isinstance(bus_id, bytes) else str(bus_id)
            self._addresses[_number(handle)] = normal_address(text) or text

    def _tell(self, data: Any) -> None:
        address = self._addresses.get(_number(data.device))
        self._on_event((address, int(data.eventData)) if address else None)


def _number(handle: Any) -> int | None:
    """What NVML's handle of a GPU points to, which is what makes two of them the same."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _timeout() -> type[BaseException]:
    """The class that pynvml raises when nothing happened in time."""
    kind: type[BaseException] = pynvml.NVMLError_Timeout
    return kind
