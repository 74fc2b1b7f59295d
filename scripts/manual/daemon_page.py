"""yunion-mps-daemon(8): the options in the words of `--help`, and what has to be known to run it."""

from __future__ import annotations

import argparse

from yunion_mps.config import KEYS
from yunion_mps.daemon.options import parser

from manual.command_page import statuses
from manual.files import add_files
from manual.roff import Page
from manual.texts import texts

_PROGRAM = "yunion-mps-daemon"


def page(date: str) -> str:
    """The source of the page."""
    told, words = parser(), texts("daemon")
    options = [action for action in told._actions if action.option_strings]  # noqa: SLF001 - argparse has no other way
    assert told.description
    assert told.epilog
    about, _, end = told.epilog.partition("\n\n")
    made = Page(_PROGRAM, 8, date, "runs NVIDIA MPS as a service")
    made.section("Synopsis")
    made.synopsis(_PROGRAM, " ".join(f"[{_invocation(action).rpartition(', ')[2]}]" for action in options))
    made.section("Description")
    for text in (told.description, " ".join(about.split()), *words["description"]):
        made.paragraph(text)
    made.section("Options")
    for action in options:
        made.term(f"`{_invocation(action)}`", (action.help or "") % {"default": action.default})
    for section in ("stop and reload", "signals", "environment"):
        made.section(section)
        _add_terms(made, words[section])
    add_files(made)
    made.section("Exit status")
    for number, meaning in statuses(end):
        made.term(number, meaning)
    made.section("Examples")
    for title, lines in words["examples"].items():
        made.paragraph(title)
        made.verbatim(f"  {line}" for line in lines.splitlines())
    made.see_also(
        [
            "yunion-mps(1)",
            "yunion-mps-host.conf(5)",
            "yunion-mps-host_container_device.yml(5)",
            "nvidia-cuda-mps-control(1)",
            "systemctl(1)",
            "journalctl(1)",
        ]
    )
    return str(made)


def _add_terms(made: Page, terms: dict[str, str]) -> None:
    stop_s = KEYS["cuda_mps_stop_timeout_s"].default
    for name, text in terms.items():
        made.term(f"`{name}`", *text.format(stop_s=stop_s).split("\n"))


def _invocation(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    if action.choices:
        return f"{names} {{{','.join(action.choices)}}}"
    return f"{names} {action.metavar}" if action.metavar else names
