"""`yunion-mps web`: the web page for a while, by whoever may ask the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import click

from yunion_mps.cli.ask import ask
from yunion_mps.config.values import ENDPOINT_EXAMPLE, is_public, normal_endpoint
from yunion_mps.errors import YunionError
from yunion_mps.gateway.handlers import Web
from yunion_mps.gateway.listeners import LIMITS, listen
from yunion_mps.host.logs import limit_tracebacks
from yunion_mps.paths import Paths

_DEFAULT = "127.0.0.1:9435"


@click.command("web", short_help="Show it all on a web page.")
@click.option(
    "--listen", "address", default=_DEFAULT, show_default=True, metavar="ADDRESS:PORT",
    help="Where to serve it.",
)  # fmt: skip
@click.option("--allow-public", is_flag=True, help="Also at an address that other hosts can reach.")
def command(address: str, allow_public: bool) -> None:
    """Serve the web page until Ctrl-C: the GPUs, who has what, and what happens. It changes nothing.

    Whoever reaches the address can read it, without a password: at 127.0.0.1 all users of this host. To have
    the page for good, set web_listen in host.conf.

    \b
    Examples:
      yunion-mps web
      yunion-mps web --listen 127.0.0.1:8080
      ssh -L 9435:127.0.0.1:9435 gpu-01 yunion-mps web
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    limit_tracebacks()
    where = _checked(address, allow_public=allow_public)
    ask("/v1/status")  # whoever may not ask, or whom nobody answers, is told so here
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(where))


def _checked(address: str, *, allow_public: bool) -> str:
    """The address as it is listened on; raises YunionError."""
    try:
        where = normal_endpoint(address)
    except ValueError as error:
        raise click.BadParameter(
            f"{address}, {error}: write {ENDPOINT_EXAMPLE}", param_hint="'--listen'"
        ) from None
    if is_public(where) and not allow_public:
        hint = "listen at 127.0.0.1, or add --allow-public if that is meant"
        raise YunionError(f"other hosts can reach {where}, and there is no password", hint)
    return where


async def _serve(address: str) -> None:
    from yunion_mps.http.server import Server

    try:
        listener = listen(address)
    except OSError as error:
        hint = "choose another: --listen 127.0.0.1:PORT"
        raise YunionError(f"nothing can be served at {address}: {error.strerror}", hint) from None
    server: Any = Server(Web(Paths.from_environment()), LIMITS)
    await server.open(listener)
    click.echo(f"Serving at http://{address}/ until Ctrl-C")
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()
