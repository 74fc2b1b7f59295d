"""The man pages say what the programs' help says, and nothing is wrong with them."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from yunion_mps.cli.root import cli as root
from yunion_mps.core.paths import Paths

from unit.cli.conftest import PROGRAM
from unit.generated import CHECKOUT
from unit.manual.conftest import PAGES, Manual, run, squeezed

#: Handed from one program to the next, and of no use to anybody else.
INTERNAL = {"YUNION_MPS_REEXEC", "YUNION_MPS_COMPLETE", "YUNION_MPS_DOMAIN"}


def commands(parent: click.Context) -> Iterator[tuple[str, ...]]:
    assert isinstance(parent.command, click.Group)
    for name in parent.command.list_commands(parent):
        command = parent.command.get_command(parent, name)
        assert command
        if command.hidden:
            continue
        yield (name,)
        if isinstance(command, click.Group):
            for below in commands(click.Context(command, parent=parent)):
                yield (name, *below)


COMMANDS = list(commands(click.Context(root)))


def help_of(*words: str) -> str:
    """The help of a command, which runs in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert root.main([*words, "--help"], prog_name="yunion-mps", standalone_mode=False) == 0
    return printed.getvalue()


def options_of(text: str) -> list[str]:
    """The entries under Options, each with its names and its words."""
    part = re.split(r"\n(?=\S)|\n\n", re.split(r"\n[Oo]ptions:\n", text)[1])[0]
    return re.split(r"\n(?= {1,4}-)", part)


def test_every_command_is_known_to_these_tests() -> None:
    assert len(COMMANDS) >= 15
    assert ("lease", "show") in COMMANDS
    assert ("config", "check") in COMMANDS


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_man_page_has_each_command_in_the_words_of_its_help(
    words: tuple[str, ...], manual: Manual
) -> None:
    page = manual.text("yunion-mps.1")
    text = help_of(*words)
    assert re.search(rf"^   .*yunion-mps {' '.join(words)}\b", page, re.MULTILINE)
    about = text.partition("\n\n")[2]
    for paragraph in re.split(r"\n\s*\n|\n(?=[Oo]ptions:\n)", about):
        if not paragraph.startswith(("Options:", "Commands:")):
            for line in paragraph.splitlines():
                assert squeezed(line) in squeezed(page), line
    shown = [option for option in options_of(text) if "--help" not in option]
    section = page[page.index(f"yunion-mps {' '.join(words)}") :]
    for option in shown:
        assert squeezed(option) in squeezed(section), option


def test_the_man_page_has_the_whole_programs_help(manual: Manual) -> None:
    page = squeezed(manual.text("yunion-mps.1"))
    text = help_of()
    for option in options_of(text):
        assert squeezed(option) in page
    statuses = re.findall(r"(\d) ([a-z ]+)", text.lower().partition("exit status:")[2].replace("\n ", ""))
    assert [number for number, _ in statuses] == list("0123456")
    for number, words in statuses:
        assert squeezed(number + words) in page


def test_the_daemons_man_page_has_all_of_its_help(manual: Manual) -> None:
    page = squeezed(manual.text("yunion-mps-daemon.8"))
    text = run(PROGRAM + "-daemon", "--help").stdout
    options = options_of(text)
    assert len(options) == 7
    for option in options:
        assert squeezed(option) in page, option
    prose, _, after = text.partition("\n\n")[2].partition("Options:\n")
    for paragraph in prose.split("\n\n"):
        assert squeezed(paragraph) in page
    for status in after.partition("Exit status:")[2].split(";"):
        assert squeezed(status) in page


def test_the_pages_have_every_variable_that_the_programs_read(manual: Manual) -> None:
    named: set[str] = set()
    for path in CHECKOUT.glob("yunion_mps/**/*.py"):
        named |= set(re.findall(r"\bYUNION_MPS_[A-Z_]+\b", path.read_text()))
    pages = "".join(manual.text(name) for name in PAGES if name.endswith(("1", "8")))
    assert len(named) >= 3
    assert {name for name in named - INTERNAL if name not in pages} == set()


def test_the_daemons_page_has_every_file_of_ours(manual: Manual) -> None:
    paths = Paths()
    names = [name for name in vars(Paths) if not name.startswith("_") and not name.endswith("_directory")]
    files = {path for name in names if isinstance(path := getattr(paths, name), str)}
    ours = {file for file in files if "yunion" in file}
    assert len(ours) >= 6
    page = manual.text("yunion-mps-daemon.8")
    assert {file for file in ours if f"       {file}\n" not in page} == set()


@pytest.mark.parametrize("name", PAGES)
def test_man_and_mandoc_report_no_problems(name: str, manual: Manual) -> None:
    assert run("mandoc", "-Tlint", manual.path(name)).stdout == ""
    assert "yunion-mps 0." in run("man", "--warnings", "-Tutf8", "-l", manual.path(name)).stdout


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_terminal_of_80_columns_and_hyphenates_nothing(name: str, manual: Manual) -> None:
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANWIDTH": "80"}
    lines = run("man", "-l", "-P", "cat", manual.path(name), env=env).stdout.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    # Where the page ends, its date may have typographer's hyphens.
    assert "\u2010" not in "\n".join(lines[:-1])
    assert len(lines) > 30


@pytest.mark.parametrize("name", PAGES)
def test_apropos_finds_the_page(name: str, manual: Manual) -> None:
    found = run("lexgrog", manual.path(name)).stdout
    assert f': "{name.rpartition(".")[0]} - ' in found


def test_all_pages_are_there_and_no_other(generated: Path) -> None:
    assert {path.name for path in (generated / "man").iterdir()} == set(PAGES)
