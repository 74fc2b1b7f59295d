"""`yunion-mps gateway`: serves over TCP what host.conf opens; what yunion-mps-gateway.service runs."""

from __future__ import annotations

import asyncio
import logging
import sys

import click

from yunion_mps.gateway.listeners import serve
from yunion_mps.host.logs import LineFormatter, limit_tracebacks
from yunion_mps.paths import Paths


@click.command("gateway", short_help="Serve over TCP what host.conf opens: the service's own.")
def command() -> None:
    """Serve over TCP what metrics_listen and web_listen in host.conf open.

    It needs no rights but to ask the daemon, and ends when host.conf opens nothing. The service
    yunion-mps-gateway runs it; by hand it is only needed on a host without systemd.

    \b
    Examples:
      yunion-mps gateway
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    limit_tracebacks()
    asyncio.run(serve(Paths.from_environment()))
