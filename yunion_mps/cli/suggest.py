"""Groups of commands that name the nearest real command when one is misspelt."""

from __future__ import annotations

import click


class SuggestingGroup(click.Group):
    """As click's group, with the nearest real command in the error, and help where no command is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the arguments apart; from click 8.2 on, none at all would be an error."""
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` begins with; raises UsageError where there is none."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            error.message += f" Did you mean {near[0]}?" if near else ""
            raise
