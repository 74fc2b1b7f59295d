"""Which process keeps a control daemon waiting, as the kernel tells; and plain words if it does not."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator

import pytest
from yunion_mps.core.models import DomainPlan
from yunion_mps.host import sockets
from yunion_mps.host.proc import process_name
from yunion_mps.mps.conversation import Conversation, connections, diagnose, front_end_at, occupied_error
from yunion_mps.mps.processes import client_variables

from integration.daemon_host import eventually

from .domain_bench import Bench
from .other_processes import PATIENCE_S, SOCKET, refusing, silent_process, stop_process

NLMSG_ERROR = 2


@pytest.fixture
def control_pid(bench: Bench) -> int:
    return bench.control().pid


@pytest.fixture
def other(plan: DomainPlan, control_pid: int) -> Iterator[int]:
    with silent_process(plan.pipe_directory) as pid:
        yield pid


def test_no_process_is_named_if_nothing_is_seen(plan: DomainPlan, control_pid: int) -> None:
    assert diagnose(control_pid, plan.pipe_directory) == ""
    assert diagnose(1 << 22, "/no/such/place") == ""


def test_a_process_that_is_connected_and_silent_is_named(bench: Bench, control_pid: int, other: int) -> None:
    assert diagnose(control_pid, bench.plan.pipe_directory) == (
        f"PID {other} ({process_name(other)}, root) is connected to it but sends nothing, "
        "which blocks all other processes"
    )


def test_a_connected_process_that_is_stopped_is_reported_as_stopped(
    bench: Bench, control_pid: int, other: int
) -> None:
    stop_process(other)
    assert diagnose(control_pid, bench.plan.pipe_directory).startswith(
        f"PID {other} ({process_name(other)}, root) is connected to it and was stopped"
    )


def test_a_stopped_control_daemon_is_its_own_cause(plan: DomainPlan, control_pid: int, other: int) -> None:
    stop_process(control_pid)
    why = diagnose(control_pid, plan.pipe_directory)
    assert why == "it was stopped by a signal (SIGSTOP) or a debugger"


def test_an_open_front_end_is_named_and_not_blamed_for_silence(bench: Bench, control_pid: int) -> None:
    leave = bench.hold_front_end()
    assert front_end_at(bench.plan.pipe_directory).endswith("(nvidia-cuda-mps, root)")
    assert diagnose(control_pid, bench.plan.pipe_directory) == ""
    leave()
    eventually(lambda: front_end_at(bench.plan.pipe_directory) == "")


def test_our_own_front_end_is_not_to_be_ended(bench: Bench, control_pid: int) -> None:
    """As while the control daemon waits for its clients after `quit`."""
    directory = bench.plan.pipe_directory
    environment = {**os.environ, **client_variables(directory)}
    with subprocess.Popen([bench.program], stdin=subprocess.PIPE, env=environment) as other:
        eventually(lambda: front_end_at(directory))
        assert front_end_at(directory, os.getpid()) == ""
        assert "end that process" in occupied_error(directory).hint
        other.kill()
    eventually(lambda: front_end_at(directory) == "")
    stop_process(control_pid)
    ours = Conversation(bench.program, directory, ["quit"], 0.0, PATIENCE_S)
    try:
        eventually(lambda: front_end_at(directory))
        error = occupied_error(directory)
        assert error.message.endswith("it was told to quit, and waits for its clients to end")
        assert "end that process" not in error.hint
    finally:
        ours.close()
        os.kill(control_pid, signal.SIGCONT)


def test_a_process_that_is_connected_elsewhere_is_not_named(bench: Bench, other: int) -> None:
    assert connections(str(bench.place)) == {}


def test_the_search_for_connected_processes_has_a_deadline(
    plan: DomainPlan, control_pid: int, other: int
) -> None:
    inodes = sockets.connected_inodes([f"{plan.pipe_directory}/control"])
    assert sockets.socket_holders(inodes) == {other: 1}
    assert sockets.socket_holders(inodes, search_s=0.0) == {}


def test_a_kernel_that_cannot_be_queried_is_not_an_error(
    plan: DomainPlan, control_pid: int, other: int
) -> None:
    def look() -> tuple[str, str]:
        return diagnose(control_pid, plan.pipe_directory), front_end_at(plan.pipe_directory)

    assert look()[0]
    assert refusing(SOCKET, errno.EPROTONOSUPPORT, look, first_argument=socket.AF_NETLINK) == ("", "")


def test_a_kernel_that_answers_with_an_error_lists_no_socket() -> None:
    """As one does that is built without sock_diag's part for Unix sockets."""
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, kernels:
        header = struct.pack("=IHHII", 36, NLMSG_ERROR, 0, 1, 0)
        kernels.send(header + struct.pack("=i", -errno.ENOENT) + header)
        assert list(sockets.unix_sockets(ours)) == []
        assert kernels.recv(1 << 16), "it was asked"
