"""How much this process holds of what it receives: gRPC messages and answers of the API server.

Each message has a limit of its own, but a peer can begin hundreds of them. So their sum has a limit, too, and
what exceeds it is refused. Parsed, an answer takes about 13 times its size, and the plugin's unit limits its
memory to 256 MiB.
"""

from __future__ import annotations

import threading

#: The largest message or answer, as in gRPC's own libraries. Objects of the API server are smaller.
MAX_MESSAGE_BYTES = 4 << 20
#: Two of the largest messages with what precedes them, or many small ones.
MAX_HELD_BYTES = 2 * MAX_MESSAGE_BYTES + (1 << 16)


class ReceivedBytes:
    """Counts the bytes that are held; may be used by several threads."""

    def __init__(self, limit_bytes: int = MAX_HELD_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self.held_bytes = 0

    def hold(self, size_bytes: int) -> bool:
        """Count more bytes; returns False, and counts nothing, if the sum would exceed the limit."""
        with self._lock:
            if self.held_bytes + size_bytes > self._limit_bytes:
                return False
            self.held_bytes += size_bytes
            return True

    def release(self, size_bytes: int) -> None:
        with self._lock:
            self.held_bytes -= size_bytes


#: What all connections of this process hold together.
OF_PROCESS = ReceivedBytes()
