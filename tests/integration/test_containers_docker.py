"""`yunion-mps run --docker`, with docker's command line and podman behind it.

The real docker, whose daemon needs a host of its own, is in tests/packages/test_docker.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.conftest import MakePodman
from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, given, leases_of
from integration.podman_host import IMAGE, Podman, files_of
from integration.test_containers import ASK
from simhost import SimHost

#: One GPU, divided by four: `run` and the client take nothing of the reference case, which has no limits.
pytestmark = pytest.mark.gpus({"kind": "v100"})


@pytest.fixture
def shared() -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="containers.") as file:
        yield Path(file.name)


def stand_in(host: SimHost, *, reads_cdi: bool) -> None:
    """A docker that is podman, and answers for itself what podman does not know of docker."""
    directories = '["/etc/cdi","/var/run/cdi"]' if reads_cdi else "null"
    program = host.root / "bin/docker"
    program.write_text(
        f'#!/bin/sh\n[ "$1" != info ] || {{ echo \'{directories}\'; exit; }}\nexec podman "$@"\n'
    )
    program.chmod(0o755)


def test_docker_s_container_keeps_its_lease_whatever_its_command_line_says(
    ready_daemon: Daemon, podman: Podman, tmp_path: Path
) -> None:
    """What looks like an option of docker's may be the command's, or the value of another option."""
    host = ready_daemon.host
    stand_in(host, reads_cdi=False)
    for place, (before, after) in enumerate(
        [
            ((), ("--cidfile", "nowhere")),
            (("--cidfile", str(tmp_path / "cid")), ()),
            (("--env", "--cidfile", "--label", "a=b"), ()),
        ]
    ):
        name = f"trainer-{place}"
        command = [*before, IMAGE, "sh", "-c", "sleep 300; exit", *after]
        done = host.run(["yunion-mps", "run", "--docker", "--", "-d", "--name", name, *command])
        assert done.returncode == 0, done.stderr

        def binding() -> list[str]:
            return [one["binding"] for one in leases_of(ready_daemon)]

        eventually(lambda: binding() != ["process"], "that the lease is bound, or lost")
        assert binding() == ["container"]
        podman.good("rm", "--force", "--time", "0", name)
        eventually(lambda: given(ready_daemon) == [], "the end of the lease")


@pytest.mark.parametrize("reads_cdi", [True, False])
def test_docker_gets_the_same_whether_it_reads_cdi_or_not(
    ready_daemon: Daemon, podman: Podman, shared: Path, *, reads_cdi: bool
) -> None:
    """Not the real docker, whose daemon needs a host of its own: its command line, with podman behind it."""
    host = ready_daemon.host
    stand_in(host, reads_cdi=reads_cdi)
    inside = f"echo $YUNION_MPS_DEVICE; {ASK}; ls /dev/shm/{shared.name}; exit 7"
    done = host.run(["yunion-mps", "run", "--docker", "--", "--rm", IMAGE, "sh", "-c", inside])
    told = [ADDRESSES[0], "25.0", f"/dev/shm/{shared.name}"]
    assert (done.returncode, done.stdout.splitlines()) == (7, told), done.stderr
    eventually(lambda: given(ready_daemon) == [], "the end of the lease")
    done = host.run(["yunion-mps", "run", "--docker", "--", "-d", "--name", "trainer", IMAGE, "sleep", "300"])
    assert done.returncode == 0, done.stderr

    def binding() -> list[tuple[str, int]]:
        leases = leases_of(ready_daemon)
        return [(lease["binding"], lease["pid"]) for lease in leases]

    inside_pid = podman.pid_of("trainer")
    eventually(lambda: binding() == [("container", inside_pid)], "that the container has the lease")
    podman.good("rm", "--force", "--time", "0", "trainer")
    eventually(lambda: given(ready_daemon) == [], "the end of the lease")


def test_a_container_that_cannot_be_started_keeps_no_device(ready_daemon: Daemon, podman: Podman) -> None:
    host = ready_daemon.host
    for engine, reads_cdi in (("--podman", True), ("--docker", False)):
        stand_in(host, reads_cdi=reads_cdi)
        done = host.run(["yunion-mps", "run", engine, "--", "--pull=never", "no/such:image", "true"])
        assert done.returncode == 125, "the engine's own"
        eventually(lambda: given(ready_daemon) == [], "the end of the lease")
    assert files_of(host) == ["yunion-mps.json"]
    assert podman.good("ps", "--quiet") == ""


_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def test_without_cdi_a_variable_that_replaces_the_device_s_is_refused(
    ready_daemon: Daemon, podman: Podman
) -> None:
    host = ready_daemon.host
    stand_in(host, reads_cdi=False)
    refused = host.run(["yunion-mps", "run", "--docker", "--", "-e", f"{_VARIABLE}=0=9G", IMAGE, "true"])
    what = "would override the device's value, because this docker does not support CDI: omit it."
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[0] == f"yunion-mps: --env {_VARIABLE} {what}"
    assert ready_daemon.get("/v1/events?kind=lease")[1]["events"] == []
    assert podman.good("ps", "--all", "--quiet") == ""


def test_a_variable_that_replaces_nothing_is_the_container_s(ready_daemon: Daemon, podman: Podman) -> None:
    """The command's words may look the same; and what CDI sets comes after the user's own."""
    host = ready_daemon.host
    assert podman.good("ps", "--quiet") == ""
    stand_in(host, reads_cdi=False)
    inside = f"echo $MINE ${_VARIABLE} $0 $1"
    command = ["--rm", "-e", "MINE=1", IMAGE, "sh", "-c", inside, "-e", f"{_VARIABLE}=0=9G"]
    done = host.run(["yunion-mps", "run", "--docker", "--", *command])
    assert done.stdout == f"1 0=4096M -e {_VARIABLE}=0=9G\n", done.stderr
    stand_in(host, reads_cdi=True)
    command = ["--rm", "-e", f"{_VARIABLE}=0=9G", IMAGE, "sh", "-c", f"echo ${_VARIABLE}"]
    done = host.run(["yunion-mps", "run", "--docker", "--", *command])
    assert (done.stdout, done.stderr) == ("0=4096M\n", "")


@pytest.mark.parametrize("name", ["mps:1", 'a,b"c'])
def test_without_cdi_the_pipe_directory_may_have_any_characters(
    daemon: Daemon, make_podman: MakePodman, name: str
) -> None:
    daemon.configure(cuda_mps_pipe_directory=f"/run/{name}")
    daemon.start().wait_ready()
    stand_in(daemon.host, reads_cdi=False)
    make_podman(daemon.host)
    inside = f"{ASK}; echo $CUDA_MPS_PIPE_DIRECTORY"
    done = daemon.host.run(["yunion-mps", "run", "--docker", "--", "--rm", IMAGE, "sh", "-c", inside])
    assert done.stdout.splitlines()[0] == "25.0", done.stderr
    assert done.stdout.splitlines()[-1] == f"{daemon.host.root}/run/{name}"
