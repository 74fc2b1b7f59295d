"""`yunion-mps who`: who has what, matched to leases, and counted against budgets."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest
import yaml
from yunion_mps.overview.holdings import Holding, filled, holdings, memory_by_gpu

from unit.cli.conftest import Cli
from unit.cli.held import OVER, PAST_MPS, TWO, busy, hold, long_ago_s
from unit.cli.test_output import on_terminal
from unit.http.by_hand import CLIENT, GONE, LEASE, clients

#: With one space for many, and no borders.
TEXT = """\
| Device | Lease | User | PID | Command | Since | Used_MiB | Of_MiB | Remark |
| 00:06.0-1 | 7c1f0e7a | alice | 4260 | python train.py | 4 d 2 h | 6000 | 5760 | over budget |
| 00:06.0-2,00:06.0-3 | 71b0b1ae | bob | | job-17 | 4 d 2 h | 0 | 11520 | idle |
| 00:06.0 | | mallory | 4711 | ./old-job | 4 d 2 h | 300 | | past MPS |
Waiting: carol (PID 4300) wants 2 devices on one GPU, for 4 d 2 h
Problem: 00:06.0-1 has 6000 of 5760 MiB: PID 4260 of alice (python train.py)
Problem: past MPS on GPU 00:06.0 with 300 MiB, where no budget holds: PID 4711 of mallory (./old-job)
Remedy: ask its owner, or end it: yunion-mps clients terminate PID
"""


def device(address: str, memory_mib: int = 5760, state: str = "available") -> Any:
    shown = {"addr": address, "mps_memory_limit": memory_mib, "mps_thread_percentage": 25, "state": state}
    return {**shown, "lease": None, "free": state == "available"}


DEVICES = [device(f"00:06.0-{slot}") for slot in range(4)]


def used(found: list[Holding]) -> dict[str, int]:
    """What is used of each holding that is in use, in MiB, by the names of its devices or its GPU."""
    return {one.named or one.gpu: one.used_mib for one in found if one.in_use}


def test_leases_processes_and_who_waits_are_listed_and_what_is_wrong_below(own: Cli) -> None:
    busy(own.host, long_ago_s())
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
    answer = json.loads(own.good("who", "-o", "json"))
    assert yaml.safe_load(own.good("who", "-o", "yaml")) == answer
    assert (answer["total"], len(answer["uses"]), len(answer["waiting"])) == (3, 3, 1)
    first = answer["uses"][0]
    assert (first["device"], first["lease"], first["memory_used"]) == ("00:06.0-1", LEASE["id"], 6000)
    assert [problem["remedy"] for problem in answer["problems"]] == [
        "ask its owner, or end it: yunion-mps clients terminate PID"
    ] * 2
    header, one, two, three = csv.reader(io.StringIO(own.good("who", "-o", "csv")))
    assert header == [
        "Device", "GPU", "Lease", "User", "PID", "Command", "Since", "Used_MiB", "Of_MiB", "Remark",
        "Container",
    ]  # fmt: skip
    assert one[6:] == ["2026-08-29T10:41:00+0000", "6000", "5760", "over budget", ""]
    assert two[:4] == ["00:06.0-2,00:06.0-3", "00:06.0", TWO["id"], "bob"]
    assert three[:4] == ["", "00:06.0", "", "mallory"]


@pytest.mark.parametrize("columns", [30, 60, 80, 120])
def test_the_table_fits_the_terminal(own: Cli, columns: int) -> None:
    busy(own.host)
    lines = [line for line in on_terminal(own, columns, "who") if line[:1] in "+|"]
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
Problem: 00:06.0-1 has 6000 of 5760 MiB: PID 4260 of alice (python train.py)
Problem: past MPS on GPU 00:06.0 with 300 MiB, where no budget holds: PID 4711
    of mallory (./old-job)
Remedy: ask its owner, or end it: yunion-mps clients terminate PID
"""


def test_on_80_columns_the_use_is_kept_and_words_are_whole(own: Cli) -> None:
    busy(own.host, long_ago_s())
    assert on_terminal(own, 80, "who") == AT_80.splitlines()


def test_what_is_not_known_is_said(own: Cli) -> None:
    own.host.clients.found = clients(troubles=("domain host: it does not answer",))
    assert own.good("who").splitlines()[-1] == "Not known: domain host: it does not answer"


