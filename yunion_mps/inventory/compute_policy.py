"""The compute policy of a GPU: its time slice, by NVIDIA's `nvidia-smi compute-policy`.

NVML has no documented call for it; NVIDIA's own DRA driver also runs this program.

Source: nvidia-smi compute-policy --help; nvidia-smi(1), section "RETURN VALUE"; github.com/NVIDIA/
k8s-dra-driver-gpu, setTimeSlice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from yunion_mps.core.enums import TIME_SLICES
from yunion_mps.core.errors import DriverError, HostError, UnsupportedError
from yunion_mps.core.reasons import DRIVER_HUNG, TIME_SLICE_REFUSED, hint_of
from yunion_mps.host.processes import find_program, outcome_of

#: How long nvidia-smi may take: it initialises NVML, which takes seconds without a persistence daemon.
TIMEOUT_S = 20.0
#: The first and the longest pause before nvidia-smi is run again after it has not answered; it doubles.
FIRST_PAUSE_S = 60.0
LAST_PAUSE_S = 3600.0
#: The exit status if the GPU does not support what is asked for.
_UNSUPPORTED = 3
_HINT = "remove time_slice from the entry of the GPU, or update the driver"
_ROW = re.compile(r"\bTimeslice\s+(\w+)", re.IGNORECASE)


class HangGuard:
    """Keeps a program that hangs from being run for each further GPU, and at each poll."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._again_at_s = 0.0

    @property
    def is_pausing(self) -> bool:
        """Whether the program has not answered, and is not to be run again yet."""
        return self._pause_s > 0 and self._clock() < self._again_at_s

    def note_answer(self) -> None:
        self._pause_s = 0.0

    def note_hang(self) -> None:
        """Begin a pause, twice as long as the one before."""
        self._pause_s = min(max(FIRST_PAUSE_S, self._pause_s * 2), LAST_PAUSE_S)
        self._again_at_s = self._clock() + self._pause_s

    def try_again(self) -> None:
        """End the pause, because an operator asks for it, or because it is the last opportunity."""
        self._again_at_s = self._clock()


#: Of nvidia-smi, which asks the same driver for each GPU.
NVIDIA_SMI = HangGuard()


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
    """Run `nvidia-smi compute-policy` for the GPU and return its output; raises DriverError.

    While it is known to hang, it is not run.
    """
    if NVIDIA_SMI.is_pausing:
        raise _hang()
    try:
        program = find_program("nvidia-smi", "install the driver's programs (nvidia-smi)")
        status, output = outcome_of([program, "compute-policy", "-i", uuid, *options], TIMEOUT_S)
    except HostError as error:
        raise DriverError(error.message, error.hint, TIME_SLICE_REFUSED) from None
    text = output.decode(errors="replace")
    if status is None:
        NVIDIA_SMI.note_hang()
        raise _hang()
    NVIDIA_SMI.note_answer()
    if status:
        message = f"nvidia-smi: {_first_error(text) or f'exit status {status}'}"
        if status == _UNSUPPORTED:
            raise UnsupportedError(message, _HINT, TIME_SLICE_REFUSED)
        raise _error(message)
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


def _hang() -> DriverError:
    """Return the same error while it is not run: another one would be told each time that it is run again."""
    message = f"nvidia-smi did not answer within {TIMEOUT_S:g} s"
    return DriverError(message, hint_of(DRIVER_HUNG), DRIVER_HUNG)
