"""What engines read and containers meet: the files, lost and old GPUs, jobs that start them, new names."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from containers.image import IMAGE
from containers.podman_host import Podman, mps, reloads
from integration.cdi_files import files_of, spec_of
from integration.daemon_host import Daemon, eventually, is_running
from integration.lease_host import ADDRESSES, leased_addresses, leases_of, take
from simhost.mps import ASK

pytestmark = pytest.mark.gpus({"kind": "v100"})


def test_a_container_of_a_job_with_env_host_gets_its_own_device(ready_daemon: Daemon, podman: Podman) -> None:
    host = ready_daemon.host
    inside = "echo $YUNION_MPS_DEVICE/$YUNION_MPS_LEASE"
    container = ["podman", "run", "--rm", "--env-host", *mps(ADDRESSES[3]), IMAGE, "sh", "-c", inside]
    done = host.run(["yunion-mps", "run", "--device", ADDRESSES[0], "--", *container])
    assert (done.returncode, done.stdout) == (0, f"{ADDRESSES[3]}/\n"), done.stderr
    own = ["podman", "run", "--rm", "--env-host", *mps(ADDRESSES[0]), IMAGE, "true"]
    refused = host.run(["yunion-mps", "run", "--device", ADDRESSES[0], "--", *own])
    assert f"device {ADDRESSES[0]} is in use: " in refused.stderr, "it is the job's"
    eventually(lambda: leased_addresses(ready_daemon) == [], "that nothing is taken")


@pytest.mark.gpus({"kind": "tesla-p40"})
def test_a_container_on_a_gpu_without_enforcement_starts_with_a_log_line(podman: Podman) -> None:
    host = podman.host
    place = host.root / "dev/log"
    place.parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.settimeout(60)
        log.bind(str(place))
        inside = "echo $YUNION_MPS_DEVICE"
        assert podman.good("run", "--rm", *mps(ADDRESSES[1]), IMAGE, "sh", "-c", inside) == ADDRESSES[1]
        told = log.recv(4096).decode()
    why = f"{ADDRESSES[1]}: budgets are not enforced on GPU 00:06.0, which is older than Volta"
    why += " or of unknown compute capability"
    assert re.fullmatch(rf"<12>yunion-mps\[\d+\]: container [0-9a-f]{{12}}: {why}", told)
    command = ["yunion-mps", "run", "--podman", "--", "--rm", IMAGE, "id"]
    refused = host.run(command)
    assert (refused.returncode, refused.stdout) == (1, ""), "a budget that is asked for is one that limits"
    assert host.run([*command[:3], "--allow-unlimited", *command[3:]]).returncode == 0


def test_a_file_from_before_a_new_pipe_directory_starts_no_container(
    ready_daemon: Daemon, podman: Podman
) -> None:
    """There CUDA would find no control daemon, and run without limits: by a lease, or by an old file."""
    host = ready_daemon.host
    inside = ["sh", "-c", ASK]
    lease = take(ready_daemon, f"devices={ADDRESSES[2]}&holder.name=job-17&holder.ttl_s=600")
    assert podman.good("run", "--rm", *mps(lease["id"]), IMAGE, *inside).startswith("25.0")
    told = ["sh", "-c", f"{ASK}; sleep 300"]
    podman.good("run", "--detach", "--name", "trainer", *mps(ADDRESSES[0]), IMAGE, *told)
    eventually(lambda: podman.good("logs", "trainer").count("25.0") == 1, "its first answer")
    file = host.root / "run/cdi/yunion-mps.json"
    before = file.read_text()
    ready_daemon.configure(cuda_mps_pipe_directory="/run/elsewhere")
    assert host.run(["yunion-mps", "reload"]).returncode == 0
    eventually(lambda: "/run/elsewhere" in file.read_text(), "the new file")
    eventually(
        lambda: {domain["state"] for domain in ready_daemon.status()["domains"]} == {"ready"},
        "that it serves there",
    )
    refused = podman.run(*mps(lease["id"]), IMAGE, *inside)
    assert refused.returncode != 0
    why = f"the control daemon of {ADDRESSES[2]} was replaced after the lease was granted"
    assert (
        f"yunion-mps: {why} (release it and run the job with a new lease: yunion-mps lease release "
        in refused.stderr
    )
    assert podman.good("run", "--rm", *mps(ADDRESSES[1]), IMAGE, *inside).startswith("25.0")
    assert set(leased_addresses(ready_daemon)) == {ADDRESSES[0], ADDRESSES[2]}, "who has a device keeps it"
    podman.good("restart", "--time", "0", "trainer")
    eventually(lambda: podman.good("logs", "trainer").count("25.0") == 2, "that it finds the new one")
    old = json.loads(before)
    old["devices"] = [{**one, "name": f"old-{one['name']}"} for one in old["devices"]]
    (host.root / "run/cdi/old.json").write_text(json.dumps(old))
    refused = podman.run(*mps(f"old-{ADDRESSES[3]}"), IMAGE, *inside)
    assert refused.returncode != 0
    assert (
        f"device {ADDRESSES[3]} changed while the container was starting (start the container again)"
        in refused.stderr
    )
    eventually(lambda: ADDRESSES[3] not in leased_addresses(ready_daemon), "that it is free again")


def test_podman_exec_needs_the_devices_environment(ready_daemon: Daemon, podman: Podman) -> None:
    """podman exec brings nothing of a CDI device's environment."""
    podman.good("run", "--detach", "--name", "trainer", *mps(ADDRESSES[1]), IMAGE, "sleep", "300")
    assert "CUDA_MPS" not in podman.good("exec", "trainer", "env"), "docs/containers.md says so"
    variables = f"--env-file <(yunion-mps env {ADDRESSES[1]} --output docker)"
    done = ready_daemon.host.run(["bash", "-c", f"podman exec {variables} trainer sh -c '{ASK}; env'"])
    expected = ready_daemon.get(f"/v1/devices/{ADDRESSES[1]}")[1]["client_environment"]
    assert done.stdout.startswith("25.0"), done.stderr
    assert {f"{name}={value}" for name, value in expected.items()} <= set(done.stdout.splitlines())


