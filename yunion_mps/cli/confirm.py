"""Asking a person before jobs are ended."""

from __future__ import annotations

import sys

import click

from yunion_mps.errors import YunionError


def need_somebody(yes: bool) -> None:
    """Wrong usage where nobody can be asked, and the answer was not given beforehand."""
    if not yes and not (sys.stdin and sys.stdin.isatty()):
        raise click.UsageError("This ends jobs, and nobody is there to be asked: add --yes.")


def confirm(question: str, yes: bool) -> None:
    """Go on where the answer is yes; raises YunionError otherwise."""
    if not yes and not click.confirm(question, err=True):
        raise YunionError("nothing was changed, and nobody was ended", "answer y to go on")
