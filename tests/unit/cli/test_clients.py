"""`yunion-mps clients` and `clients terminate`: what they print, and what they ask."""

from __future__ import annotations

import pytest
from yunion_mps.errors import ControlError, NotAllowedError, YunionError

from unit.cli.conftest import Cli, table_of
from unit.cli.held import OUTSIDE_MPS
from unit.http.by_hand import CLIENT, GONE, SERVER, WAITING, clients

TABLE = """\
+------+-------+-----------------+-----------+---------+------------+--------+--------+---------------------+
| PID  | User  | Command         | Device    | GPUs    | Memory_MiB | Server | Domain | Started             |
+------+-------+-----------------+-----------+---------+------------+--------+--------+---------------------+
| 4260 | alice | python train.py | 00:06.0-1 | 00:06.0 | 512        | 4250   | host   | 2026-08-29 10:41:00 |
| 4261 |       |                 |           |         |            |        | host   |                     |
+------+-------+-----------------+-----------+---------+------------+--------+--------+---------------------+
"""
EMPTY = """\
+-----+------+---------+--------+------+------------+--------+--------+---------+
| PID | User | Command | Device | GPUs | Memory_MiB | Server | Domain | Started |
+-----+------+---------+--------+------+------------+--------+--------+---------+
+-----+------+---------+--------+------+------------+--------+--------+---------+
"""
WHO = "PID 4260 (python train.py) of alice"


@pytest.fixture
def utc(own: Cli) -> Cli:
    own.env["TZ"] = "UTC"
    return own


def test_clients_are_listed_with_their_server_below(utc: Cli) -> None:
    utc.host.clients.found = clients(CLIENT, GONE)
    assert utc.good("clients") == TABLE + "MPS server (PID 4250) of alice, domain host: ACTIVE\n"


def test_a_failed_server_comes_first_and_the_unknown_last(utc: Cli) -> None:
    utc.host.clients.found = clients(
        CLIENT,
        GONE,
        servers=({**SERVER, "pid": 4300, "state": None}, {**SERVER, "state": "FAULT"}),
        errors=("domain 0001:e1:00.0: it does not answer",),
    )
    assert utc.good("clients") == (
        "FAULT: MPS server (PID 4250) of alice, domain host: its jobs have failed, and it serves again once "
        "they have ended\n" + TABLE + "MPS server (PID 4300) of alice, domain host: running\n"
        "Not known: domain 0001:e1:00.0: it does not answer\n"
    )


def test_processes_outside_mps_are_named_below(utc: Cli) -> None:
    utc.host.clients.found = clients(CLIENT, OUTSIDE_MPS)
    assert utc.good("clients").splitlines()[-2:] == [
        "PID 4711: it uses a GPU outside MPS, where no budget holds",
        "MPS server (PID 4250) of alice, domain host: ACTIVE",
    ]


def test_a_waiting_client_is_shown_with_the_servers_user_and_a_hint(utc: Cli) -> None:
    utc.host.clients.found = clients(CLIENT, GONE, waiting=(WAITING,))
    assert utc.good("clients") == (
        TABLE + "MPS server (PID 4250) of alice, domain host: ACTIVE\n"
        "Waiting: PID 4262 of bob (python eval.py), since 2026-08-29 10:40:10, for the MPS server (PID 4250) "
        "of alice, domain host\n"
        "Hint: wait for the other user's jobs, or serve all users at once: cuda_mps_multiuser: true\n"
    )


def test_without_clients_the_table_is_empty(utc: Cli) -> None:
    utc.host.clients.found = clients(servers=())
    assert utc.good("clients") == EMPTY


def test_clients_are_printed_for_programs_too(utc: Cli) -> None:
    two = {**CLIENT, "gpus": ["00:06.0", "00:07.0"]}
    utc.host.clients.found = clients(two, GONE, waiting=(WAITING,))
    answer, (header, first, second) = utc.read("clients")
    assert answer == utc.host.clients.found
    assert header == [*TABLE.splitlines()[1].replace(" ", "").strip("|").split("|"), "Container"]
    assert first[4:6] == ["00:06.0,00:07.0", "512"]
    assert second == ["4261", "", "", "", "", "", "", "host", "", ""]


def test_what_runs_in_a_container_is_named_with_it(utc: Cli) -> None:
    utc.host.clients.found = clients({**CLIENT, "container": "trainer", "container_id": "a" * 64})
    assert "| trainer: python train.py |" in utc.good("clients")


def test_on_80_columns_the_list_keeps_pid_user_command_and_device(utc: Cli) -> None:
    utc.host.clients.found = clients(
        {**CLIENT, "command": "/usr/bin/python3 -m torch.distributed.run train.py"}
    )
    table = table_of(utc.on_terminal(80, "clients"))
    assert len(table[0]) <= 80
    assert table[1].replace(" ", "").strip("|").split("|")[:4] == ["PID", "User", "Command", "Device"]


@pytest.mark.parametrize(("options", "force"), [([], ""), (["--force"], " force")])
def test_a_client_is_ended_and_how_is_said(own: Cli, options: list[str], force: str) -> None:
    out = own.good("clients", "terminate", "4260", "--yes", *options)
    assert out == f"{WHO}: its MPS server let go of it; ended by SIGTERM\n"
    assert own.host.clients.done == ["clients", f"terminate 4260 for 0{force}"]


@pytest.mark.parametrize(
    ("pid", "who"),
    [
        (WAITING["pid"], "PID 4262 (python eval.py) of bob"),
        (GONE["pid"], "PID 4261 (unknown) of a user who is gone"),
    ],
    ids=["waiting", "ending"],
)
def test_what_is_known_of_a_client_that_is_ended_is_said(own: Cli, pid: int, who: str) -> None:
    own.host.clients.found = clients(GONE, waiting=(WAITING,))
    assert own.good("clients", "terminate", str(pid), "--yes").startswith(f"{who}: ")


def test_ending_a_client_is_confirmed_first(own: Cli) -> None:
    told = f"End {WHO}? [y/N]: y\n{WHO}: its MPS server let go of it; ended by SIGTERM\n"
    assert own.answered(b"y\n", "clients", "terminate", "4260") == (0, told)


def test_with_no_it_goes_on(own: Cli) -> None:
    code, text = own.answered(b"n\n", "clients", "terminate", "4260")
    assert code == 1
    assert "yunion-mps: cancelled: nothing was changed, and no job was ended\n" in text
    assert own.host.clients.done == ["clients"]


def test_a_client_that_goes_on_is_a_failure(own: Cli) -> None:
    own.host.clients.ended = False
    own.host.clients.how = how = "it goes on after 5 s: end it with --force"
    told = f"yunion-mps: {WHO}: {how}\nyunion-mps: see how it is: yunion-mps clients\n"
    assert own("clients", "terminate", "4260", "--yes") == (1, "", told)


def test_a_process_that_is_no_client_is_not_ended(own: Cli) -> None:
    told = "yunion-mps: PID 1 is no client of MPS\nyunion-mps: list the clients with: yunion-mps clients\n"
    assert own("clients", "terminate", "1", "--yes") == (1, "", told)
    assert own.host.clients.done == ["clients"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotAllowedError("PID 4260 is a job of bob", "hint"), 4),
        (ControlError("it does not let go", "hint"), 1),
    ],
)
def test_what_is_refused_is_said(own: Cli, error: YunionError, code: int) -> None:
    own.host.clients.refusal = error
    told = f"yunion-mps: {error}\nyunion-mps: hint\n"
    assert own("clients", "terminate", "4260", "--yes") == (code, "", told)