def test_a_user_cannot_steer_the_terminal(own: Cli) -> None:
    hold(own.host, {**LEASE, "command": "sh \x1b[2J"})
    own.host.clients.found = clients({**PAST_MPS, "command": "\x1b]0;x\x07"})
    assert "\x1b" not in own.good("who") + own.good("status") + own.good("top", "--once")


def changed(answer: Any, **fields: Any) -> Any:
    """The answer with other values."""
    return {**answer, **fields}


def test_a_process_counts_against_the_lease_of_its_device() -> None:
    found = holdings(DEVICES, [LEASE], [CLIENT])
    assert used(found) == {"00:06.0-1": 512}
    assert [one.named for one in found] == [f"00:06.0-{slot}" for slot in range(4)]


def test_a_process_without_a_device_counts_against_its_pids_lease() -> None:
    assert used(holdings(DEVICES, [LEASE], [changed(CLIENT, device=None)])) == {"00:06.0-1": 512}


def test_two_processes_of_a_device_are_over_budget_together() -> None:
    half = changed(CLIENT, memory_by_gpu=[3000])
    found = holdings(DEVICES, [LEASE], [half, changed(half, pid=4261)])
    assert [one.over_mib for one in found] == [0, 240, 0, 0]


def test_several_devices_of_a_lease_are_one_budget() -> None:
    client = changed(CLIENT, device="00:06.0-2,00:06.0-3", memory_by_gpu=[7000])
    found = holdings(DEVICES, [TWO], [client])
    assert used(found) == {"00:06.0-2,00:06.0-3": 7000}
    (held,) = (one for one in found if one.lease)
    assert (held.budget_mib, held.over_mib) == (11520, 0)
    assert filled(held, {"00:06.0-2": 5760, "00:06.0-3": 5760}) == [("00:06.0-2", 5760), ("00:06.0-3", 1240)]


def test_a_lease_over_two_gpus_has_a_budget_on_each() -> None:
    lease = changed(LEASE, devices=["00:06.0-1", "00:07.0-0"], memory=[5760, 1000])
    client = changed(CLIENT, device="00:06.0-1,00:07.0-0")
    client |= {"gpus": ["00:06.0", "00:07.0"], "memory_by_gpu": [10, 1001]}
    found = holdings([*DEVICES, device("00:07.0-0", 1000)], [lease], [client])
    assert used(found) == {"00:06.0-1": 10, "00:07.0-0": 1001}
    assert {one.named: one.over_mib for one in found if one.over_mib} == {"00:07.0-0": 1}
    assert memory_by_gpu([client]) == {"00:06.0": 10, "00:07.0": 1001}


def test_what_is_past_mps_counts_against_no_device() -> None:
    found = holdings(DEVICES, [LEASE], [changed(PAST_MPS, device="00:06.0-1"), CLIENT])
    assert used(found) == {"00:06.0-1": 512, "00:06.0": 300}
    assert [one.past_mps for one in found] == [False, False, False, False, True]


def test_a_client_that_names_no_device_is_no_device_s(own: Cli) -> None:
    hold(own.host)
    own.host.clients.found = clients({**CLIENT, "device": None})
    (row,) = json.loads(own.good("who", "-o", "json"))["uses"]
    assert (row["device"], row["gpu"], row["remark"]) == (None, "00:06.0", "no device")


def test_memory_that_the_driver_does_not_tell_is_unknown_and_no_trouble(own: Cli) -> None:
    own.host.clients.found = clients({**OVER, "memory_by_gpu": [None], "memory_used": None})
    (row,) = json.loads(own.good("who", "-o", "json"))["uses"]
    assert (row["memory_used"], row["remark"]) == (None, "")


def test_a_process_without_memory_yet_is_at_its_device() -> None:
    found = holdings(DEVICES, [], [changed(CLIENT, gpus=[], memory_by_gpu=[])])
    assert used(found) == {"00:06.0-1": 0}


def test_who_has_just_ended_has_nothing() -> None:
    assert used(holdings(DEVICES, [], [GONE])) == {}


def test_a_lease_of_a_device_that_is_not_listed_yet_is_there() -> None:
    assert used(holdings([], [LEASE], [CLIENT])) == {"00:06.0-1": 512}
