"""Tables fit the terminal they are printed on, and are whole in a pipe."""

from __future__ import annotations

import contextlib
import re

import pytest
from yunion_mps.cli.output import Column, age, display_width, fit, hint_text, table
from yunion_mps.core.text import count

from unit.cli.conftest import Cli, open_terminal

LIST = "isolated-device-list"


@pytest.mark.parametrize("columns", [40, 80, 100, 132, 400])
@pytest.mark.parametrize("name", ["cli", "troubled_cli"])
def test_cloudpods_table_is_complete_on_every_terminal(
    request: pytest.FixtureRequest, name: str, columns: int
) -> None:
    host = request.getfixturevalue(name)
    assert host.on_terminal(columns, LIST) == host.good(LIST).splitlines()


@pytest.mark.parametrize("command", ["list", "gpus", LIST, "list -o wide", "gpus -o wide"])
def test_on_a_terminal_wide_enough_a_table_is_as_when_piped(troubled_cli: Cli, command: str) -> None:
    wide = troubled_cli.on_terminal(500, *command.split())
    assert wide == troubled_cli.good(*command.split()).splitlines()
    assert not [line for line in wide if "…" in line or "show all: -o csv" in line]


@pytest.mark.parametrize("command", ["list", "gpus"])
@pytest.mark.parametrize("columns", [50, 60, 80, 132])
def test_a_table_fits_the_terminal_and_keeps_its_names(troubled_cli: Cli, command: str, columns: int) -> None:
    header, *lines = troubled_cli.on_terminal(columns, *command.split())
    rows = [line for line in lines if re.match(r"[0-9a-f:.-]+ ", line)]
    assert max(map(len, (header, *rows))) <= columns
    piped = troubled_cli.good(*command.split()).splitlines()
    assert [row.split()[0] for row in rows] == [line.split()[0] for line in piped[1 : 1 + len(rows)]]


@pytest.mark.parametrize("columns", [36, 37])
def test_omitted_columns_are_named_in_one_line_that_fits(cli: Cli, columns: int) -> None:
    (line,) = [line for line in cli.on_terminal(columns, "list") if "hidden" in line]
    assert line.endswith("; show all: -o csv)")
    assert len(line) <= columns
    assert ("hidden: GPU, SM %" in line) == (columns == 37)


@pytest.mark.parametrize("columns", [60, 80])
def test_reasons_are_whole_on_every_terminal(troubled_cli: Cli, columns: int) -> None:
    """What is too long for a line goes on below, indented, and breaks only between words or commands."""

    def told(lines: list[str]) -> list[str]:
        text = re.sub(r"\n +", " ", "\n".join(lines))
        return [line for line in text.splitlines() if re.match(r"(\d\S+|Problem|Hint): +\S", line)]

    for command in ("gpus", "status", "who"):
        lines = troubled_cli.on_terminal(columns, command)
        reasons = told(lines)
        assert reasons == told(troubled_cli.good(command).splitlines())
        assert reasons, command
        broad = [line for line in lines if len(line) > columns and line[:1] != "("]
        assert all(re.fullmatch(r" +(\S+|nvidia-smi .*)", line) for line in broad), "but a path or a command"


def test_without_utf_8_cut_text_is_marked_in_ascii(cli: Cli) -> None:
    ascii_only = Cli(cli.root)
    ascii_only.env["LC_ALL"] = "C"
    lines = ascii_only.process_lines(50, "list")
    assert "".join(lines).isascii()
    assert [line.replace("…", "~") for line in cli.on_terminal(50, "list")] == lines


def test_an_empty_table_is_a_sentence_or_a_header() -> None:
    columns = (Column("A", 0), Column("Bc", 1))
    assert table(columns, [], none="No leases.") == "No leases.\n"
    assert table(columns, []) == "A  Bc\n"
    assert table(columns, [], boxed=True) == "+---+----+\n| A | Bc |\n+---+----+\n+---+----+\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (True, "yes"),
        (25.0, "25"),
        (33.3, "33.3"),
        (0, "0"),
        ([1], "[1]"),
        (["a", "b"], "a,b"),
        ("a\x1b[2J\nb", "a\\x1b[2J\\nb"),
    ],
)
def test_a_cell_is_one_line_that_cannot_steer_the_terminal(value: object, shown: str) -> None:
    assert table((Column("V", 0),), [(value,)]).splitlines()[1] == shown


@pytest.mark.parametrize("width", range(12))
def test_text_with_wide_letters_is_cut_and_filled_to_columns(width: int) -> None:
    for text in ("", "train", "訓練をする", "e\u0301te\u0301", "a\x1b[2Jb"):
        for utf8 in (True, False):
            assert display_width(fit(text, width, utf8=utf8)) == width
    assert fit("訓練をする", 6) == "訓練… "
    assert fit("12", 5, right_aligned=True) == "   12"


def test_ages_and_counts_read_as_people_say_them() -> None:
    told = [age(seconds) for seconds in (-5, 59, 61, 3600, 7800, 86399, 90061, 259200, 11 * 86400 + 3600)]
    assert told == ["0s", "59s", "1m", "1h", "2h10m", "23h59m", "1d1h", "3d", "11d"]
    assert [count(1, "GPU"), count(2, "GPU")] == ["1 GPU", "2 GPUs"]


HINTS = (
    ("repair or reset the GPU, then: yunion-mps reload; run the diagnostics: yunion-mps doctor",
     ("yunion-mps reload", "yunion-mps doctor")),
    ("reset it (nvidia-smi --gpu-reset -i GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400) or reboot",
     ("(nvidia-smi --gpu-reset -i GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400)",)),
    ("install a newer nvidia-cuda-mps-control, or set cuda_mps_multiuser: false",
     ("cuda_mps_multiuser: false",)),
    ("enlarge it: mount -o remount,size=1G /dev/shm; docker run --shm-size 1g",
     ("mount -o remount,size=1G /dev/shm", "docker run --shm-size 1g")),
    ("systemctl restart yunion-mps-daemon", ("systemctl restart yunion-mps-daemon",)),
)  # fmt: skip


@pytest.mark.parametrize("columns", range(30, 100, 7))
@pytest.mark.parametrize(("hint", "commands"), HINTS)
def test_a_hint_is_never_broken_inside_a_command(hint: str, commands: tuple[str, ...], columns: int) -> None:
    ours, theirs = open_terminal(columns)
    with open(ours), open(theirs, "w") as terminal, contextlib.redirect_stdout(terminal):
        lines = hint_text(hint).splitlines()
    assert " ".join(line.strip() for line in lines) == f"Hint: {hint}"
    for command in commands:
        assert any(command in line for line in lines), lines
    assert [line for line in lines if len(line) > columns and not any(one in line for one in commands)] == []
