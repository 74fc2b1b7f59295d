"""The client has words, and an exit code, for every way in which the daemon can fail to answer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from yunion_mps.core.errors import (
    BusyError,
    HostError,
    NotAllowedError,
    NotFoundError,
    UnreachableError,
    YunionError,
)
from yunion_mps.core.models import Event
from yunion_mps.core.paths import Paths
from yunion_mps.http.client import BadConfigurationError, DaemonClient, NoAnswerError
from yunion_mps.http.listener import listen
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import GET_EVENTS, GET_STATUS, REEXEC

from integration.daemon_host import eventually
from unit.http.conftest import Serve
from unit.http.server_host import NOBODY, ServerHost, as_user, short_root

START = "start it: systemctl start yunion-mps-daemon; if that fails, see: systemctl status yunion-mps-daemon"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"


@pytest.fixture
def paths() -> Iterator[Paths]:
    with short_root() as found:
        yield found


@contextlib.contextmanager
def listening(paths: Paths, answer: bytes | None = None) -> Iterator[socket.socket]:
    """Something in the daemon's place; with `answer` it says that to one client, and hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(paths.socket)
        listener.listen(0)
        thread = threading.Thread(target=say, args=(listener, answer or b""))
        if answer is not None:
            thread.start()
        yield listener
        if answer is not None:
            thread.join()


def say(listener: socket.socket, answer: bytes) -> None:
    connection = listener.accept()[0]
    with connection:
        connection.recv(1 << 16)
        connection.sendall(answer)


def failure(
    client: DaemonClient, operation: Operation[Any] = GET_STATUS, **arguments: Any
) -> tuple[int, str, str]:
    """The exit code, what is wrong, and what to do."""
    with pytest.raises(YunionError) as caught:
        client.call(operation, **arguments)
    error = caught.value
    kinds: dict[int, tuple[type[YunionError], ...]] = {
        1: (YunionError, NotFoundError, BusyError),
        3: (UnreachableError, NoAnswerError),
        4: (NotAllowedError,),
        6: (BadConfigurationError,),
    }
    assert type(error) in kinds[error.exit_code]
    return error.exit_code, error.message, error.hint


def test_if_nothing_listens_the_daemon_is_not_running(paths: Paths) -> None:
    listen(paths).close()
    assert failure(DaemonClient(paths)) == (
        3,
        f"the daemon is not running: nothing is listening on {paths.socket}",
        START,
    )


def test_a_path_that_cannot_be_one_is_named(paths: Paths) -> None:
    os.rmdir(paths.run_directory)
    os.symlink("/dev/null", paths.run_directory)
    wrong = f"the daemon cannot be reached on {paths.socket}: Not a directory"
    assert failure(DaemonClient(paths)) == (3, wrong, START)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_user_outside_the_group_gets_a_hint_to_join(host: ServerHost) -> None:
    os.chown(host.paths.socket, 0, 12345)
    with as_user(NOBODY):
        code, wrong, hint = failure(DaemonClient(host.paths))
    assert code == 4
    assert wrong == f"permission denied: cannot connect to {host.paths.socket}"
    assert hint == "run as root, or join the group: usermod -aG yunion-mps nobody, then log in again"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_user_without_a_name_gets_a_hint_that_can_be_typed(host: ServerHost) -> None:
    os.chown(host.paths.socket, 0, 12345)
    with as_user(54321):
        _, _, hint = failure(DaemonClient(host.paths))
    assert hint == (
        "run as root, or have root start COMMAND in the group, because uid 54321 has no name: "
        "setpriv --reuid 54321 --regid 54321 --groups yunion-mps COMMAND"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_member_of_the_group_may_ask(host: ServerHost) -> None:
    with as_user(NOBODY):
        assert DaemonClient(host.paths).call(GET_STATUS)["state"] == "ready"


def silent(paths: Paths) -> tuple[int, str, str]:
    hint = "see what it is doing: journalctl -u yunion-mps-daemon; "
    hint += "a restart kills jobs that are still running after cuda_mps_stop_timeout_s"
    return 3, f"the daemon did not answer on {paths.socket} within 0.2 s", hint


def test_a_daemon_that_does_not_answer_is_given_up(paths: Paths) -> None:
    with listening(paths):
        assert failure(DaemonClient(paths, 0.2)) == silent(paths)


def wait_in_line(paths: Paths) -> list[socket.socket]:
    """Connect until the kernel lets no other client wait to be accepted."""
    clients: list[socket.socket] = []
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.setblocking(False)
        try:
            client.connect(paths.socket)
        except BlockingIOError:
            client.close()
            return clients
        clients.append(client)


def test_a_daemon_that_does_not_accept_is_given_up_after_the_same_time(paths: Paths) -> None:
    with listening(paths), contextlib.ExitStack() as waiting:
        for client in wait_in_line(paths):
            waiting.enter_context(client)
        assert failure(DaemonClient(paths, 0.2)) == silent(paths)


def test_in_a_burst_a_client_waits_until_it_is_its_turn(paths: Paths) -> None:
    with listening(paths) as listener:
        clients = wait_in_line(paths)

        def take_turns() -> None:
            for client in clients:
                listener.accept()[0].close()
                client.close()
            say(listener, HEAD + b'{"my":     "answer"}')

        timer = threading.Timer(0.1, take_turns)
        timer.start()
        answer: Any = DaemonClient(paths).call(GET_STATUS)
        assert answer == {"my": "answer"}
        timer.join()


def test_an_answer_that_trickles_in_is_given_up_at_the_deadline(paths: Paths) -> None:
    def trickle() -> None:
        connection = listener.accept()[0]
        with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(HEAD.replace(b" 20\r", b" 1000000\r"))
            while not over.wait(0.01):
                connection.sendall(b" ")

    over = threading.Event()
    with listening(paths) as listener:
        thread = threading.Thread(target=trickle)
        thread.start()
        assert failure(DaemonClient(paths, 0.2)) == silent(paths)
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"\x16\x03\x01\x02\x00\r\n\r\n", "illegal status line"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "illegal status line"),
        (HEAD + b'{"half":', "it stopped or restarted"),
        (HEAD[:30], "it stopped or restarted"),
        (b"", "it stopped or restarted"),
    ],
    ids=["binary", "another protocol", "half a body", "half a head", "nothing"],
)
def test_a_truncated_answer_is_an_error(paths: Paths, answer: bytes, why: str) -> None:
    with listening(paths, answer):
        code, wrong, hint = failure(DaemonClient(paths))
    assert code == 3
    assert wrong.startswith(f"the daemon's answer on {paths.socket} was cut off: ")
    assert why in wrong
    assert hint == "see: journalctl -u yunion-mps-daemon"


