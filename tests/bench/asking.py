"""The least of an HTTP client, so that the client's own time is small and the same for daemon and floor."""

from __future__ import annotations

import socket

from bench.values import BenchError
from simhost.host import Closes


def request_for(target: str, method: str = "GET") -> bytes:
    """A request without a body, as curl sends it."""
    length = "Content-Length: 0\r\n" if method == "POST" else ""
    return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n{length}\r\n".encode()


class Http(Closes):
    """One connection, kept."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(60)
        self._socket.connect(path)

    def close(self) -> None:
        self._socket.close()

    def ask(self, target: str, method: str = "GET") -> tuple[bytes, int]:
        """The answer's body, and the size of the whole answer; raises BenchError unless it is 200 or 201."""
        self.send(request_for(target, method))
        return self.answer(target)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def answer(self, target: str) -> tuple[bytes, int]:
        """What `ask` returns, once that was sent."""
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._more()
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
        while len(body) < length:
            body += self._more()
        if not lines[0].startswith((b"http/1.1 200", b"http/1.1 201")):
            raise BenchError(f"{target} was answered by {answer[:300]!r}")
        return body, len(head) + 4 + length

    def exchange(self, request: bytes, size: int) -> bytes:
        """Send a request and take an answer of a known size."""
        self._socket.sendall(request)
        parts = [self._socket.recv(size)]
        left = size - len(parts[0])
        while left:
            parts.append(self._more())
            left -= len(parts[-1])
        return b"".join(parts)

    def _more(self) -> bytes:
        data = self._socket.recv(1 << 18)
        if not data:
            raise BenchError("the connection was closed within an answer")
        return data
