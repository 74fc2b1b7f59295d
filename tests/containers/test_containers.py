"""Containers with devices: the real podman, and NVIDIA's real front-end in a container of it.

The real docker, whose daemon needs a host of its own, is in tests/packages/test_docker.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from containers.conftest import MakePodman
from containers.image import IMAGE
from containers.podman_host import Podman, mps, reloads
from integration.cdi_files import files_of, spec_of
from integration.daemon_host import Daemon, eventually, is_running
from integration.lease_host import ADDRESSES, leased_addresses, leases_of, queued_requests, take
from simhost import SimHost
from simhost.host import IN_UNITS
from simhost.mps import ASK
from waiting import readable

pytestmark = pytest.mark.gpus({"kind": "v100"})

_PATIENCE_S = 60.0


@pytest.fixture
def system_log(host: SimHost) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(host.root / "dev/log"))
        log.settimeout(_PATIENCE_S)
        yield log


def test_a_cdi_device_gives_a_container_its_budget_and_pipe_directory(
    ready_daemon: Daemon, podman: Podman
) -> None:
    """For root and for another user; the control daemon runs outside, the front-end is in the container."""
    environment = podman.good("run", "--rm", *mps(ADDRESSES[1]), IMAGE, "env", "-0")
    found = dict(entry.partition("=")[::2] for entry in environment.split("\0"))
    expected = ready_daemon.get(f"/v1/devices/{ADDRESSES[1]}")[1]["client_environment"]
    assert {name: found.get(name) for name in expected} == expected
    assert ready_daemon.control("start_server -uid 0", "get_default_active_thread_percentage")[-1] == "25.0"
    for user in ("0", "1000"):
        told = podman.good("run", "--rm", "--user", user, *mps(ADDRESSES[1]), IMAGE, "sh", "-c", ASK)
        assert told.splitlines()[0] == "25.0"
    assert podman.good("run", "--rm", *mps("all"), IMAGE, "sh", "-c", ASK).splitlines()[0] == "25.0"


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_device_is_the_container_s_alone_until_it_ends(
    ready_daemon: Daemon, make_podman: MakePodman, system_log: socket.socket, runtime: str
) -> None:
    host = ready_daemon.host
    eventually(lambda: spec_of(host), "the file of the devices")
    podman = make_podman(host, runtime)
    told = podman.run(*podman.needs, *mps(ADDRESSES[1]), IMAGE, "sh", "-c", ASK)
    assert told.stdout.splitlines()[:1] == ["25.0"], told.stderr
    begin = ["run", "--detach", *podman.needs, "--name", "trainer", *mps(ADDRESSES[1])]
    podman.good(*begin, IMAGE, "sleep", "300")
    assert podman.good("inspect", "--format", "{{.OCIRuntime}}", "trainer") == runtime
    (lease,) = leases_of(ready_daemon)
    assert (lease["devices"], lease["binding"]) == ([ADDRESSES[1]], "container")
    assert (lease["pid"], lease["container"]) == (podman.pid_of("trainer"), "trainer")
    assert "trainer: sleep 300" in host.run(["yunion-mps", "who"]).stdout
    taken = f"device {ADDRESSES[1]} is in use: trainer of root, PID {lease['pid']} (see: yunion-mps who)"
    for name in (ADDRESSES[1], "all"):
        refused = podman.run(*podman.needs, *mps(name), IMAGE, "true")
        assert refused.returncode != 0
        said = {"runc": f"yunion-mps: {taken}", "crun": "(exit code: 5)"}  # crun tells no more of a hook
        assert refused.stderr.rstrip().endswith(said[runtime])
        assert system_log.recv(4096).decode().endswith(f": {taken}")
    assert host.run(["yunion-mps", "run", "--device", ADDRESSES[1], "true"]).returncode == 5
    podman.good("stop", "--time", "0", "trainer")
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")
    podman.good("start", "trainer")
    assert leased_addresses(ready_daemon) == [ADDRESSES[1]], "it is taken again at each start"


def test_run_gives_a_container_a_lease_that_ends_with_it(ready_daemon: Daemon, podman: Podman) -> None:
    host = ready_daemon.host
    inside = "echo $YUNION_MPS_DEVICE; exit 7"
    done = host.run(["yunion-mps", "run", "--podman", "--", "--rm", IMAGE, "sh", "-c", inside])
    assert (done.returncode, done.stdout) == (7, f"{ADDRESSES[0]}\n"), done.stderr
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")
    command = ["yunion-mps", "run", "--podman", "--gpu", "00:06.0", "--", "-d", "--name", "trainer"]
    done = host.run([*command, IMAGE, "sleep", "300"])
    assert done.returncode == 0, done.stderr
    (lease,) = leases_of(ready_daemon)
    assert (lease["binding"], lease["pid"]) == ("container", podman.pid_of("trainer"))
    assert files_of(host) == [f"yunion-mps-lease-{lease['id']}.json", "yunion-mps.json"]
    refused = podman.run(*mps(lease["id"]), IMAGE, "true")
    assert "already belongs to a container" in refused.stderr
    assert "take another lease" in refused.stderr
    podman.good("rm", "--force", "--time", "0", "trainer")
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")
    assert files_of(host) == ["yunion-mps.json"]


def test_the_lease_outlives_engine_client_and_daemon_not_the_container(
    ready_daemon: Daemon, podman: Podman
) -> None:
    command = ["yunion-mps", "run", "--podman", "--", "--rm", "--name", "trainer", IMAGE]
    client = ready_daemon.host.popen([*command, "sh", "-c", "echo begun; exec sleep 300"])
    assert client.stdout is not None
    assert client.stdout.readline() == "begun\n"
    inside = podman.pid_of("trainer")
    client.kill()
    client.communicate()
    assert is_running(inside)
    assert leased_addresses(ready_daemon) == [ADDRESSES[0]]
    ready_daemon.kill()
    (kept, _) = files_of(ready_daemon.host)
    (ready_daemon.host.root / "run/cdi" / kept).unlink()
    (ready_daemon.host.root / "run/cdi/yunion-mps-lease-ended.json").write_text("{}")
    ready_daemon.start().wait_ready()
    assert leased_addresses(ready_daemon) == [ADDRESSES[0]]
    eventually(lambda: files_of(ready_daemon.host) == [kept, "yunion-mps.json"], "those of leases there are")
    assert leased_addresses(ready_daemon.reexec()) == [ADDRESSES[0]]
    os.kill(inside, signal.SIGKILL)
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")
    eventually(lambda: files_of(ready_daemon.host) == ["yunion-mps.json"], "the end of its file")


@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_several_devices_are_one_budget_by_run_and_refused_by_hand(
    ready_daemon: Daemon, podman: Podman
) -> None:
    host = ready_daemon.host
    inside = "echo $YUNION_MPS_DEVICE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    command = ["yunion-mps", "run", "--podman", "--count", "2", "--across", "--", "--rm", IMAGE]
    assert host.run([*command, "sh", "-c", inside]).stdout == "00:06.0-0,00:07.0-0 0=4096M,1=4096M\n"
    refused = podman.run(*mps("00:06.0-0"), *mps("00:07.0-0"), IMAGE, "true")
    assert (
        "a container can have only one device, but this one was given 00:06.0-0 and 00:07.0-0"
    ) in refused.stderr
    alone = ["yunion-mps", "run", "--podman", "--", "--rm", *mps("00:07.0-0"), IMAGE, "true"]
    assert re.search(r"[0-9a-f-]{36} and 00:07\.0-0 \(", host.run(alone).stderr), "the lease"
    eventually(lambda: leased_addresses(ready_daemon) == [], "that nothing is taken")


def test_a_container_whose_domain_does_not_serve_does_not_start(ready_daemon: Daemon, podman: Podman) -> None:
    lease = take(ready_daemon, f"devices={ADDRESSES[2]}&holder.name=job-17&holder.ttl_s=600")
    ready_daemon.pipe_directory.rename(ready_daemon.pipe_directory.with_name("away"))
    ready_daemon.pipe_directory.write_text("")
    os.kill(ready_daemon.control_pid(), signal.SIGKILL)
    eventually(lambda: ready_daemon.status()["state"] == "failed", "that it does not serve")
    there = [device["name"] for device in spec_of(ready_daemon.host)["devices"]]
    assert ADDRESSES[1] in there, "so that the reason can be said"
    refused = podman.run(*mps(ADDRESSES[1]), IMAGE, "true")
    assert refused.returncode != 0
    why = f"yunion-mps: device {ADDRESSES[1]} cannot be allocated now: 1 unavailable (GPU 00:06.0: its domain"
    assert why in refused.stderr, "and not the engine's word on the directory"
    refused = podman.run(*mps(lease["id"]), IMAGE, "true")
    assert f"yunion-mps: device {ADDRESSES[2]} is unavailable: its domain is " in refused.stderr


def test_memory_in_units_is_a_device_while_its_lease_lives(daemon: Daemon, make_podman: MakePodman) -> None:
    host = daemon.host
    host.divide(IN_UNITS)
    daemon.start().wait_ready()
    podman = make_podman(host)
    assert spec_of(host) == {}
    lease = take(daemon, "memory_mib=2048&holder.name=job-17&holder.ttl_s=600")
    for name in (lease["id"], "00:06.0-m0"):
        limit = podman.good(
            "run", "--rm", *mps(name), IMAGE, "sh", "-c", "echo $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
        )
        assert limit == "0=2048M"
        assert leased_addresses(daemon) == ["00:06.0-m0"], (
            "a lease of a name outlives the containers that use it"
        )
    assert daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    assert files_of(host) == []


def test_nvidias_cdi_file_is_included_as_soon_as_it_exists(
    ready_daemon: Daemon, podman: Podman, tmp_path: Path
) -> None:
    host = ready_daemon.host
    (tmp_path / "libcuda.so.1").write_text("the driver's\n")
    mount = {
        "hostPath": str(tmp_path / "libcuda.so.1"),
        "containerPath": "/usr/lib/libcuda.so.1",
        "options": ["ro", "bind"],
    }
    gpu = {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}], "env": ["THEIRS=1"]}}
    spec = {
        "cdiVersion": "0.3.0",
        "kind": "nvidia.com/gpu",
        "containerEdits": {"mounts": [mount]},
        "devices": [gpu],
    }
    gpu["containerEdits"]["deviceNodes"][0] = {"path": "/dev/nvidia0", "hostPath": "/dev/null"}  # type: ignore[index]
    (host.root / "run/cdi/nvidia.json").write_text(json.dumps(spec))
    reloads(ready_daemon)
    eventually(lambda: "libcuda" in json.dumps(spec_of(host)), "that it is included")
    inside = "cat /usr/lib/libcuda.so.1; ls /dev/nvidia0; echo $THEIRS $YUNION_MPS_DEVICE"
    told = podman.good("run", "--rm", *mps(ADDRESSES[3]), IMAGE, "sh", "-c", inside)
    assert told.splitlines() == ["the driver's", "/dev/nvidia0", f"1 {ADDRESSES[3]}"]


def test_rootless_podman_does_the_same_for_a_user_of_the_socket_s_group(
    ready_daemon: Daemon, podman: Podman
) -> None:
    uid = 65534
    refused = podman.as_user(uid, "podman", "run", "--rm", *mps(ADDRESSES[1]), IMAGE, "true")
    assert "yunion-mps: permission denied: cannot connect to" in refused.stderr
    ready_daemon.socket_path.chmod(0o666)  # as if it were of the group
    inside = ["sh", "-c", f"echo $YUNION_MPS_DEVICE; {ASK}"]
    done = podman.as_user(uid, "podman", "run", "--rm", *mps(ADDRESSES[1]), IMAGE, *inside)
    assert done.stdout.splitlines()[:2] == [ADDRESSES[1], "25.0"], done.stderr
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")
    command = ["yunion-mps", "run", "--podman", "--", "-d", "--name", "theirs", IMAGE, "sleep", "300"]
    done = podman.as_user(uid, *command)
    assert done.returncode == 0, done.stderr
    (lease,) = leases_of(ready_daemon)
    assert (lease["uid"], lease["binding"]) == (uid, "container")
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():  # with cgroups v1, rootless podman makes none
        assert lease["container"] == "theirs"
    done = podman.as_user(uid, "podman", "rm", "--force", "--time", "0", "theirs")
    assert done.returncode == 0, done.stderr
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")


def stand_in(host: SimHost, *, reads_cdi: bool) -> None:
    """A docker that is podman, and answers for itself what podman does not know of docker."""
    directories = '["/etc/cdi","/var/run/cdi"]' if reads_cdi else "null"
    program = host.root / "bin/docker"
    program.unlink(missing_ok=True)  # one that is being started cannot be written to
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
        eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")


def test_a_container_that_cannot_be_started_keeps_no_device(ready_daemon: Daemon, podman: Podman) -> None:
    host = ready_daemon.host
    for engine, reads_cdi in (("--podman", True), ("--docker", False)):
        stand_in(host, reads_cdi=reads_cdi)
        done = host.run(["yunion-mps", "run", engine, "--", "--pull=never", "no/such:image", "true"])
        assert done.returncode == 125, "the engine's own"
        eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")
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


RUN = ("yunion-mps", "run", "--podman")
LOOP = "trap 'echo ended; exit 3' TERM; trap 'echo heard' USR1; echo begun; while :; do sleep 0.1; done"


def test_a_queued_run_gets_what_a_container_leaves_ctrl_c_ends_its_wait(
    ready_daemon: Daemon, podman: Podman
) -> None:
    host = ready_daemon.host
    podman.good("run", "--detach", "--name", "trainer", *mps("all"), IMAGE, "sleep", "300")

    def waiting() -> int:
        return len(queued_requests(ready_daemon))

    inside = ["sh", "-c", "echo $YUNION_MPS_DEVICE"]
    patient = host.popen([*RUN, "--wait", "--gpu", "00:06.0", "--", "--rm", IMAGE, *inside], stderr=-1)
    eventually(lambda: waiting() == 1, "that it waits")
    hasty = host.popen([*RUN, "--wait", "--", "--rm", IMAGE, "true"], stderr=-1)
    eventually(lambda: waiting() == 2, "that both wait")
    hasty.send_signal(signal.SIGINT)
    hasty.communicate()
    assert hasty.returncode == 130
    eventually(lambda: waiting() == 1, "that it has left the queue")
    podman.good("rm", "--force", "--time", "0", "trainer")
    told, _ = patient.communicate()
    assert (patient.returncode, told) == (0, f"{ADDRESSES[0]}\n")
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")


def test_input_signals_and_terminal_are_the_container_s(ready_daemon: Daemon, podman: Podman) -> None:
    host = ready_daemon.host
    assert podman.good("ps", "--quiet") == ""
    done = host.run([*RUN, "--", "--rm", "-i", IMAGE, "cat"], input="hello\n")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    command = " ".join([*RUN, "--", "--rm", "-it", IMAGE, "sh -c 'test -t 0 && test -t 1 && exit 7'"])
    done = host.run(["script", "--quiet", "--return", "--command", command, "/dev/null"])
    assert done.returncode == 7, done.stdout
    begun = host.popen([*RUN, "--", "--rm", IMAGE, "sh", "-c", LOOP])
    assert begun.stdout is not None
    assert begun.stdout.readline() == "begun\n"
    while not readable(begun.stdout, 0.1):
        begun.send_signal(signal.SIGUSR1)  # podman hands signals on from a moment after its container's start
    begun.send_signal(signal.SIGTERM)
    assert set(begun.communicate()[0].splitlines()) == {"heard", "ended"}
    assert begun.returncode == 3
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")


def test_a_name_s_lease_that_has_ended_neither_ends_nor_begins_containers(
    ready_daemon: Daemon, podman: Podman
) -> None:
    lease = take(ready_daemon, f"devices={ADDRESSES[1]}&holder.name=job-17&holder.ttl_s=600")
    for name in ("trainer", "teacher"):
        podman.good("run", "--detach", "--name", name, "--device", lease["cdi"], IMAGE, "sleep", "300")
    assert leased_addresses(ready_daemon) == [ADDRESSES[1]], "both share it"
    podman.good("rm", "--force", "--time", "0", "teacher")
    assert leased_addresses(ready_daemon) == [ADDRESSES[1]]
    assert ready_daemon.host.run(["yunion-mps", "lease", "release", "job-17"]).returncode == 0
    assert (leased_addresses(ready_daemon), files_of(ready_daemon.host)) == ([], ["yunion-mps.json"])
    assert podman.good("ps", "--format", "{{.Names}}") == "trainer"
    refused = podman("restart", "--time", "0", "trainer")
    assert f"unresolvable CDI devices {lease['cdi']}" in refused.stderr
