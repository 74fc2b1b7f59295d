"""A node with MPS, time-slicing and MIG: jobs get the type that they request, and an index keeps its type."""

from __future__ import annotations

import signal
import subprocess

import pytest

from engines.slurm import Slurm, environment, wait_unused
from integration.daemon_host import Daemon
from integration.lease_host import leased_addresses, leases_of
from simhost import SimHost
from simhost.host import SHARED

pytestmark = pytest.mark.gpus({"kind": "v100", "count": 2}, {"kind": "h100", "count": 2})

DIVISIONS = [2, SHARED, "mig: [1g.10gb, 1g.10gb]", "mig: 3g.40gb\n  virtual_number: 2"]
#: For `gres-conf --shards`, which needs shares of one type.
WITH_SHARDS = [SHARED.replace("3", "2"), SHARED, DIVISIONS[2]]
#: The addresses by type.
MPS = ["00:06.0-0", "00:06.0-1", "00:09.0-g1-0", "00:09.0-g1-1"]
TIME_SLICED = ["00:07.0-0", "00:07.0-1", "00:07.0-2"]
INSTANCES = ["00:08.0-g7", "00:08.0-g8"]
TYPES = {"mps": MPS, "time-sliced": TIME_SLICED, "1g.10gb": INSTANCES}


@pytest.fixture
def divisions() -> list[object]:
    return DIVISIONS


@pytest.fixture
def host(host: SimHost, divisions: list[object]) -> SimHost:
    host.divide(*divisions)
    return host


def test_jobs_of_each_type_have_the_environment_of_their_device(slurm: Slurm, daemon: Daemon) -> None:
    script = f"env; {slurm.until_told}"
    jobs = [slurm.submit(script, f"--gres=gpu:{kind}:1") for kind in TYPES for _ in TYPES[kind]]
    slurm.wait(lambda: all("YUNION_MPS_DEVICE" in slurm.output(job) for job in jobs), "their output")
    assert {lease["name"] for lease in leases_of(daemon)} == {f"slurm:{job}" for job in jobs}
    gpus = daemon.host.gpus
    instances = [one.uuid for gpu in gpus for one in gpu.mig_devices()]
    visible = [*[gpus[0].uuid] * 2, *[instances[2]] * 2, *[gpus[1].uuid] * 3, *instances[:2]]
    for job, addr, uuid in zip(jobs, [*MPS, *TIME_SLICED, *INSTANCES], visible):
        found = environment(slurm.output(job))
        assert (found["YUNION_MPS_DEVICE"], found["CUDA_VISIBLE_DEVICES"]) == (addr, uuid)
        assert ("CUDA_MPS_PIPE_DIRECTORY" in found) == (addr in MPS)
        assert any(name.startswith("CUDA_MPS_") for name in found) == (addr in MPS)
        assert found.get("YUNION_MPS_MEMORY_MIB") == ("5461" if addr in TIME_SLICED else None)
    assert slurm.job_state(slurm.submit("true", "--gres=gpu:1g.10gb:1")) == "PENDING"
    slurm.tell_jobs()
    wait_unused(slurm, daemon)
    assert slurm.reason() == "none"


def test_each_job_of_an_array_may_get_another_type(slurm: Slurm) -> None:
    array = slurm.submit(f"echo $YUNION_MPS_DEVICE; {slurm.until_told}", "--gres=gpu:1", "--array=1-9")
    every = sorted([*MPS, *TIME_SLICED, *INSTANCES])
    slurm.wait(lambda: sorted(slurm.output(array).split()) == every, "the output of all jobs")
    slurm.tell_jobs()


@pytest.mark.parametrize(
    ("mapping", "divisions"), [("gpu:mps", DIVISIONS), ("shard", WITH_SHARDS)], ids=["devices", "shards"]
)
def test_a_job_with_two_instances_starts_a_step_on_each(slurm: Slurm, daemon: Daemon) -> None:
    show = f"sh -c 'echo $CUDA_VISIBLE_DEVICES; {slurm.until_told}'"
    step = f"srun --quiet -n1 --exact --gres=gpu:1g.10gb:1 {show} &"
    job = slurm.submit(f"{step}\n{step}\nwait", "--gres=gpu:1g.10gb:2", "-n2")
    instances = sorted(one.uuid for one in daemon.host.gpus[2].mig_devices())
    slurm.wait(lambda: sorted(slurm.output(job).split()) == instances, "the output of both steps")
    slurm.tell_jobs()
    slurm.wait_job(job, "COMPLETED")


