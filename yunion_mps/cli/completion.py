"""`yunion-mps completion`: the shells' completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

#: Click's script for bash cannot complete a word with a colon, which every device address has: bash takes
#: such a word apart (COMP_WORDBREAKS). This one looks at the line itself, and offers what comes after it.
_BASH = """\
_yunion_mps_completion() {
    local line=${COMP_LINE:0:COMP_POINT} words kind value
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local last=$((${#words[@]} - 1)) before=""
    [[ $COMP_WORDBREAKS == *:* ]] && before=${words[last]%"${words[last]##*:}"}
    COMPREPLY=()
    while IFS=, read -r kind value; do
        if [[ $kind == file ]]; then
            COMPREPLY=()
            compopt -o default 2>/dev/null
            return
        fi
        COMPREPLY+=("${value#"$before"}")
    done < <(COMP_WORDS=$line COMP_CWORD=$last _YUNION_MPS_COMPLETE=bash_complete "$1")
}
complete -o nosort -F _yunion_mps_completion yunion-mps
"""


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    Examples:
      yunion-mps completion bash > /etc/bash_completion.d/yunion-mps
      yunion-mps completion zsh  > "${fpath[1]}/_yunion-mps"
      yunion-mps completion fish > ~/.config/fish/completions/yunion-mps.fish
    """
    if shell == "bash":
        click.echo(_BASH, nl=False)
        return
    from yunion_mps.cli.root import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "yunion-mps", "_YUNION_MPS_COMPLETE").source())
