"""The stand-in server and clients of MPS under NVIDIA's real control daemon, and so what that one does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from integration.daemon_host import eventually
from simhost import SimHost
from simhost.mps import CONTROL, PATIENCE_S, Client, StandIns

OTHER_UID = 1234

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


class ControlDaemon:
    """The real control daemon of a host, and the stand-ins that it serves."""

    def __init__(self, host: SimHost, stand_ins: StandIns, stack: ExitStack) -> None:
        self.stand_ins = stand_ins
        self.pipes = host.root / "pipes"
        self.log_file = host.root / "control.log"
        self.pipes.mkdir()
        self._host = host
        self._stack = stack
        self._env = {
            **host.env,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(host.root),
        }
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        with self.log_file.open("a") as log:
            self.process = self._host.popen(
                [self.stand_ins.folder / CONTROL, "-f"],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(end, self.process)
        eventually(lambda: "100.0" in self.ask("get_default_active_thread_percentage"))
        return self.process

    def front_end(self, command: str) -> subprocess.Popen[str]:
        """A front-end that was given a command, and waits for the answer."""
        front_end = self.open_front_end()
        assert front_end.stdin is not None
        with suppress(BrokenPipeError), front_end.stdin as commands:  # it found no control daemon yet
            commands.write(f"{command}\n")
        front_end.stdin = None
        return front_end

    def open_front_end(self) -> subprocess.Popen[str]:
        """A front-end as somebody has it open who types commands."""
        front_end = self._host.popen(
            [self.stand_ins.folder / CONTROL], env=self._env, stdin=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._stack.callback(end, front_end)
        return front_end

    def ask(self, command: str) -> list[str]:
        return answer(self.front_end(command))

    def attach(self, uid: int | None = None) -> Client:
        client = self.stand_ins.client(self.pipes, uid)
        assert [client.says(), client.says()] == ["asking", "attached"]
        return client

    def queue(self, uid: int | None = None) -> Client:
        """A client that the control daemon has put on its list."""
        client = self.stand_ins.client(self.pipes, uid)
        assert client.says() == "asking"
        self.wait_log(
            f"NEW CLIENT {client.pid} from user {uid or 0}: Server is not ready, push client to pending"
        )
        return client

    def server(self) -> int:
        (pid,) = self.ask("get_server_list")
        return int(pid)

    def wait_log(self, text: str) -> None:
        eventually(lambda: text in self.log_file.read_text())

    def wait_server_gone(self, pid: int) -> None:
        eventually(lambda: pid not in self.stand_ins.servers())


def answer(front_end: subprocess.Popen[str]) -> list[str]:
    return front_end.communicate(timeout=PATIENCE_S)[0].splitlines()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


@pytest.fixture
def control() -> Iterator[ControlDaemon]:
    with SimHost.create(None) as host, StandIns(host) as stand_ins, ExitStack() as stack:
        yield ControlDaemon(host, stand_ins, stack)


def test_first_client_gets_a_server_that_stays_without_clients(control: ControlDaemon) -> None:
    assert control.ask("get_server_list") == []
    client = control.attach()
    server = control.server()
    with open(f"/proc/{server}/status") as status:
        assert f"PPid:\t{control.process.pid}\n" in status.read()
    control.wait_log(f"NEW SERVER {server}: Ready")
    client.end()
    eventually(lambda: control.ask(f"get_client_list {server}") == [])
    assert control.server() == server


def test_clients_are_in_each_list(control: ControlDaemon) -> None:
    clients = [control.attach(), control.attach()]
    server = control.server()
    control.wait_log(f"NEW CLIENT {clients[1].pid} from user {os.geteuid()}: Server already exists")
    assert control.ask(f"get_client_list {server}") == [str(client.pid) for client in clients]
    header, *rows = control.ask("ps")
    assert header.split()[:3] == ["PID", "ID", "SERVER"]
    assert [row.split()[:3] for row in rows] == [
        [str(client.pid), str(number), str(server)] for number, client in enumerate(clients, 1)
    ]
    assert control.ask("get_device_client_list")[1:] == [f"{clients[0].pid}.1", f"{clients[1].pid}.2"]


def test_server_copies_the_defaults_and_keeps_them(control: ControlDaemon) -> None:
    control.ask("set_default_active_thread_percentage 25")
    control.ask("set_default_device_pinned_mem_limit 0 5G")
    control.attach()
    control.ask("set_default_active_thread_percentage 50")
    server = control.server()
    assert control.ask(f"get_active_thread_percentage {server}") == ["25.0"]
    assert control.ask(f"get_device_pinned_mem_limit {server} 0") == ["5G"]
    assert control.ask(f"get_device_pinned_mem_limit {server} 1") == []
    assert control.ask(f"set_active_thread_percentage {server} 10") == ["10.0"]


def test_a_client_can_be_terminated(control: ControlDaemon) -> None:
    client, other = control.attach(), control.attach()
    server = control.server()
    assert control.ask(f"terminate_client {server} {client.pid}") == ["0"]
    assert client.says() == "terminated"
    assert control.ask(f"get_client_list {server}") == [str(other.pid)]


def test_a_client_that_waits_for_its_server_is_in_no_list(control: ControlDaemon) -> None:
    control.stand_ins.behave("starting")
    client = control.queue()
    server = control.server()
    assert control.ask("ps") == ["Server not found"]
    assert control.ask(f"get_client_list {server}") == []
    control.wait_log(f"Server {server} is <busy>")
    control.stand_ins.behave()
    assert client.says() == "attached"
    assert control.ask(f"get_client_list {server}") == [str(client.pid)]


def test_server_that_fails_is_started_six_times_for_a_client(control: ControlDaemon) -> None:
    control.stand_ins.behave("failing")
    client = control.queue()
    assert client.says() == "refused"
    control.wait_log("Removed Shm file")
    assert control.log_file.read_text().count("exited with status 1") == 6
    assert control.ask("get_server_list") == []


@as_root
def test_another_users_client_waits_until_the_first_users_are_gone(control: ControlDaemon) -> None:
    client = control.attach()
    first = control.server()
    other = control.queue(OTHER_UID)
    assert control.server() == first
    client.end()
    assert other.says() == "attached"
    server = control.server()
    assert server != first
    assert os.stat(f"/proc/{server}").st_uid == OTHER_UID
    assert control.ask(f"get_client_list {server}") == [str(other.pid)]


@as_root
def test_another_users_waiting_client_hides_those_that_run(control: ControlDaemon) -> None:
    if control.stand_ins.asked:
        pytest.skip("a control daemon that asks (550) goes on as before")
    client = control.attach()
    server = control.server()
    assert control.ask(f"get_client_list {server}") == [str(client.pid)]
    control.queue(OTHER_UID)
    assert control.ask(f"get_client_list {server}") == []
    assert control.ask("ps") == ["Server not found"]
    control.queue()  # and the first user's next one waits as well


def test_server_that_is_shut_down_serves_its_clients_to_their_end(control: ControlDaemon) -> None:
    client = control.attach()
    server = control.server()
    assert control.ask(f"shutdown_server {server}") == []
    assert control.server() == server
    client.end()
    control.wait_server_gone(server)
    eventually(lambda: control.ask("get_server_list") == [])


def test_server_that_is_shut_down_by_force_leaves_its_clients(control: ControlDaemon) -> None:
    client = control.attach()
    assert control.ask(f"shutdown_server {control.server()} -f") == []
    assert client.says() == "server gone"
    eventually(lambda: control.ask("get_server_list") == [])


def test_quit_waits_for_clients_and_refuses_new_ones(control: ControlDaemon) -> None:
    client = control.attach()
    quit_ = control.front_end("quit")
    control.wait_log("Cmd:quit")
    late = control.stand_ins.client(control.pipes)
    assert [late.says(), late.says()] == ["asking", "refused"]
    assert quit_.poll() is None
    client.end()
    assert quit_.wait(PATIENCE_S) == 0
    assert control.process.wait(PATIENCE_S) == 0


def test_quit_with_a_timeout_ends_servers_with_their_clients(control: ControlDaemon) -> None:
    client = control.attach()
    assert control.ask("quit -t 1") == []
    assert client.says() == "server gone"
    assert control.process.wait(PATIENCE_S) == 0
    control.wait_log("quit command issued with timeout of 1")


@as_root
def test_server_outlives_a_control_daemon_that_is_killed(control: ControlDaemon) -> None:
    client = control.attach()
    old = control.server()
    waiting = control.queue(OTHER_UID)
    control.process.kill()
    control.process.wait()
    assert waiting.says() == "refused"
    control.start()
    assert control.ask("get_server_list") == []
    control.attach()
    assert sorted(control.stand_ins.servers()) == sorted([old, control.server()])
    client.end()
    control.wait_server_gone(old)


def test_server_may_follow_its_control_daemon(control: ControlDaemon) -> None:
    control.stand_ins.behave("following")
    client = control.attach()
    control.process.kill()
    assert client.says() == "server gone"


def test_stopped_server_lets_nobody_be_answered_once_it_was_asked(control: ControlDaemon) -> None:
    control.attach()
    server = control.server()
    os.kill(server, signal.SIGSTOP)
    assert control.server() == server
    listing = control.front_end("ps")
    control.wait_log("Cmd:ps")
    unanswered = control.front_end("get_server_list")
    with pytest.raises(subprocess.TimeoutExpired):
        unanswered.wait(0.2)
    end(unanswered)
    os.kill(server, signal.SIGCONT)
    assert len(answer(listing)) == 2


def test_front_end_is_not_answered_while_another_one_is_open(control: ControlDaemon) -> None:
    opened = control.log_file.read_text().count("NEW UI")
    interactive = control.open_front_end()
    eventually(lambda: control.log_file.read_text().count("NEW UI") > opened)
    # Which of the two depends on who is faster; the first is with the exit status 0.
    assert control.ask("get_default_active_thread_percentage") in (
        [],
        ["Cannot send command to MPS control daemon process"],
    )
    end(interactive)
    eventually(lambda: control.ask("get_default_active_thread_percentage") == ["100.0"])
