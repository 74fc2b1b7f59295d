"""The completion files do what they are for in the three shells, and reading them starts no program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.tmux import Tmux
from unit.cli.conftest import PROGRAM, Cli
from unit.manual.conftest import program, run

FILES = {"bash": "yunion-mps.bash", "zsh": "_yunion-mps", "fish": "yunion-mps.fish"}

#: Started without this machine's files, and how the file is made known.
START = {
    "bash": ("--norc --noprofile -i", "source {file}"),
    "zsh": ("-f -i", "fpath=({directory} $fpath); autoload -Uz compinit; compinit -u -D"),
}


def environment(cli: Cli, home: Path, generated: Path) -> dict[str, str]:
    """A terminal that knows nothing, and fish's directory of what packages bring."""
    vendor = home / "share/fish"
    vendor.mkdir(parents=True)
    (vendor / "vendor_completions.d").symlink_to(generated / "completions")
    return {
        **cli.env,
        "PATH": f"{Path(PROGRAM).parent}:{cli.env['PATH']}",
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "XDG_DATA_DIRS": str(home / "share"),
        "TERM": "dumb",
        "PS1": "$ ",
        "INPUTRC": "/dev/null",
        "HISTFILE": "",
    }


@contextmanager
def terminal(shell: str, cli: Cli, home: Path, generated: Path) -> Iterator[Tmux]:
    """A shell on a terminal of its own that knows the file."""
    options, known = START[shell]
    directory = generated / "completions"
    with Tmux(environment(cli, home, generated), 150, 40) as screen:
        screen.type(f"exec {program(shell)} {options}", "Enter")
        screen.type(f"{known.format(file=directory / FILES[shell], directory=directory)}; clear", "Enter")
        screen.type(f"cd {home}; echo rea''dy", "Enter")
        screen.wait("^ready$")
        yield screen


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_tab_completes_a_command_and_a_device(
    shell: str, cli: Cli, generated: Path, tmp_path: Path
) -> None:
    with terminal(shell, cli, tmp_path, generated) as screen:
        screen.type("yunion-mps gp", "Tab", "-o csv", "Enter")
        screen.wait("^addr,name,")
        for typed, device in ((("00:06.0-2", "Tab", " "), "00:06.0-2"), (("0", "Tab", "3 "), "00:06.0-3")):
            screen.type("yunion-mps show ", *typed, "-o csv", "Enter")
            screen.wait(f"^addr,{device}$")


@pytest.mark.parametrize("typed", ["0001\t2", "0001:e\t1", "0001:e1:00\t0", "0001:e1:00.0-2\t"])
def test_an_address_with_colons_is_completed_as_it_is_typed(
    typed: str, troubled_cli: Cli, generated: Path, tmp_path: Path
) -> None:
    begin, _, end = typed.partition("\t")
    with terminal("bash", troubled_cli, tmp_path, generated) as screen:
        screen.type(f"yunion-mps show {begin}", "Tab", f"{end} -o csv", "Enter")
        screen.wait(f"^addr,0001:e1:00.0-{typed.strip()[-1]}$")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("words", ["--count 2 python3 train", "./train"])
def test_a_tab_completes_the_name_of_a_file_for_a_command_to_run(
    words: str, shell: str, cli: Cli, generated: Path, tmp_path: Path
) -> None:
    (tmp_path / "training.py").write_text("")
    with terminal(shell, cli, tmp_path, generated) as screen:
        screen.type(f"yunion-mps run {words}", "Tab")
        screen.wait(rf"yunion-mps run {words}ing\.py")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("yunion-mps sta", ["status"]),
        ("yunion-mps ter", ["terminate"]),
        ("yunion-mps events --kind c", ["compute_mode", "configuration", "client"]),
        ("yunion-mps isolated-device-list --of", ["--offset"]),
        ("yunion-mps show ", ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]),
        ("yunion-mps run python3 /usr/bin/dpkg-que", ["/usr/bin/dpkg-query"]),
    ],
)
def test_fish_finds_the_file_among_those_of_packages_and_completes(
    line: str, offered: list[str], cli: Cli, generated: Path, tmp_path: Path
) -> None:
    env = environment(cli, tmp_path, generated)
    done = run("fish", "-c", f"complete --do-complete '{line}'", env=env)
    assert sorted(each.split("\t")[0] for each in done.stdout.splitlines()) == sorted(offered)


@pytest.mark.parametrize("shell", list(FILES))
def test_reading_the_file_starts_no_program(shell: str, generated: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    stand_in = tmp_path / "yunion-mps"
    stand_in.write_text(f'#!/bin/sh\necho "$*" >>{started}\n')
    stand_in.chmod(0o755)
    file = generated / "completions" / FILES[shell]
    read = f"autoload -Uz compinit; compinit -u -D; source {file}" if shell == "zsh" else f"source {file}"
    options = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "TERM": "dumb"}
    assert run(shell, *options, "-c", f"{read}; type yunion-mps >/dev/null", env=env).stdout == ""
    assert not started.exists()


@pytest.mark.parametrize("shell", list(FILES))
def test_the_file_is_what_the_command_prints(shell: str, generated: Path) -> None:
    printed = run(PROGRAM, "completion", shell).stdout
    assert (generated / "completions" / FILES[shell]).read_text() == printed


def test_all_files_are_there_and_no_other(generated: Path) -> None:
    assert {path.name for path in (generated / "completions").iterdir()} == set(FILES.values())
