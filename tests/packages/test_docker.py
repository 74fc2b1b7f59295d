"""Docker 26 of Debian 13 on a booted machine: with CDI switched on, and as it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from packages.conftest import NewMachine
from packages.docker import CALLS, IMAGE, Docker
from packages.driver import CLIENT
from packages.family import Deb
from packages.machine import UNIT, Done
from packages.operator import Operator
from packages.versions import Packages
from simhost.mps import ASK

ADDRESSES = [f"00:06.0-{slot}" for slot in range(4)]
RUN = ("yunion-mps", "run", "--docker", "--")
#: A client of MPS that ignores SIGTERM, and what a container needs of the machine to run it.
STUBBORN_CLIENT = ("python3", "-IS", CLIENT, "stubborn")
CLIENT_MOUNTS = tuple(f"--volume={folder}:{folder}:ro" for folder in ("/usr", "/lib", "/lib64", "/opt"))


@pytest.fixture(scope="module")
def operator(new_machine: NewMachine, current: Packages) -> Iterator[Operator]:
    with new_machine("trixie", "trixie-docker", [{"kind": "v100", "pci": "0000:00:06.0"}], CALLS) as machine:
        operator = Operator(machine.boot())
        Deb(machine).install(current)
        operator.configure()
        operator.start()
        yield operator


@pytest.fixture(scope="module")
def engine(operator: Operator) -> Docker:
    docker = Docker(operator.machine)
    docker.start(reads_cdi=True)
    docker.make_image()
    return docker


def device_option(name: str) -> tuple[str, str]:
    return "--device", f"yunion.io/mps={name}"


def environment(printed: str) -> dict[str, str]:
    return dict(entry.partition("=")[::2] for entry in printed.split("\0"))


def leases(operator: Operator) -> list[dict[str, Any]]:
    return list(operator.ask("leases")["leases"])


def nothing_is_taken(operator: Operator) -> None:
    operator.machine.wait_until("all is given back", lambda: leases(operator) == [])


def container_lease(operator: Operator) -> dict[str, Any]:
    """The one lease, once it is a container's."""
    operator.machine.wait_until(
        "a container has it", lambda: [one["binding"] for one in leases(operator)] == ["container"]
    )
    (lease,) = leases(operator)
    return lease


@pytest.fixture
def docker(engine: Docker, operator: Operator) -> Iterator[Docker]:
    """Docker that reads CDI; a lease that outlives its container fails the test."""
    engine.start(reads_cdi=True)
    yield engine
    engine.remove_all()
    nothing_is_taken(operator)


@pytest.fixture
def docker_without_cdi(engine: Docker, operator: Operator) -> Iterator[Docker]:
    engine.start(reads_cdi=False)
    yield engine
    engine.remove_all()
    nothing_is_taken(operator)


def test_a_cdi_device_gives_a_container_its_budget_and_pipe_directory(
    operator: Operator, docker: Docker
) -> None:
    """The control daemon runs outside, NVIDIA's front-end in the container, and both name one server."""
    operator.control("start_server -uid 0")
    (server,) = operator.servers()
    expected = operator.ask(f"devices/{ADDRESSES[1]}")["client_environment"]
    done = docker.run(*device_option(ADDRESSES[1]), "--env", "CUDA_VISIBLE_DEVICES=7", IMAGE, "env", "-0")
    found = environment(done.stdout)
    assert {name: found.get(name) for name in expected} == expected
    for user in ("0", "1000"):
        told = docker.run(*device_option(ADDRESSES[1]), "--user", user, IMAGE, "sh", "-c", ASK).stdout
        assert told.splitlines() == ["25.0", str(server)]
    told = docker.run(IMAGE, "sh", "-c", ASK).stdout
    assert told.startswith("Cannot find MPS control daemon"), "without the device"


def test_a_device_is_the_container_s_alone_until_it_ends(operator: Operator, docker: Docker) -> None:
    # Without a network, for docker renames no container of a bridge that is not there.
    options = ("--detach", "--network", "none", "--name", "trainer", *device_option(ADDRESSES[1]))
    docker("run", *options, IMAGE, "sleep", "300")
    lease = container_lease(operator)
    pid = int(docker.told("trainer", "{{.State.Pid}}"))
    assert lease["devices"] == [ADDRESSES[1]]
    assert operator.machine.run("readlink", f"/proc/{pid}/exe").stdout == "/usr/bin/sleep\n"
    assert (lease["container"], lease["container_id"]) == ("trainer", docker.told("trainer", "{{.Id}}"))
    assert "trainer: sleep 300" in operator.machine.run("yunion-mps", "who").stdout
    refused = docker.run(*device_option(ADDRESSES[1]), IMAGE, "true", check=False)
    assert refused.returncode != 0
    taken = f"yunion-mps: device {ADDRESSES[1]} is in use: trainer of root, PID {lease['pid']}"
    assert f"{taken} (see: yunion-mps who)" in refused.stderr
    log = ("journalctl", "--output=cat", "--identifier=yunion-mps")
    operator.machine.wait_until("it is logged", lambda: taken[12:] in operator.machine.run(*log).stdout)
    docker("rename", "trainer", "teacher")
    assert container_lease(operator)["container"] == "teacher"
    docker("rename", "teacher", "trainer")
    docker("restart", "--time", "0", "trainer")
    assert container_lease(operator)["pid"] != lease["pid"], "it is taken again at each start"
    docker("stop", "--time", "0", "trainer")
    nothing_is_taken(operator)
    docker.remove("trainer")


def test_a_safe_stop_disconnects_a_client_before_it_is_killed(operator: Operator, docker: Docker) -> None:
    stop_safely(operator, docker, "stopped-cdi")


