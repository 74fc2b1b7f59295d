"""A line reaches the terminal or pipe of a process's user, and never anything else."""

from __future__ import annotations

import contextlib
import os
import pty
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.host.stderr import write_to_stderr

from waiting import readable

UID = os.geteuid()
LINE = "yunion-mps: terminating PID 42\n"


@contextlib.contextmanager
def process_with(stderr: int) -> Iterator[int]:
    """A process with this standard error; its PID."""
    with subprocess.Popen(["sleep", "600"], stderr=stderr) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_line_reaches_a_pipe_of_the_user(pipe: tuple[int, int]) -> None:
    with process_with(pipe[1]) as pid:
        assert write_to_stderr(pid, UID, LINE)
    assert os.read(pipe[0], 100).decode() == LINE
    assert os.get_blocking(pipe[1]), "the process's own descriptor is as it was"


def test_a_line_reaches_a_terminal_of_the_user() -> None:
    master, terminal = pty.openpty()
    try:
        with process_with(terminal) as pid:
            assert write_to_stderr(pid, UID, LINE)
        assert readable(master, 60.0)
        assert os.read(master, 100).decode() == LINE.replace("\n", "\r\n")
    finally:
        os.close(master)
        os.close(terminal)


def test_nothing_is_written_to_a_pipe_of_another_user(pipe: tuple[int, int]) -> None:
    with process_with(pipe[1]) as pid:
        assert not write_to_stderr(pid, UID + 1, LINE)
    assert not readable(pipe[0], 0.0)


def test_a_full_pipe_or_one_without_a_reader_loses_the_line(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    with contextlib.suppress(BlockingIOError):
        while os.write(pipe[1], bytes(1 << 16)):
            pass
    with process_with(pipe[1]) as pid:
        assert not write_to_stderr(pid, UID, LINE)
        os.close(pipe[0])
        assert not write_to_stderr(pid, UID, LINE)


def test_nothing_is_written_to_a_file_a_named_pipe_or_a_socket(tmp_path: Path) -> None:
    file, fifo = tmp_path / "job.log", tmp_path / "fifo"
    os.mkfifo(fifo)
    ours, its = socket.socketpair()
    ours.setblocking(False)
    opened = [os.open(file, os.O_WRONLY | os.O_CREAT), os.open(fifo, os.O_RDWR)]
    with ours, its:
        for stderr in (*opened, its.fileno(), subprocess.DEVNULL):
            with process_with(stderr) as pid:
                assert not write_to_stderr(pid, UID, LINE)
        with pytest.raises(BlockingIOError):
            ours.recv(100)
    assert file.read_text() == ""
    assert not readable(opened[1], 0.0)
    for descriptor in opened:
        os.close(descriptor)


def test_a_process_that_has_ended_gets_no_line(pipe: tuple[int, int]) -> None:
    with process_with(pipe[1]) as pid:
        pass
    assert not write_to_stderr(pid, UID, LINE)
