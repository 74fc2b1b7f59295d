"""The compute policy of a GPU: its time slice, by NVIDIA's `nvidia-smi compute-policy`.

NVML has no documented call for it; NVIDIA's own DRA driver also runs this program.

Source: nvidia-smi compute-policy --help; github.com/NVIDIA/k8s-dra-driver-gpu, setTimeSlice.
"""

from __future__ import annotations

import re

from yunion_mps.core.enums import TIME_SLICES
from yunion_mps.core.errors import DriverError, HostError
from yunion_mps.core.reasons import TIME_SLICE_REFUSED
from yunion_mps.host.processes import find_program, outcome_of

#: It initialises NVML, which takes seconds without a persistence daemon.
_TIMEOUT_S = 20.0
_HINT = "remove time_slice from the entry of the GPU, or update the driver"
_ROW = re.compile(r"\bTimeslice\s+(\w+)", re.IGNORECASE)


def time_slice_of(uuid: str) -> str:
    """Return the GPU's time slice: `default`, `short`, `medium` or `long`.

    Raises DriverError if nvidia-smi does not report it.
    """
    row = _ROW.search(_run(uuid, "--list"))
    if row is None or row[1].lower() not in TIME_SLICES:
        raise _error("nvidia-smi does not report the time slice")
    return row[1].lower()


def set_time_slice(uuid: str, name: str) -> None:
    """Set the GPU's time slice and read it back.

    Raises DriverError if it is not in effect.
    """
    _run(uuid, "--set-timeslice", str(TIME_SLICES.index(name)))
    actual = time_slice_of(uuid)
    if actual != name:
        raise _error(f"the time slice is {actual} after it was set to {name}")


def _run(uuid: str, *options: str) -> str:
    """Run `nvidia-smi compute-policy` for the GPU and return its output; raises DriverError."""
    try:
        program = find_program("nvidia-smi", "install the driver's programs (nvidia-smi)")
        status, output = outcome_of([program, "compute-policy", "-i", uuid, *options], _TIMEOUT_S)
    except HostError as error:
        raise DriverError(error.message, error.hint, TIME_SLICE_REFUSED) from None
    text = output.decode(errors="replace")
    if status is None:
        raise _error(f"nvidia-smi did not answer within {_TIMEOUT_S:g} s")
    if status:
        raise _error(f"nvidia-smi: {_first_error(text) or f'exit status {status}'}")
    return text


def _first_error(output: str) -> str:
    """Return what nvidia-smi says after the name of a GPU, or else its first line; empty without output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        _, colon, message = line.rpartition(" : ")
        if colon:
            return message
    return lines[0] if lines else ""


def _error(message: str) -> DriverError:
    return DriverError(message, _HINT, TIME_SLICE_REFUSED)