@pytest.mark.parametrize(
    ("kind", "gpu", "mapping", "divisions"),
    [
        ("mps", 0, "gpu:mps", DIVISIONS),
        ("time-sliced", 1, "gpu:mps", DIVISIONS),
        ("1g.10gb", 2, "gpu:mps", DIVISIONS),
        ("2g.20gb", 2, "gpu:mps", [*DIVISIONS[:2], "mig: [2g.20gb, 2g.20gb]", DIVISIONS[3]]),
        ("1g.10gb", 2, "shard", WITH_SHARDS),
    ],
    ids=["mps", "time-sliced", "1g.10gb", "2g.20gb", "shards"],
)
def test_every_task_has_a_device_if_they_are_requested_per_task(
    slurm: Slurm, daemon: Daemon, kind: str, gpu: int
) -> None:
    """Slurm 22.05 reads the type as the number: 0 of mps, 1 of 1g.10gb and 2 of 2g.20gb."""
    show = "echo $CUDA_VISIBLE_DEVICES $YUNION_MPS_DEVICE"
    done = slurm.srun(f"--gpus-per-task={kind}:1", "-n2", "sh", "-c", show)
    found = daemon.host.gpus[gpu]
    instances = {f"00:08.0-g{one.gpu_instance}": one.uuid for one in found.mig_devices()}
    expected = instances or dict.fromkeys(TYPES[kind][:2], found.uuid)
    tasks = sorted(line.split() for line in done.stdout.splitlines())
    assert tasks == sorted([uuid, addr] for addr, uuid in expected.items()), f"{done}{slurm.logs()}"
    wait_unused(slurm, daemon)


def test_a_step_with_fewer_devices_than_its_job_binds_them_to_its_tasks(slurm: Slurm, version: str) -> None:
    """Slurm 22.05 tells a task neither its own devices nor those of the step."""
    step = "srun --quiet -n2 --exact --gpus-per-task=time-sliced:1"
    show = "printenv YUNION_MPS_DEVICE"
    job = slurm.submit(f"{step} {show}; {step} --gpu-bind=single:1 {show}", "--gres=gpu:time-sliced:3", "-n2")
    slurm.wait_job(job, "COMPLETED")
    lines = slurm.output(job).splitlines()
    assert sorted(lines[-2:]) == TIME_SLICED[:2]
    if version == "22.05":
        assert "yunion-mps: Slurm did not assign the task its devices" in slurm.output(job)
        assert "yunion-mps: add --gpu-bind=single:1 to srun" in slurm.output(job)
    else:
        assert sorted(lines[:-2]) == TIME_SLICED[:2]


def test_later_steps_follow_an_instance_that_is_created_again(slurm: Slurm, daemon: Daemon) -> None:
    """Steps with both of the job's instances, and with the one that is missing for a while."""
    show = "printenv CUDA_VISIBLE_DEVICES"
    steps = f"srun --quiet {show}; srun --quiet -n1 --exact --gres=gpu:1g.10gb:1 {show}; echo end"
    again = f"while ! [ -e {slurm.folder}/go$n ]; do sleep 0.05; done; {steps}"
    job = slurm.submit(f"{steps}\nfor n in 1 2; do {again}; done", "--gres=gpu:1g.10gb:2")

    def outputs(number: int) -> list[str]:
        slurm.wait(lambda: slurm.output(job).count("end") == number, "the output of the steps")
        return slurm.output(job).split("end\n")[number - 1].splitlines()

    def is_told(what: str) -> bool:
        path = slurm.host.root / f"run/yunion-mps/slurm/{job}.instances"
        return path.exists() and what in path.read_text()

    gpu = daemon.host.gpus[2]
    old, other = [one.uuid for one in gpu.mig_devices()]
    assert outputs(1) == [f"{old},{other}", old]
    daemon.host.fail("nvmlDeviceCreateGpuInstance*", "unknown")
    gpu.end_instances(gpu.mig_devices()[0].gpu_instance)
    slurm.wait(lambda: is_told("no longer exists"), "its end")
    (slurm.folder / "go1").touch()
    why = "the MIG instance no longer exists [mig_instance_gone]"
    gone = f"yunion-mps: device {INSTANCES[0]} is unavailable: {why}"
    assert [line for line in outputs(2) if line.startswith("yunion-mps: device")] == [gone] * 2
    assert not [line for line in outputs(2) if line.startswith("MIG-")]
    daemon.host.clear()
    slurm.wait(lambda: is_told('"missing": {}'), "its creation")
    (new,) = {one.uuid for one in gpu.mig_devices()} - {other}
    assert new != old
    (slurm.folder / "go2").touch()
    assert outputs(3) == [f"{new},{other}", new], slurm.output(job)
    wait_unused(slurm, daemon)
    slurm.wait(
        lambda: list((slurm.host.root / "run/yunion-mps/slurm").iterdir()) == [], "the end of its files"
    )