NO_JSON = "the daemon's answer (status 200) is not JSON"
SEE = "see: journalctl -u yunion-mps-daemon"


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        *(
            (b"200 OK", body, (3, NO_JSON, "check which program listens on its socket: ss -xlp"))
            for body in (b"<html>no</html>     ", b'["unclosed"         ', b"\xff\xfe" * 10)
        ),
        *(
            (b"500 Oh", body, (1, "the daemon answered with status 500", SEE))
            for body in (b'"just a text"       ', b"[]                  ", b"null                ")
        ),
        (b"403 No", b'{"detail":"not you"}', (4, "not you", SEE)),
    ],
)  # fmt: skip
def test_every_invalid_answer_is_an_error(
    paths: Paths, status: bytes, body: bytes, expected: tuple[int, str, str]
) -> None:
    with listening(paths, HEAD.replace(b"200 OK", status) + body):
        assert failure(DaemonClient(paths)) == expected


def test_a_client_that_is_turned_away_can_read_why(serve: Serve) -> None:
    """Again and again, for the server may hang up before the client has said anything."""
    host = serve(connections=1, reserved_for_root=0, first_request_timeout_s=600)
    host.connect()
    host.wait_connections(1)
    host.keep_connections()
    for _ in range(50):
        assert failure(DaemonClient(host.paths)) == (
            1,
            "too many connections are open",
            "close some, or try again in a moment",
        )


def test_a_question_may_take_longer_than_others(host: ServerHost) -> None:
    """Longer than what the daemon may wait for it."""
    answers: list[object] = []
    client = DaemonClient(host.paths, 0.0)
    asking = threading.Thread(
        target=lambda: answers.append(client.call(GET_EVENTS, 60.0, after=0, wait_s=60))
    )
    asking.start()
    eventually(lambda: host.events.waiting, "one that waits")
    host.record(Event("info", "gpu", "00:06.0", "back"))
    asking.join()
    assert len(answers) == 1


def test_until_closed_waits_until_the_program_serves_no_more(host: ServerHost) -> None:
    answers: list[object] = []
    asking = threading.Thread(
        target=lambda: answers.append(DaemonClient(host.paths).call(REEXEC, until_closed=True))
    )
    asking.start()
    eventually(lambda: host.reloader.done == ["reexec"], "the request")
    host.assert_serves()
    assert answers == []
    host.stop()
    asking.join()
    assert answers == [{"pid": 4200}]


def test_until_closed_raises_a_refusal_at_once(host: ServerHost) -> None:
    host.reloader.error = HostError("the new program cannot start: no", "correct that")
    with pytest.raises(YunionError, match="the new program cannot start: no"):
        DaemonClient(host.paths).call(REEXEC, until_closed=True)
