"""The hook, as an engine calls it: the container's state on standard input, and one line if it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.container_hook import hook
from yunion_mps.core.errors import HostError, NothingFreeError

from unit.http.fake_services import LEASE
from unit.http.server_host import ServerHost, short_root
from unit.http.snapshots import reference

pytestmark = pytest.mark.processes

Json = dict[str, Any]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerHost]:
    with ServerHost(reference()) as host:
        monkeypatch.setenv("YUNION_MPS_ROOT", host.paths.root)
        yield host


def call(*arguments: str, folder: Path | None = None, state: str | None = None, **more: float) -> int:
    """The exit status of the hook of a container in this bundle, by default one with just this device."""
    with tempfile.TemporaryDirectory() as temporary:
        if folder is None and arguments:
            name = "YUNION_MPS_LEASE" if arguments[0] == LEASE["id"] else "YUNION_MPS_DEVICE"
            folder = bundle(Path(temporary), **{name: arguments[0]})
        text = json.dumps({"id": "a" * 64, "pid": os.getpid(), "bundle": str(folder), "status": "creating"})
        return hook.main(list(arguments), io.StringIO(text if state is None else state), **more)


def accepted(name: str, folder: Path | None = None) -> None:
    """The container starts, and nothing is printed."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        assert (call(name, folder=folder), printed.getvalue()) == (0, "")


def refused(*arguments: str, exit_code: int = 1, **how: Any) -> str:
    """The one line with which the container does not start."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        assert call(*arguments, **how) == exit_code
    begin, _, line = printed.getvalue().partition(": ")
    assert begin == "yunion-mps"
    assert line.find("\n") == len(line) - 1
    return line[:-1]


def bundle(folder: Path, **environment: str) -> Path:
    """What an engine makes of a container before it starts it."""
    words = [f"{name}={value}" for name, value in {**LEASE["environment"], **environment}.items()]
    (folder / "config.json").write_text(json.dumps({"process": {"env": ["PATH=/bin", *words]}}))
    return folder


def devices(host: ServerHost) -> list[tuple[str, ...]]:
    return [request.devices for request, _, _ in host.leases.requested]


def test_a_device_is_taken_for_the_containers_first_process(host: ServerHost, tmp_path: Path) -> None:
    accepted("00:06.0-1", bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-1"))
    ((request, holder, wait_s),) = host.leases.requested
    assert (request.devices, holder.binding, holder.pid, wait_s) == (
        ("00:06.0-1",),
        "container",
        os.getpid(),
        0,
    )


def test_a_lease_is_bound_to_the_containers_first_process(host: ServerHost, tmp_path: Path) -> None:
    accepted(LEASE["id"], bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-1", YUNION_MPS_LEASE=LEASE["id"]))
    assert host.leases.done == [f"bind {LEASE['id']} for {os.geteuid()} to {os.getpid()}"]


def test_the_hook_names_the_device_holder_in_one_line(host: ServerHost) -> None:
    why = "device 00:06.0-1 cannot be allocated now: 1 of 1 leased"
    host.leases.refusal = NothingFreeError(why, "wait for it")
    held = {**LEASE, "container": "trainer", "container_id": "a" * 64}
    host.leases.listed = {"leases": [held], "waiting": [], "total": 1}
    taken = "device 00:06.0-1 is in use: trainer of alice, PID 4260 (see: yunion-mps who)"
    for name, said in (("00:06.0-1", taken), ("all", taken), ("00:06.0-2", f"{why} (wait for it)")):
        assert refused(name, exit_code=NothingFreeError.exit_code) == said


def test_a_second_device_is_refused_because_only_one_would_be_used(host: ServerHost, tmp_path: Path) -> None:
    given = bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-3")
    said = refused("00:06.0-2", folder=given)
    assert "was given 00:06.0-2 and 00:06.0-3 (to combine several into one budget:" in said
    accepted("00:06.0-3", given)
    assert devices(host) == [("00:06.0-3",)]


def test_a_device_beside_a_lease_is_refused_whichever_comes_last(host: ServerHost, tmp_path: Path) -> None:
    """A device's environment leaves the lease's name in there, where it comes after the lease's."""
    given = bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-3", YUNION_MPS_LEASE=LEASE["id"])
    assert f"was given 00:06.0-3 and lease {LEASE['id']} (" in refused("00:06.0-3", folder=given)
    assert "was given 00:06.0-2 and 00:06.0-3 (" in refused("00:06.0-2", folder=given)
    assert devices(host) == []


