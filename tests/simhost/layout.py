"""The shared state of a simulated host: one memory-mapped file, its layout defined here and only here.

Every process that loads the simulated NVML maps the file `MAP_SHARED`; so does the Python side. The C library
is compiled against the header that `c_header` makes from these structures, and `_Static_assert` in it holds
both to the same sizes. All integers are of the host's byte order; all memory amounts are MiB.
"""

from __future__ import annotations

import ctypes
from typing import Any

MAGIC = 0x53494D48  # "SIMH"
VERSION = 5

MAX_GPUS = 64
MAX_OTHERS = 16  # devices of other vendors
MAX_PROCESSES = 32  # a GPU
MAX_FAILURES = 64
MAX_EVENTS = 64  # a ring: the oldest is overwritten
MAX_PROFILES = 8  # of GPU instances of a GPU
MAX_INSTANCES = 8  # GPU instances of a GPU, and compute instances of each; NVIDIA's GPUs have 7 at most

FOREVER = 0xFFFFFFFF  # Failure.times: until cleared
ALL_GPUS = -1  # Failure.gpu
UNKNOWN_MIB = 0xFFFFFFFFFFFFFFFF  # Process.used_mib: the driver cannot tell
#: Process.sm_percent: no sample of it; Gpu.utilization: that of its processes; render: no render node
UNSET = 0xFFFFFFFF

PROCESS_COMPUTE, PROCESS_MPS = 1, 2


