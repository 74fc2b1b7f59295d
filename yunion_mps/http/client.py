"""The client: one question to the daemon, with a deadline and words for every way it can fail."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import time
from typing import Any

import h11

from yunion_mps.errors import (
    BusyError,
    ConfigError,
    NeverFreeError,
    NotAllowedError,
    NotFoundError,
    NothingFreeError,
    UnreachableError,
    YunionError,
)
from yunion_mps.paths import Paths

TIMEOUT_S = 30.0
_UNIT = "yunion-mps-daemon"


class BadConfigurationError(YunionError):
    """The daemon refuses the configuration; the message holds one problem a line."""

    exit_code = ConfigError.exit_code


_KINDS: dict[int, type[YunionError]] = {
    403: NotAllowedError,
    404: NotFoundError,
    422: BadConfigurationError,
    410: NeverFreeError,
    423: NothingFreeError,
    503: BusyError,
}


class Client:
    """Asks the daemon of this host over its socket."""

    def __init__(self, paths: Paths, timeout_s: float = TIMEOUT_S) -> None:
        self._path = paths.socket
        self._timeout_s = timeout_s

    def get(self, target: str, timeout_s: float | None = None) -> Any:
        """The JSON answer to a GET; raises YunionError of the kind that the failure is.

        `timeout_s` is for a question that the daemon may take longer to answer than others.
        """
        return _result(*self._request("GET", target, timeout_s))

    def get_text(self, target: str) -> str:
        """The answer to a GET that is no JSON; raises as `get` does."""
        status, body = self._request("GET", target, None)
        return body.decode(errors="replace") if status == 200 else str(_result(status, body))

    def post(self, target: str, timeout_s: float | None = None, *, until_closed: bool = False) -> Any:
        """The JSON answer to a POST; raises as `get` does. It is never sent twice.

        With `until_closed` it returns only once the program that has answered does not serve any more.
        """
        return _result(*self._request("POST", target, timeout_s, until_closed=until_closed))

    def delete(self, target: str, timeout_s: float | None = None) -> Any:
        """The JSON answer to a DELETE; raises as `get` does. It is never sent twice."""
        return _result(*self._request("DELETE", target, timeout_s))

    def _request(
        self, method: str, target: str, timeout_s: float | None, *, until_closed: bool = False
    ) -> tuple[int, bytes]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        with self._connect(timeout_s) as connection:
            try:
                status, body = _ask(connection, method, target, deadline_s, keep=until_closed)
                if until_closed and status == 200:
                    _see_out(connection, deadline_s)
            except socket.timeout:
                raise self._silent(timeout_s) from None
            except (OSError, h11.ProtocolError) as error:
                # h11's words for an end before any answer mean nothing to a person.
                why = "it ended or began anew" if "ConnectionClosed" in str(error) else str(error)
                what = f"the daemon's answer on {self._path} broke off: {why}"
                raise UnreachableError(what, f"see: journalctl -u {_UNIT}") from None
        return status, body

    def _connect(self, timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # In a burst of clients the kernel lets a connect wait; with Python's own timeout it does not.
            wait = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
            connection.connect(self._path)
            connection.settimeout(timeout_s)
        except OSError as error:
            connection.close()
            raise self._unreachable(error, timeout_s) from None
        return connection

    def _unreachable(self, error: OSError, timeout_s: float) -> YunionError:
        if error.errno in (errno.EACCES, errno.EPERM):
            return NotAllowedError(
                f"you may not ask the daemon: no permission for {self._path}",
                "become root, or join the group: usermod -aG yunion-mps USER, then log in anew",
            )
        if error.errno == errno.EAGAIN:
            return self._silent(timeout_s)
        if error.errno == errno.ENOENT:
            what = f"the daemon is not running: there is no {self._path}"
        elif error.errno == errno.ECONNREFUSED:
            what = f"the daemon is not running: nothing answers on {self._path}"
        else:
            what = f"the daemon cannot be reached on {self._path}: {error.strerror}"
        return UnreachableError(
            what, f"start it: systemctl start {_UNIT}; or see why not: systemctl status {_UNIT}"
        )

    def _silent(self, timeout_s: float) -> YunionError:
        return UnreachableError(
            f"the daemon does not answer on {self._path} within {timeout_s:g} s",
            f"see what it does: journalctl -u {_UNIT}; a restart ends jobs that do not end in time",
        )


def _ask(
    connection: socket.socket, method: str, target: str, deadline_s: float, *, keep: bool
) -> tuple[int, bytes]:
    """Status and body of the answer; with `keep` the connection stays open after it."""
    http = h11.Connection(h11.CLIENT)
    headers = [("Host", "localhost"), ("Accept", "application/json, text/plain")]
    headers += [] if keep else [("Connection", "close")]
    headers += [("Content-Length", "0")] if method == "POST" else []
    question = h11.Request(method=method, target=target, headers=headers)
    with contextlib.suppress(BrokenPipeError):  # who is turned away still gets to read why
        connection.sendall((http.send(question) or b"") + (http.send(h11.EndOfMessage()) or b""))
    status, body = 0, []
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(_receive(connection, deadline_s))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body.append(bytes(event.data))
        else:
            return status, b"".join(body)


def _receive(connection: socket.socket, deadline_s: float) -> bytes:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise socket.timeout
    connection.settimeout(left_s)
    return connection.recv(1 << 18)


def _see_out(connection: socket.socket, deadline_s: float) -> None:
    with contextlib.suppress(ConnectionError):
        while _receive(connection, deadline_s):
            pass


def _result(status: int, body: bytes) -> Any:
    try:
        answer = json.loads(body)
    except ValueError:
        raise UnreachableError(
            f"the daemon's answer (status {status}) is not JSON", "is another program on its socket?"
        ) from None
    if status == 200:
        return answer
    problem = answer if isinstance(answer, dict) else {}
    message = str(problem.get("detail") or f"the daemon answered {status}")
    hint = str(problem.get("hint") or f"see: journalctl -u {_UNIT}")
    raise _KINDS.get(status, YunionError)(message, hint)
