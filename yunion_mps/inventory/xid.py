"""XIDs, the numbers of errors that the driver reports: which of them mean that the GPU is ill.

After NVIDIA's catalogue (https://docs.nvidia.com/deploy/xid-errors): fatal are those whose remedy is to reset
the GPU or to reboot. The others end a job at most; one that is not here is told, and not taken for fatal.
"""

from __future__ import annotations

_FATAL = {
    48: "double bit ECC error",
    62: "the GPU's internal micro-controller halted",
    64: "memory rows cannot be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    140: "unrecovered ECC error",
    143: "the GPU could not be initialised",
}
_OTHERS = {
    13: "graphics engine exception, mostly a fault of a job",
    31: "memory page fault, mostly a fault of a job",
    43: "the GPU stopped processing for a job",
    45: "a job's channels were torn down",
    63: "memory rows are remapped with the next reset",
    68: "video processor exception",
    94: "contained memory error, which ends the job that met it",
    109: "a context switch took too long",
    154: "the driver recommends another recovery action (nvidia-smi -q)",
}


def meaning(xid: int) -> tuple[bool, str]:
    """Whether the XID is fatal for the GPU, and what it means."""
    if xid in _FATAL:
        return True, _FATAL[xid]
    return False, _OTHERS.get(xid, "see NVIDIA's catalogue of XIDs, and: dmesg | grep -i xid")
