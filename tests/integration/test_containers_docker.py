"""`yunion-mps run --docker`, with docker's command line and podman behind it.

The real docker, whose daemon needs a host of its own, is in tests/packages/test_docker.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.daemon_host import Daemon, eventually
from integration.lease_host import given, leases_of
from integration.podman_host import IMAGE, Podman, files_of
from simhost import SimHost

#: One GPU, divided by four: `run` and the client take nothing of the reference case, which has no limits.
pytestmark = pytest.mark.gpus({"kind": "v100"})


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
