"""No fault loses a lease, leases a device twice, leaves a lease behind, or keeps the node drained."""

from __future__ import annotations

import shutil

import pytest

from engines.attached import attach
from engines.slurm import NODE, Slurm, wait_unused
from integration.daemon_host import PATIENCE_S, Daemon
from integration.lease_host import ADDRESSES, leased_addresses, leases_of, restart, take
from simhost.mps import StandIns

pytestmark = pytest.mark.gpus({"kind": "v100"})

SHARE = "--gres=gpu:mps:1"
SHOW = "echo $YUNION_MPS_DEVICE"


def wait_drained(slurm: Slurm, code: str) -> None:
    slurm.wait(lambda: slurm.state() == "drained" and f"yunion-mps: {code}: " in slurm.reason(), code)


def wait_idle(slurm: Slurm) -> None:
    slurm.wait(lambda: slurm.state() == "idle", "an idle node")  # 24.11 may still show the former reason


def wait_reconciled(slurm: Slurm, daemon: Daemon) -> None:
    """Wait until the health check has found that no lease's job is left."""

    def is_unused() -> bool:
        slurm.check_health()
        return leases_of(daemon) == []

    slurm.wait(is_unused, "the release of all devices by the health check")


def test_the_node_is_drained_until_the_daemon_is_back(slurm: Slurm, daemon: Daemon) -> None:
    daemon.stop()
    job = slurm.submit(SHOW, SHARE)
    wait_drained(slurm, "daemon_unreachable")
    slurm.wait_job(job, "PENDING")
    daemon.start().wait_ready()
    slurm.check_health_a_minute_later()
    slurm.start_again(job)
    slurm.wait_job(job, "COMPLETED")
    slurm.wait(lambda: slurm.output(job) == f"{ADDRESSES[0]}\n", "the output")
    wait_unused(slurm, daemon)
    wait_idle(slurm)


def test_a_device_leased_outside_slurm_drains_the_node(slurm: Slurm, daemon: Daemon) -> None:
    take(daemon, f"devices={ADDRESSES[0]}&holder.name=by-hand&holder.ttl_s=600")
    job = slurm.submit(SHOW, SHARE)
    wait_drained(slurm, "slurm_device_held")
    assert "by-hand" in slurm.reason()
    slurm.wait_job(job, "PENDING")
    slurm.check_health_a_minute_later()
    assert slurm.state() == "drained"
    assert daemon.ask("DELETE", "/v1/leases/by-hand")[0] == 200
    slurm.check_health_a_minute_later()
    slurm.start_again(job)
    slurm.wait_job(job, "COMPLETED")
    wait_idle(slurm)


def is_free_after_reload(daemon: Daemon) -> bool:
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    return bool(daemon.get(f"/v1/devices/{ADDRESSES[0]}")[1]["state"] == "free")


def test_a_lost_gpu_drains_the_node_with_its_code(slurm: Slurm, daemon: Daemon) -> None:
    slurm.set(HealthCheckInterval=1)
    daemon.host.gpus[0].lose()
    wait_drained(slurm, "gpu_lost")
    daemon.host.gpus[0].restore()
    slurm.wait(lambda: is_free_after_reload(daemon), "the GPU")
    wait_idle(slurm)


def test_a_node_is_not_drained_because_slurmctld_does_not_answer(slurm: Slurm, daemon: Daemon) -> None:
    """If it is overloaded, only some commands fail, and every node would be drained at the same time."""
    slurm.submit(f"{SHOW}; {slurm.until_told}", SHARE)
    slurm.wait(lambda: leased_addresses(daemon) == ADDRESSES[:1], "its lease")
    folder = slurm.folder / "failing"
    slurm.write_hook("health-check", f"mkdir {folder}; ln -s /bin/false {folder}/squeue; PATH={folder}:$PATH")
    slurm.check_health()
    assert (slurm.state(), "yunion-mps: squeue: " in slurm.logs()) == ("mixed", True)


def test_a_changed_division_drains_the_node_and_leases_no_other_device(slurm: Slurm, daemon: Daemon) -> None:
    daemon.host.divide(2)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    job = slurm.submit(SHOW, SHARE)
    wait_drained(slurm, "slurm_devices_changed")
    assert leases_of(daemon) == []
    daemon.host.divide(4)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    slurm.check_health_a_minute_later()
    slurm.start_again(job)
    slurm.wait_job(job, "COMPLETED")
    wait_idle(slurm)


