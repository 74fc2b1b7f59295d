"""yunion-mps(1), from click's commands: what `--help` says, in its words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc

import click
from yunion_mps.cli.root import cli
from yunion_mps.paths import ROOT_VARIABLE
from yunion_mps.planning import DEVICE_VARIABLE

from manual.files import add_files
from manual.roff import Page

_PROGRAM = "yunion-mps"
#: What click takes for a paragraph whose lines stay as they are.
_KEPT = "\b\n"
_HELP_OPTION = ("-h, --help", "--help")

_WHO_MAY = """\
`yunion-mps` asks `yunion-mps-daemon`(8) on its socket, and tells it what to do. Root and the members of the
group `yunion-mps` may look, and take devices and give them back; only root may change what concerns
everybody. Its commands `config` and `completion` need no daemon."""
_ENVIRONMENT = {
    DEVICE_VARIABLE: """\
The device that `show` is about where none is given. A process that uses a device has it in its environment
(see `show`), so within a job it names the job's own.""",
    ROOT_VARIABLE: """\
Another root directory than /, under which every path lies: to look into an unpacked host, and for tests.""",
}


def page(date: str) -> str:
    """The source of the page."""
    root = click.Context(cli, info_name=_PROGRAM, **cli.context_settings)
    (title, *prose), kept = _help(cli)
    made = Page(_PROGRAM, 1, date, title.rstrip("."))
    made.section("Synopsis")
    made.synopsis(_PROGRAM, " ".join(cli.collect_usage_pieces(root)))
    made.section("Description")
    for text in (*prose, _WHO_MAY):
        made.paragraph(text)
    _add_kept(made, kept)
    made.section("Options")
    for option, words in _options(root):
        made.term(f"`{option}`", words)
    made.section("Commands")
    made.paragraph("Each has `--help` as well, which says what stands here.")
    for context, names in _commands(root):
        _add_command(made, context, names)
    made.section("Exit status")
    for number, words in statuses(cli.epilog or ""):
        made.term(number, words)
    made.section("Environment")
    for variable, words in _ENVIRONMENT.items():
        made.term(f"`{variable}`", words)
    add_files(made, "host_conf", "socket")
    made.see_also(
        [
            "yunion-mps-daemon(8)",
            "yunion-mps-host.conf(5)",
            "yunion-mps-host_container_device.yml(5)",
            "nvidia-smi(1)",
            "nvidia-cuda-mps-control(1)",
        ]
    )
    return str(made)


def statuses(text: str) -> list[tuple[str, str]]:
    """Each exit status and its meaning, out of a program's help: `exit status: 0 done; 1 …`."""
    listed = " ".join(text.partition("exit status:")[2].split())
    return [
        (number, words) for number, _, words in (part.strip().partition(" ") for part in listed.split(";"))
    ]


def _commands(parent: click.Context) -> Iterator[tuple[click.Context, list[str]]]:
    """Every command below `parent` in the order of the help, with all its names; the first is its own."""
    group = parent.command
    assert isinstance(group, click.Group)
    names: dict[click.Command, list[str]] = {}
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command
        names.setdefault(command, []).append(f"{parent.command_path} {name}")
    for command, called in names.items():
        context = click.Context(command, info_name=called[0].rpartition(" ")[2], parent=parent)
        yield context, called
        if isinstance(command, click.Group):
            yield from _commands(context)


def _add_command(made: Page, context: click.Context, names: list[str]) -> None:
    command = context.command
    made.subsection(f"{', '.join(names)} {' '.join(command.collect_usage_pieces(context))}")
    prose, kept = _help(command)
    for text in prose:
        made.paragraph(text)
    for option, words in _options(context):
        if option not in _HELP_OPTION:
            made.term(f"`{option}`", words)
    _add_kept(made, kept)


def _options(context: click.Context) -> list[tuple[str, str]]:
    records = [parameter.get_help_record(context) for parameter in context.command.get_params(context)]
    return [record for record in records if record]


def _help(command: click.Command) -> tuple[list[str], list[str]]:
    """The help's paragraphs, and those of them whose lines click keeps as they are."""
    texts = re.split(r"\n\s*\n", cleandoc(command.help or ""))
    prose = [" ".join(text.split()) for text in texts if not text.startswith(_KEPT)]
    return prose, [text[len(_KEPT) :] for text in texts if text.startswith(_KEPT)]


def _add_kept(made: Page, texts: list[str]) -> None:
    for text in texts:
        title, _, rest = text.partition("\n")
        if title.endswith(":"):
            made.paragraph(title)
        made.verbatim((rest if title.endswith(":") else text).splitlines())
