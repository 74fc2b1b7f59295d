"""MIG instances that other programs use or destroy: how they are reported, and when they are leased."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from yunion_mps.core import reasons

from integration.daemon_host import Daemon, eventually
from integration.lease_host import leases_of, queued, run_job, take
from integration.mig_devices import devices, instances
from simhost import SimHost
from simhost.gpu import MigDevice

MIG = "mig: [3g.40gb, 2g.20gb]"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with SimHost.create([{"kind": "h100"}]) as host:
        host.divide(MIG)
        with Daemon(host) as made:
            made.configure(cuda_mps_scope="gpu")
            yield made


def larger_instance(daemon: Daemon) -> tuple[MigDevice, str]:
    """The larger instance and its address."""
    (found,) = [one for one in instances(daemon) if one.profile == "3g.40gb"]
    return found, f"00:06.0-g{found.gpu_instance}"


def use_larger_instance(daemon: Daemon) -> str:
    """Let this process, which has no lease, use the larger instance; returns its address."""
    instance, address = larger_instance(daemon)
    daemon.host.gpus[0].add_process(os.getpid(), 700, on=(instance.gpu_instance, 0))
    return address


def destroy_larger_instance(daemon: Daemon) -> tuple[str, str]:
    """Destroy the larger instance; returns the UUID and the address that it had."""
    instance, address = larger_instance(daemon)
    for what in ("-dci", "-dgi"):
        daemon.host.run(["nvidia-smi", "mig", "-i", 0, what, "-gi", instance.gpu_instance], check=True)
    return instance.uuid, address


def test_a_whole_instance_that_another_program_uses_is_not_leased(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    address = use_larger_instance(daemon)
    refused = run_job(daemon.host, "--gpu", address, "true")
    why = f"PID {os.getpid()} of root"
    assert (why in refused.stderr, refused.returncode) == (True, 5)
    row = devices(daemon)[address]
    assert (row["state"], row["reason_code"]) == ("unavailable", reasons.PROCESS_WITHOUT_LEASE)
    assert leases_of(daemon) == []
    other = run_job(daemon.host, "printenv", "YUNION_MPS_DEVICE", check=True).stdout.strip()
    assert other in devices(daemon).keys() - {address}
    waiting = queued(daemon, f"gpu={address}")
    daemon.host.gpus[0].remove_process(os.getpid())
    eventually(lambda: daemon.polls() and leases_of(daemon), "the lease")
    assert devices(daemon)[address]["state"] == "leased"
    waiting.close()


def test_a_poll_finds_what_another_program_uses_and_when_it_ends(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    address = use_larger_instance(daemon)
    eventually(lambda: daemon.polls() and devices(daemon)[address]["state"] == "unavailable", "the use")
    assert daemon.status()["devices"]["unavailable"] == 1
    daemon.host.gpus[0].remove_process(os.getpid())
    eventually(lambda: devices(daemon)[address]["state"] == "free", "its end")


def test_a_leased_instance_stays_leased_whatever_uses_it(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    _, address = larger_instance(daemon)
    take(daemon, f"holder.name=job&holder.ttl_s=600&devices={address}")
    use_larger_instance(daemon)
    eventually(lambda: daemon.polls() and daemon.status()["problems"], "the warning")
    assert devices(daemon)[address]["state"] == "leased"


SLICED = "type: NVIDIA_GPU_SHARE\n  virtual_number: 2"


@pytest.mark.parametrize("more", ["", f"\n  {SLICED}"], ids=["whole", "time-sliced"])
def test_a_process_without_a_lease_on_an_instance_is_a_warning(daemon: Daemon, more: str) -> None:
    daemon.host.divide(MIG + more)
    daemon.start().wait_ready()
    address = use_larger_instance(daemon)
    (problem,) = daemon.status()["problems"]
    found = (problem["level"], problem["code"], problem["gpu"], problem["pid"])
    assert found == ("warning", reasons.PROCESS_WITHOUT_LEASE, address, os.getpid())
    assert f"uses GPU {address} (700 MiB) without a lease" in problem["text"]
    shown = daemon.host.run(["yunion-mps", "who"], check=True).stdout
    assert "without a lease" in " ".join(shown.split())


def test_a_process_without_a_lease_on_a_time_sliced_gpu_is_a_warning(daemon: Daemon) -> None:
    daemon.host.divide(SLICED)
    daemon.start().wait_ready()
    daemon.host.gpus[0].add_process(os.getpid(), 700)
    (problem,) = daemon.status()["problems"]
    assert (problem["level"], problem["code"]) == ("warning", reasons.PROCESS_WITHOUT_LEASE)


def test_a_process_outside_mps_on_an_instance_is_a_problem(daemon: Daemon) -> None:
    daemon.host.divide(f"{MIG}\n  virtual_number: 2")
    daemon.start().wait_ready()
    address = use_larger_instance(daemon)
    (problem,) = daemon.status()["problems"]
    assert (problem["level"], problem["code"]) == ("problem", reasons.PROCESS_OUTSIDE_MPS)
    assert (problem["gpu"], daemon.status()["outside_mps"]) == (address, 1)


@pytest.mark.parametrize("more", ["", "\n  virtual_number: 2"], ids=["whole", "mps"])
def test_no_lease_has_an_instance_that_was_just_destroyed(daemon: Daemon, more: str) -> None:
    daemon.host.divide(MIG + more)
    daemon.start().wait_ready()
    before, _ = destroy_larger_instance(daemon)
    wait = ("--wait=1m",) if more else ()  # until its control daemon is ready
    there = run_job(daemon.host, *wait, "--gpu", "00:06.0", "printenv", "CUDA_VISIBLE_DEVICES", check=True)
    assert there.stdout.strip() in {one.uuid for one in instances(daemon)} - {before}


def test_a_destroyed_instance_that_cannot_be_created_again_is_refused(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    daemon.host.fail("nvmlDeviceCreateGpuInstanceWithPlacement", "insufficient_resources")
    _, address = destroy_larger_instance(daemon)
    refused = run_job(daemon.host, "--device", address, "true")
    assert (refused.returncode != 0, reasons.MIG_INSTANCE_GONE in refused.stderr) == (True, True)
    assert leases_of(daemon) == []
    other = run_job(daemon.host, "printenv", "CUDA_VISIBLE_DEVICES", check=True).stdout.strip()
    assert other in {one.uuid for one in instances(daemon)}


def test_a_repeated_request_gets_the_instance_that_is_created_again(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    _, address = larger_instance(daemon)
    request = f"devices={address}&holder.name=job&holder.ttl_s=600"
    lease = take(daemon, request)
    before, _ = destroy_larger_instance(daemon)
    again = take(daemon, request)
    assert again["id"] == lease["id"]
    assert again["environment"]["CUDA_VISIBLE_DEVICES"] in {one.uuid for one in instances(daemon)} - {before}


@pytest.mark.parametrize("asks", ["take", "bind"])
def test_a_lease_whose_instance_was_just_destroyed_is_refused(daemon: Daemon, asks: str) -> None:
    daemon.start().wait_ready()
    _, address = larger_instance(daemon)
    request = f"devices={address}&holder.name=job&holder.ttl_s=600"
    lease = take(daemon, request)
    daemon.host.fail("nvmlDeviceCreateGpuInstanceWithPlacement", "insufficient_resources")
    destroy_larger_instance(daemon)
    path = {"take": ("/v1/leases", request), "bind": (f"/v1/leases/{lease['id']}/bind", f"pid={os.getpid()}")}
    status, answer = daemon.ask("POST", *path[asks])
    assert (status >= 400, answer["code"]) == (True, reasons.MIG_INSTANCE_GONE)
    assert answer["hint"].endswith(f"yunion-mps lease release {lease['id']}")
    assert [one["id"] for one in leases_of(daemon)] == [lease["id"]], "it is kept"


def test_a_repeated_request_ignores_the_jobs_of_its_own_lease(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    request = f"devices={larger_instance(daemon)[1]}&holder.name=job&holder.ttl_s=600"
    lease = take(daemon, request)
    use_larger_instance(daemon)
    assert take(daemon, request)["id"] == lease["id"]


def test_a_leased_gpu_put_in_mig_mode_while_stopped_outdates_its_lease(daemon: Daemon) -> None:
    daemon.host.divide(2)
    daemon.start().wait_ready()
    request = "devices=00:06.0-0&holder.name=job&holder.ttl_s=600"
    lease = take(daemon, request)
    assert daemon.stop() == 0
    daemon.host.run(["nvidia-smi", "-i", 0, "-mig", 1], check=True)
    daemon.host.divide(MIG)
    daemon.start().wait_ready()
    (problem,) = daemon.status()["problems"]
    assert (problem["code"], problem["devices"]) == (reasons.LEASE_OUTDATED, ["00:06.0-0"])
    for path, words in (("/v1/leases", request), (f"/v1/leases/{lease['id']}/bind", f"pid={os.getpid()}")):
        answer = daemon.ask("POST", path, words)[1]
        assert answer["code"] == reasons.LEASE_OUTDATED
        assert answer["detail"] == "device 00:06.0-0 is unavailable: the control daemon of its lease is gone"
        assert answer["hint"].endswith(f"yunion-mps lease release {lease['id']}")
    assert set(devices(daemon)) > {address for _, address in [larger_instance(daemon)]}, (
        "the layout is in effect"
    )


def run_in_lease(daemon: Daemon, lease: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run a command that prints the instance, in the environment that the lease had when it was granted."""
    environment = {**daemon.host.env, **lease["environment"]}
    return run_job(daemon.host, "--inherit", "printenv", "CUDA_VISIBLE_DEVICES", env=environment)


