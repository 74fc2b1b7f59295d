"""Tables fit the terminal they are printed on, and are whole in a pipe."""

from __future__ import annotations

import re

import pytest
from yunion_mps.cli.output import columns_of, draw, duration, fit
from yunion_mps.overview import count

from unit.cli.conftest import Cli, table_of

TABLES = (["list"], ["show", "00:06.0-1"], ["gpus"])


@pytest.mark.parametrize("columns", [30, 60, 80, 132, 400])
@pytest.mark.parametrize("command", TABLES, ids=" ".join)
@pytest.mark.parametrize("name", ["cli", "troubled"])
def test_a_table_fits_the_terminal(
    request: pytest.FixtureRequest, name: str, command: list[str], columns: int
) -> None:
    table = table_of(request.getfixturevalue(name).on_terminal(columns, *command))
    assert len(table) > 3
    assert len({len(line) for line in table}) == 1
    assert len(table[0]) <= columns


@pytest.mark.parametrize("command", TABLES, ids=" ".join)
def test_on_a_terminal_wide_enough_a_table_is_as_when_piped(troubled: Cli, command: list[str]) -> None:
    wide = troubled.on_terminal(500, *command)
    piped = troubled.good(*command).splitlines()
    assert table_of(wide) == table_of(piped)
    assert not [line for line in wide if "…" in line or "no room" in line]


def test_on_80_columns_the_list_keeps_names_and_says_what_it_omits(cli: Cli) -> None:
    lines = cli.on_terminal(80, "list")
    assert lines[1].replace(" ", "").strip("|").split("|") == [
        "ID",
        "Dev_type",
        "Model",
        "Addr",
        "Device_path",
    ]
    assert [line.split("|")[4].strip() for line in lines[3:7]] == [f"00:06.0-{slot}" for slot in range(4)]
    assert lines[-2] == "(no room for 6 columns: use -o csv)"
    assert lines[-1] == "*** Total: 4 Pages: 1 Limit: 20 Offset: 0 Page: 1 ***"


@pytest.mark.parametrize("columns", [36, 40, 60, 80, 120, 140])
def test_what_a_table_leaves_out_is_said_in_one_line_that_fits_too(cli: Cli, columns: int) -> None:
    line = cli.on_terminal(columns, "list")[-2]
    assert line.startswith("(no room for ")
    assert line.endswith(": use -o csv)")
    assert len(line) <= columns
    assert ("Device_minor" in line) == (columns > 100)


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_reasons_are_whole_on_every_terminal(troubled: Cli, columns: int) -> None:
    """What is too long for a line goes on below, indented, and breaks only between words."""

    def told(lines: list[str]) -> list[str]:
        text = re.sub(r"\n +", " ", "\n".join(lines))
        return [line for line in text.splitlines() if re.match(r"(\d\S+|Problem|Hint): +\S", line)]

    for command in ("gpus", "status", "who"):
        lines = troubled.on_terminal(columns, command)
        reasons = told(lines)
        assert reasons == told(troubled.good(command).splitlines())
        assert bool(reasons) == (command != "who")
        assert all(len(line) <= columns for line in lines if " " in line.strip() and line[:1] != "(")


def test_without_utf_8_cut_text_is_marked_in_ascii(cli: Cli) -> None:
    ascii_only = Cli(cli.root)
    ascii_only.env["LC_ALL"] = "C"
    lines = ascii_only.on_terminal(80, "list")
    assert "".join(lines).isascii()
    assert [line.replace("…", "~") for line in cli.on_terminal(80, "list")] == lines


def test_on_80_columns_a_device_is_shown_whole(cli: Cli) -> None:
    lines = cli.on_terminal(80, "show", "00:06.0-1")
    assert lines == cli.good("show", "00:06.0-1").splitlines()


def test_a_table_without_rows_has_a_header() -> None:
    assert draw(("A", "Bc"), []) == "+---+----+\n| A | Bc |\n+---+----+\n+---+----+\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (True, "true"),
        (25.0, "25"),
        (33.3, "33.3"),
        (0, "0"),
        ([1], "[1]"),
        ("a\x1b[2J\nb", "a\\x1b[2J\\nb"),
    ],
)
def test_a_cell_is_one_line_that_cannot_steer_the_terminal(value: object, shown: str) -> None:
    assert draw(("V",), [(value,)]).splitlines()[3] == f"| {shown.ljust(max(1, len(shown)))} |"


@pytest.mark.parametrize("width", range(12))
def test_text_with_wide_letters_is_cut_and_filled_to_columns(width: int) -> None:
    for text in ("", "train", "訓練をする", "e\u0301te\u0301", "a\x1b[2Jb"):
        for utf8 in (True, False):
            assert columns_of(fit(text, width, utf8=utf8)) == width
    assert fit("訓練をする", 6) == "訓練… "
    assert fit("12", 5, to_the_right=True) == "   12"


def test_durations_and_counts_read_as_people_say_them() -> None:
    told = [duration(seconds) for seconds in (-5, 0, 59, 61, 3600, 90061)]
    assert told == ["0 s", "0 s", "59 s", "1 min 1 s", "1 h", "1 d 1 h"]
    assert [count(1, "GPU"), count(2, "GPU")] == ["1 GPU", "2 GPUs"]