@pytest.mark.parametrize(
    "words", [["--gres=gpu:5"], ["--gres=gpu:mps:1,gpu:time-sliced:1"], ["--exclusive", "--gpus=1"]]
)
def test_a_job_with_devices_of_different_types_fails_with_the_reason(
    slurm: Slurm, daemon: Daemon, words: list[str]
) -> None:
    done = slurm.srun(*words, "true")
    assert done.returncode != 0
    assert "several types, but a process can use only one" in done.stdout, f"{done}{slurm.logs()}"
    assert "request one type (mps, time-sliced, 1g.10gb) without --exclusive" in done.stdout
    wait_unused(slurm, daemon)
    slurm.wait(lambda: slurm.state() == "idle", "the node")
    assert slurm.reason() == "none"


def is_shared(daemon: Daemon, sharing: str) -> bool:
    device = daemon.get(f"/v1/devices/{MPS[0]}")[1]
    return bool((device["sharing"], device["state"]) == (sharing, "free"))


def test_a_changed_type_drains_the_node_and_leases_nothing(slurm: Slurm, daemon: Daemon) -> None:
    daemon.host.divide("type: NVIDIA_GPU_SHARE\n  virtual_number: 2", *DIVISIONS[1:])
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    slurm.wait(lambda: is_shared(daemon, "time-slicing"), "the change")
    job = slurm.submit("true", "--gres=gpu:mps:1")
    slurm.wait(lambda: "yunion-mps: slurm_devices_changed: " in slurm.reason(), "the drain")
    assert "was mps with 8192 MiB, but is now time-sliced with 8192 MiB" in slurm.reason()
    slurm.wait_job(job, "PENDING")
    assert leases_of(daemon) == []
    daemon.host.divide(*DIVISIONS)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    slurm.wait(lambda: is_shared(daemon, "mps"), "the change")
    slurm.check_health_a_minute_later()
    slurm.start_again(job)
    slurm.wait_job(job, "COMPLETED")


def test_a_type_that_changes_after_a_job_drains_the_node_at_once(slurm: Slurm, daemon: Daemon) -> None:
    """No other job of this type could start, and the next one would be requeued."""
    running = slurm.submit(slurm.until_told, "--gres=gpu:time-sliced:1")
    slurm.wait(lambda: leases_of(daemon), "its lease")
    daemon.host.divide(2, 3, *DIVISIONS[2:])
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    slurm.wait(lambda: daemon.get(f"/v1/devices/{TIME_SLICED[1]}")[1]["state"] == "pending", "the change")
    slurm.check_health()
    why = f"device {TIME_SLICED[1]}: the change to mps waits for lease slurm:{running} of root to end"
    assert slurm.reason() == f"yunion-mps: leases_pending: {why}"
    slurm.tell_jobs()
    slurm.wait_job(running, "COMPLETED")
    wait_unused(slurm, daemon)
    slurm.wait(lambda: daemon.get(f"/v1/devices/{TIME_SLICED[0]}")[1]["sharing"] == "mps", "the change")
    slurm.check_health()
    assert slurm.reason().startswith("yunion-mps: slurm_devices_changed: "), (
        "gres.conf has to be written again"
    )
    daemon.host.divide(*DIVISIONS)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    slurm.wait(lambda: daemon.get(f"/v1/devices/{TIME_SLICED[0]}")[1]["state"] == "free", "the change")
    slurm.check_health()
    slurm.wait(lambda: slurm.state() == "idle", "the node")


