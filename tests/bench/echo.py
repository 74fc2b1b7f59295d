"""The floor of a request: an asyncio server on a Unix socket that answers everything with so many bytes.

python -I echo.py SOCKET BYTES; each piece that arrives is one request. It prints a line once it listens.
"""

import asyncio
import sys


class Echo(asyncio.Protocol):
    """One client."""

    def connection_made(self, transport):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        self.transport = transport

    def data_received(self, data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        self.transport.write(ANSWER)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_unix_server(Echo, sys.argv[1], backlog=512)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    ANSWER = b"x" * int(sys.argv[2])
    asyncio.run(serve())
