"""Calls to the driver through pynvml, which only this package uses: errors with hints, and deadlines.

With a broken GPU, a driver call may hang forever, so every call has a deadline.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Collection, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import pynvml as pynvml

from yunion_mps.core import reasons
from yunion_mps.core.errors import DriverError, ShortageError
from yunion_mps.core.reasons import Reason, hint_of
from yunion_mps.core.text import decode_line, printable
from yunion_mps.host import threads

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class _Meaning(NamedTuple):
    """What an error of NVML means."""

    message: str
    code: str = reasons.DRIVER_ERROR
    #: What to do; if it is empty, that of the code.
    hint: str = ""

    @property
    def error(self) -> DriverError:
        return DriverError(self.message, self.hint or hint_of(self.code), self.code)


#: The meanings of NVML's errors.
#: Source: NVML API Reference, nvmlReturn_t.
_MEANINGS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: _Meaning(
        "the NVIDIA driver's library libnvidia-ml.so.1 is not installed", reasons.DRIVER_MISSING
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: _Meaning(
        "the NVIDIA driver's kernel module is not loaded", reasons.DRIVER_NOT_LOADED
    ),
    pynvml.NVML_ERROR_UNINITIALIZED: _Meaning(
        "the NVIDIA driver was unloaded meanwhile", reasons.DRIVER_NOT_LOADED
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: _Meaning(
        "the NVIDIA driver's library and its kernel module have different versions", reasons.DRIVER_MISMATCH
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: _Meaning(
        "the GPU has fallen off the bus or is otherwise inaccessible (GPU is lost)", reasons.GPU_LOST
    ),
    pynvml.NVML_ERROR_IN_USE: _Meaning("in use by a process", reasons.MIG_IN_USE),
    pynvml.NVML_ERROR_RESET_REQUIRED: _Meaning("the GPU must be reset first", reasons.MIG_RESET_REQUIRED),
    pynvml.NVML_ERROR_NO_PERMISSION: _Meaning(
        "NVML: permission denied", hint="run as root: systemctl start yunion-mps-daemon"
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: _Meaning("the driver does not support this on the GPU"),
}

#: Errors that mean a field is unknown, not that the GPU is broken.
_UNKNOWN_FIELD = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
)

MIB = 1 << 20

#: The name by which pynvml loads NVML; driver packages make it a symlink to the file of their version.
_LIBRARY = "libnvidia-ml.so.1"


#: A driver that has to wake many GPUs takes tens of seconds for the first call.
TIMEOUT_S = 60.0


def replaced_library(maps: str = "/proc/self/maps") -> str:
    """Return which library a new process would load instead of the one that this process has loaded.

    Empty if it would load the same one, or if this process has loaded none.

    maps: the file of the process's mappings, as in proc(5).
    """
    with contextlib.suppress(OSError), open(maps, encoding="utf-8", errors="replace") as file:
        for line in file:
            _, slash, path = line.rstrip("\n").partition("/")
            loaded = f"{slash}{path}"
            if not os.path.basename(loaded).startswith("libnvidia-ml.so"):
                continue
            # A file that was overwritten is listed as `PATH (deleted)`, so it differs, too.
            current = os.path.realpath(os.path.join(os.path.dirname(loaded), _LIBRARY))
            return "" if current == loaded else f"{current} (inode {os.stat(current).st_ino})"
    return ""


def reason_of(error: DriverError) -> Reason:
    """Return the error as the reason why a GPU is unusable."""
    return Reason(error.message, reasons.GPU_ERROR if error.code == reasons.DRIVER_ERROR else error.code)


class _Work:
    """Work on a thread; once its caller has given it up, it makes no more driver calls."""

    is_abandoned = False


#: The `work` of each thread.
_of_thread = threading.local()


def refuse_if_abandoned() -> None:
    """Raise DriverError if the caller of this thread's work has given it up."""
    work: _Work | None = getattr(_of_thread, "work", None)
    if work and work.is_abandoned:
        text = "an earlier call took too long, so this one is not made"
        raise _Meaning(text, reasons.DRIVER_HUNG).error


