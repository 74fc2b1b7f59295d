"""Conversations with NVIDIA's real control daemon, and what shows that its limits are in effect."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence

import pytest
from yunion_mps.core.errors import ControlError, HostError
from yunion_mps.core.models import DomainPlan
from yunion_mps.host.sockets import Peer
from yunion_mps.mps import limits
from yunion_mps.mps.conversation import Conversation, peer_of
from yunion_mps.mps.processes import client_variables
from yunion_mps.planning.division import share_percentage
from yunion_mps.planning.environment import decimal

from descriptors import open_descriptors
from integration.daemon_host import eventually

from .domain_bench import Bench
from .other_processes import converse


def check_setting(plan: DomainPlan, answer: Sequence[str]) -> None:
    """As a domain checks what is answered to both, if no server runs."""
    limits.check_percentage(plan, answer[0] if answer else None)
    limits.check_limits(plan, answer[1:])


NO_DEVICE = (
    "check the end of the control daemon's log; its devices stay unavailable until the limits are in effect"
)


def test_there_is_no_peer_without_a_control_daemon(bench: Bench) -> None:
    assert peer_of(bench.plan.pipe_directory) is None
    bench.control().kill()
    assert os.path.exists(f"{bench.plan.pipe_directory}/control"), "the socket stays behind"
    assert peer_of(bench.plan.pipe_directory) is None


def test_a_stopped_control_daemon_is_still_the_peer(bench: Bench) -> None:
    process = bench.control()
    process.signal(signal.SIGSTOP)
    peer = peer_of(bench.plan.pipe_directory)
    assert peer is not None
    assert peer.pid == process.pid


def test_finding_the_peer_does_not_wait_for_a_full_queue(plan: DomainPlan) -> None:
    os.makedirs(plan.pipe_directory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{plan.pipe_directory}/control")
        listener.listen(0)
        waiting = []
        for _ in range(5):
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(f"{plan.pipe_directory}/control")
        assert peer_of(plan.pipe_directory) in (None, Peer(os.getpid(), os.getuid()))
        for connection in waiting:
            connection.close()


def test_a_limit_that_the_control_daemon_ignores_is_noticed(bench: Bench) -> None:
    """It keeps the memory limits of 32 devices, and says nothing to one for a 33rd."""
    plan = bench.planned((5760,) * 33)
    bench.control(plan)
    answer = bench.ask(*limits.set_commands(plan), *limits.get_commands(plan))
    with pytest.raises(ControlError, match="the memory limit of device 32 is not in effect"):
        check_setting(plan, answer)


@pytest.mark.parametrize("memory_mib", [1, 9, 512, 1023, 1024, 1025, 1535, 2047, 2048, 5760, 143771])
def test_memory_limits_are_shown_as_the_control_daemon_shows_them(bench: Bench, memory_mib: int) -> None:
    plan = bench.planned((memory_mib,))
    bench.control(plan)
    set_it = f"set_default_device_pinned_mem_limit 0 {memory_mib}M"
    assert bench.ask(set_it, "get_default_device_pinned_mem_limit 0") == [limits.memory_text(memory_mib)]


def test_every_possible_percentage_is_kept_as_set(bench: Bench) -> None:
    bench.control()
    expected = {share_percentage(1, n, overcommit) for overcommit in (1, 2, None) for n in range(1, 1001)}
    ordered = sorted(expected)
    commands = [f"set_default_active_thread_percentage {decimal(value)}" for value in ordered]
    assert bench.ask(*commands) == [f"{value:.1f}" for value in ordered]


MORE = "the control daemon gave an unexpected answer: "
RIGHT = ["25.0", "5G", "25.0", "512M", "25.0"]


@pytest.fixture
def two_gpus(bench: Bench) -> DomainPlan:
    return bench.planned((5760, 512))


def memory(device: int, expected: int, got: str) -> str:
    return (
        f"the memory limit of device {device} is not in effect: it was set to {expected}M, "
        f"but the control daemon reports {got}"
    )


def percentage(got: str) -> str:
    return f"the thread percentage is not in effect: it was set to 25.0, but the control daemon reports {got}"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", percentage("nothing")),
        ("25.0", memory(0, 5760, "nothing")),
        ("25.0 4G 25.0 512M 25.0", memory(0, 5760, "'4G'")),
        ("5G 25.0 512M 25.0", percentage("'5G'")),
        ("25.0 5G 25.0 512M", percentage("nothing")),
        ("25.0 5G 25.0 513M 25.0", memory(1, 512, "'513M'")),
        ("25.0 5G 25.0 512M 30.0", percentage("'30.0'")),
        ("refused 5G 25.0 512M 25.0", percentage("'refused'")),
        ("25.0 5G 25.0 512M 25.0 refused", MORE + "'refused'"),
    ],
)
def test_every_wrong_answer_is_refused_and_names_the_limit(
    two_gpus: DomainPlan, answer: str, message: str
) -> None:
    with pytest.raises(ControlError) as caught:
        check_setting(two_gpus, answer.split())
    assert caught.value.message == message
    assert caught.value.hint == NO_DEVICE


def test_no_line_of_the_right_answer_can_be_missing_doubled_or_other(two_gpus: DomainPlan) -> None:
    for index in range(len(RIGHT)):
        for instead in ([], [RIGHT[index]] * 2, ["x"], [""], ["26.0"], ["6G"], [RIGHT[index] + " "]):
            wrong = RIGHT[:index] + instead + RIGHT[index + 1 :]
            if wrong != RIGHT:
                with pytest.raises(ControlError):
                    check_setting(two_gpus, wrong)


def test_a_stopped_control_daemon_is_given_up_at_the_deadline(bench: Bench) -> None:
    bench.control().signal(signal.SIGSTOP)
    before = open_descriptors()
    conversation = Conversation(
        bench.program,
        bench.plan.pipe_directory,
        [*limits.set_commands(bench.plan), *limits.get_commands(bench.plan)],
        100.0,
        5.0,
    )
    assert conversation.deadline_s == 105.0
    assert conversation.poll(100.0) is None
    assert conversation.poll(104.9) is None
    with pytest.raises(ControlError) as caught:
        conversation.poll(105.0)
    assert caught.value.message == (
        "the control daemon did not answer 'set_default_active_thread_percentage 25' within 5 s"
    )
    assert caught.value.hint == "check the end of its log"
    assert open_descriptors() == before, "the front-end and its pipe are gone"


def test_without_a_control_daemon_the_front_ends_words_are_the_error(bench: Bench) -> None:
    os.makedirs(bench.plan.pipe_directory)
    with pytest.raises(ControlError) as caught:
        bench.ask("get_server_list")
    assert caught.value.message.startswith(
        "nvidia-cuda-mps-control reported: Cannot find MPS control daemon process"
    )


@pytest.mark.parametrize("answer", ["", "echo 25.0;"])
def test_a_front_end_whose_connection_broke_has_no_answer(bench: Bench, answer: str) -> None:
    """As when a server exits meanwhile: the same question is asked again."""
    conversation = Conversation(bench.script(f"{answer} exit 1"), "/", ["x"], 0.0, 5.0)
    assert eventually(lambda: conversation.poll(0.0) == [])


def test_a_front_end_that_fails_silently_is_described_by_its_status(bench: Bench) -> None:
    with pytest.raises(ControlError) as caught:
        converse(bench.script("exit 7"), bench.plan, "get_server_list")
    assert caught.value.message == "nvidia-cuda-mps-control reported: status 7"


def test_an_answer_s_lines_have_no_control_characters(bench: Bench) -> None:
    """`ps` quotes the commands of its clients."""
    words = r"printf 'a\033[2J\302\2055\nb\r\nc\0\377'"
    lines = ["a\\x1b[2J\\x855", "b", "c\\x00\ufffd"]
    assert converse(bench.script(words), bench.plan, "ps") == lines
    with pytest.raises(ControlError) as caught:
        converse(bench.script(f"{words}; exit 7"), bench.plan, "ps")
    assert caught.value.message == "nvidia-cuda-mps-control reported: " + "\n".join(lines)


def test_an_endless_answer_is_cut_and_ends_at_the_deadline(bench: Bench) -> None:
    program = bench.script("exec yes")
    conversation = Conversation(program, bench.plan.pipe_directory, ["get_server_list"], 0.0, 5.0)
    for _ in range(3):
        assert conversation.poll(1.0) is None
    with pytest.raises(ControlError, match="within 5 s"):
        conversation.poll(5.0)


def test_a_front_end_that_cannot_be_started_leaves_no_pipe_behind(plan: DomainPlan) -> None:
    before = open_descriptors()
    with pytest.raises(HostError):
        Conversation("/no/such/program", plan.pipe_directory, ["quit"], 0.0, 5.0)
    assert open_descriptors() == before


def test_the_front_ends_environment_is_built_from_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere/else")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    answer = converse(bench.script("exec /usr/bin/env"), bench.plan, "quit")
    assert dict(line.split("=", 1) for line in answer) == {
        **client_variables(bench.plan.pipe_directory),
        "PWD": os.getcwd(),
    }