def test_a_check_with_an_older_answer_does_not_resume_the_node(slurm: Slurm, daemon: Daemon) -> None:
    slurm.hold("health-check", "sinfo")
    with slurm.begin_health_check() as check:
        slurm.wait(lambda: slurm.is_held("health-check"), "the check, which has found nothing wrong")
        take(daemon, f"devices={ADDRESSES[0]}&holder.name=by-hand&holder.ttl_s=600")
        slurm.submit(SHOW, SHARE)
        wait_drained(slurm, "slurm_device_held")
        slurm.release("health-check")
        assert check.wait(PATIENCE_S) == 0
    assert slurm.state() == "drained"


def test_a_drain_by_the_administrator_is_left_alone(slurm: Slurm, daemon: Daemon) -> None:
    slurm.ask("scontrol", "update", f"NodeName={NODE}", "State=DRAIN", "Reason=new disk")
    slurm.check_health()
    take(daemon, f"devices={ADDRESSES[0]}&holder.name=by-hand&holder.ttl_s=600")
    slurm.check_health()
    assert (slurm.state(), slurm.reason()) == ("drained", "new disk")


def test_a_reboot_that_the_administrator_requests_is_not_cancelled(slurm: Slurm, daemon: Daemon) -> None:
    slurm.set(RebootProgram="/bin/true")
    slurm.submit(f"{SHOW}; {slurm.until_told}", SHARE)
    slurm.wait(lambda: leased_addresses(daemon) == ADDRESSES[:1], "its lease")
    daemon.stop()
    slurm.check_health()
    assert slurm.state() == "draining"
    slurm.ask("scontrol", "reboot", "ASAP", "nextstate=RESUME", NODE)
    daemon.start().wait_ready()
    slurm.check_health()
    assert slurm.state() == "draining@"


def test_leases_of_jobs_that_slurm_does_not_know_are_released(slurm: Slurm, daemon: Daemon) -> None:
    host = daemon.host
    words = ["--ttl", "infinity", "--for", "slurm"]
    for name, device in (("slurm:999", ADDRESSES[0]), ("slurm:1000-a", ADDRESSES[1])):
        done = host.run(["yunion-mps", "lease", "take", name, *words, "--device", device])
        assert done.returncode == 0, done.stderr
    slurm.check_health()
    assert leased_addresses(daemon) == ADDRESSES[1:2]


def test_a_leftover_process_keeps_the_lease_and_drains_the_node(
    jobs: StandIns, slurm: Slurm, daemon: Daemon
) -> None:
    lease = take(daemon, f"devices={ADDRESSES[0]}&holder.name=slurm:999&holder.ttl_s=0&reserved_for=slurm")
    with attach(jobs, daemon, lease):
        slurm.check_health()
        assert leased_addresses(daemon) == ADDRESSES[:1]
        assert "a process of the ended job 999 still uses 00:06.0-0" in slurm.reason()
    slurm.wait(lambda: leases_of(daemon)[0]["state"] == "idle", "the end of its use")
    slurm.check_health()
    assert (slurm.state(), leases_of(daemon)) == ("idle", [])


def test_the_epilog_terminates_leftover_processes_of_its_job(
    jobs: StandIns, slurm: Slurm, daemon: Daemon
) -> None:
    slurm.hold("epilog")
    slurm.submit(SHOW, SHARE)
    slurm.wait(lambda: slurm.is_held("epilog"), "its Epilog")
    with attach(jobs, daemon, leases_of(daemon)[0]):
        slurm.release("epilog")
        wait_unused(slurm, daemon)
        (event,) = daemon.get("/v1/events?kind=client")[1]["events"]
        assert event["what"].endswith("its MPS server disconnected it; ended by SIGTERM")
    assert slurm.reason() == "none"


