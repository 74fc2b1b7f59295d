"""What other programs read: `metrics` for Prometheus, `web` and `gateway` over TCP."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from yunion_mps.cli.common import call
from yunion_mps.errors import YunionError
from yunion_mps.escaping import printable
from yunion_mps.http.operations import GET_METRICS, GET_STATUS
from yunion_mps.paths import Paths

_DEFAULT = "127.0.0.1:9435"


@click.command("metrics", short_help="Print the metrics, as Prometheus reads them.")
def metrics() -> None:
    """Print the metrics, as Prometheus reads them.

    To have them scraped, set metrics_listen in host.conf; for node_exporter's textfile collector, set
    metrics_textfile. What each one means is in docs/metrics.md.

    \b
    Examples:
      yunion-mps metrics
      yunion-mps metrics | promtool check metrics
    """
    sys.stdout.write("\n".join(map(printable, call(GET_METRICS).split("\n"))))


@click.command("web", short_help="Show it all on a web page.")
@click.option(
    "--listen", "address", default=_DEFAULT, show_default=True, metavar="ADDRESS:PORT",
    help="Where to serve it.",
)  # fmt: skip
@click.option("--allow-public", is_flag=True, help="Also at an address that other hosts can reach.")
def web(address: str, allow_public: bool) -> None:
    """Serve the web page until Ctrl-C: the GPUs, who has what, and what happens. It changes nothing.

    Anyone who reaches the address can read it, without a password: at 127.0.0.1 all users of this host. To
    have the page for good, set web_listen in host.conf.

    \b
    Examples:
      yunion-mps web
      yunion-mps web --listen 127.0.0.1:8080
      ssh -L 9435:127.0.0.1:9435 gpu-01 yunion-mps web
    """
    import asyncio

    from yunion_mps.host import logs

    logs.set_up("warning", plain=True)
    where = _checked(address, allow_public=allow_public)
    call(GET_STATUS)  # raises if the daemon does not answer, or not this user
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(where))


def _checked(address: str, *, allow_public: bool) -> str:
    """The address as it is listened on; raises YunionError."""
    from yunion_mps.config.values import ENDPOINT_EXAMPLE, is_public, normal_endpoint

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
    import asyncio

    from yunion_mps.gateway.server import LIMITS, Web, listen
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


@click.command("gateway", short_help="Serve over TCP what host.conf opens: the service's own.")
def gateway() -> None:
    """Serve over TCP what metrics_listen and web_listen in host.conf open.

    It needs no rights but to ask the daemon, and ends when host.conf opens nothing. The service
    yunion-mps-gateway runs it; by hand it is only needed on a host without systemd.

    \b
    Examples:
      yunion-mps gateway
    """
    import asyncio

    from yunion_mps.gateway.server import serve
    from yunion_mps.host import logs

    logs.set_up("info", plain=True)
    asyncio.run(serve(Paths.from_environment()))