@pytest.mark.parametrize(
    ("kind", "gpu", "entry", "why"),
    [
        ("time-sliced", 1, 3, "leases_pending: GPU 00:07.0: the change to mps waits for lease "),
        ("mps", 3, "mig: 3g.40gb", "leases_pending: GPU 00:09.0-g1: the change to a single device waits "),
        ("mps", 3, "mig: 2g.20gb\n  virtual_number: 2", "mig_in_use: GPU 00:09.0: its MIG layout waits for "),
        ("1g.10gb", 2, "mig: 2g.20gb", "mig_in_use: GPU 00:08.0: its MIG layout waits for "),
    ],
    ids=["time-slicing", "type", "layout", "instances"],
)
def test_a_change_that_waits_for_jobs_on_all_devices_drains_the_node(
    slurm: Slurm, daemon: Daemon, kind: str, gpu: int, entry: object, why: str
) -> None:
    """The next job would be requeued: Slurm starts it as soon as a device is free."""
    for _ in TYPES[kind]:
        slurm.submit(slurm.until_told, f"--gres=gpu:{kind}:1")
    slurm.wait(lambda: leased_addresses(daemon) == TYPES[kind], "their leases")
    daemon.host.divide(*(entry if index == gpu else one for index, one in enumerate(DIVISIONS)))
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    slurm.wait(lambda: daemon.get("/v1/status")[1]["problems"], "the change")
    slurm.check_health()
    assert slurm.reason().startswith(f"yunion-mps: {why}"), slurm.logs()
    assert (slurm.state(), leased_addresses(daemon)) == ("draining", TYPES[kind])
    daemon.host.divide(*DIVISIONS)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    slurm.check_health()
    slurm.wait(lambda: slurm.state() == "mixed", "the end of the drain")


def test_a_pending_layout_is_the_drain_reason_until_the_job_ends(slurm: Slurm, daemon: Daemon) -> None:
    """The free instance no longer has a device, but gres.conf cannot be written before the job ends."""
    running = slurm.submit(slurm.until_told, "--gres=gpu:1g.10gb:1")
    slurm.wait(lambda: leased_addresses(daemon) == INSTANCES[:1], "its lease")
    daemon.host.divide(*DIVISIONS[:2], "mig: 2g.20gb", DIVISIONS[3])
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    slurm.wait(lambda: daemon.get("/v1/status")[1]["problems"], "the change")
    why = "mig_in_use: GPU 00:08.0: its MIG layout waits for "
    waiting = slurm.submit("true", "--gres=gpu:1g.10gb:1")
    slurm.wait(lambda: slurm.reason().startswith(f"yunion-mps: {why}"), "the drain by its Prolog")
    slurm.wait_job(waiting, "PENDING")
    slurm.check_health()
    assert slurm.reason().startswith(f"yunion-mps: {why}"), slurm.logs()
    written = daemon.host.run(("yunion-mps", "slurm", "gres-conf"))
    assert (written.returncode, written.stdout) == (1, "")
    assert "GPU 00:08.0: its MIG layout waits for " in written.stderr
    slurm.tell_jobs()
    slurm.wait_job(running, "COMPLETED")
    wait_unused(slurm, daemon)
    slurm.wait(lambda: not daemon.get("/v1/status")[1]["problems"], "the layout")
    slurm.check_health()
    assert slurm.reason().startswith("yunion-mps: slurm_devices_changed: "), "it has to be written now"
    daemon.host.run(("yunion-mps", "slurm", "gres-conf"), check=True)


def test_types_in_another_order_drain_the_node(slurm: Slurm, daemon: Daemon) -> None:
    """Slurm would count the devices in the order of slurm.conf."""
    place = slurm.folder / "slurm.conf"
    text = place.read_text()
    place.write_text(text.replace("Gres=gpu:mps:4,gpu:time-sliced:3", "Gres=gpu:time-sliced:3,gpu:mps:4"))
    slurm.kill("slurmd")
    slurm.kill("slurmctld")
    slurm.start_controller()
    slurm.start_node()
    job = slurm.submit("true", "--gres=gpu:mps:1")
    slurm.wait(lambda: "slurm_devices_changed: slurm.conf: " in slurm.reason(), "the drain")
    slurm.wait_job(job, "PENDING")
    assert leases_of(daemon) == []
    slurm.check_health_a_minute_later()
    assert slurm.state() == "drained"