@pytest.mark.parametrize("when", ["begins", "has ended"])
@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_a_killed_hook_leaves_nothing_behind(slurm: Slurm, daemon: Daemon, hook: str, when: str) -> None:
    files = slurm.host.root / "run/yunion-mps/slurm"
    kill = "kill -KILL $$" if when == "begins" else f"rm -f {files}/*.json; kill -KILL $$"
    slurm.write_hook(hook, *([kill] if when == "begins" else ["", kill]))
    job = slurm.submit(SHOW, SHARE)
    slurm.wait(lambda: slurm.state() == "drained", "the drain by Slurm itself")
    slurm.write_hook(hook)
    wait_reconciled(slurm, daemon)
    assert list(files.glob("[0-9]*")) == []
    slurm.ask("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
    again = slurm.submit(SHOW, SHARE)
    slurm.wait_job(again, "COMPLETED")
    wait_unused(slurm, daemon)
    assert slurm.job_state(job) == ("PENDING" if hook == "prolog" else "COMPLETED")


def replace(slurm: Slurm, daemon: Daemon, victim: str) -> None:
    """Kill one of the daemons, and start it again; or let ours execute itself again."""
    if victim == "daemon":
        restart(daemon)
    elif victim == "reexec":
        daemon.reexec()
    else:
        slurm.kill(victim)
        slurm.start_node() if victim == "slurmd" else slurm.start_controller()


@pytest.mark.parametrize("mapping", ["gpu:mps", "shard"])
@pytest.mark.parametrize("when", ["begins", "has ended"])
@pytest.mark.parametrize("victim", ["slurmd", "slurmctld", "daemon", "reexec"])
def test_a_killed_daemon_neither_loses_nor_leaks_a_lease(
    slurm: Slurm, daemon: Daemon, mapping: str, victim: str, when: str
) -> None:
    """It is killed before the hook has leased or released, and after that."""
    share = f"--gres={mapping}:1"
    running = slurm.submit(f"{SHOW}; {slurm.until_told}", share)
    slurm.wait(lambda: slurm.output(running), "its output")
    (before,) = leases_of(daemon)
    slurm.hold("prolog", when=when)
    starting = slurm.submit(SHOW, share)
    slurm.wait(lambda: slurm.is_held("prolog"), "its Prolog")
    assert len(leases_of(daemon)) == (1 if when == "begins" else 2)
    if victim == "slurmctld":
        slurm.wait_saved()
    replace(slurm, daemon, victim)
    assert before["id"] in [lease["id"] for lease in leases_of(daemon)]
    if victim.startswith("slurm"):  # Slurm does not restart this job, and may drain the node because of it
        slurm.ask("scancel", starting)
    slurm.release("prolog")
    slurm.wait_job(starting, "COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL")
    slurm.hold("epilog", when=when)
    slurm.tell_jobs()
    slurm.wait(lambda: slurm.is_held("epilog"), "its Epilog")
    if victim == "slurmctld":
        slurm.wait_saved()
    replace(slurm, daemon, victim)
    if victim == "slurmd":  # slurmctld repeats its order to end the job after 17 s instead of 60 s
        slurm.set(MinJobAge=10, MessageTimeout=3)
    slurm.release("epilog")
    slurm.wait_job(running, "COMPLETED")
    wait_reconciled(slurm, daemon)
    if victim == "slurmctld":  # until slurmd registers again, 22.05 does not tell Prolog a job's devices
        slurm.ask("scontrol", "reconfigure")
        slurm.wait(lambda: "SlurmdStartTime=2" in slurm.ask("scontrol", "show", "node"), "its registration")
    again = slurm.submit(SHOW, share)
    slurm.wait(lambda: slurm.is_completed(again), "the next job")
    wait_unused(slurm, daemon)
    wait_idle(slurm)


def test_a_job_cancelled_during_its_prolog_leaves_no_lease(slurm: Slurm, daemon: Daemon) -> None:
    slurm.hold("prolog")
    job = slurm.submit(SHOW, SHARE)
    slurm.wait(lambda: slurm.is_held("prolog"), "its Prolog")
    slurm.ask("scancel", job)
    slurm.release("prolog")
    slurm.wait_job(job, "CANCELLED")
    wait_unused(slurm, daemon)
    wait_idle(slurm)


def test_after_a_reboot_leases_of_ended_jobs_do_not_block_new_jobs(slurm: Slurm, daemon: Daemon) -> None:
    running = slurm.submit(f"{SHOW}; {slurm.until_told}", SHARE, "--no-requeue")
    slurm.wait(lambda: leased_addresses(daemon) == ADDRESSES[:1], "its lease")
    slurm.write_hook("epilog", "exit 0")  # at a boot, no Epilog runs
    slurm.kill("slurmd")
    daemon.kill()
    slurm.kill_jobs()
    shutil.rmtree(slurm.host.root / "run/yunion-mps")
    slurm.ask("scancel", running)
    daemon.start().wait_ready()
    slurm.start_node()
    job = slurm.submit(SHOW, SHARE)
    slurm.wait_job(job, "COMPLETED")
    slurm.write_hook("epilog")
    wait_unused_of(slurm, daemon, running)


def wait_unused_of(slurm: Slurm, daemon: Daemon, job: str) -> None:
    slurm.wait(
        lambda: f"slurm:{job}" not in [lease["name"] for lease in leases_of(daemon)], f"the release of {job}"
    )
