"""Asking the daemon without keeping others waiting."""

from __future__ import annotations

import asyncio
import contextlib

import h11

from yunion_mps.errors import UnreachableError
from yunion_mps.http.query import Response
from yunion_mps.paths import Paths

_PIECE_BYTES = 1 << 18


async def ask(paths: Paths, target: str, accept: str = "*/*", timeout_s: float = 10.0) -> Response:
    """The daemon's answer to a GET, whatever its status; raises UnreachableError where none comes."""
    try:
        return await asyncio.wait_for(_ask(paths.socket, target, accept), timeout_s)
    except asyncio.TimeoutError:
        what = f"the daemon does not answer within {timeout_s:g} s"
    except PermissionError:
        what = "whoever serves this may not ask the daemon"
        raise UnreachableError(what, "serve it as root, or as a member of the group yunion-mps") from None
    except (OSError, h11.ProtocolError):
        what = "the daemon is not running"
    raise UnreachableError(what, "see: systemctl status yunion-mps-daemon")


async def _ask(path: str, target: str, accept: str) -> Response:
    reader, writer = await asyncio.open_unix_connection(path)
    http = h11.Connection(h11.CLIENT)
    try:
        accepted = (accept or "*/*").encode("latin-1")  # which may be anything that a client has sent
        headers = [(b"Host", b"localhost"), (b"Accept", accepted), (b"Connection", b"close")]
        request = h11.Request(method="GET", target=target, headers=headers)
        writer.write((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
        status, kind, body = 0, "", bytearray()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(_PIECE_BYTES))
            elif isinstance(event, h11.Response):
                status = event.status_code
                kind = next((value for name, value in event.headers if name == b"content-type"), b"").decode()
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return Response(status, kind, bytes(body))
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
