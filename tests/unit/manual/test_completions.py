"""The completion files do what they are for in the three shells, and reading them starts no program."""

from __future__ import annotations

import os
import pty
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from unit.cli.conftest import PROGRAM, Cli
from unit.manual.conftest import program, run
from waiting import readable

FILES = {"bash": "yunion-mps.bash", "zsh": "_yunion-mps", "fish": "yunion-mps.fish"}

#: Started without this machine's files, and how the file is made known.
START = {
    "bash": (["--norc", "--noprofile", "-i"], "source {file}"),
    "zsh": (["-f", "-i"], "fpath=({directory} $fpath); autoload -Uz compinit; compinit -u -D"),
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


class Terminal:
    """A shell on a terminal of its own, as somebody sits before it."""

    def __init__(self, shell: str, env: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        arguments, _ = START[shell]
        self._process = subprocess.Popen(
            [program(shell), *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        self.printed = b""

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)
        os.close(self._ours)

    def type(self, text: str, until: str) -> str:
        """What is printed from here until `until` is."""
        begin = len(self.printed)
        os.write(self._ours, text.encode())
        while until.encode() not in self.printed[begin:]:
            assert readable(self._ours, 60), self.printed[begin:]
            self.printed += os.read(self._ours, 65536)
        return self.printed[begin:].decode(errors="replace")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_tab_completes_a_command_and_a_device(
    shell: str, cli: Cli, generated: Path, tmp_path: Path
) -> None:
    env = environment(cli, tmp_path, generated)
    directory = generated / "completions"
    prepare = START[shell][1].format(file=directory / FILES[shell], directory=directory)
    with closing(Terminal(shell, env)) as terminal:
        terminal.type(f"{prepare}; echo rea''dy\n", "ready\r\n")
        printed = terminal.type("yunion-mps gp\t-o csv\n", "addr,name")
        assert "error" not in printed
        terminal.type("yunion-mps show 00:06.0-2\t -o csv\n", "addr,00:06.0-2")
        terminal.type("yunion-mps show 0\t3 -o csv\n", "addr,00:06.0-3")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("words", ["--count 2 python3 train", "./train"])
def test_a_tab_completes_the_name_of_a_file_for_a_command_to_run(
    words: str, shell: str, cli: Cli, generated: Path, tmp_path: Path
) -> None:
    directory = generated / "completions"
    prepare = START[shell][1].format(file=directory / FILES[shell], directory=directory)
    (tmp_path / "training.py").write_text("")
    with closing(Terminal(shell, environment(cli, tmp_path, generated))) as terminal:
        terminal.type(f"{prepare}; cd {tmp_path}; echo rea''dy\n", "ready\r\n")
        terminal.type(f"yunion-mps run {words}\t", "ing.py")


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
