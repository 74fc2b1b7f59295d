"""MIG on a host with a running daemon: devices, layouts, and what comes in between."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from yunion_mps.core import reasons

from integration.conftest import MakeDivided
from integration.daemon_host import Daemon, eventually
from integration.mig_devices import devices, free, gpu, instances, profiles

MIG = "mig: all-balanced"


@pytest.fixture
def daemon(make_divided: MakeDivided) -> Daemon:
    """On a host with an H100 in MIG mode, if the entry asks for it, beside one that is time-sliced."""
    sliced = "type: NVIDIA_GPU_SHARE\n  virtual_number: 2"
    return make_divided([{"kind": "h100", "count": 2}], MIG, sliced, cuda_mps_scope="gpu")


BALANCED = ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]


def test_a_start_applies_the_layout_and_a_command_runs_on_an_instance(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    assert profiles(daemon) == BALANCED
    assert set(devices(daemon)) == {f"00:06.0-g{one.gpu_instance}" for one in instances(daemon)}
    (big,) = [one for one in instances(daemon) if one.profile == "3g.40gb"]
    command = ["yunion-mps", "run", "--gpu", f"00:06.0-g{big.gpu_instance}", "env"]
    environment = daemon.host.run(command, check=True).stdout.splitlines()
    assert f"CUDA_VISIBLE_DEVICES={big.uuid}" in environment
    assert not [line for line in environment if line.startswith("CUDA_MPS_")]


def test_a_lease_of_an_instance_is_shown_by_every_command(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    address = sorted(devices(daemon))[0]
    for words in (
        ("lease", "take", "job", "--ttl", "1h", "--device", address),
        ("lease", "show", "job"),
        ("show", address),
        ("env", address),
        ("lease", "renew", "job"),
        ("lease", "release", "job"),
    ):
        shown = daemon.host.run(("yunion-mps", *words), check=True).stdout
        assert "not enforced" not in shown


def test_a_gpu_shows_how_it_is_shared(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    listed = daemon.get("/v1/gpus")[1]["gpus"]
    assert [(row["addr"], row["sharing"]) for row in listed if row["parent"] is None] == [
        ("00:06.0", "mig"),
        ("00:07.0", "time-slicing"),
    ]


def test_an_instance_without_a_compute_instance_is_listed(daemon: Daemon) -> None:
    daemon.host.gpus[0].mig = True
    daemon.host.run(("nvidia-smi", "mig", "-i", 0, "-cgi", "3g.40gb"), check=True)
    daemon.host.divide("mig: [1g.10gb]")
    daemon.start().wait_ready()
    found = [row for row in daemon.get("/v1/gpus")[1]["gpus"] if row["mig_profile"] == "3g.40gb"]
    assert [(row["state"], row["reason"]) for row in found] == [("not used", "it has no compute instance")]
    assert found[0]["addr"] not in devices(daemon)
    assert daemon.status()["problems"] == [], "it is none of our business"


def test_a_gpu_without_instances_yet_enforces_no_budget(make_divided: MakeDivided) -> None:
    entry = "type: NVIDIA_GPU_SHARE\n  mig: all-3g.20gb\n  virtual_number: 2"
    daemon = make_divided([{"kind": "a100"}], entry, cuda_mps_pipe_directory="/run/mps").start().wait_ready()
    row = daemon.host.run(["yunion-mps", "gpus"], check=True).stdout.splitlines()[1]
    assert row.partition(" mig ")[2].split()[0] == "-", row


def test_an_instance_that_another_program_divided_is_listed(daemon: Daemon) -> None:
    daemon.host.gpus[0].mig = True
    smi = ("nvidia-smi", "mig", "-i", 0)
    daemon.host.run((*smi, "-cgi", "3g.40gb"), check=True)
    number = re.findall(r"\|\s+0\s+MIG 3g.40gb\s+\d+\s+(\d+)", daemon.host.run((*smi, "-lgi")).stdout)[0]
    daemon.host.run((*smi, "-cci", "1c.3g.40gb,1c.3g.40gb", "-gi", number), check=True)
    daemon.host.divide("mig: [1g.10gb]")
    daemon.start().wait_ready()
    address = f"00:06.0-g{number}"
    rows = {row["addr"]: row for row in daemon.get("/v1/gpus")[1]["gpus"]}
    found, parent = rows[address], rows["00:06.0"]
    why = "another program divided it into 2 compute instances"
    assert (found["state"], found["reason"]) == ("not used", why)
    assert (found["reason_code"], found["uuid"]) == (reasons.MIG_FOREIGN_INSTANCE, None)
    assert (found["mig_profile"], found["parent"]) == ("3g.40gb", parent["uuid"])
    shown = daemon.host.run(["yunion-mps", "gpus"], check=True).stdout
    assert f"{address}: {why}" in " ".join(shown.split())
    assert address not in devices(daemon)
    status = daemon.status()
    assert (status["state"], status["problems"]) == ("ready", []), "it is none of our business"
    for command in ("status", "top --once", "list", "who"):
        daemon.host.run(["yunion-mps", *command.split()], check=True)
    metrics = daemon.host.run(["yunion-mps", "metrics"])
    assert "Traceback" not in metrics.stderr


def test_a_leased_instance_stays_until_its_lease_ends(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    (big,) = [one for one in instances(daemon) if one.profile == "3g.40gb"]
    words = f"holder.name=job&holder.ttl_s=600&devices=00:06.0-g{big.gpu_instance}"
    status, lease = daemon.ask("POST", "/v1/leases", words)
    assert status == 201, lease
    daemon.host.divide("mig: all-1g.10gb")
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    found = gpu(daemon)
    assert (found["state"], found["reason_code"]) == ("pending", reasons.MIG_IN_USE)
    shown = daemon.status()
    assert (shown["state"], [one["level"] for one in shown["problems"]]) == ("ready", ["pending"])
    assert daemon.log.count("<6>GPU 00:06.0: its MIG layout waits for ") == 1
    assert not re.search("^<[0-5]>", daemon.log, re.MULTILINE), "nothing is wrong"
    assert big in instances(daemon)
    leased = devices(daemon)[f"00:06.0-g{big.gpu_instance}"]
    assert (leased["state"], leased["reason"]) == ("leased", "")
    assert daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    eventually(lambda: profiles(daemon) == ["1g.10gb"] * 7, "the new layout")
    eventually(lambda: free(daemon) == 7, "seven free devices")


def test_a_start_beside_leases_logs_nothing_about_a_layout_that_is_applied(daemon: Daemon) -> None:
    daemon.host.divide(*["type: NVIDIA_GPU_SHARE\n  virtual_number: 2"] * 2)
    daemon.start().wait_ready()
    words = "holder.name=job&holder.ttl_s=600&devices=00:07.0-0&allow_unlimited=true"
    assert daemon.ask("POST", "/v1/leases", words)[0] == 201
    daemon.kill()
    daemon.host.divide(MIG, "type: NVIDIA_GPU_SHARE\n  virtual_number: 2")
    daemon.start().wait_ready()
    eventually(lambda: profiles(daemon) == BALANCED, "the layout")
    eventually(lambda: free(daemon) == 4, "its devices")
    assert not re.search("^<[0-5]>", daemon.log, re.MULTILINE)
    assert [event for event in daemon.get("/v1/events?kind=mig")[1]["events"] if event["code"]] == []


def test_a_client_on_an_instance_that_has_to_go_is_named(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    (big,) = [one for one in instances(daemon) if one.profile == "3g.40gb"]
    daemon.host.gpus[0].add_process(os.getpid(), 100, on=(big.gpu_instance, 0))
    daemon.host.divide("mig: all-1g.10gb")
    assert daemon.reload_now()[0] == 200
    found = gpu(daemon)
    assert found["reason_code"] == reasons.MIG_IN_USE
    assert f"PID {os.getpid()}" in found["reason"]
    assert big in instances(daemon)
    daemon.host.gpus[0].remove_process(os.getpid())
    eventually(lambda: profiles(daemon) == ["1g.10gb"] * 7, "the new layout")


def test_an_instance_that_is_destroyed_by_another_program_is_made_again(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    before = {row["id"] for row in devices(daemon).values()}
    (big,) = [one for one in instances(daemon) if one.profile == "3g.40gb"]
    daemon.host.run(["nvidia-smi", "mig", "-i", 0, "-dci", "-gi", big.gpu_instance], check=True)
    daemon.host.run(["nvidia-smi", "mig", "-i", 0, "-dgi", "-gi", big.gpu_instance], check=True)
    eventually(lambda: daemon.polls() and profiles(daemon) == BALANCED, "the instance")
    eventually(lambda: free(daemon) == 4, "its device")
    assert {row["id"] for row in devices(daemon).values()} == before
    events = daemon.get("/v1/events?kind=mig")[1]["events"]
    assert reasons.MIG_CHANGED in [event["code"] for event in events]


def test_each_instance_has_a_control_daemon_with_its_own_limits(daemon: Daemon) -> None:
    daemon.host.divide("mig: [3g.40gb, 2g.20gb]\n  virtual_number: 2", 2)
    daemon.configure(cuda_mps_scope="host")
    daemon.start().wait_ready()
    domains = {domain["name"]: domain for domain in daemon.status()["domains"]}
    for one, limit in zip(instances(daemon), ("19G", "9G")):
        domain = domains[f"00:06.0-g{one.gpu_instance}"]
        environment = Path(f"/proc/{domain['pid']}/environ").read_bytes().split(b"\0")
        assert f"CUDA_VISIBLE_DEVICES={one.uuid}".encode() in environment
        place = Path(domain["pipe_directory"])
        asked = daemon.control("get_default_device_pinned_mem_limit 0", pipe_directory=place)
        assert asked == [limit], "NVIDIA's program prints whole GiB"
        assert daemon.control("get_default_active_thread_percentage", pipe_directory=place) == ["50.0"]
    assert set(domains) == {"host", *(f"00:06.0-g{one.gpu_instance}" for one in instances(daemon))}
    assert [gpu.compute_mode for gpu in daemon.host.gpus] == ["default", "exclusive_process"]


def test_after_a_kill_in_a_call_the_next_daemon_finishes(daemon: Daemon) -> None:
    daemon.host.fail("nvmlGpuInstanceCreateComputeInstance", "success", times=1, delay_ms=60_000, skip=1)
    daemon.start()
    eventually(lambda: not daemon.host.show()["failures"], "the call")
    daemon.kill()
    daemon.start().wait_ready()
    eventually(lambda: profiles(daemon) == BALANCED, "the layout")
    eventually(lambda: free(daemon) == 4, "its devices")


def test_after_a_kill_in_a_destruction_the_next_daemon_finishes(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    daemon.host.divide("mig: all-1g.10gb")
    daemon.host.fail("nvmlGpuInstanceDestroy", "success", times=1, delay_ms=60_000, skip=1)
    reload = daemon.host.popen(["yunion-mps", "reload"])
    eventually(lambda: not daemon.host.show()["failures"], "the call")
    daemon.kill()
    reload.communicate()
    daemon.start().wait_ready()
    eventually(lambda: profiles(daemon) == ["1g.10gb"] * 7, "the layout")
    eventually(lambda: free(daemon) == 7, "its devices")


def test_a_gpu_includes_the_devices_of_its_instances(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    addresses = set(devices(daemon))
    found = daemon.get("/v1/devices?limit=0&addr=00:06.0")[1]["isolated_devices"]
    assert {row["addr"] for row in found} == addresses
    for name in ("00:06.0", daemon.host.gpus[0].uuid):
        listed = daemon.host.run(["yunion-mps", "list", "--gpu", name, "--output", "json"], check=True).stdout
        assert {row["addr"] for row in json.loads(listed)["isolated_devices"]} == addresses
        device = daemon.host.run(
            ["yunion-mps", "run", "--gpu", name, "printenv", "YUNION_MPS_DEVICE"], check=True
        ).stdout
        assert device.strip() in addresses


def test_status_and_plan_say_what_a_layout_waits_for(make_divided: MakeDivided) -> None:
    daemon = make_divided([{"kind": "a100"}], MIG).start().wait_ready()
    eventually(lambda: gpu(daemon)["reason_code"] == reasons.MIG_RESET_REQUIRED, "the reason")
    why = f"GPU 00:06.0: {gpu(daemon)['reason']}"
    status = daemon.get("/v1/status")[1]
    assert (status["notice"], status["notice_code"]) == (why, reasons.MIG_RESET_REQUIRED)
    plan = daemon.get("/v1/plan")[1]
    assert (plan["changes"], [one["pending"] for one in plan["pending"]]) == ([], [why])
    shown = daemon.host.run(["yunion-mps", "plan"], check=True).stdout
    title = "A reload would change nothing else; these changes are pending:"
    assert " ".join(shown.split()) == f"{title} Pending: {why}"
    shown = daemon.host.run(["yunion-mps", "status"]).stdout
    assert why in " ".join(shown.split())
    assert "no GPU on this host" not in shown