def begin_client(operator: Operator, unit: str) -> int:
    """Run a client that ignores SIGTERM in the container `trainer`, in a unit with a safe stop; its PID."""
    run = ("systemd-run", f"--unit={unit}", "--property=KillMode=mixed", *RUN[:-1], "--safe-stop=0s", "--")
    options = ("--network", "none", "--name", "trainer", *CLIENT_MOUNTS)
    operator.machine.run(*run, *options, IMAGE, *STUBBORN_CLIENT)
    attached = "it is attached"
    (client,) = operator.machine.wait_until(attached, lambda: operator.ask("clients")["clients"])
    assert client["container"] == "trainer"
    return int(client["pid"])


def stop_safely(operator: Operator, docker: Docker, unit: str) -> None:
    pid = begin_client(operator, unit)
    container_lease(operator)
    operator.machine.run("systemctl", "stop", unit)
    assert docker.told("trainer", "{{.State.Status}} {{.State.ExitCode}}") == "exited 137"
    assert operator.has_disconnected(pid)
    nothing_is_taken(operator)
    operator.machine.run("systemctl", "reset-failed", unit, check=False)
    docker.remove("trainer")


def test_after_terminate_docker_stop_kills_no_client_of_mps(operator: Operator, docker: Docker) -> None:
    machine = operator.machine
    pid = begin_client(operator, "terminated")
    (device,) = container_lease(operator)["devices"]
    assert machine.run("yunion-mps", "terminate", device, "--yes", check=False).returncode == 1
    assert docker.told("trainer", "{{.State.Status}}") == "running", "it ignores SIGTERM"
    assert operator.has_disconnected(pid)
    assert operator.ask("clients")["clients"] == []
    docker("stop", "--time", "0", "trainer")
    nothing_is_taken(operator)
    machine.wait_until("its end", lambda: machine.show("ActiveState", "terminated") != "active")
    machine.run("systemctl", "reset-failed", "terminated", check=False)
    docker.remove("trainer")


def test_run_gives_a_container_a_lease_that_ends_with_it(operator: Operator, docker: Docker) -> None:
    machine = operator.machine
    inside = f"echo $YUNION_MPS_DEVICE; {ASK}; exit 7"
    done = machine.run(*RUN, "--rm", IMAGE, "sh", "-c", inside, check=False)
    assert (done.returncode, done.stdout.split()[:2]) == (7, [ADDRESSES[0], "25.0"]), done.stderr
    nothing_is_taken(operator)
    machine.run(*RUN, "--detach", "--name", "trainer", IMAGE, "sleep", "300")
    lease = container_lease(operator)
    requested = json.loads(docker.told("trainer", "{{json .HostConfig.DeviceRequests}}"))
    assert [(one["Driver"], one["DeviceIDs"]) for one in requested] == [
        ("cdi", [f"yunion.io/mps={lease['id']}"])
    ]
    docker.remove("trainer")


def test_run_docker_gives_the_same_environment_and_a_lease(
    operator: Operator, docker_without_cdi: Docker
) -> None:
    machine = operator.machine
    refused = docker_without_cdi.run(*device_option(ADDRESSES[1]), IMAGE, "true", check=False)
    assert 'could not select device driver "cdi"' in refused.stderr, "as docs/containers.md has it"
    inside = f"env -0 | cat; {ASK}"
    done = machine.run(*RUN, "--rm", IMAGE, "sh", "-c", inside)
    *entries, told = done.stdout.split("\0")
    found = environment("\0".join(entries))
    expected = operator.ask(f"devices/{ADDRESSES[0]}")["client_environment"]
    assert {name: found.get(name) for name in expected} == expected
    assert told.splitlines()[0] == "25.0"
    nothing_is_taken(operator)
    machine.run(*RUN, "--detach", "--name", "trainer", IMAGE, "sleep", "300")
    lease = container_lease(operator)
    assert (lease["pid"], lease["container"]) == (
        int(docker_without_cdi.told("trainer", "{{.State.Pid}}")),
        "trainer",
    )
    docker_without_cdi.remove("trainer")
    nothing_is_taken(operator)


def test_without_cdi_a_replaced_budget_is_noticed_in_any_directory(
    operator: Operator, docker_without_cdi: Docker
) -> None:
    machine = operator.machine
    words = ("--env", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=16G", IMAGE, "env")
    refused = machine.run(*RUN, *words, check=False)
    assert (refused.returncode, "would override the device's value" in refused.stderr) == (2, True)
    assert leases(operator) == []
    operator.configure(more='cuda_mps_pipe_directory: "/run/mps:1,a"')
    machine.run("systemctl", "restart", UNIT)
    done = machine.run(*RUN, "--rm", IMAGE, "sh", "-c", f"echo $CUDA_MPS_PIPE_DIRECTORY; {ASK}")
    assert done.stdout.splitlines()[:2] == ["/run/mps:1,a", "25.0"], done.stderr


def test_docker_accepts_the_env_file_and_fails_without_a_device(
    operator: Operator, docker_without_cdi: Docker
) -> None:
    """An empty file would be taken for none, and the container run without limits."""

    def printed(device: str) -> Done:
        script = f"docker run --rm --env-file <(yunion-mps env {device} -o docker) {IMAGE} env -0"
        return operator.machine.run("bash", "-c", script, check=False)

    expected = operator.ask(f"devices/{ADDRESSES[2]}")["client_environment"]
    assert expected.items() <= environment(printed(ADDRESSES[2]).stdout).items()
    refused = printed("00:06.0-99")
    assert (refused.returncode, refused.stdout) == (125, "")
    assert "no variable name on line '=no-device-available'" in refused.stderr


def test_without_cdi_a_safe_stop_does_the_same(operator: Operator, docker_without_cdi: Docker) -> None:
    stop_safely(operator, docker_without_cdi, "stopped-plain")