def test_the_lease_of_the_engines_own_job_is_no_second_device(host: ServerHost, tmp_path: Path) -> None:
    """`podman run --env-host` within a job: the device's own variables come last, and this one is empty."""
    accepted("00:06.0-3", bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-3", YUNION_MPS_LEASE=""))
    assert devices(host) == [("00:06.0-3",)]


def test_a_device_not_served_when_its_file_was_read_is_refused(host: ServerHost, tmp_path: Path) -> None:
    given = bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-3")
    again = "device 00:06.0-3 became available only now (start the container again)"
    assert refused("00:06.0-3", "--unserved", folder=given) == again
    host.leases.refusal = NothingFreeError("device 00:06.0-3 cannot be allocated now: it is lost", "reboot")
    said = refused("00:06.0-3", "--unserved", folder=given, exit_code=NothingFreeError.exit_code)
    assert said == "device 00:06.0-3 cannot be allocated now: it is lost (reboot)"


def test_a_container_without_the_nodes_of_its_instance_takes_no_device(host: ServerHost) -> None:
    what = ("MIG instance 00:06.0-g1: no such device node", "create it")
    assert refused("00:06.0-g1", "--missing-nodes", *what) == f"{what[0]} ({what[1]})"
    assert devices(host) == []
    assert "only be called by a container engine" in refused("00:06.0-g1", "--missing-nodes", what[0])


@pytest.fixture
def system_log(host: ServerHost) -> Iterator[socket.socket]:
    place = Path(host.paths.under("/dev/log"))
    place.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(place))
        yield log


def test_a_refusal_is_in_the_systems_log_because_some_engines_hide_it(
    host: ServerHost, system_log: socket.socket
) -> None:
    host.leases.refusal = HostError("the daemon is stopping", "start it again")
    said = refused("00:06.0-1")
    assert system_log.recv(4096).decode() == f"<12>yunion-mps[{os.getpid()}]: container {'a' * 12}: {said}"


def test_a_command_line_with_control_characters_or_no_end_is_made_safe(
    host: ServerHost, system_log: socket.socket, tmp_path: Path
) -> None:
    """The holder of the device has chosen its command, and root reads it."""
    host.leases.refusal = NothingFreeError("1 of 1 leased", "wait")
    held = {**LEASE, "command": "python -c \x1b[2J\nprint()\r" + "a" * 100_000}
    host.leases.listed = {"leases": [held], "waiting": [], "total": 1}
    given = bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-1")
    state = json.dumps({"id": "\n\ud800", "pid": os.getpid(), "bundle": str(given)})
    said = refused("00:06.0-1", state=state, exit_code=NothingFreeError.exit_code)
    logged = system_log.recv(1 << 18).decode()
    begin = "device 00:06.0-1 is in use: python -c \\x1b[2J\\nprint()\\r"
    assert said.startswith(begin)
    assert f"container \\n\\ud800: {begin}" in logged
    assert max(len(said), len(logged)) < 2000
    assert (said + logged).isprintable()


