"""`yunion-mps completion`: the shells' completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    Examples:
      yunion-mps completion bash > /etc/bash_completion.d/yunion-mps
      yunion-mps completion zsh  > "${fpath[1]}/_yunion-mps"
      yunion-mps completion fish > ~/.config/fish/completions/yunion-mps.fish
    """
    from yunion_mps.cli.root import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "yunion-mps", "_YUNION_MPS_COMPLETE").source())
