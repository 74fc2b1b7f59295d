"""MIG layouts that are changed or restored while leases, other programs or the driver are in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from yunion_mps.core import reasons

from integration.conftest import MakeDivided
from integration.daemon_host import Daemon, eventually
from integration.mig_devices import devices, gpu, instances, profiles
from integration.test_mig import BALANCED, MIG, daemon
from simhost.mps import StandIns

__all__ = ["daemon"]


def lease_instance(daemon: Daemon, profile: str) -> str:
    """Lease an instance of this profile by name, and return its address."""
    (one,) = [one for one in instances(daemon) if one.profile == profile]
    address = f"00:06.0-g{one.gpu_instance}"
    words = f"holder.name=job&holder.ttl_s=600&devices={address}"
    assert daemon.ask("POST", "/v1/leases", words)[0] == 201
    return address


def create_instance(daemon: Daemon, profile: str) -> str:
    """Create an instance as another program does, and return its address."""
    before = {one.gpu_instance for one in instances(daemon)}
    daemon.host.create_mig_devices(0, profile)
    (one,) = [one for one in instances(daemon) if one.gpu_instance not in before]
    return f"00:06.0-g{one.gpu_instance}"


def losses(daemon: Daemon) -> dict[str, str]:
    shown = daemon.host.run(["yunion-mps", "plan", "-o", "json"], check=True).stdout
    return {one["subject"]: one["holder"] for one in json.loads(shown)["losses"]}


def test_reload_now_names_what_it_takes_away_and_then_does(daemon: Daemon) -> None:
    daemon.host.divide("mig: [3g.40gb, 1g.10gb]")
    daemon.start().wait_ready()
    leased, foreign = lease_instance(daemon, "3g.40gb"), create_instance(daemon, "1g.10gb")
    assert losses(daemon) == {}
    daemon.host.divide("mig: 7g.80gb")
    named = {leased: "job of root", foreign: "another program (1g.10gb)"}
    assert losses(daemon) == named
    assert len(instances(daemon)) == 3, "a plan changes nothing"
    done = daemon.host.run(["yunion-mps", "reload", "--now", "--yes"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("The MIG layouts will remove these:\n")
    assert [word in done.stderr for word in (*named, *named.values())] == [True] * 4
    assert profiles(daemon) == ["7g.80gb"]
    assert losses(daemon) == {}


def test_another_layout_leaves_the_compute_mode_as_it_is(daemon: Daemon) -> None:
    daemon.host.divide("mig: [3g.40gb, 1g.10gb]")
    daemon.start().wait_ready()
    daemon.host.divide("mig: 7g.80gb")
    assert {change["kind"] for change in daemon.get("/v1/plan")[1]["changes"]} == {"MIG layout", "budget"}
    daemon.host.run(["yunion-mps", "reload", "--drain"], check=True)
    assert gpu(daemon)["compute_mode"] == "Default"


@pytest.mark.parametrize("way", ["NVIDIA_MPS", "NVIDIA_GPU_SHARE"])
def test_reload_now_does_not_keep_a_leased_gpu_as_it_was(daemon: Daemon, way: str) -> None:
    daemon.host.divide(f"type: {way}\n  virtual_number: 2")
    daemon.start().wait_ready()
    words = "holder.name=job&holder.ttl_s=600&allow_unlimited=true&devices=00:06.0-0"
    assert daemon.ask("POST", "/v1/leases", words)[0] == 201
    daemon.host.divide("mig: 3g.40gb")
    done = daemon.host.run(["yunion-mps", "reload", "--now", "--yes"])
    assert done.returncode == 0, done.stderr
    assert (profiles(daemon), gpu(daemon)["sharing"]) == (["3g.40gb"], "mig")
    assert [one["code"] for one in daemon.status()["problems"]] == ["lease_outdated"]


def test_reload_now_destroys_later_only_what_it_has_named(daemon: Daemon) -> None:
    daemon.host.divide("mig: 3g.40gb")
    daemon.start().wait_ready()
    (ours,) = instances(daemon)
    daemon.host.gpus[0].add_process(4321, 100, on=(ours.gpu_instance, 0))
    daemon.host.divide("mig: 7g.80gb")
    assert daemon.host.run(["yunion-mps", "reload", "--now", "--yes", "--timeout", "1"]).returncode == 1
    late = create_instance(daemon, "1g.10gb")
    daemon.host.gpus[0].remove_process(4321)
    in_the_way = reasons.MIG_FOREIGN_INSTANCE
    eventually(lambda: gpu(daemon)["reason_code"] == in_the_way or profiles(daemon) == ["7g.80gb"], "a poll")
    assert profiles(daemon) == ["1g.10gb", "3g.40gb"]
    assert late in losses(daemon)
    daemon.host.run(["yunion-mps", "reload", "--now", "--yes"], check=True)
    assert profiles(daemon) == ["7g.80gb"]


def test_a_leased_instance_stays_whole_until_its_lease_ends(daemon: Daemon) -> None:
    daemon.host.divide("mig: [3g.40gb, 1g.10gb]")
    daemon.start().wait_ready()
    leased = lease_instance(daemon, "3g.40gb")
    daemon.host.divide("type: NVIDIA_GPU_SHARE\n  mig: [3g.40gb, 1g.10gb]\n  virtual_number: 2")
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    shared = {row["addr"]: row["sharing"] for row in daemon.get("/v1/gpus")[1]["gpus"]}
    assert shared[leased] == "none"
    names = [row["addr"] for row in daemon.get("/v1/devices?limit=100")[1]["isolated_devices"]]
    assert (names.count(leased), len(names), len({*names})) == (1, 3, 3)
    daemon.host.run(["yunion-mps", "lease", "release", "job"], check=True)
    eventually(lambda: {f"{leased}-0", f"{leased}-1"} <= devices(daemon).keys(), "the new division")


def test_without_mig_a_leased_instance_names_its_lease(daemon: Daemon) -> None:
    daemon.host.divide("mig: [3g.40gb, 1g.10gb]")
    daemon.start().wait_ready()
    leased = lease_instance(daemon, "3g.40gb")
    daemon.host.divide(2)
    for method, path in (("GET", "/v1/plan"), ("POST", "/v1/reload")):
        changes = daemon.ask(method, path)[1]["changes"]
        effects = {one["subject"]: one["effect"] for one in changes if one["kind"] == "budget"}
        assert (effects.pop(leased), {*effects.values()}) == ("once lease job of root has ended", {"at once"})
    assert devices(daemon)[leased]["state"] == "leased"
    found = daemon.host.run(["yunion-mps", "doctor"]).stdout
    hint = "once no lease holds its instances (yunion-mps lease list): nvidia-smi -i"
    assert hint in " ".join(found.split())
    daemon.configure(enable_cuda_mps=False)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    assert "-mig 0" not in daemon.host.run(["yunion-mps", "doctor"]).stdout


def test_a_drain_waits_for_the_lease_of_an_instance_to_be_removed(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    number = lease_instance(daemon, "3g.40gb").partition("-")[2]
    daemon.host.divide("mig: all-1g.10gb")
    done = daemon.host.run(["yunion-mps", "reload", "--drain", "--timeout", "1"])
    assert done.returncode == 1
    assert "still pending after 1s: GPU 00:06.0: its MIG layout waits for " in done.stderr
    assert f"lease job of root on instance {number} (3g.40gb) to end; everything else" in done.stderr
    with daemon.host.popen(["yunion-mps", "reload", "--drain"]) as process:
        eventually(lambda: daemon.polls(), "a poll")
        assert process.poll() is None
        daemon.host.run(["yunion-mps", "lease", "release", "job"], check=True)
        assert process.wait() == 0
    assert profiles(daemon) == ["1g.10gb"] * 7


def test_reload_now_names_what_it_did_at_once(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    lease_instance(daemon, "3g.40gb")
    daemon.host.divide("mig: all-1g.10gb")
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    done = daemon.host.run(["yunion-mps", "reload", "--now", "--yes"], check=True)
    assert "Reloaded with these changes:" in done.stdout
    assert "destroyed g" in done.stdout
    assert "created g" in done.stdout


@pytest.mark.parametrize("entry", ["mig: all-3g.40gb\n  virtual_number: 2", MIG])
def test_reload_now_says_of_nothing_that_it_has_done_that_it_comes_later(daemon: Daemon, entry: str) -> None:
    daemon.host.divide(entry)
    daemon.start().wait_ready()
    address = sorted(devices(daemon))[0]
    words = f"holder.name=job&holder.ttl_s=600&devices={address}"
    assert daemon.ask("POST", "/v1/leases", words)[0] == 201
    daemon.host.divide("mig: all-1g.10gb")
    done = daemon.host.run(["yunion-mps", "reload", "--now", "--yes"], check=True)
    assert profiles(daemon) == ["1g.10gb"] * 7
    assert "MIG layout" in done.stdout
    assert "later" not in done.stdout
    assert "lease job" not in done.stdout


def test_the_status_names_the_lease_that_a_whole_gpu_waits_for(daemon: Daemon) -> None:
    daemon.host.divide(2)
    daemon.start().wait_ready()
    words = "holder.name=job&holder.ttl_s=600&devices=00:06.0-0"
    assert daemon.ask("POST", "/v1/leases", words)[0] == 201
    daemon.host.divide(MIG)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    status = daemon.status()
    assert status["notice"] == ""
    reasons = [problem["text"] for problem in status["problems"]]
    assert any(text.endswith("waits for lease job of root to end") for text in reasons), reasons
    refused = daemon.host.run(["yunion-mps", "run", "--device", "00:06.0-1", "true"])
    assert refused.returncode == 1, refused.stderr
    assert "lease job of root" in refused.stderr
    shown = daemon.host.run(["yunion-mps", "env", "00:06.0-0"])
    assert shown.returncode == 0, shown.stderr
    assert daemon.host.run(["yunion-mps", "reload", "--drain", "--timeout", "1"]).returncode == 1
    daemon.host.run(["yunion-mps", "lease", "release", "job"], check=True)
    assert daemon.host.run(["yunion-mps", "reload", "--drain"]).returncode == 0
    assert profiles(daemon) == BALANCED


def test_restore_fails_until_the_gpu_is_reset(make_divided: MakeDivided) -> None:
    entry = "mig: all-disabled\n  virtual_number: 2\n  mig_restore: true"
    daemon = make_divided([{"kind": "a100", "mig": True}], entry).start().wait_ready()
    (gpu,) = daemon.host.gpus
    gpu.reset()
    eventually(lambda: not gpu.mig, "the mode")
    daemon.kill()
    for _ in range(2):
        assert daemon.run("--restore") == 1, daemon.log
        assert "MIG mode will be on after the next reset of the GPU; reset it: nvidia-smi" in daemon.log
    gpu.reset()
    assert daemon.run("--restore") == 0, daemon.log
    assert gpu.mig


@pytest.mark.parametrize("entry", ["virtual_number: 2", "mig: all-3g.40gb\n  virtual_number: 2"])
def test_an_idle_mps_server_is_ended_for_a_layout(daemon: Daemon, entry: str) -> None:
    """By the real control daemon, which does not end one with clients."""
    host = daemon.host
    with StandIns(host) as stand_ins:
        host.divide(entry)
        daemon.env["PATH"] = host.env["PATH"]
        daemon.start().wait_ready()
        place = Path(daemon.status()["domains"][0]["pipe_directory"])
        job = stand_ins.attached(place)
        (server,) = stand_ins.servers()
        on = [one.gpu_instance for one in instances(daemon) if one.uuid in str(place)]
        host.gpus[0].add_process(server, 100, on=(on[0], 0) if on else None)
        host.divide(MIG)
        assert daemon.ask("POST", "/v1/reload")[0] == 200
        eventually(lambda: daemon.polls(), "a poll")
        assert stand_ins.servers() == [server]
        job.end()
        eventually(lambda: not stand_ins.servers(), "the end of the server")
        host.gpus[0].remove_process(server)
        eventually(lambda: profiles(daemon) == BALANCED, "the layout")


def test_the_daemons_check_counts_what_a_layout_will_give(daemon: Daemon) -> None:
    daemon.configure(cuda_mps_scope="gpu")
    assert daemon.run("--check") == 0
    assert "the configuration is valid: 6 devices" in daemon.log, "four instances, and two of the other GPU"


def test_a_drain_admits_no_job_on_an_instance_that_has_to_go(daemon: Daemon) -> None:
    """With MPS on instances, and the real control daemon; it ends without a second drain."""
    host = daemon.host
    with StandIns(host) as stand_ins:
        host.divide("mig: [3g.40gb, 3g.40gb]\n  virtual_number: 2")
        daemon.env["PATH"] = host.env["PATH"]
        daemon.start().wait_ready()
        place = Path(daemon.status()["domains"][0]["pipe_directory"])
        (number,) = [one.gpu_instance for one in instances(daemon) if one.uuid in str(place)]
        job = stand_ins.attached(place)
        host.divide("mig: [2g.20gb, 2g.20gb, 2g.20gb]")
        with host.popen(["yunion-mps", "reload", "--drain"]) as process:
            address = f"00:06.0-g{number}-1"
            eventually(lambda: devices(daemon)[address]["state"] == "pending", "the drain")
            refused = host.run(["yunion-mps", "run", "--device", address, "true"])
            assert refused.returncode == 1, refused.stderr
            late = stand_ins.client(place)
            assert late.says() == "asking"
            job.end()
            assert late.says() == "attached"
            late.end()
            assert process.wait() == 0
        assert profiles(daemon) == ["2g.20gb"] * 3


@pytest.mark.parametrize("before", ["mig: [3g.40gb, 3g.40gb]\n  virtual_number: 2", "virtual_number: 2"])
def test_a_drain_outlasts_the_lease_that_blocks_the_layout(daemon: Daemon, before: str) -> None:
    """With the real control daemon, although NVML does not list its server."""
    host = daemon.host
    with StandIns(host) as stand_ins:
        host.divide(before)
        daemon.env["PATH"] = host.env["PATH"]
        daemon.start().wait_ready()
        address = sorted(devices(daemon))[0]
        words = f"holder.name=job&holder.ttl_s=600&devices={address}"
        status, lease = daemon.ask("POST", "/v1/leases", words)
        assert status == 201
        place = Path(lease["environment"]["CUDA_MPS_PIPE_DIRECTORY"])
        job = stand_ins.attached(place)
        (drained,) = stand_ins.servers()
        host.divide("mig: [2g.20gb, 2g.20gb, 2g.20gb]")
        done = host.run(["yunion-mps", "reload", "--drain", "--timeout", "1"])
        assert done.returncode == 1, done.stderr
        late = stand_ins.client(place)
        assert late.says() == "asking"
        job.end()
        assert late.says() == "attached"
        if not stand_ins.asked:  # from 550 on a server admits clients until it ends
            assert drained not in stand_ins.servers(), "it admitted no other client"
        host.run(["yunion-mps", "lease", "release", "job"], check=True)
        late.end()
        eventually(lambda: profiles(daemon) == ["2g.20gb"] * 3, "the layout")
