"""The hook, as an engine calls it: the container's state on standard input, and one line if it refuses."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.containers import hook
from yunion_mps.errors import HostError, NothingFreeError

from unit.http.by_hand import LEASE
from unit.http.server_host import ServerHost, short_root
from unit.http.snapshots import reference

pytestmark = pytest.mark.processes

Json = dict[str, Any]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerHost]:
    with ServerHost(reference()) as host:
        monkeypatch.setenv("YUNION_MPS_ROOT", host.paths.root)
        yield host


def call(*arguments: str, bundle: object = "/nowhere", state: str | None = None, **more: float) -> int:
    text = json.dumps({"id": "a" * 64, "pid": os.getpid(), "bundle": str(bundle), "status": "creating"})
    return hook.main(list(arguments), io.StringIO(text if state is None else state), **more)


def bundle(folder: Path, **environment: str) -> Path:
    """What an engine makes of a container before it starts it."""
    words = [f"{name}={value}" for name, value in {**LEASE["environment"], **environment}.items()]
    (folder / "config.json").write_text(json.dumps({"process": {"env": ["PATH=/bin", *words]}}))
    return folder


def test_a_device_is_taken_for_the_container_s_first_process(host: ServerHost, tmp_path: Path) -> None:
    assert call("00:06.0-1", bundle=bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-1")) == 0
    ((request, holder, wait_s),) = host.leases.requested
    assert (request.device, holder.binding, holder.pid, wait_s) == ("00:06.0-1", "container", os.getpid(), 0)


def test_a_lease_is_bound_to_the_container_s_first_process(host: ServerHost, tmp_path: Path) -> None:
    given = bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-1", YUNION_MPS_LEASE=LEASE["id"])
    assert call(LEASE["id"], bundle=given) == 0
    assert host.leases.done == [f"bind {LEASE['id']} for {os.geteuid()} to {os.getpid()}"]


def test_whose_device_it_is_is_told_in_one_line(host: ServerHost, capsys: pytest.CaptureFixture[str]) -> None:
    host.leases.refusal = NothingFreeError(
        "device 00:06.0-1 cannot be allocated now: 1 of 1 in use", "wait for it"
    )
    held = {**LEASE, "container": "trainer", "container_id": "a" * 64}
    host.leases.found = {"leases": [held], "waiting": [], "total": 1}
    for name in ("00:06.0-1", "all"):
        assert call(name) == NothingFreeError.exit_code
        assert capsys.readouterr().err == (
            "yunion-mps: device 00:06.0-1 is taken: trainer of alice, PID 4260 (see: yunion-mps who)\n"
        )
    assert call("00:06.0-2") == NothingFreeError.exit_code
    assert capsys.readouterr().err == (
        "yunion-mps: device 00:06.0-1 cannot be allocated now: 1 of 1 in use (wait for it)\n"
    )


def test_of_two_devices_a_container_would_only_use_one_so_it_is_refused(
    host: ServerHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-3")
    assert call("00:06.0-2", bundle=given) == 1
    assert "was given 00:06.0-2 beside 00:06.0-3 (several as one budget:" in capsys.readouterr().err
    assert call("00:06.0-3", bundle=given) == 0
    assert [request.device for request, _, _ in host.leases.requested] == ["00:06.0-3"]


def test_a_device_beside_a_lease_is_refused_whichever_comes_last(
    host: ServerHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device's environment leaves the lease's name in there, where it comes after the lease's."""
    given = bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-3", YUNION_MPS_LEASE=LEASE["id"])
    assert call("00:06.0-3", bundle=given) == 1
    assert f"was given 00:06.0-3 beside lease {LEASE['id']} (" in capsys.readouterr().err
    assert call("00:06.0-2", bundle=given) == 1
    assert "was given 00:06.0-2 beside 00:06.0-3 (" in capsys.readouterr().err
    assert host.leases.requested == []


def test_the_lease_of_the_job_that_starts_the_engine_is_no_second_device(
    host: ServerHost, tmp_path: Path
) -> None:
    """`podman run --env-host` within a job: the device's own variables come last, and this one is empty."""
    given = bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-3", YUNION_MPS_LEASE="")
    assert call("00:06.0-3", bundle=given) == 0
    assert [request.device for request, _, _ in host.leases.requested] == ["00:06.0-3"]


def test_a_device_that_was_not_served_when_the_file_was_read_is_refused(
    host: ServerHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-3")
    assert call("00:06.0-3", "--unserved", bundle=given) == 1
    said = "yunion-mps: device 00:06.0-3 is only just served again (start the container again)\n"
    assert capsys.readouterr().err == said
    host.leases.refusal = NothingFreeError(
        "device 00:06.0-3 cannot be allocated now: its GPU is lost", "reboot"
    )
    assert call("00:06.0-3", "--unserved", bundle=given) == NothingFreeError.exit_code
    assert capsys.readouterr().err.endswith("its GPU is lost (reboot)\n")


def test_a_refusal_is_in_the_system_s_log_as_some_engines_hide_it(host: ServerHost) -> None:
    host.leases.refusal = HostError("the daemon is stopping", "start it again")
    assert call("00:06.0-1") == 1, "no log listens there"
    place = Path(host.paths.under("/dev/log"))
    place.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(place))
        assert call("00:06.0-1") == 1
        line = f"container {'a' * 12}: the daemon is stopping (start it again)"
        assert log.recv(4096).decode() == f"<12>yunion-mps[{os.getpid()}]: {line}"