def call_driver(function: Callable[..., Any], *arguments: Any, ignored: Collection[int] = ()) -> Any:
    """Return the result of a call of NVML.

    ignored: error numbers for which this returns None.

    Raises DriverError for other errors, and if the caller has given up this thread's work.
    """
    refuse_if_abandoned()
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in ignored:
            return None
        raise driver_error(error) from None


def driver_error(error: Any) -> DriverError:
    """Return what an NVMLError means."""
    meaning = _MEANINGS.get(error.value) or _Meaning(f"NVML error: {printable(str(error))}")
    return meaning.error


def optional(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, None if the driver does not know the field.

    Raises DriverError for other errors.
    """
    return call_driver(lambda: function(*arguments), ignored=_UNKNOWN_FIELD)


def whole_mib(size: int | None) -> int | None:
    """Return a size in bytes as MiB, rounded down; None if it is None."""
    return None if size is None else size // MIB


def printable_text(value: Any) -> str:
    """Return a text of NVML, which is of bytes with some releases of pynvml, without control characters."""
    return decode_line(value) if isinstance(value, bytes) else printable(str(value))


class _Gate:
    """Lets driver calls run together, or one exclusive call alone.

    The exclusive call waits for those in progress, but keeps no new ones out, so it may time out. Only one
    caller may ask for it at a time.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shared_calls = 0
        self._is_exclusive = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive)
            self._shared_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._shared_calls -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[bool]:
        """Wait until no call is in progress, and yield whether that came about in time."""
        with self._changed:
            is_alone = self._changed.wait_for(lambda: self._shared_calls == 0, timeout_s)
            self._is_exclusive = is_alone
        try:
            yield is_alone
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()


class Deadline:
    """Makes calls on threads that must return within `timeout_s`."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._gate = _Gate()
        #: Gets the outcome of a call that took too long.
        self._hanging: SimpleQueue[Any] | None = None

    def call(self, work: Callable[[], T], *, may_hang: bool = False) -> T:
        """Return the result of `work`, or raise its error.

        If it takes too long, the driver call that hangs may still succeed later, but `work` makes no call
        after it. While an earlier call hangs, no other is made.

        may_hang: if no thread can be started, make the call on the caller's thread, without a deadline.

        Raises DriverError if it takes too long, and ShortageError if no thread can be started.
        """
        with self._gate.shared():
            return self._call(work, may_hang=may_hang)

    def call_alone(self, work: Callable[[], None], wait_s: float) -> bool:
        """Make the call while no other is made; return False if others do not end within `wait_s`.

        Raises DriverError and ShortageError like `call`.
        """
        with self._gate.exclusive(wait_s) as is_alone:
            if is_alone:
                self._call(work, may_hang=False)
            return is_alone

    def _call(self, work: Callable[[], T], *, may_hang: bool) -> T:
        if self._hanging and self._hanging.empty():
            text = "the NVIDIA driver still does not answer an earlier call"
            raise _Meaning(text, reasons.DRIVER_HUNG).error
        outcome: SimpleQueue[tuple[T, BaseException | None]] = SimpleQueue()
        state = _Work()

        def run() -> T:
            _of_thread.work = state
            try:
                return work()
            finally:
                _of_thread.work = None  # the thread is used again

        try:
            threads.start_thread(run, lambda result, error: outcome.put((result, error)))
        except ShortageError:
            if not may_hang:
                raise
            return work()
        try:
            result, error = outcome.get(timeout=self._timeout_s)
        except Empty:
            state.is_abandoned = True
            self._hanging = outcome
            text = f"the NVIDIA driver did not answer within {self._timeout_s:g} s"
            raise _Meaning(text, reasons.DRIVER_HUNG).error from None
        if error:
            raise error
        return result


def bounded(method: F) -> F:
    """Decorate a method whose calls must end within `self.deadline`."""

    @functools.wraps(method)
    def wrapper(self: Any, *arguments: Any) -> Any:
        bound_method = functools.partial(method, self)
        return self.deadline.call(lambda: bound_method(*arguments))

    return wrapper  # type: ignore[return-value]
