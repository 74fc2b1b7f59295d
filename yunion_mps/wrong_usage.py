"""click's errors as those of our programs: `no such option: --foo`, and a hint at the help."""

from __future__ import annotations

from difflib import get_close_matches

import click

from yunion_mps.errors import YunionError
from yunion_mps.text import printable

#: The similarity from which a word is suggested for another: `clients` is not close to `events`.
CLOSE = 0.7


def wrong_usage(error: click.ClickException, program: str) -> YunionError:
    """Return click's message on one line, with a hint at the command's help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else program
    if isinstance(error, click.NoSuchOption):
        suggestions = get_close_matches(error.option_name, error.possibilities or (), n=1, cutoff=CLOSE)
        message = error.message + (f" (did you mean {suggestions[0]}?)" if suggestions else "")
    else:
        message = error.format_message()
    words = printable(" ".join(message.split()))
    if not words.endswith("..."):
        words = words.removesuffix(".")
    if not words[:2].isupper():  # unlike DEVICE
        words = words[:1].lower() + words[1:]
    found = YunionError(words, f"see: {path} --help")
    found.exit_code = error.exit_code
    return found
