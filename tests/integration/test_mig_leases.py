"""Leases of MIG instances that are destroyed, and created again at their places with other UUIDs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
from yunion_mps.core import reasons

from integration.cdi_files import spec_of
from integration.conftest import MakeDivided
from integration.daemon_host import Daemon, eventually
from integration.lease_host import end_job, leases_of, queued, run_job, start_job, take

MIG = "mig: [3g.40gb, 2g.20gb]"
OTHER = "mig: all-1g.10gb"
ENTRIES = [MIG, f"{MIG}\n  virtual_number: 2"]


@pytest.fixture(params=ENTRIES, ids=["alone", "mps"])
def daemon(request: pytest.FixtureRequest, make_divided: MakeDivided) -> Daemon:
    return make_divided([{"kind": "h100"}], request.param, cuda_mps_scope="gpu").start().wait_ready()


def device_of(daemon: Daemon, profile: str = "3g.40gb") -> dict[str, Any]:
    rows = daemon.get("/v1/devices?limit=0")[1]["isolated_devices"]
    return dict(next((row for row in rows if row["mig_profile"] == profile), {}))


def reload_now(daemon: Daemon, entry: str) -> None:
    daemon.host.divide(entry)
    assert daemon.reload_now()[0] == 200


def destroy(daemon: Daemon) -> None:
    number = device_of(daemon)["addr"].partition("-g")[2].partition("-")[0]
    for what in ("-dci", "-dgi"):
        daemon.host.run(["nvidia-smi", "mig", "-i", 0, what, "-gi", number], check=True)


def change_and_change_back(daemon: Daemon) -> None:
    file = daemon.host.root / "etc/yunion/host_container_device.yml"
    before = file.read_text()
    reload_now(daemon, OTHER)
    eventually(lambda: len(daemon.host.gpus[0].mig_devices()) == 7, "the other layout")
    file.write_text(before)
    assert daemon.reload_now()[0] == 200


def reboot(daemon: Daemon) -> None:
    daemon.kill()
    daemon.host.reboot()
    daemon.start().wait_ready()


CREATED_AGAIN = [destroy, change_and_change_back, reboot]


def environment(daemon: Daemon) -> dict[str, str]:
    (lease,) = leases_of(daemon)
    return dict(lease["environment"])


def wait_for_new_instance(daemon: Daemon, former: str) -> str:
    """Wait until the lease has the instance that was created again; returns its UUID."""

    def found() -> bool:
        daemon.polls()
        uuid = str(device_of(daemon).get("gpu_uuid", former))
        return uuid != former and environment(daemon)["CUDA_VISIBLE_DEVICES"] == uuid

    eventually(found, "the lease of the new instance")
    return environment(daemon)["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("create_again", CREATED_AGAIN)
def test_a_lease_by_name_continues_on_an_instance_created_again(
    daemon: Daemon, create_again: Callable[[Daemon], None]
) -> None:
    device = device_of(daemon)
    request = f"devices={device['addr']}&holder.name=job-17&holder.ttl_s=600"
    job = take(daemon, request)
    create_again(daemon)
    uuid = wait_for_new_instance(daemon, device["gpu_uuid"])
    eventually(lambda: device_of(daemon)["state"] == "leased", "its control daemon, if it has one")
    row = device_of(daemon)
    assert (row["id"], row["lease"]) == (device["id"], job["id"])
    expected = daemon.get(f"/v1/devices/{row['addr']}")[1]["client_environment"]
    assert environment(daemon) == {**expected, "YUNION_MPS_LEASE": job["id"]}
    eventually(lambda: daemon.status()["problems"] == [], "no problem")
    assert take(daemon, request)["environment"] == environment(daemon), "the same lease again"
    spec = json.dumps(spec_of(daemon.host, f"yunion-mps-lease-{job['id']}.json"))
    assert uuid in spec
    assert device["gpu_uuid"] not in spec
    daemon.kill()
    daemon.start().wait_ready()
    assert environment(daemon)["CUDA_VISIBLE_DEVICES"] == uuid


def test_now_takes_no_lease_away_that_was_taken_after_the_list(daemon: Daemon) -> None:
    device = device_of(daemon)
    daemon.host.divide(OTHER)
    listed = daemon.get("/v1/plan")[1]
    job = take(daemon, f"devices={device['addr']}&holder.name=job-17&holder.ttl_s=600")
    status, answer = daemon.ask("POST", "/v1/reload", f"mode=now&confirmation={listed['confirmation']}")
    assert (status, answer["code"]) == (409, "not_confirmed")
    assert f"lease {job['id'][:8]} on {device['addr']} of job-17 of root" in answer["detail"]
    assert device_of(daemon)["lease"] == job["id"]
    assert daemon.reload_now()[0] == 200
    eventually(lambda: len(daemon.host.gpus[0].mig_devices()) == 7, "the other layout")
    told = [event["what"] for event in daemon.get("/v1/events?kind=configuration")[1]["events"]]
    assert f"ends or removes lease {job['id'][:8]} on {device['addr']} of job-17 of root" in told


def test_while_its_instance_is_missing_a_lease_is_a_problem(daemon: Daemon) -> None:
    device = device_of(daemon)
    request = f"devices={device['addr']}&holder.name=job-17&holder.ttl_s=600"
    job = take(daemon, request)
    reload_now(daemon, OTHER)
    gone = reasons.MIG_INSTANCE_GONE

    def lease() -> dict[str, Any]:
        return dict(daemon.get(f"/v1/leases/{job['id']}")[1])

    eventually(lambda: lease()["reason_code"] == gone, "the reason")
    why = "the MIG instance no longer exists"
    assert (lease()["state"], why in lease()["reason"]) == ("unavailable", True)
    status = daemon.status()
    (problem,) = [one for one in status["problems"] if one["code"] == gone and one["devices"]]
    assert (problem["level"], problem["devices"]) == ("problem", [device["addr"]])
    assert f"lease {job['id'][:8]} of root ({device['addr']}): {why}" == problem["text"]
    assert status["state"] == "degraded"
    refused, answer = daemon.ask("POST", "/v1/leases", request)
    assert (refused >= 400, answer["code"]) == (True, gone)
    assert why in daemon.host.run(["yunion-mps", "env", device["addr"]]).stderr
    hook = daemon.ask("POST", f"/v1/leases/{job['id']}/bind", "pid=1")[1]
    assert (hook["code"], why in hook["detail"]) == (gone, True)
    inherited = {**daemon.host.env, **job["environment"]}
    command = ["yunion-mps", "run", "--inherit", "true"]
    refusal = daemon.host.run(command, env=inherited)
    assert (refusal.returncode, why in refusal.stderr) == (1, True)
    assert [one["id"] for one in leases_of(daemon)] == [job["id"]], "it is kept"


def test_a_host_whose_only_device_is_a_leased_instance_is_ready(make_divided: MakeDivided) -> None:
    daemon = make_divided([{"kind": "h100"}], "mig: 3g.40gb").start().wait_ready()
    take(daemon, f"devices={device_of(daemon)['addr']}&holder.name=job-17&holder.ttl_s=600")
    daemon.host.divide("mig: all-disabled\n  virtual_number: 2")
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    assert (daemon.status()["state"], daemon.get("/readyz")) == ("ready", (200, "ok\n"))


def test_what_a_job_starts_later_has_the_instance_created_again(daemon: Daemon) -> None:
    device = device_of(daemon)
    job = start_job(daemon.host, "--device", device["addr"])
    before = environment(daemon)
    destroy(daemon)
    uuid = wait_for_new_instance(daemon, device["gpu_uuid"])
    shown = run_job(
        daemon.host, "--inherit", "env", env={**daemon.host.env, **before}, check=True
    ).stdout.splitlines()
    assert f"CUDA_VISIBLE_DEVICES={uuid}" in shown
    assert {line for line in shown if line.startswith("CUDA_MPS_PIPE")} == {
        f"CUDA_MPS_PIPE_DIRECTORY={path}"
        for name, path in environment(daemon).items()
        if name == "CUDA_MPS_PIPE_DIRECTORY"
    }
    end_job(job)
    eventually(lambda: not leases_of(daemon), "the end of the lease")


def test_a_request_waits_for_the_layout_of_its_gpu(make_divided: MakeDivided) -> None:
    daemon = make_divided([{"kind": "a100"}], "mig: all-balanced").start().wait_ready()
    why = daemon.get("/v1/gpus")[1]["gpus"][0]["reason"]
    refused = run_job(daemon.host, "--gpu", "00:06.0", "true").stderr
    assert f"cannot be allocated now: GPU 00:06.0: {why} [{reasons.MIG_RESET_REQUIRED}]" in refused
    waiting = queued(daemon, "gpu=00:06.0")
    daemon.host.gpus[0].reset()
    eventually(lambda: daemon.polls() and leases_of(daemon), "the lease")
    waiting.close()


@pytest.mark.parametrize("daemon", [MIG], indirect=True)
def test_a_stop_does_not_end_a_job_on_a_whole_instance(daemon: Daemon) -> None:
    job = start_job(daemon.host)
    assert daemon.stop(signal.SIGTERM) == 0
    assert job.poll() is None
    end_job(job)


def test_run_across_uses_whole_gpus_and_warns_if_only_instances_are_left(make_divided: MakeDivided) -> None:
    daemon = make_divided([{"kind": "h100", "count": 4}], MIG, MIG, 2, 2).start().wait_ready()
    command = ("--count", "2", "--across", "printenv", "YUNION_MPS_DEVICE")
    first = run_job(daemon.host, *command, check=True)
    assert (first.stdout, first.stderr) == ("00:08.0-0,00:09.0-0\n", "")
    for slot in range(2):
        take(daemon, f"holder.name=job{slot}&holder.ttl_s=600&devices=00:08.0-{slot}")
    second = run_job(daemon.host, *command, check=True)
    gpus = {address.partition("-g")[0] for address in second.stdout.strip().split(",")}
    assert gpus == {"00:06.0", "00:07.0"}
    first_instance = second.stdout.partition(",")[0]
    assert second.stderr.splitlines() == [
        "yunion-mps: a CUDA process can use only one MIG instance, by default the first: " + first_instance,
        "yunion-mps: start one process per instance, each with its UUID in CUDA_VISIBLE_DEVICES",
    ]
