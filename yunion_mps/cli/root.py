"""The root command: which commands there are. Each is imported only when it is called."""

from __future__ import annotations

import gc
import importlib

import click

from yunion_mps.cli.suggest import SuggestingGroup

#: The commands and the modules that hold them, in the order of the help.
COMMANDS = {
    "isolated-device-list": "yunion_mps.cli.list",
    "list": "yunion_mps.cli.list",
    "show": "yunion_mps.cli.show",
    "run": "yunion_mps.cli.run",
    "env": "yunion_mps.cli.environment",
    "lease": "yunion_mps.cli.lease",
    "gpus": "yunion_mps.cli.gpus",
    "status": "yunion_mps.cli.status",
    "top": "yunion_mps.cli.top",
    "who": "yunion_mps.cli.who",
    "clients": "yunion_mps.cli.clients",
    "events": "yunion_mps.cli.events",
    "doctor": "yunion_mps.cli.doctor",
    "plan": "yunion_mps.cli.plan",
    "reload": "yunion_mps.cli.reload",
    "config": "yunion_mps.cli.config",
    "metrics": "yunion_mps.cli.metrics",
    "web": "yunion_mps.cli.web",
    "gateway": "yunion_mps.cli.gateway",
    "daemon-reexec": "yunion_mps.cli.reexec",
    "completion": "yunion_mps.cli.completion",
}


class LazyGroup(SuggestingGroup):
    """A group whose commands are found by name and imported on use: `list` does not pay for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of `COMMANDS`."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, None where there is none of this name.

        From here on garbage is collected: any command may run for days (`web`), and none knows beforehand.
        """
        del ctx
        module = COMMANDS.get(cmd_name)
        command: click.Command | None = importlib.import_module(module).command if module else None
        gc.freeze()  # what was imported stays for good; the collector need not look at it
        gc.enable()
        return command


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    del parameter
    if value and not ctx.resilient_parsing:
        from yunion_mps import version_line

        click.echo(version_line("yunion-mps"))
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
