"""The grammar of NVIDIA's logs: a corpus of lines, and what each says."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from yunion_mps.mps.log_lines import (
    SERVER_EXITED,
    LogLine,
    parse_line,
    parse_lines,
    parse_server_lines,
)


class Expected(NamedTuple):
    kind: str
    pid: int
    uid: int | None
    status: int | None
    line: str


def corpus() -> list[Expected]:
    text = Path(__file__).with_name("log_lines.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [expected(said, line) for said, line in zip(lines[::2], lines[1::2])]


def expected(said: str, line: str) -> Expected:
    words = said.split()
    values = {name: int(value) for name, _, value in (word.partition("=") for word in words) if value}
    kind = " ".join(word for word in words if "=" not in word)
    return Expected(kind, values.get("pid", 0), values.get("uid"), values.get("status"), line)


CORPUS = corpus()


@pytest.mark.parametrize("case", CORPUS, ids=[case.line.partition("] ")[2] or case.line for case in CORPUS])
def test_each_line_of_the_corpus_says_what_is_written_above_it(case: Expected) -> None:
    said = next(parse_line(case.line))
    assert (said.kind, said.pid, said.uid, said.status) == case[:4]


def test_the_corpus_has_every_kind_of_line() -> None:
    assert {case.kind for case in CORPUS} == {
        "other", "control daemon started", "client waits", "client served", "start ordered", "end ordered",
        "server begins", "server ready", "server exited", "server exception", "failure", "client connected",
    }  # fmt: skip


def test_a_header_says_when_and_by_which_process() -> None:
    (line,) = parse_line("[2026-11-20 18:20:41.986 Legacy Server   425] Failed to start : invalid argument")
    assert (line.time, line.writer, line.writer_pid) == ("2026-11-20 18:20:41", "Legacy Server", 425)
    assert line.text == "Failed to start : invalid argument"


def test_words_without_a_header_may_stand_before_one() -> None:
    text = "ERROR: init 250 result=11[2026-11-20 09:34:17.770 Control   261] Server 7 exited with status 1"
    words, line = parse_line(text)
    assert (words.text, words.time, words.writer_pid) == ("ERROR: init 250 result=11", "", 0)
    assert (line.kind, line.pid) == (SERVER_EXITED, 7)


def test_a_truncated_log_may_begin_with_nuls() -> None:
    (line,) = parse_lines(
        b"\0" * 4096 + b"[2026-11-20 09:34:17.770 Control   261] Server 7 exited with status 1\n"
    )
    assert (line.kind, line.pid) == (SERVER_EXITED, 7)


def test_what_control_log_says_of_its_queries_is_skipped() -> None:
    chatter = b"[2026-11-20 12:40:49.964 Control 21889] NEW UI\n" * 3
    assert list(parse_lines(chatter)) == []
    assert len(list(parse_server_lines(chatter))) == 3


def test_no_line_of_control_log_that_says_something_is_skipped() -> None:
    control = [case for case in CORPUS if " Control " in case.line or case.line.startswith("ERROR")]
    said = [case for case in control if case.kind != "other"]
    assert len(said) > 20
    for case in said:
        assert [line.kind for line in parse_lines(case.line.encode())][:1] == [case.kind]


def test_what_a_line_says_is_escaped_and_bounded() -> None:
    (line,) = parse_line("[2026-11-20 09:34:17.770 Server   7] Failed to start : \x1b[2J" + "x" * 1000)
    assert line.text.startswith("Failed to start : \\x1b[2Jxxx")
    assert len(line.text) < 210


def test_a_number_that_is_too_large_is_none() -> None:
    (line,) = parse_line(f"[2026-11-20 09:34:17.770 Control   7] Cmd:start_server -uid {'9' * 5000}")
    assert (line.kind, line.uid) == ("other", None)


def test_a_line_of_random_bytes_says_nothing() -> None:
    assert [line.kind for line in parse_lines(b"\xff\xfeerver \xc3(\n")] == ["other"]
    assert LogLine("other").text == ""