@pytest.mark.parametrize("change", ["CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"])
def test_a_container_of_before_a_change_is_refused_once(
    host: ServerHost, tmp_path: Path, change: str
) -> None:
    """Where CUDA finds no control daemon it runs without limits; the next start reads the new file."""
    now = {**LEASE["environment"], change: "/run/new", "YUNION_MPS_LEASE": LEASE["id"]}
    host.leases.granted = {**LEASE, "environment": now}
    said = refused("00:06.0-1", folder=bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-1"))
    assert said == "device 00:06.0-1 changed while the container was starting (start the container again)"
    accepted("00:06.0-1", bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-1", **{change: "/run/new"}))


@pytest.mark.parametrize("name", ["00:06.0-1", LEASE["id"]])
def test_a_lost_answer_is_requested_again_with_the_same_key(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The one that ended may have given the device to this container."""
    asked: list[str] = []

    def serve(listening: socket.socket) -> None:
        for answer in (b"", json.dumps(LEASE).encode()):
            connection, _ = listening.accept()
            with connection:
                asked.append(connection.recv(1 << 16).decode())
                if answer:
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer
                    )

    with short_root() as paths, socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.setenv("YUNION_MPS_ROOT", paths.root)
        listening.bind(paths.socket)
        listening.listen()
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        accepted(name)
        thread.join()
    assert asked[0] == asked[1]
    has_key = "Idempotency-Key: " in asked[0]
    assert has_key == (name != LEASE["id"]), "a lease's container is known by its PID"


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"pid": "x"}', "{}", "[" * 100_000], ids=len)
def test_an_invalid_container_state_is_refused(host: ServerHost, text: str) -> None:
    assert refused("00:06.0-1", state=text).startswith("the container engine passed no container state")
    assert devices(host) == []


@pytest.mark.parametrize("state", ["<&-", "0>/dev/null", "</dev/null"])
def test_without_a_state_on_its_input_it_says_so(host: ServerHost, state: str) -> None:
    code = "import sys; from yunion_mps.container_hook import hook; sys.exit(hook.main(['a'], sys.stdin))"
    command = ["sh", "-c", f'"$0" -c "$1" {state}', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (
        "yunion-mps: the container engine passed no container state "
        "(install it as a hook of an OCI runtime, which passes the state)\n"
    )
    assert (done.returncode, done.stderr) == (1, said)


def test_the_hook_called_by_hand_explains_its_purpose() -> None:
    assert refused().startswith("cdi-hook can only be called by a container engine")


def test_a_fifo_in_place_of_the_containers_configuration_blocks_nothing(
    host: ServerHost, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "config.json")
    said = refused("00:06.0-1", folder=tmp_path)
    assert said.startswith(f"{tmp_path}/config.json: cannot be read: not a regular file")
    assert devices(host) == []


@pytest.mark.parametrize("text", [None, "", "[]", '{"process": {"env": 7}}', "{}", "[" * 100_000, "\xff"])
def test_a_container_whose_environment_is_unknown_is_refused(
    host: ServerHost, tmp_path: Path, text: str | None
) -> None:
    """It could have a second device, or the variables of before a change, and so no limits."""
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert refused("00:06.0-1", folder=tmp_path).startswith(f"{tmp_path}/config.json: cannot be read: ")
    assert devices(host) == []


@pytest.mark.parametrize("place", [{}, {"bundle": 7}, {"bundle": "a\0b"}])
def test_a_container_whose_configuration_has_no_place_is_refused(host: ServerHost, place: Json) -> None:
    state = json.dumps({"id": "a", "pid": os.getpid(), **place})
    assert "configuration" in refused("00:06.0-1", state=state)
    assert devices(host) == []


def test_a_container_without_the_devices_variables_is_refused(host: ServerHost, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"process": {"args": ["true"]}}')
    said = refused("00:06.0-1", folder=tmp_path)
    assert said.startswith("the container has no variables of device 00:06.0-1, so nothing would limit it")
    assert devices(host) == []


def test_without_a_daemon_it_waits_a_moment_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_root() as paths:
        monkeypatch.setenv("YUNION_MPS_ROOT", paths.root)
        assert refused("00:06.0-1", retry_s=0.3, exit_code=3).startswith("the daemon is not running")


def test_it_loads_nothing_of_ours_but_the_daemons_client() -> None:
    """Every container that is given a device waits for it."""
    names = "(name for name in sys.modules if 'yunion_mps.' in name)"
    code = f"import yunion_mps.container_hook.hook, sys; print(*{names})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert set(loaded.split()) == {
        "yunion_mps.http", "yunion_mps.http.client", "yunion_mps.http.messages",
        "yunion_mps.http.operation", "yunion_mps.http.operations",
        "yunion_mps.container_hook", "yunion_mps.container_hook.hook", "yunion_mps.container_hook.container",
        "yunion_mps.containers", "yunion_mps.http.parameters",
        "yunion_mps.core", "yunion_mps.core.errors", "yunion_mps.core.text",
        "yunion_mps.core.models", "yunion_mps.core.paths", "yunion_mps.core.reasons",
        "yunion_mps.core.enums", "yunion_mps.core.addresses", "yunion_mps.core.mig", "yunion_mps.core.units",
        "yunion_mps.host", "yunion_mps.host.files",
    }  # fmt: skip
