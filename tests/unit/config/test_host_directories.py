"""The two directories of host.conf: where pipes and logs may lie, and how long a path may be."""

from __future__ import annotations

import pytest

from unit.config.files import HOST, Files

OWN = "write a directory of its own, for example /tmp/nvidia-mps"


@pytest.mark.parametrize(
    "path",
    ["/tmp", "/run", "/var", "/etc", "/root", "/srv", "/var/log", "/var/tmp", "/var/run", "/var/lib",
     "/dev/shm", "/usr/local", "/usr/lib", "/run/lock", "/tmp/", "//tmp", "/tmp/x/..", "/var/./log/"],
)  # fmt: skip
def test_a_shared_directory_is_refused_for_pipes_and_logs(files: Files, path: str) -> None:
    files.write(f"cuda_mps_pipe_directory: {path}\ncuda_mps_log_directory: {path}\n")
    assert files.messages() == [
        f'{HOST}:1: cuda_mps_pipe_directory is "{path}", which is shared with other software: {OWN}/pipe',
        f'{HOST}:2: cuda_mps_log_directory is "{path}", which is shared with other software: {OWN}/log',
    ]


@pytest.mark.parametrize(
    "path", ["/tmp/mps", "/run/mps", "/var/log/mps", "/dev/shm/mps", "/opt/mps", "/var/mps"]
)
def test_a_directory_of_its_own_in_a_shared_one_is_right(files: Files, path: str) -> None:
    config = files.write(f"cuda_mps_pipe_directory: {path}\ncuda_mps_log_directory: {path}\n").load()
    assert (config.cuda_mps_pipe_directory, config.cuda_mps_log_directory) == (path, path)


def test_directories_are_normalised(files: Files) -> None:
    config = files.write("cuda_mps_pipe_directory: //run//mps/./x/../pipe/\n").load()
    assert config.cuda_mps_pipe_directory == "/run/mps/pipe"


@pytest.mark.parametrize(("scope", "added"), [("host", 19), ("gpu", 19 + 41)])
def test_a_pipe_directory_is_refused_if_its_sockets_have_no_address(
    files: Files, scope: str, added: int
) -> None:
    room = 107 - added - len(str(files.root))
    assert len("/control_privileged") == 19
    files.write(f"cuda_mps_scope: {scope}\ncuda_mps_pipe_directory: /run/{'p' * (room - 5)}\n").load()
    files.write(f"cuda_mps_scope: {scope}\ncuda_mps_pipe_directory: /run/{'p' * (room - 4)}\n")
    assert files.messages() == [
        (
            f"{HOST}:2: cuda_mps_pipe_directory is {room + 1} bytes long, too long for a socket's address:"
            f" choose a path of at most {room} bytes"
        )
    ]
