"""The root command and completion; here errors become one line of what is wrong and one of what to do."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

import click

from yunion_mps.cli.output import cell, refuse_closed_output, unwritable
from yunion_mps.errors import InfeasibleError, YunionError
from yunion_mps.escaping import printable

_PROGRAM = "yunion-mps"

#: The commands, each with its module in `cli` and its name there, in the order of the help.
COMMANDS = {
    "isolated-device-list": ("devices", "list_devices"),
    "list": ("devices", "list_devices"),
    "show": ("devices", "show_device"),
    "run": ("run", "run"),
    "env": ("run", "print_environment"),
    "lease": ("lease", "lease_group"),
    "gpus": ("devices", "list_gpus"),
    "status": ("status", "status"),
    "top": ("top", "top"),
    "who": ("status", "who"),
    "clients": ("clients", "clients_group"),
    "events": ("events", "show_events"),
    "doctor": ("doctor", "doctor"),
    "plan": ("reload", "plan"),
    "reload": ("reload", "reload"),
    "config": ("config", "config_group"),
    "metrics": ("serve", "metrics"),
    "web": ("serve", "web"),
    "gateway": ("serve", "gateway"),
    "daemon-reexec": ("reload", "reexec"),
    "completion": ("root", "completion"),
}


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


class SuggestingGroup(click.Group):
    """As click's group, with the nearest real command in the error, and help if no command is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the arguments apart; from click 8.2 on, none at all would be an error."""
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` begins with; raises UsageError if there is none."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            error.message += f" Did you mean {near[0]}?" if near else ""
            raise


class LazyGroup(SuggestingGroup):
    """A group whose commands are found by name and imported on use: `list` does not pay for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, None if there is none of this name.

        From here on garbage is collected: any command may run for days (`web`), and none knows beforehand.
        """
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"yunion_mps.cli.{module}"), name)
        gc.freeze()  # what was imported stays for good; the collector need not look at it
        gc.enable()
        return command


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    del parameter
    if value and not ctx.resilient_parsing:
        from yunion_mps import version_line

        click.echo(version_line(_PROGRAM))
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nexit status:\n"
    "  0 done; 1 the request failed; 2 wrong usage; 3 the daemon cannot be reached;\n"
    "  4 not allowed; 5 nothing free now; 6 bad configuration",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the version and the revision, and exit.",
)  # fmt: skip
def cli() -> None:
    """NVIDIA GPUs divided into devices with budgets, by MPS.

    \b
    See what this host offers:            yunion-mps list
    See one device and how to use it:     yunion-mps show 00:06.0-1
    Run a command with a device:          yunion-mps run python train.py
    See whether all is well:              yunion-mps status
    See who has what:                     yunion-mps who
    Watch it:                             yunion-mps top
    Find what makes MPS fail:             yunion-mps doctor
    See what happened:                    yunion-mps events
    See whose jobs are running:           yunion-mps clients
    Check both files, touch nothing:      yunion-mps config check
    Try a new configuration:              yunion-mps plan; yunion-mps reload
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
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "yunion-mps", "_YUNION_MPS_COMPLETE").source())


def run() -> int:
    """Run the command that the arguments name; returns its exit status."""
    try:
        status = _main()
    except YunionError as error:
        return _fail(error)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        return _fail(_wrong_usage(error))
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader of our output has enough
        _forget_output()
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the same, where click saw it first
            return 0
        raise
    except OSError as error:
        _forget_output()
        return _fail(unwritable(error.strerror))
    return status if isinstance(status, int) else 0  # click hands on what an Exit asked for


def _main() -> object:
    if sys.argv[1:2] != ["run"]:  # what it runs may well have no output, as under exec(1)
        refuse_closed_output()
    status: object = cli.main(prog_name=_PROGRAM, standalone_mode=False)
    if sys.stdout is not None:
        sys.stdout.flush()
    return status


def _wrong_usage(error: click.ClickException) -> YunionError:
    """Click's words for it, in one line, and the help of the command that it met."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else _PROGRAM
    found = YunionError(cell(" ".join(error.format_message().split())), f"see: {path} --help")
    found.exit_code = error.exit_code
    return found


def _forget_output() -> None:
    """Python would try once more to write what is left, at its end, and complain."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: YunionError) -> int:
    reason_code = f" [{error.code}]" if isinstance(error, InfeasibleError) else ""
    texts = (f"{error.message}{reason_code}", error.hint)
    lines = [printable(line) for text in texts if text for line in text.split("\n")]
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # the exit status says it even if nothing can be written
            print("\n".join(f"{_PROGRAM}: {line}" for line in lines), file=sys.stderr)
    return error.exit_code
