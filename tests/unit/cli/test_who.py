"""`yunion-mps who`: who has what, matched to leases, and counted against budgets."""

from __future__ import annotations

import json
import re

import pytest

from unit.cli.conftest import Cli
from unit.cli.held import OVER, TWO, busy, hold, long_ago
from unit.http.by_hand import CLIENT, LEASE, clients

#: With one space for many, and no borders.
TEXT = """\
| Device | Lease | User | PID | Command | Since | Used_MiB | Of_MiB | Remark |
| 00:06.0-1 | 7c1f0e7a | alice | 4260 | python train.py | 4 d 2 h | 6000 | 5760 | over budget |
| 00:06.0-2,00:06.0-3 | 71b0b1ae | bob | | job-17 | 4 d 2 h | 0 | 11520 | idle |
| 00:06.0 | | mallory | 4711 | ./old-job | 4 d 2 h | 300 | | outside MPS |
Waiting: carol (PID 4300) wants 2 devices on one GPU, for 4 d 2 h
Problem: 00:06.0-1 uses 6000 of 5760 MiB: PID 4260 of alice (python train.py)
Problem: PID 4711 of mallory (./old-job) uses GPU 00:06.0 (300 MiB) without MPS, so no budget limits it
Hint: ask its owner, or terminate it: yunion-mps clients terminate PID
"""


def test_leases_processes_and_queued_requests_are_listed_above_problems(own: Cli) -> None:
    busy(own.host, long_ago())
    rows = [line for line in own.good("who").splitlines() if line[0] != "+"]
    squeezed = [re.sub(r" +", " ", line) for line in rows]
    assert squeezed == TEXT.splitlines()


def test_numbers_stand_on_the_right(own: Cli) -> None:
    own.host.clients.found = clients(
        CLIENT, {**CLIENT, "pid": 97, "device": "00:06.0-2", "memory_by_gpu": [5]}
    )
    lines = own.good("who").splitlines()
    assert [line.split("|")[7] for line in lines[3:5]] == ["      512 ", "        5 "]
    assert [line.split("|")[4] for line in lines[3:5]] == [" 4260 ", "   97 "]


def test_without_leases_and_processes_the_table_of_who_is_empty(own: Cli) -> None:
    hold(own.host)
    own.host.clients.found = clients()
    assert len(own.good("who").splitlines()) == 4


def test_what_runs_in_a_container_is_named_with_it(own: Cli) -> None:
    own.env["COLUMNS"] = "160"
    hold(own.host, {**LEASE, "container": "trainer", "container_id": "a" * 64})
    own.host.clients.found = clients(
        {**CLIENT, "pid": 4261, "container": "trainer", "container_id": "a" * 64}
    )
    assert "| trainer: python train.py |" in own.good("who")
    assert json.loads(own.good("who", "-o", "json"))["uses"][0]["container"] == "trainer"
    assert own.good("who", "-o", "csv").rstrip().endswith(",trainer")
    own.host.clients.found = clients()
    assert "| trainer: python train.py |" in own.good("who"), "idle, by its lease"
    assert "trainer: python train.py" in own.good("top", "--once")
    own.host.clients.found = clients({**OVER, "container": "trainer", "container_id": "a" * 64})
    for command in (["top", "--once"], ["status"]):
        assert "trainer: python train.py" in own.good(*command)


def test_it_is_printed_for_programs_too(own: Cli) -> None:
    own.env["TZ"] = "UTC"
    busy(own.host)
    answer, (header, one, two, three) = own.read("who")
    assert (answer["total"], len(answer["uses"]), len(answer["waiting"])) == (3, 3, 1)
    first = answer["uses"][0]
    assert (first["device"], first["lease"], first["memory_used"]) == ("00:06.0-1", LEASE["id"], 6000)
    assert [problem["hint"] for problem in answer["problems"]] == [
        "ask its owner, or terminate it: yunion-mps clients terminate PID"
    ] * 2
    assert header == [
        "Device", "GPU", "Lease", "User", "PID", "Command", "Since", "Used_MiB", "Of_MiB", "Remark",
        "Container",
    ]  # fmt: skip
    assert one[6:] == ["2026-08-29T10:41:00.500Z", "6000", "5760", "over budget", ""]
    assert two[:4] == ["00:06.0-2,00:06.0-3", "00:06.0", TWO["id"], "bob"]
    assert three[:4] == ["", "00:06.0", "", "mallory"]


@pytest.mark.parametrize("columns", [30, 60, 80, 120])
def test_the_table_fits_the_terminal(own: Cli, columns: int) -> None:
    busy(own.host)
    lines = [line for line in own.on_terminal(columns, "who") if line[:1] in "+|"]
    assert all(len(line) <= columns for line in lines)


AT_80 = """\
+---------------------+---------+------+-----------------+----------+--------+
| Device              | User    | PID  | Command         | Used_MiB | Of_MiB |
+---------------------+---------+------+-----------------+----------+--------+
| 00:06.0-1           | alice   | 4260 | python train.py |     6000 |   5760 |
| 00:06.0-2,00:06.0-3 | bob     |      | job-17          |        0 |  11520 |
| 00:06.0             | mallory | 4711 | ./old-job       |      300 |        |
+---------------------+---------+------+-----------------+----------+--------+
(no room for Lease, Since, Remark: use -o csv)
Waiting: carol (PID 4300) wants 2 devices on one GPU, for 4 d 2 h
Problem: 00:06.0-1 uses 6000 of 5760 MiB: PID 4260 of alice (python train.py)
Problem: PID 4711 of mallory (./old-job) uses GPU 00:06.0 (300 MiB) without MPS,
    so no budget limits it
Hint: ask its owner, or terminate it: yunion-mps clients terminate PID
"""


def test_on_80_columns_the_use_is_kept_and_words_are_whole(own: Cli) -> None:
    busy(own.host, long_ago())
    assert own.on_terminal(80, "who") == AT_80.splitlines()


def test_what_is_not_known_is_said(own: Cli) -> None:
    own.host.clients.found = clients(errors=("domain host: it does not answer",))
    assert own.good("who").splitlines()[-1] == "Not known: domain host: it does not answer"


def test_a_client_that_names_no_device_is_no_device_s(own: Cli) -> None:
    hold(own.host)
    own.host.clients.found = clients({**CLIENT, "device": None})
    (row,) = json.loads(own.good("who", "-o", "json"))["uses"]
    assert (row["device"], row["gpu"], row["remark"]) == (None, "00:06.0", "no device")


def test_memory_that_the_driver_does_not_tell_is_unknown_and_no_trouble(own: Cli) -> None:
    own.host.clients.found = clients({**OVER, "memory_by_gpu": [None], "memory_used": None})
    (row,) = json.loads(own.good("who", "-o", "json"))["uses"]
    assert (row["memory_used"], row["remark"]) == (None, "")
