"""`metrics`, `web`, and the internal command `gateway`: what is also served over TCP."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from yunion_mps.cli.calls import call_daemon
from yunion_mps.core.errors import YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.core.text import printable
from yunion_mps.host.log import set_up_log
from yunion_mps.http.operations import GET_METRICS, GET_STATUS

# What serves is imported where it is needed: asyncio alone takes 60 ms, and --help and completion import this
# module to list its commands.

_DEFAULT = "127.0.0.1:9435"


@click.command("metrics", short_help="Print the metrics in the Prometheus text format.")
def metrics() -> None:
    """Print the metrics in the Prometheus text format.

    To let Prometheus scrape them, set metrics_listen in host.conf. For node_exporter's textfile collector,
    set metrics_textfile. docs/metrics.md describes each metric.

    \b
    Examples:
      yunion-mps metrics
      yunion-mps metrics | promtool check metrics
    """
    sys.stdout.write("\n".join(map(printable, call_daemon(GET_METRICS).split("\n"))))


@click.command("web", short_help="Serve the web page.")
@click.option(
    "--listen", "address", default=_DEFAULT, show_default=True, metavar="ADDRESS:PORT",
    help="Listen on this address.",
)  # fmt: skip
@click.option("--allow-public", is_flag=True, help="Allow an address that other hosts can reach.")
def web(address: str, allow_public: bool) -> None:
    """Serve a read-only web page with GPUs, devices, jobs and events until you press Ctrl-C.

    Anyone who can reach the address can read the page without a password; 127.0.0.1 is open to all users of
    this host. To serve the page permanently, set web_listen in host.conf.

    \b
    Examples:
      yunion-mps web
      yunion-mps web --listen 127.0.0.1:8080
      ssh -L 9435:127.0.0.1:9435 gpu-01 yunion-mps web
    """
    import asyncio  # see above

    set_up_log("warning", plain=True)
    endpoint = _check_address(address, allow_public=allow_public)
    call_daemon(GET_STATUS)  # raises if the daemon does not answer this user
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(endpoint))


def _check_address(address: str, *, allow_public: bool) -> str:
    """Return the normalised address; raises BadParameter if other hosts can reach it."""
    from yunion_mps.config.values import ENDPOINT_EXAMPLE, is_public, normalise_endpoint

    try:
        endpoint = normalise_endpoint(address)
    except ValueError as error:
        raise click.BadParameter(
            f"{address!r} is {error}: write {ENDPOINT_EXAMPLE}", param_hint="'--listen'"
        ) from None
    if is_public(endpoint) and not allow_public:
        message = f"other hosts can reach {endpoint}, and the page is not protected by a password"
        hint = "use 127.0.0.1, or add --allow-public if this is intended"
        raise click.BadParameter(f"{message}: {hint}", param_hint="'--listen'")
    return endpoint


async def _serve(address: str) -> None:
    # See above.
    import asyncio

    from yunion_mps.gateway.server import LIMITS, WebPage
    from yunion_mps.http.listener import listen_on
    from yunion_mps.http.server import Server

    try:
        listener = listen_on(address)
    except OSError as error:
        hint = "choose another port: --listen 127.0.0.1:PORT"
        raise YunionError(f"cannot listen on {address}: {error.strerror}", hint) from None
    server: Any = Server(WebPage(Paths.from_environment()), LIMITS)
    await server.open(listener)
    click.echo(f"Serving at http://{address}/ (press Ctrl-C to stop)")
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()


@click.command("gateway", hidden=True)
def gateway() -> None:
    """Serve the metrics and the web page on the addresses set by metrics_listen and web_listen in host.conf.

    The service yunion-mps-gateway runs this command as an unprivileged user; run it yourself only on a host
    without systemd. It exits if host.conf sets neither key.

    \b
    Examples:
      yunion-mps gateway
    """
    # See above.
    import asyncio

    from yunion_mps.gateway.server import serve_gateway

    set_up_log("info", plain=True)
    asyncio.run(serve_gateway(Paths.from_environment()))
