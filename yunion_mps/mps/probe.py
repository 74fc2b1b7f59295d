"""Asking a control daemon for a sign of life, without a process and with two lines in its log.

A control daemon greets whoever connects (measured with 535 and 550), and it does so from the one loop that
serves everybody. So a greeting shows that it serves, and a missing one that it does not, whatever the cause:
it was stopped, it hangs, or somebody connected and keeps it waiting.
"""

from __future__ import annotations

import contextlib
import socket

from yunion_mps.errors import ShortageError
from yunion_mps.mps.control import SilentError, credentials_of


class Probe:
    """One connection to a control daemon's socket, until it greets."""

    def __init__(self, pipe_directory: str, pid: int, now_s: float, timeout_s: float) -> None:
        """Connect; raises SilentError where the socket is gone or another process', ShortageError too."""
        self.began_s = now_s
        self.deadline_s = now_s + timeout_s
        self._timeout_s = timeout_s
        self._accepted = True
        try:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise ShortageError(f"no socket can be made: {error.strerror}") from None
        try:
            self._connect(pipe_directory, pid)
        except BaseException:
            self.close()
            raise

    def _connect(self, pipe_directory: str, pid: int) -> None:
        self._connection.settimeout(0)
        try:
            self._connection.connect(f"{pipe_directory}/control")
        except BlockingIOError:  # so many wait to be accepted that one more may not even wait
            self._accepted = False
            return
        except OSError as error:
            what = f"its socket in {pipe_directory} is gone ({error.strerror})"
            raise SilentError(what, "clients cannot find it any more") from None
        peer = credentials_of(self._connection)
        if peer.pid != pid:
            what = f"its socket in {pipe_directory} is that of another process (PID {peer.pid})"
            raise SilentError(what, "clients do not find it any more")

    def fileno(self) -> int:
        """A descriptor that becomes readable with the greeting."""
        return self._connection.fileno()

    @property
    def watched(self) -> bool:
        """Whether there is something to wait for on the descriptor."""
        return self._accepted

    def poll(self, now_s: float) -> bool:
        """Whether the greeting has come; raises SilentError once it is overdue."""
        if self._accepted:
            with contextlib.suppress(BlockingIOError):
                if self._receive():
                    return True
                raise SilentError("it closes its socket to whoever connects", "look at the end of its log")
        if now_s >= self.deadline_s:
            raise SilentError(f"it has not answered for {self._timeout_s:g} s", "look at the end of its log")
        return False

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(64)
        except BlockingIOError:
            raise
        except OSError:
            return b""

    def close(self) -> None:
        """End the connection."""
        self._connection.close()