def test_inherit_gets_the_instance_that_is_created_again(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    lease = take(daemon, f"devices={larger_instance(daemon)[1]}&holder.name=job&holder.ttl_s=600")
    before, _ = destroy_larger_instance(daemon)
    done = run_in_lease(daemon, lease)
    assert done.stdout.strip() in {one.uuid for one in instances(daemon)} - {before}, done.stderr


def test_inherit_refuses_an_instance_that_was_just_destroyed(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    lease = take(daemon, f"devices={larger_instance(daemon)[1]}&holder.name=job&holder.ttl_s=600")
    daemon.host.fail("nvmlDeviceCreateGpuInstanceWithPlacement", "insufficient_resources")
    destroy_larger_instance(daemon)
    done = run_in_lease(daemon, lease)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"[{reasons.MIG_INSTANCE_GONE}]" in done.stderr
    assert f"yunion-mps lease release {lease['id']}" in done.stderr


def test_inherit_refuses_a_destroyed_instance_even_without_a_lease(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    instance, address = larger_instance(daemon)
    bare = {"environment": daemon.get(f"/v1/devices/{address}")[1]["client_environment"]}
    assert run_in_lease(daemon, bare).stdout.strip() == instance.uuid
    daemon.host.fail("nvmlDeviceCreateGpuInstanceWithPlacement", "insufficient_resources")
    destroy_larger_instance(daemon)
    gone = f"[{reasons.MIG_INSTANCE_GONE}]"
    eventually(lambda: daemon.polls() and gone in run_in_lease(daemon, bare).stderr, "the refusal")
    daemon.kill()
    assert run_in_lease(daemon, bare).returncode == 0, "the daemon cannot be reached"
