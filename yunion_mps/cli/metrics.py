"""`yunion-mps metrics`: what Prometheus reads."""

from __future__ import annotations

import sys

import click

from yunion_mps.cli.ask import daemon
from yunion_mps.escaping import printable


@click.command("metrics", short_help="Print the metrics, as Prometheus reads them.")
def command() -> None:
    """Print the metrics, as Prometheus reads them.

    To have them scraped, set metrics_listen in host.conf; for node_exporter's textfile collector, set
    metrics_textfile. What each one means is in docs/metrics.md.

    \b
    Examples:
      yunion-mps metrics
      yunion-mps metrics | promtool check metrics
    """
    sys.stdout.write("\n".join(map(printable, daemon().get_text("/metrics").split("\n"))))
