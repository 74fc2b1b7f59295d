"""The processes on a GPU or MIG device, by whichever version of NVML's call the driver supports.

pynvml asks for the number of processes with an empty buffer, and takes Success for "there are none". Some
drivers answer Success with a count, so here the first call has room already. pynvml also knows only the
newest version of a call, which some drivers do not support although an older one works.

Source: NVML API Reference, nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetMPSComputeRunningProcesses and
nvmlProcessInfo_t.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from yunion_mps.inventory.driver import MIB, pynvml

COMPUTE = "nvmlDeviceGetComputeRunningProcesses"
MPS_CLIENTS = "nvmlDeviceGetMPSComputeRunningProcesses"

#: MPS allows 60 clients of a GPU at most, so one call is usually enough.
FIRST_ROOM = 128
#: The room is doubled as long as processes are added; no host has a million.
_MOST_ROOM = 1 << 20


class RunningProcess(NamedTuple):
    """A process on a GPU."""

    pid: int
    #: None if the driver does not report it.
    memory_mib: int | None


class _ProcessInfoV1(ctypes.Structure):
    """What the call without a version fills in (nvmlProcessInfo_v1_t)."""

    _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))


#: The versions of both calls, the newest first, with the type of their items.
_VERSIONS = (
    ("_v3", pynvml.c_nvmlProcessInfo_v2_t),
    ("_v2", pynvml.c_nvmlProcessInfo_v2_t),
    ("", _ProcessInfoV1),
)
#: Errors that say that this version does not work, and nothing about the others.
_TRY_OLDER = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def running_processes(handle: Any, kind: str = COMPUTE) -> list[RunningProcess]:
    """Return the processes of this kind on a GPU or MIG device.

    kind: COMPUTE or MPS_CLIENTS.

    Raises NVMLError if the driver does not report them.
    """
    refusals = []
    for suffix, item in _VERSIONS:
        try:
            return _read(kind + suffix, item, handle)
        except pynvml.NVMLError as error:
            if error.value not in _TRY_OLDER:
                raise
            refusals.append(error)
    raise refusals[0]


def _read(name: str, item: Any, handle: Any) -> list[RunningProcess]:
    function = getattr(pynvml.nvmlLib, name, None)
    if function is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    room = FIRST_ROOM
    while True:
        items = (item * room)()
        number = ctypes.c_uint(room)
        status = function(handle, ctypes.byref(number), items)
        is_full = status == pynvml.NVML_ERROR_INSUFFICIENT_SIZE or number.value > room
        if is_full and room < _MOST_ROOM:
            room *= 2
            continue
        if status != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(status)
        filled = items[: min(number.value, room)]
        return [RunningProcess(int(info.pid), _memory_mib(info)) for info in filled]


def _memory_mib(info: Any) -> int | None:
    size = int(info.usedGpuMemory)
    return None if size == pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value else size // MIB
