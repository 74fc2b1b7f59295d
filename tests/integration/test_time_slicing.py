"""A host with a GPU that is time-sliced beside one with a control daemon, and a running daemon."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from yunion_mps.core import reasons

from integration.daemon_host import Daemon, eventually
from integration.lease_host import end_job, leases_of, start_job, take
from simhost.host import SHARED

ADDRESS = "00:07.0-0"

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100", "count": 2})]


@pytest.fixture
def mixed(daemon: Daemon) -> Daemon:
    daemon.host.divide(4, SHARED)
    return daemon.start().wait_ready()


def environment_of(daemon: Daemon, *options: str, **given: str) -> dict[str, str]:
    """The environment of a command that `run` starts."""
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    words = ("yunion-mps", "run", *options, "--", "python3", "-c", script)
    found = daemon.host.run(words, env={**daemon.host.env, **given}, check=True)
    variables: dict[str, str] = json.loads(found.stdout)
    return variables


def states(daemon: Daemon) -> dict[str, str]:
    devices = daemon.get("/v1/devices")[1]["isolated_devices"]
    return {device["addr"]: device["state"] for device in devices if device["addr"].startswith("00:07")}


def modes(daemon: Daemon) -> list[str]:
    return [gpu.compute_mode for gpu in daemon.host.gpus]


def test_run_needs_a_permission_and_hides_the_mps_of_its_caller(mixed: Daemon) -> None:
    refused = mixed.host.run(("yunion-mps", "run", "--gpu", "00:07.0", "true"))
    assert refused.returncode == 1
    assert (
        "no budget is enforced on GPU 00:07.0 (Tesla V100-SXM2-16GB), which is time-sliced" in refused.stderr
    )
    outer = {"CUDA_MPS_PIPE_DIRECTORY": "/x", "CUDA_MPS_LOG_DIRECTORY": "/y"}
    inside = environment_of(mixed, "--gpu", "00:07.0", "--allow-unlimited", **outer)
    assert not [name for name in inside if name.startswith("CUDA_MPS_")]
    assert inside["CUDA_VISIBLE_DEVICES"] == mixed.host.gpus[1].uuid
    assert (inside["YUNION_MPS_DEVICE"], inside["YUNION_MPS_MEMORY_MIB"]) == (ADDRESS, "5461")


def test_devices_that_enforce_budgets_are_preferred(mixed: Daemon) -> None:
    inside = environment_of(mixed, "--allow-unlimited", XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    assert inside["YUNION_MPS_DEVICE"] == "00:06.0-0"
    assert inside["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5", "the caller's own"


def test_a_process_on_a_time_sliced_gpu_is_not_outside_mps(mixed: Daemon) -> None:
    mixed.host.gpus[1].add_process(os.getpid(), 700)
    (client,) = mixed.get("/v1/clients")[1]["clients"]
    assert (client["mps"], client["domain"], client["memory_used_mib"]) == (None, "", 700)
    status = mixed.get("/v1/status")[1]
    assert (status["state"], status["outside_mps"], status["clients"]) == ("ready", 0, 1)


@pytest.mark.parametrize(
    ("entry", "ends"), [(f"{SHARED[:-1]}3", "stop"), (None, "reboot")], ids=["time-sliced", "removed"]
)
def test_a_lease_through_mps_has_its_control_daemon_after_a_stop(
    daemon: Daemon, entry: str | None, ends: str
) -> None:
    daemon.host.divide(4, 2)
    daemon.start().wait_ready()
    request = f"holder.name=job&holder.ttl_s=600&devices={ADDRESS}"
    lease = take(daemon, request)
    if ends == "reboot":
        control = daemon.control_pid() or 0
        daemon.kill()
        os.kill(control, signal.SIGKILL)
        daemon.host.reboot()
    else:
        assert daemon.stop() == 0
    daemon.host.divide(4, *([entry] if entry else []))
    daemon.start().wait_ready()
    assert take(daemon, request)["environment"] == lease["environment"]
    assert (modes(daemon)[1], states(daemon)[ADDRESS]) == ("exclusive_process", "leased")
    codes = [one["code"] for one in daemon.status()["problems"]]
    assert codes == [reasons.LEASES_PENDING], "the change waits, and the lease is not outdated"
    assert daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    after = {f"00:07.0-{slot}": "free" for slot in range(3)} if entry else {}
    eventually(lambda: states(daemon) == after, "the division of the configuration")
    eventually(lambda: modes(daemon)[1] == "default", "its compute mode")


@pytest.mark.parametrize(
    ("before", "after", "leased"),
    [
        (f"{SHARED[:-1]}2", 2, ["00:07.0-0"]),
        (2, f"{SHARED[:-1]}2", ["00:07.0-0", "00:07.0-1"]),
    ],
)
def test_drain_and_now_wait_for_the_leases_of_another_way_of_sharing(
    daemon: Daemon, before: str | int, after: str | int, leased: list[str]
) -> None:
    daemon.host.divide(4, before)
    daemon.start().wait_ready()
    for address in leased:  # each in a lease, because MPS does not combine devices of a GPU
        take(daemon, f"holder.name={address}&holder.ttl_s=600&allow_unlimited=true&devices={address}")
    daemon.host.divide(4, after)
    for options in (["--drain"], ["--now", "--yes"]):
        done = daemon.host.run(["yunion-mps", "reload", *options, "--timeout", "1"])
        assert done.returncode == 1
        pending = done.stderr.partition("still pending after 1s: ")[2]
        assert re.search(
            "GPU 00:07.0: .*waits for lease 00:07.0-0 of root.* to end.*; everything else is in", pending
        )
        why = "its control daemon is draining because of a pending change to GPU 00:07.0: "
        assert f"GPU 00:06.0: 4 devices pending: {why}" in pending
    with daemon.host.popen(["yunion-mps", "reload", "--drain"]) as process:
        assert process.stderr is not None
        assert f"lease {leased[-1]} of root" in process.stderr.readline()
        for address in leased:
            daemon.host.run(["yunion-mps", "lease", "release", address], check=True)
        assert process.wait() == 0
    eventually(lambda: set(states(daemon).values()) == {"free"}, "the new way of sharing")
    assert (modes(daemon)[1] == "default") == (after != 2)


def test_a_drain_waits_for_a_time_slice_as_long_as_leases_keep_it(daemon: Daemon) -> None:
    """Afterwards, a process without a lease keeps it, which is shown and not waited for."""
    daemon.host.divide(4, f"{SHARED}\n  time_slice: short")
    daemon.start().wait_ready()
    sliced = daemon.host.gpus[1]
    take(daemon, f"holder.name=job&holder.ttl_s=600&allow_unlimited=true&devices={ADDRESS}")
    daemon.host.divide(4, SHARED)
    sliced.add_process(os.getpid(), 700)
    with daemon.host.popen(["yunion-mps", "reload", "--drain"]) as process:
        assert process.stderr is not None
        assert "the restoration of its time slice" in process.stderr.readline()
        assert sliced.time_slice == "short"
        daemon.host.run(["yunion-mps", "lease", "release", "job"], check=True)
        assert process.wait() == 0
        assert process.stderr.read() == "yunion-mps: everything else is in effect\n"
    assert sliced.time_slice == "short"
    sliced.remove_process(os.getpid())
    eventually(lambda: sliced.time_slice == "default", "the original time slice")


def test_a_daemon_killed_while_a_mode_changes_leaves_nothing_half_applied(mixed: Daemon) -> None:
    for _ in range(3):
        mixed.host.divide(4, 2)
        mixed.host.fail("nvmlDeviceSetComputeMode", "success", delay_ms=200)
        mixed.signal(signal.SIGHUP)
        mixed.kill()
        mixed.host.clear()
        mixed.host.divide(4, SHARED)
        mixed.start().wait_ready()
        eventually(lambda: list(states(mixed).values()) == ["free"] * 3, "the time-sliced devices")
        assert modes(mixed) == ["exclusive_process", "default"]
    assert mixed.stop() == 0
    assert modes(mixed) == ["default", "default"]


def test_restore_keeps_the_settings_of_a_leased_job_without_a_context(daemon: Daemon) -> None:
    daemon.host.run(["nvidia-smi", "-i", 1, "-c", "EXCLUSIVE_PROCESS"], check=True)
    daemon.host.divide(4, f"{SHARED}; time_slice: short")
    daemon.start().wait_ready()
    sliced = daemon.host.gpus[1]
    job = start_job(daemon.host, "--allow-unlimited", "--gpu", sliced.uuid)
    daemon.kill()
    assert daemon.run("--restore") == 1, daemon.log
    assert (sliced.compute_mode, sliced.time_slice) == ("default", "short")
    end_job(job)
    assert daemon.run("--restore") == 0, daemon.log
    assert (sliced.compute_mode, sliced.time_slice) == ("exclusive_process", "default")


def test_restore_keeps_the_time_slice_of_a_running_job(daemon: Daemon) -> None:
    daemon.host.divide(4, f"{SHARED}\n  time_slice: short")
    daemon.start().wait_ready()
    sliced = daemon.host.gpus[1]
    sliced.add_process(os.getpid(), 700)
    daemon.kill()
    assert daemon.run("--restore") == 1, daemon.log
    assert sliced.time_slice == "short"
    what = "the time slice of GPU 00:07.0 differs from the original; jobs may still need the current one"
    assert what in daemon.log
    sliced.remove_process(os.getpid())
    daemon.host.fail("nvmlInit*", "driver_not_loaded")
    assert daemon.run("--restore") == 1, daemon.log
    daemon.host.clear()
    assert daemon.run("--restore") == 0, daemon.log
    assert sliced.time_slice == "default"


@pytest.mark.parametrize("command", ["plan", "reload"])
def test_plan_and_reload_list_settings_that_another_program_changed(daemon: Daemon, command: str) -> None:
    daemon.host.divide(4, f"{SHARED}\n  time_slice: short")
    daemon.start().wait_ready()
    sliced = daemon.host.gpus[1]

    def corrections() -> dict[str, tuple[str, str, bool]]:
        daemon.host.gpus[0].compute_mode, sliced.time_slice = "default", "long"
        done = daemon.host.run(["yunion-mps", command, "--output", "json"], check=True)
        changes = json.loads(done.stdout)["changes"]
        return {one["kind"]: (one["before"], one["after"], one["at_once"]) for one in changes}

    # Again and again, because a poll corrects the compute mode, too.
    expected = {"compute mode": ("Default", "Exclusive_Process", True), "time slice": ("long", "short", True)}
    eventually(lambda: corrections() == expected, "both corrections")
    assert sliced.time_slice == ("short" if command == "reload" else "long")
    events = daemon.get("/v1/events?kind=gpu")[1]["events"]
    assert ("time_slice_changed" in [one["code"] for one in events]) == (command == "reload")


def control_daemons(daemon: Daemon, method: str, path: str) -> list[bool]:
    """Return whether each control daemon that a plan or reload ends or starts does so at once."""
    changes = daemon.ask(method, path)[1]["changes"]
    return [change["at_once"] for change in changes if change["kind"] == "control daemon"]


@pytest.mark.parametrize("leased", [True, False], ids=["leased", "idle"])
def test_gpus_that_swap_their_ways_of_sharing_swap_the_control_daemon(mixed: Daemon, leased: bool) -> None:
    """The control daemons before and after both serve one GPU in the same pipe directory."""
    if leased:
        for name, address in (("m", "00:06.0-0"), ("t", "00:07.0-0")):
            take(mixed, f"holder.name={name}&holder.ttl_s=600&devices={address}&allow_unlimited=true")
    mixed.host.divide(SHARED, 4)
    expected = [not leased] * 2
    assert control_daemons(mixed, "GET", "/v1/plan") == expected
    assert control_daemons(mixed, "POST", "/v1/reload") == expected


@pytest.fixture
def exclusive(daemon: Daemon) -> Daemon:
    """Its time-sliced GPU was in a mode that keeps a second process out."""
    daemon.host.gpus[1].compute_mode = "exclusive_process"
    daemon.host.divide(4, SHARED)
    return daemon.start().wait_ready()


def test_restore_keeps_the_mode_that_a_lease_by_name_needs(exclusive: Daemon) -> None:
    take(exclusive, "holder.name=pod-1&holder.ttl_s=600&allow_unlimited=true&devices=00:07.0-0")
    exclusive.kill()
    assert exclusive.run("--restore") == 1, exclusive.log
    assert "once no process uses the GPU and its leases are released" in exclusive.log
    exclusive.start().wait_ready()
    assert exclusive.ask("DELETE", "/v1/leases/pod-1")[0] == 200
    assert exclusive.stop() == 0
    assert modes(exclusive)[1] == "exclusive_process"


def test_a_stop_keeps_the_mode_that_running_jobs_need(exclusive: Daemon) -> None:
    exclusive.host.gpus[1].add_process(os.getpid(), 700)
    assert exclusive.stop() == 0
    assert modes(exclusive)[1] == "default"
    assert "GPU 00:07.0 keeps its compute mode, because jobs without MPS use it" in exclusive.log
    assert exclusive.run("--restore") == 1, exclusive.log
    assert "jobs may still need the current one: once no process uses the GPU" in exclusive.log
    assert modes(exclusive)[1] == "default"
    exclusive.host.gpus[1].remove_process(os.getpid())
    assert exclusive.run("--restore") == 0, exclusive.log
    assert modes(exclusive)[1] == "exclusive_process"


def test_a_stop_keeps_the_mode_that_a_leased_job_needs_to_start(exclusive: Daemon) -> None:
    take(exclusive, f"holder.name=job&holder.ttl_s=600&devices={ADDRESS}&allow_unlimited=true")
    assert exclusive.stop() == 0
    assert modes(exclusive)[1] == "default"
    exclusive.start().wait_ready()
    (lease,) = leases_of(exclusive)
    assert exclusive.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    assert exclusive.stop() == 0
    assert modes(exclusive)[1] == "exclusive_process"


def test_a_gpu_that_is_given_up_gets_its_mode_back_after_its_jobs(exclusive: Daemon) -> None:
    exclusive.host.gpus[1].add_process(os.getpid(), 700)
    exclusive.host.divide(4)
    assert exclusive.ask("POST", "/v1/reload")[0] == 200
    assert exclusive.polls()
    assert modes(exclusive)[1] == "default"
    exclusive.host.gpus[1].remove_process(os.getpid())
    eventually(lambda: exclusive.polls() and modes(exclusive)[1] == "exclusive_process", "its mode")


def test_doctor_accepts_the_current_mode_while_a_lease_requires_it(daemon: Daemon) -> None:
    daemon.host.divide(4, SHARED)
    daemon.start().wait_ready()
    for address in ("00:06.0-0", "00:07.0-0"):
        take(daemon, f"holder.name=job-{address[4]}&holder.ttl_s=600&allow_unlimited=true&devices={address}")
    daemon.host.divide(SHARED, 4)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    assert "in compute mode" not in daemon.host.run(["yunion-mps", "doctor"]).stdout
