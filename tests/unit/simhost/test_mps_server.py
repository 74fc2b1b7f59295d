"""What NVIDIA's real control daemon does with the stand-in server, and no other test has to know."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from integration.daemon_host import Daemon
from simhost import SimHost
from simhost.mps import StandIns

OTHER_UID = 1234


@pytest.fixture
def host() -> Iterator[SimHost]:
    with SimHost.create() as host:
        yield host


@pytest.fixture
def stand_ins(host: SimHost) -> Iterator[StandIns]:
    with StandIns(host) as made:
        yield made


@pytest.fixture
def daemon(host: SimHost, stand_ins: StandIns) -> Iterator[Daemon]:
    with Daemon(host) as daemon:
        yield daemon.start().wait_ready()


def test_a_server_copies_the_defaults_and_keeps_them(daemon: Daemon, stand_ins: StandIns) -> None:
    stand_ins.attached(daemon.pipe_directory)
    (server,) = stand_ins.servers()
    daemon.control("set_default_active_thread_percentage 50")
    limits = [f"get_device_pinned_mem_limit {server} {device}" for device in (0, 1)]
    assert daemon.control(f"get_active_thread_percentage {server}", *limits) == ["25.0", "5G"]
    assert daemon.control(f"set_active_thread_percentage {server} 10") == ["10.0"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_waiting_client_hides_those_that_run(daemon: Daemon, stand_ins: StandIns) -> None:
    if stand_ins.asked:
        pytest.skip("a control daemon that asks (550) goes on as before")
    client = stand_ins.attached(daemon.pipe_directory)
    clients = f"get_client_list {stand_ins.servers()[0]}"
    assert daemon.control(clients) == [str(client.pid)]
    assert stand_ins.client(daemon.pipe_directory, OTHER_UID).says() == "asking"
    waiting = str(daemon.get("/v1/clients")[1]["waiting"])
    assert daemon.control(clients, "ps") == ["Server not found"], waiting