@pytest.mark.parametrize("kind", ["time-sliced", "1g.10gb"])
def test_the_epilog_ends_leftover_processes_without_mps(slurm: Slurm, daemon: Daemon, kind: str) -> None:
    slurm.hold("epilog")
    slurm.submit("true", f"--gres=gpu:{kind}:1")
    slurm.wait(lambda: slurm.is_held("epilog"), "its Epilog")
    (lease,) = leases_of(daemon)
    instance = next((one.gpu_instance, 0) for one in daemon.host.gpus[2].mig_devices())
    with subprocess.Popen(["sleep", "600"], env={**daemon.env, **lease["environment"]}) as leftover:
        try:
            if kind == "time-sliced":
                daemon.host.gpus[1].add_process(leftover.pid, 100)
            else:
                daemon.host.gpus[2].add_process(leftover.pid, 100, on=instance)
            slurm.wait(lambda: leases_of(daemon)[0]["state"] == "in use", "its use of the device")
            slurm.check_health()
            slurm.release("epilog")
            wait_unused(slurm, daemon)
            assert leftover.wait() == -signal.SIGTERM
        finally:
            leftover.kill()
    (event,) = daemon.get("/v1/events?kind=client")[1]["events"]
    assert event["what"].endswith(": ended by SIGTERM")
    assert slurm.reason() == "none"


def test_nothing_acts_on_a_cancelled_job_without_mps_before_slurm_kills_it(
    slurm: Slurm, daemon: Daemon
) -> None:
    """It ignores SIGTERM until KillWait is over."""
    slurm.set(KillWait=21, HealthCheckInterval=1)
    job = slurm.submit("trap '' TERM; echo $$; while :; do sleep 0.1; done", "--gres=gpu:time-sliced:1")
    slurm.wait(lambda: slurm.output(job), "its output")
    daemon.host.gpus[1].add_process(int(slurm.output(job)), 100)
    slurm.wait(lambda: leases_of(daemon)[0]["state"] == "in use", "its use of the device")
    slurm.ask("scancel", "--full", job)
    slurm.wait_job(job, "CANCELLED")
    wait_unused(slurm, daemon)
    assert daemon.get("/v1/events?kind=client")[1]["events"] == []
    assert slurm.reason() == "none"


@pytest.mark.parametrize("kind", TYPES)
def test_a_job_passes_its_device_on_to_run_inherit(slurm: Slurm, daemon: Daemon, kind: str) -> None:
    inherit = ["yunion-mps", "run", "--inherit", "--safe-stop", "printenv", "YUNION_MPS_DEVICE"]
    done = slurm.srun(f"--gres=gpu:{kind}:1", *inherit)
    assert done.stdout == f"{TYPES[kind][0]}\n", f"{done}{slurm.logs()}"


@pytest.mark.parametrize("mapping", ["shard"])
@pytest.mark.parametrize("divisions", [WITH_SHARDS])
def test_shards_are_of_the_shared_gpus_and_instances_have_none(slurm: Slurm, daemon: Daemon) -> None:
    script = f"env; {slurm.until_told}"
    requests = ["shard:2", "shard:2", "shard:1", "gpu:1g.10gb:1", "gpu:1g.10gb:1"]
    jobs = [slurm.submit(script, f"--gres={request}") for request in requests]
    slurm.wait(lambda: all("YUNION_MPS_DEVICE" in slurm.output(job) for job in jobs), "their output")
    found = [environment(slurm.output(job)) for job in jobs]
    of_shards = sorted(one["YUNION_MPS_DEVICE"] for one in found[:3])
    assert of_shards in (
        ["00:06.0-0,00:06.0-1", "00:07.0-0,00:07.0-1", "00:07.0-2"],
        ["00:06.0-0,00:06.0-1", "00:07.0-0", "00:07.0-1,00:07.0-2"],
    )
    assert {one["YUNION_MPS_MEMORY_MIB"] for one in found[:3]} == {"16384", "10922", "5461"}
    assert sorted(one["YUNION_MPS_DEVICE"] for one in found[3:]) == INSTANCES
    assert not [name for one in found for name in one if name.startswith("CUDA_MPS_")]
    slurm.tell_jobs()
    wait_unused(slurm, daemon)
    whole = environment(slurm.srun("--gres=gpu:time-sliced:1", "env").stdout)
    assert whole["YUNION_MPS_DEVICE"] == "00:06.0-0,00:06.0-1"
    assert "several types" in slurm.srun("--gres=gpu:3", "true").stdout