def test_a_command_line_with_control_characters_or_no_end_is_made_safe(
    host: ServerHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """The holder of the device has chosen its command, and root reads it."""
    place = Path(host.paths.under("/dev/log"))
    place.parent.mkdir()
    host.leases.refusal = NothingFreeError("1 of 1 in use", "wait")
    held = {**LEASE, "command": "python -c \x1b[2J\nprint()\r" + "a" * 100_000}
    host.leases.found = {"leases": [held], "waiting": [], "total": 1}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(place))
        state = json.dumps({"id": "\n\ud800", "pid": os.getpid()})
        assert call("00:06.0-1", state=state) == NothingFreeError.exit_code
        logged = log.recv(1 << 18).decode()
    said = capsys.readouterr().err
    begin = "device 00:06.0-1 is taken: python -c \\x1b[2J\\nprint()\\r"
    assert said.startswith(f"yunion-mps: {begin}")
    assert f"container \\n\\ud800: {begin}" in logged
    assert len(said) < 2000
    assert len(logged) < 2000
    assert (said + logged).replace("\n", "", 1).isprintable()


@pytest.mark.parametrize("change", ["CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"])
def test_a_container_of_before_a_change_is_refused_once(
    host: ServerHost, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """Where CUDA finds no control daemon it runs without limits; the next start reads the new file."""
    now = {**LEASE["environment"], change: "/run/new", "YUNION_MPS_LEASE": LEASE["id"]}
    host.leases.given = {**LEASE, "environment": now}
    before = bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-1")
    assert call("00:06.0-1", bundle=before) == 1
    said = "yunion-mps: device 00:06.0-1 has just become another (start the container again)\n"
    assert capsys.readouterr().err == said
    assert (
        call("00:06.0-1", bundle=bundle(tmp_path, YUNION_MPS_DEVICE="00:06.0-1", **{change: "/run/new"})) == 0
    )


@pytest.mark.parametrize("name", ["00:06.0-1", LEASE["id"]])
def test_where_the_answer_is_lost_the_next_daemon_is_asked_the_very_same(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The one that ended may have given the device to this container."""
    asked: list[str] = []

    def serve(listening: socket.socket) -> None:
        for answer in (b"", json.dumps(LEASE).encode()):
            connection, _ = listening.accept()
            with connection:
                asked.append(connection.recv(1 << 16).decode().split()[1])
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
        assert call(name) == 0
        thread.join()
    assert asked[0] == asked[1]
    assert ("&request=" in asked[0]) == (name != LEASE["id"]), "a lease's container is known by its PID"


def test_an_odd_name_is_asked_for_as_it_is(host: ServerHost) -> None:
    assert call("gpu é&pid=1") == 0
    assert [(request.device, holder.pid) for request, holder, _ in host.leases.requested] == [
        ("gpu é&pid=1", os.getpid())
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"pid": "x"}', "{}", "[" * 100_000], ids=len)
def test_what_is_no_container_s_state_is_refused(
    host: ServerHost, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert call("00:06.0-1", state=text) == 1
    assert capsys.readouterr().err.startswith("yunion-mps: the container engine gave no container's state")
    assert host.leases.requested == []


@pytest.mark.parametrize("state", ["<&-", "0>/dev/null", "</dev/null"])
def test_without_a_state_on_its_input_it_says_so(host: ServerHost, state: str) -> None:
    code = "import sys; from yunion_mps.containers.hook import main; sys.exit(main(['00:06.0-1'], sys.stdin))"
    command = ["sh", "-c", f'"$0" -c "$1" {state}', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = "yunion-mps: the container engine gave no container's state (is it an OCI runtime's hook?)\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_by_hand_it_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 1
    assert capsys.readouterr().err.startswith("yunion-mps: cdi-hook is called by container engines alone")


def test_any_refusal_of_the_daemon_s_ends_the_start(
    host: ServerHost, capsys: pytest.CaptureFixture[str]
) -> None:
    host.leases.refusal = HostError("the daemon is stopping", "start it again")
    assert call("00:06.0-1") == 1
    assert capsys.readouterr().err == "yunion-mps: the daemon is stopping (start it again)\n"


def test_without_a_daemon_it_waits_a_moment_and_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with short_root() as paths:
        monkeypatch.setenv("YUNION_MPS_ROOT", paths.root)
        assert call("00:06.0-1", away_s=0.3) == 3
    assert capsys.readouterr().err.startswith("yunion-mps: the daemon is not running")


def test_it_loads_nothing_of_ours_but_the_daemon_s_client() -> None:
    """Every container that is given a device waits for it."""
    names = "(name for name in sys.modules if 'yunion_mps.' in name)"
    code = f"import yunion_mps.containers.hook, sys; print(*{names})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert set(loaded.split()) == {
        "yunion_mps.http", "yunion_mps.http.client", "yunion_mps.http.messages", "yunion_mps.http.operations",
        "yunion_mps.containers", "yunion_mps.containers.hook", "yunion_mps.errors", "yunion_mps.escaping",
        "yunion_mps.models", "yunion_mps.paths",
    }  # fmt: skip
