"""Directories that the service's unit does not let the daemon use are errors of the configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.config import load
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import METRICS_FILE_FAILED
from yunion_mps.host.lock import holder_of_lock, take_lock
from yunion_mps.host.sandbox import UNIT
from yunion_mps.supervisor.unit_access import own_unit_problems, unit_problems, unit_warnings

from unit.http.server_host import short_root

CONF = "etc/yunion/host.conf"


@pytest.fixture
def paths() -> Iterator[Paths]:
    with short_root() as found:
        yield found


def configure(paths: Paths, *lines: str) -> Path:
    file = Path(paths.host_conf)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["enable_cuda_mps: true", *lines, ""]))
    return file


def problems(paths: Paths) -> list[str]:
    return [str(problem) for problem in unit_problems(paths, load(paths)[0])]


@pytest.mark.parametrize(
    ("key", "path", "setting", "example"),
    [
        ("cuda_mps_pipe_directory", "/home/mps", "ProtectHome=read-only", "/run/nvidia-mps/pipe"),
        ("cuda_mps_log_directory", "/usr/local/mps", "ProtectSystem=full", "/run/nvidia-mps/log"),
    ],
)
def test_a_directory_that_the_unit_may_not_write_has_its_line_and_fix(
    paths: Paths, key: str, path: str, setting: str, example: str
) -> None:
    file = configure(paths, f"{key}: {path}")
    what = f"{key} is {path}, which {UNIT} may not write to ({setting})"
    permit = f"mkdir -p {path}; systemctl edit yunion-mps-daemon, with the lines [Service] and "
    permit += f"ReadWritePaths={path}"
    assert problems(paths) == [
        f"{file}:2: {what}: write another directory, for example {example}; or permit it: {permit}"
    ]


def test_a_symlink_is_followed_to_what_the_unit_forbids(paths: Paths) -> None:
    configure(paths, "cuda_mps_log_directory: /srv/mps")
    assert problems(paths) == []
    Path(paths.under("/srv")).mkdir()
    os.symlink(paths.under("/home/mps"), paths.under("/srv/mps"))
    (line,) = problems(paths)
    assert (
        f"cuda_mps_log_directory is /srv/mps (a symlink to /home/mps), which {UNIT} may not write to" in line
    )


def test_an_absolute_symlink_of_another_root_stays_below_it(paths: Paths) -> None:
    configure(paths, "cuda_mps_pipe_directory: /srv/link/mps")
    Path(paths.under("/srv")).mkdir()
    os.symlink("/home", paths.under("/srv/link"))
    (line,) = problems(paths)
    assert "cuda_mps_pipe_directory is /srv/link/mps (a symlink to /home/mps), which" in line


def test_a_metrics_file_that_the_unit_may_not_write_is_a_warning(paths: Paths) -> None:
    configure(paths, "metrics_textfile: /home/x/y.prom")
    assert problems(paths) == [], "the daemon runs without it"
    (warning,) = unit_warnings(paths, load(paths)[0])
    assert warning.code == METRICS_FILE_FAILED
    forbids = f"which {UNIT} may not write to (ProtectHome=read-only)"
    assert warning.startswith(f"metrics_textfile is /home/x/y.prom, in /home/x, {forbids}: permit it: ")
    configure(paths, "metrics_textfile: /srv/x/y.prom")
    assert unit_warnings(paths, load(paths)[0]) == []


def test_a_state_directory_that_is_a_symlink_is_an_error(paths: Paths) -> None:
    configure(paths)
    state = Path(paths.state_directory)
    state.parent.mkdir(parents=True, exist_ok=True)
    state.symlink_to("/srv/state")
    (line,) = problems(paths)
    assert line.startswith(
        f"{state}: is a symlink, so systemd does not start {UNIT} (StateDirectory=yunion-mps)"
    )
    assert line.endswith(f"mount --bind /srv/state {state}")


def test_a_private_tmp_hides_the_default_pipe_directory(paths: Paths) -> None:
    file = configure(paths)
    drop_in = Path(paths.under(f"/etc/systemd/system/{UNIT}.d/tmp.conf"))
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\nPrivateTmp=yes\n")
    (line,) = problems(paths)
    hidden = f"where other programs do not see what {UNIT} writes (PrivateTmp=yes)"
    assert line.startswith(f"{file}: cuda_mps_pipe_directory is /tmp/nvidia-mps/pipe, {hidden}")


def test_directories_that_are_not_used_are_no_error(paths: Paths) -> None:
    file = configure(paths, "cuda_mps_pipe_directory: /home/mps")
    file.write_text(file.read_text().replace("true", "false"))
    assert problems(paths) == []
    file.write_text(file.read_text().replace("false", "true"))
    entries = Path(paths.under("/etc/yunion/host_container_device.yml"))
    entries.write_text("devices:\n- path: '00:06.0'\n  type: NVIDIA_GPU_SHARE\n  virtual_number: 2\n")
    assert problems(paths) == []


def test_nothing_is_refused_while_a_daemon_runs_without_the_unit(paths: Paths) -> None:
    configure(paths, "cuda_mps_pipe_directory: /home/mps")
    assert holder_of_lock(paths) is None
    lock = take_lock(paths)
    try:
        assert holder_of_lock(paths) == os.getpid()
        assert problems(paths) == []
    finally:
        os.close(lock)
    assert len(problems(paths)) == 1


def test_a_start_without_the_unit_is_not_refused(paths: Paths) -> None:
    configure(paths, "cuda_mps_pipe_directory: /home/mps")
    assert own_unit_problems(paths, load(paths)[0]) == []
