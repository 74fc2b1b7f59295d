"""The files that container engines read, as the daemon keeps them; and an engine that is not there."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from integration.daemon_host import Daemon, eventually, is_running
from integration.lease_host import given, take
from integration.podman_host import IMAGE, files_of, reloads, spec_of

#: One GPU, divided by four: `run` and the client take nothing of the reference case, which has no limits.
pytestmark = pytest.mark.gpus({"kind": "v100"})


def test_the_file_is_written_only_when_it_changes_and_removed_at_the_stop(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    eventually(lambda: spec_of(host), "the file")
    path = host.root / "run/cdi/yunion-mps.json"
    first = path.stat()
    take(ready_daemon, "holder.name=a&holder.ttl_s=600")
    reloads(ready_daemon)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    path.unlink()
    reloads(ready_daemon)
    eventually(lambda: spec_of(host), "the file again")
    host.divide(2)
    reloads(ready_daemon)
    eventually(lambda: len(spec_of(host)["devices"]) == 5, "two devices by two names, and all of them")
    ready_daemon.kill()
    assert len(spec_of(host)["devices"]) == 5
    ready_daemon.start().wait_ready()
    assert ready_daemon.stop() == 0, ready_daemon.log
    assert files_of(host) == []


def test_a_file_that_another_program_changed_is_written_again(ready_daemon: Daemon) -> None:
    """An engine refuses half a file as a whole, and finds no device of ours."""
    host = ready_daemon.host
    whole = eventually(lambda: spec_of(host), "the file")
    path = host.root / "run/cdi/yunion-mps.json"
    for begin in ("{", json.dumps({**whole, "devices": whole["devices"][:1]})):
        path.write_text(begin)
        reloads(ready_daemon)
        eventually(lambda text=begin: path.read_text() != text, "the file to be written again")  # type: ignore[misc]
        assert spec_of(host) == whole
    path.unlink()
    path.symlink_to("nowhere")
    reloads(ready_daemon)
    eventually(lambda: spec_of(host) == whole, "a file in the place of the link")
    path.unlink()
    path.mkdir()
    reloads(ready_daemon)
    trouble = f"containers cannot find the devices: {path}: Is a directory"
    eventually(lambda: trouble in ready_daemon.warnings(), "the warning")
    path.rmdir()
    reloads(ready_daemon)
    eventually(lambda: spec_of(host) == whole, "the file")


@pytest.mark.gpus({"kind": "v100", "count": 32})
def test_a_stop_right_after_the_start_leaves_no_file_of_many_devices(daemon: Daemon) -> None:
    """Writing it takes longer than such a stop."""
    host = daemon.host
    daemon.configure(cuda_mps_replicas=48)
    (host.root / "etc/yunion/host_container_device.yml").unlink()
    (host.root / "run/cdi").mkdir()
    for _ in range(3):
        daemon.start().wait_ready()
        assert daemon.stop() == 0, daemon.log
        assert files_of(host) == []


def test_a_directory_that_cannot_be_written_is_said_once_and_tried_again(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    eventually(lambda: spec_of(host), "the file")
    directory = host.root / "run/cdi"
    shutil.rmtree(directory)
    directory.write_text("")
    reloads(ready_daemon)
    trouble = f"containers cannot find the devices: {directory}/yunion-mps.json: File exists"
    eventually(lambda: trouble in ready_daemon.warnings(), "the warning")
    reloads(ready_daemon)
    shown = host.run(["yunion-mps", "status"]).stdout
    assert f"Warning:  {trouble}\nHint:     make the directory writable for root" in shown
    assert ready_daemon.log.count(trouble) == 1
    told = [event["what"] for event in ready_daemon.get("/v1/events?kind=daemon")[1]["events"]]
    assert told.count(trouble) == 1
    assert ready_daemon.ask("POST", "/v1/leases")[0] == 201, "all else goes on"
    refused = host.run(["yunion-mps", "lease", "take", "job-17", "--ttl", "60"])
    assert refused.returncode == 0, "by name it is of use without a container, too"
    status, answer = ready_daemon.ask("POST", "/v1/leases", "cdi=true")
    assert status == 409
    assert answer["detail"].startswith("containers cannot find the lease: ")
    assert len(given(ready_daemon)) == 2
    directory.unlink()
    reloads(ready_daemon)
    eventually(lambda: spec_of(host), "the file")
    eventually(lambda: trouble not in ready_daemon.warnings(), "the end of the warning")
    assert "containers can find the devices again" in ready_daemon.log


def test_the_file_of_a_lease_follows_the_driver_and_comes_back(ready_daemon: Daemon) -> None:
    """A scheduler's lease may live for months, and its containers are started again."""
    host = ready_daemon.host
    eventually(lambda: spec_of(host), "the file")
    lease = take(ready_daemon, "holder.name=job-17&holder.ttl_s=600")
    name = f"yunion-mps-lease-{lease['id']}.json"
    made = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ncontainerEdits: {env: [DRIVER=new]}\n"
    (host.root / "run/cdi/nvidia.yaml").write_text(made)
    reloads(ready_daemon)
    eventually(lambda: spec_of(host, name)["containerEdits"].get("env") == ["DRIVER=new"], "the driver")
    whole = spec_of(host, name)
    (host.root / "run/cdi" / name).unlink()
    reloads(ready_daemon)
    eventually(lambda: spec_of(host, name), "the file of the lease")
    (host.root / "run/cdi" / name).write_text("{")
    reloads(ready_daemon)
    eventually(lambda: (host.root / "run/cdi" / name).read_text() != "{", "the file to be written again")
    assert spec_of(host, name) == whole
    assert ready_daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    reloads(ready_daemon)
    assert name not in files_of(host)


def test_a_specification_of_nvidia_s_that_is_none_is_said(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    eventually(lambda: spec_of(host), "the file")
    path = host.root / "run/cdi/nvidia.yaml"
    path.write_text("kind: [")
    reloads(ready_daemon)
    trouble = f"containers do not get the driver from yunion-mps: {path} is ignored: it is not YAML"
    eventually(lambda: trouble in ready_daemon.warnings(), "the warning")
    assert len(spec_of(host)["devices"]) == 9


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_an_engine_that_is_not_there_is_said_in_a_line(ready_daemon: Daemon, engine: str) -> None:
    host = ready_daemon.host
    program = shutil.which("yunion-mps", path=host.env["PATH"])
    alone = {**host.env, "PATH": str(Path(str(program)).parent)}
    done = host.run([str(program), "run", f"--{engine}", "--", IMAGE, "true"], env=alone)
    hint = "install it, or run the command without a container: yunion-mps run COMMAND"
    lines = [f"yunion-mps: {engine} is not installed [program_missing]", f"yunion-mps: {hint}"]
    assert (done.returncode, done.stderr.splitlines()) == (1, lines)
    assert given(ready_daemon) == []


def test_ctrl_c_while_an_engine_is_silent_leaves_nothing_leased(ready_daemon: Daemon, tmp_path: Path) -> None:
    host = ready_daemon.host
    engine, told = host.root / "bin/docker", tmp_path / "pid"
    engine.write_text(f"#!/bin/sh\necho $$ > {told}.new; mv {told}.new {told}; exec sleep 300\n")
    engine.chmod(0o755)
    asking = host.popen(["yunion-mps", "run", "--docker", "--", IMAGE, "true"], stderr=-1)
    eventually(told.exists, "that docker is asked")
    asking.send_signal(signal.SIGINT)
    asking.communicate()
    assert asking.returncode == 130
    assert not is_running(int(told.read_text()))
    assert ready_daemon.get("/v1/events?kind=lease")[1]["events"] == []
