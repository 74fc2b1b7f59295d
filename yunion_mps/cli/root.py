"""The root command and completion; prints errors as a line with the error and one with a hint."""

from __future__ import annotations

import gc
import importlib
import os
import sys

import click

from yunion_mps.cli.output import as_json, refuse_closed_output, unwritable
from yunion_mps.core.errors import YunionError
from yunion_mps.core.program import (
    CONTEXT_SETTINGS,
    print_error,
    suggestion,
    version_option,
    write_error,
    wrong_usage,
)

_PROGRAM = "yunion-mps"
#: The longest short help, which fits beside the longest name in 80 columns.
_LONGEST = 54

#: The commands by task, in the order of the help, each with its module in `cli` and its name there.
SECTIONS = {
    "Run jobs": {
        "run": ("run", "run_job"),
        "env": ("environment", "print_environment"),
        "lease": ("lease", "lease_group"),
    },
    "Devices and GPUs": {
        "list": ("devices", "list_devices"),
        "isolated-device-list": ("devices", "list_as_cloudpods"),
        "show": ("devices", "show_device"),
        "gpus": ("devices", "list_gpus"),
    },
    "Monitor and troubleshoot": {
        "status": ("status", "status"),
        "who": ("who", "who"),
        "top": ("top", "top"),
        "events": ("events", "show_events"),
        "doctor": ("doctor", "doctor"),
        "terminate": ("terminate", "terminate_jobs"),
    },
    "Configure": {
        "config": ("config", "config_group"),
        "plan": ("reload", "plan"),
        "reload": ("reload", "reload"),
    },
    "Integrate": {
        "slurm": ("slurm", "slurm_group"),
        "ray": ("ray", "ray_group"),
        "metrics": ("gateway", "metrics"),
        "web": ("gateway", "web"),
        "completion": ("root", "completion"),
    },
}
#: Called by the packages' scripts and units; help and completion omit them.
_INTERNAL = {
    "gateway": ("gateway", "gateway"),
    "daemon-reexec": ("reload", "reexec_daemon"),
    "stop-job-unit": ("safe_stop", "stop_job_unit"),
}
COMMANDS: dict[str, tuple[str, str]] = {}
for _section in (*SECTIONS.values(), _INTERNAL):
    COMMANDS.update(_section)


#: Click's script for bash cannot complete words with colons, such as device addresses, because bash splits
#: them (COMP_WORDBREAKS). This one parses the line itself, and offers what follows the colon.
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
    """A group that lists commands in the order of their definition, and suggests the nearest one.

    Without a command it prints its help.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help if there are no arguments, which is an error since click 8.2."""
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` begins with; raises UsageError with a suggestion."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            error.message = error.message.rstrip(".") + suggestion(args[0], self.list_commands(ctx))
            raise


class LazyGroup(SuggestingGroup):
    """A group that imports a command when it is used: `list` does not need the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each task under a heading, aligned across tasks."""
        width = max(map(len, COMMANDS))
        for title, section in SECTIONS.items():
            rows: list[tuple[str, str]] = []
            for name in section:
                command = self.get_command(ctx, name)
                if command:
                    rows.append((name.ljust(width), command.get_short_help_str(_LONGEST)))
            with formatter.section(title):
                formatter.write_dl(rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, and enable garbage collection, because any command may run for days (`web`)."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"yunion_mps.cli.{module}"), name)
        gc.freeze()  # imported modules are never freed, so the collector can skip them
        gc.enable()
        return command


@click.group(
    cls=LazyGroup,
    context_settings=CONTEXT_SETTINGS,
    epilog="\b\nExit status:\n"
    "  0 success; 1 failure; 2 wrong usage; 3 the daemon is unreachable;\n"
    "  4 permission denied; 5 no device is free; 6 invalid configuration\n\n"
    "With --output json, a command that fails prints its error as JSON, too: the last line on standard error "
    "has code, message, hint and exit_status.",
)
@version_option(_PROGRAM)
def cli() -> None:
    """Share NVIDIA GPUs between jobs, with enforced limits.

    Each GPU is divided into devices through MPS, MIG or time-slicing, and jobs lease them. A device has a
    budget of memory and of SM threads, which MPS and MIG enforce and time-slicing does not.

    \b
    Examples:
      yunion-mps list                  list the devices of this host
      yunion-mps run python train.py   run a command on a device of its own
      yunion-mps who                   show which jobs use which devices
      yunion-mps status                show the state of the service
      yunion-mps doctor                find out why MPS does not work
    """


@click.command("completion", short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def completion(shell: str) -> None:
    """Print a completion script for SHELL: bash, zsh or fish.

    It completes commands, options, devices, GPUs, leases and PIDs. The packages install it for all three
    shells.

    \b
    Examples:
      yunion-mps completion bash > /etc/bash_completion.d/yunion-mps
      yunion-mps completion zsh  > "${fpath[1]}/_yunion-mps"
      yunion-mps completion fish > ~/.config/fish/completions/yunion-mps.fish
    """
    if shell == "bash":
        click.echo(_BASH, nl=False)
        return
    from click.shell_completion import get_completion_class  # not needed to run a command

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "yunion-mps", "_YUNION_MPS_COMPLETE").source())


def run_cli() -> int:
    """Run the command line; return the exit status. Raises SystemExit if a command does so itself."""
    try:
        status = _main()
    except YunionError as error:
        return _print_error(error)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        return _print_error(wrong_usage(error, _PROGRAM))
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader of our output has read enough
        _discard_output()
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the same, caught by click first
            return 0
        raise
    except OSError as error:
        _discard_output()
        return _print_error(unwritable(error.strerror))
    return status if isinstance(status, int) else 0  # click returns the status of an Exit


def _print_error(error: YunionError) -> int:
    """Print the error for people, or as one line of JSON if that is the command's format."""
    if not _prints_json(sys.argv[1:]):
        return print_error(_PROGRAM, error)
    record = {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "exit_status": error.exit_code,
    }
    write_error(as_json(record) + "\n")
    return error.exit_code


def _prints_json(arguments: list[str]) -> bool:
    """Return whether the command's --output is json, even if the other arguments are wrong."""
    command: click.Command | None = cli
    while isinstance(command, click.Group) and arguments:
        name, *arguments = arguments
        command = command.get_command(click.Context(command), name)
    if command is None or isinstance(command, click.Group):
        return False
    settings = {**command.context_settings, "resilient_parsing": True, "ignore_unknown_options": True}
    try:
        options, _, _ = command.make_parser(click.Context(command, **settings)).parse_args(arguments)
    except click.UsageError:
        return False
    return options.get("output") == "json"


def _main() -> object:
    if sys.argv[1:2] != ["run"]:  # the command may have no output, as under exec(1)
        refuse_closed_output()
    status: object = cli.main(prog_name=_PROGRAM, standalone_mode=False)
    if sys.stdout is not None:
        sys.stdout.flush()
    return status


def _discard_output() -> None:
    """Discard unwritten output; otherwise, Python would try to write it at exit and report an error."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