class Process(ctypes.Structure):
    """One process on a GPU; a slot with pid 0 is free."""

    _fields_ = [
        ("pid", ctypes.c_uint32),
        ("type", ctypes.c_uint32),  # PROCESS_*
        ("used_mib", ctypes.c_uint64),
        ("sm_percent", ctypes.c_uint32),
        ("gpu_instance", ctypes.c_uint32),  # id of the instance it runs on, or UNSET
        ("compute_instance", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Profile(ctypes.Structure):
    """A GPU instance profile of a GPU (see mig.py); an entry without a name ends the list."""

    _fields_ = [
        ("name", ctypes.c_char * 24),
        ("memory_mib", ctypes.c_uint64),
        ("number", ctypes.c_uint32),  # NVML_GPU_INSTANCE_PROFILE_*
        ("id", ctypes.c_uint32),
        ("slices", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("sm", ctypes.c_uint32),
        ("copy", ctypes.c_uint32),
        ("decoders", ctypes.c_uint32),
        ("jpeg", ctypes.c_uint32),
        ("ofa", ctypes.c_uint32),
        ("size", ctypes.c_uint32),  # memory slices
        ("starts", ctypes.c_uint32),  # bit n: may be placed at memory slice n
        ("reserved", ctypes.c_uint32),
    ]


class Compute(ctypes.Structure):
    """One compute instance, which is a MIG device; free without a serial number."""

    _fields_ = [
        ("serial", ctypes.c_uint32),
        ("id", ctypes.c_uint32),
        ("slices", ctypes.c_uint32),
        ("start", ctypes.c_uint32),
        ("uuid", ctypes.c_char * 48),
    ]


class Instance(ctypes.Structure):
    """One GPU instance; free without a serial number."""

    _fields_ = [
        ("serial", ctypes.c_uint32),
        ("id", ctypes.c_uint32),
        ("profile", ctypes.c_uint32),  # index of the profile
        ("start", ctypes.c_uint32),
        ("computes", Compute * MAX_INSTANCES),
    ]


class Gpu(ctypes.Structure):
    """One GPU. Slots are in the order of the PCI addresses in the description, NVML's indices of today's."""

    _fields_ = [
        ("uuid", ctypes.c_char * 64),
        ("name", ctypes.c_char * 96),
        ("memory_mib", ctypes.c_uint64),
        ("reserved_mib", ctypes.c_uint64),
        ("pci_domain", ctypes.c_uint32),
        ("pci_bus", ctypes.c_uint32),
        ("pci_device", ctypes.c_uint32),
        ("pci_device_id", ctypes.c_uint32),  # device << 16 | vendor, as NVML has it
        ("capability_major", ctypes.c_uint32),
        ("capability_minor", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),  # of /dev/nvidia<minor>
        ("mig_capable", ctypes.c_uint32),
        ("mig_current", ctypes.c_uint32),
        ("mig_pending", ctypes.c_uint32),
        ("mig_needs_reset", ctypes.c_uint32),  # a change of the mode stays pending until the next reset
        ("reset_required", ctypes.c_uint32),  # 1: nothing is created, and no mode changes, before a reset
        ("time_slice", ctypes.c_uint32),  # 0 to 3, as nvidia-smi compute-policy numbers them
        ("last_serial", ctypes.c_uint32),  # of all instances ever: a handle or UUID is never used again
        ("compute_mode", ctypes.c_uint32),  # nvmlComputeMode_t
        ("on_bus", ctypes.c_uint32),  # 0: there is no such PCI device
        ("driver", ctypes.c_char * 32),  # of the kernel: nvidia, another one, or none
        ("present", ctypes.c_uint32),  # on the bus, and nvidia's: enumerated by the next nvmlInit
        ("arrivals", ctypes.c_uint32),  # how often it became present; who had it before has lost it
        ("render", ctypes.c_uint32),  # number of its render node, whenever it has one; or UNSET
        ("lost", ctypes.c_uint32),  # 1: every call on its handle gives GPU_IS_LOST
        ("lost_lookup", ctypes.c_uint32),  # what looking up a lost GPU's handle gives (nvmlReturn_t)
        ("utilization", ctypes.c_uint32),  # percent
        ("temperature_c", ctypes.c_uint32),
        ("power_mw", ctypes.c_uint32),
        ("power_limit_mw", ctypes.c_uint32),
        ("processes", Process * MAX_PROCESSES),
        ("profiles", Profile * MAX_PROFILES),
        ("instances", Instance * MAX_INSTANCES),
    ]


class Other(ctypes.Structure):
    """One device of another vendor."""

    _fields_ = [("render", ctypes.c_uint32)]  # number of its render node, or UNSET


class Failure(ctypes.Structure):
    """One rule by which calls fail; a slot with an empty call is free."""

    _fields_ = [
        ("call", ctypes.c_char * 64),  # fnmatch(3) pattern for the name without _v2, _v3
        ("gpu", ctypes.c_int32),  # slot, or ALL_GPUS
        ("error", ctypes.c_uint32),  # nvmlReturn_t; 0: the call only takes its time
        ("skip", ctypes.c_uint32),  # how many calls are to succeed first
        ("times", ctypes.c_uint32),  # how many calls are still to fail, or FOREVER
        ("delay_ms", ctypes.c_uint32),  # wait before the call answers; ends early when the rule is cleared
        ("id", ctypes.c_uint32),  # tells this rule from a later one in the same slot
    ]


class Event(ctypes.Structure):
    """One event of a GPU, e.g. an Xid error."""

    _fields_ = [
        ("type", ctypes.c_uint64),  # nvmlEventType*
        ("data", ctypes.c_uint64),  # the Xid
        ("gpu", ctypes.c_uint32),
    ]


class State(ctypes.Structure):
    """The whole file."""

    _fields_ = [
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("changes", ctypes.c_uint32),  # counts changes; a futex on which the C side waits
        ("driver_version", ctypes.c_char * 80),  # of the kernel module
        ("library_version", ctypes.c_char * 80),  # of the library's file; a process may have an older one
        ("driver_loaded", ctypes.c_uint32),
        ("drm_loaded", ctypes.c_uint32),  # nvidia-drm, which makes the render nodes
        ("cuda_version", ctypes.c_uint32),  # 1000 * major + 10 * minor
        ("gpu_count", ctypes.c_uint32),  # slots in use
        ("failure_count", ctypes.c_uint32),  # rules in effect; 0 keeps the calls off the lock
        ("last_failure_id", ctypes.c_uint32),
        ("event_count", ctypes.c_uint32),  # events ever; event n is in slot n % MAX_EVENTS
        ("failures", Failure * MAX_FAILURES),
        ("events", Event * MAX_EVENTS),
        ("gpus", Gpu * MAX_GPUS),
        ("others", Other * MAX_OTHERS),
    ]


STATE_SIZE = ctypes.sizeof(State)

_C_TYPES = {ctypes.c_uint32: "uint32_t", ctypes.c_int32: "int32_t", ctypes.c_uint64: "uint64_t"}
_CONSTANTS = (
    "MAGIC VERSION MAX_GPUS MAX_OTHERS MAX_PROCESSES MAX_FAILURES MAX_EVENTS MAX_PROFILES MAX_INSTANCES "
    "FOREVER ALL_GPUS UNSET PROCESS_COMPUTE PROCESS_MPS"
)


def c_header() -> str:
    """Return the C header of these structures: `struct sim_gpu` for `Gpu`, `SIM_MAX_GPUS` for `MAX_GPUS`."""
    lines = ["/* Made from layout.py; do not edit. */", "#include <stdint.h>"]
    lines += [f"#define SIM_{name} ({globals()[name]:#x})" for name in _CONSTANTS.split()]
    lines.append(f"#define SIM_UNKNOWN_MIB UINT64_C({UNKNOWN_MIB:#x})")
    for struct in (Process, Profile, Compute, Instance, Gpu, Other, Failure, Event, State):
        name = f"struct sim_{struct.__name__.lower()}"
        members = [f"    {_c_member(field[0], field[1])};" for field in struct._fields_]
        lines += [f"{name} {{", *members, "};"]
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name}");')
    return "\n".join(lines) + "\n"


def _c_member(name: str, kind: Any) -> str:
    if kind in _C_TYPES:
        return f"{_C_TYPES[kind]} {name}"
    item, length = kind._type_, kind._length_
    if item is ctypes.c_char:
        return f"char {name}[{length}]"
    return f"struct sim_{item.__name__.lower()} {name}[{length}]"