def test_of_many_containers_for_one_device_one_gets_and_keeps_it(
    ready_daemon: Daemon, podman: Podman
) -> None:
    begin = ["run", "--detach", *mps(ADDRESSES[1])]
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda name: podman(*begin, "--name", name, IMAGE, "sleep", "300"), "abcdefgh"))
    (winner,) = [name for name, one in zip("abcdefgh", done) if one.returncode == 0]
    for name, one in zip("abcdefgh", done):
        if name != winner:
            assert f"device {ADDRESSES[1]} is in use: {winner} of root, PID " in one.stderr

    def holders() -> list[tuple[int, str]]:
        leases = leases_of(ready_daemon)
        return [(lease["pid"], lease["container"]) for lease in leases]

    for verb in (["restart", "--time", "0"], ["restart", "--time", "0"], ["pause"], ["unpause"]):
        podman.good(*verb, winner)
        assert holders() == [(podman.pid_of(winner), winner)], verb
    inside = podman.pid_of(winner)
    monitor = int(Path(f"/proc/{inside}/stat").read_text().rpartition(")")[2].split()[1])
    assert Path(f"/proc/{monitor}/comm").read_text() == "conmon\n"
    os.kill(monitor, signal.SIGKILL)
    eventually(lambda: not is_running(monitor), "the end of the monitor")
    assert holders() == [(inside, winner)]
    ready_daemon.reexec()
    ((pid, name),) = holders()
    assert pid == inside
    assert name != winner, "only the monitor knew it: the storage is elsewhere"
    os.kill(inside, signal.SIGKILL)
    eventually(lambda: holders() == [], "the end of the lease")


@pytest.mark.parametrize(
    "words",
    [
        ["--pid=host"], ["--user=1000", "--cap-drop=all", "--security-opt=no-new-privileges"],
        ["--read-only"], ["--ipc=host"], ["--shm-size=10m", "--ipc=private"], ["--tmpfs=/tmp"],
        ["--volume=/tmp:/tmp", "--volume=/dev/shm:/dev/shm"], ["--uidmap=0:100000:5000"],
        ["--cgroupns=host", "--privileged"],
        ["--env=CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=99G", "--env=CUDA_MPS_PIPE_DIRECTORY=/nowhere"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_container_has_its_budget_and_mps_whatever_else_it_is_given(
    ready_daemon: Daemon, podman: Podman, words: list[str]
) -> None:
    inside = f"{ASK}; echo $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    told = podman.good("run", "--rm", *words, *mps(ADDRESSES[1]), IMAGE, "sh", "-c", inside).splitlines()
    assert (told[0], told[-1]) == ("25.0", "0=4096M")
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")


def test_a_container_of_a_pod_goes_by_its_own_name(ready_daemon: Daemon, podman: Podman) -> None:
    podman.good("pod", "create", "--infra=false", "--name", "pod")
    begin = ["run", "--detach", "--pod", "pod", "--name", "trainer", *mps(ADDRESSES[2])]
    podman.good(*begin, IMAGE, "sleep", "300")
    assert "trainer: sleep 300" in ready_daemon.host.run(["yunion-mps", "who"]).stdout
    podman.good("pod", "rm", "--force", "--time", "0", "pod")
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")


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


def test_an_unwritable_cdi_directory_is_logged_once_and_retried(ready_daemon: Daemon) -> None:
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
    assert len(leased_addresses(ready_daemon)) == 2
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


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_missing_engine_is_one_line(ready_daemon: Daemon, engine: str) -> None:
    host = ready_daemon.host
    program = shutil.which("yunion-mps", path=host.env["PATH"])
    alone = {**host.env, "PATH": str(Path(str(program)).parent)}
    done = host.run([str(program), "run", f"--{engine}", "--", IMAGE, "true"], env=alone)
    hint = "install it, or run the command without a container: yunion-mps run COMMAND"
    lines = [f"yunion-mps: {engine} is not installed [program_missing]", f"yunion-mps: {hint}"]
    assert (done.returncode, done.stderr.splitlines()) == (1, lines)
    assert leased_addresses(ready_daemon) == []


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
