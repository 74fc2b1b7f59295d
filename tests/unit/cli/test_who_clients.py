"""`yunion-mps who --clients`: what is said around the table, which the golden outputs show."""

from __future__ import annotations

from unit.cli.conftest import Cli
from unit.http.fake_services import CLIENT, ENDED_CLIENT, SERVER, clients


def test_a_failed_server_comes_first_and_the_unknown_last(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients(
        CLIENT,
        ENDED_CLIENT,
        servers=({**SERVER, "pid": 4300, "state": None}, {**SERVER, "state": "FAULT"}),
        errors=("domain 0001:e1:00.0: it does not answer",),
    )
    first, header, _, gone, *last = own_cli.good("who", "--clients").splitlines()
    assert first == (
        "Fault: MPS server (PID 4250) of alice, domain host: its jobs failed; it accepts new ones "
        "after they have exited"
    )
    assert header.split() == ["PID", "USER", "DEVICE", "MEMORY", "SERVER", "AGE", "COMMAND"]
    assert gone.split() == ["4261", "-", "-", "-", "-", "-", "-"]
    assert last == [
        "MPS server (PID 4300) of alice, domain host: running",
        "Incomplete: domain 0001:e1:00.0: it does not answer",
    ]


def test_without_clients_there_is_a_sentence(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients(servers=())
    assert own_cli.good("who", "--clients") == "No processes use the GPUs.\n"


def test_servers_without_clients_use_the_gpus(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients()
    assert own_cli.good("who", "--clients").splitlines() == [
        "No jobs use the GPUs.",
        "MPS server (PID 4250) of alice, domain host: ACTIVE",
    ]
