"""The metrics of the real daemon: on its socket, by its command, and in a file."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from integration.daemon_host import Daemon, eventually
from integration.lease_host import STRANGER, take

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def printed(daemon: Daemon) -> str:
    done = daemon.host.run(["yunion-mps", "metrics"], env=daemon.env)
    assert (done.returncode, done.stderr) == (0, "")
    return str(done.stdout)


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(daemon: Daemon, name: str, **labels: str) -> float | None:
    return samples(printed(daemon)).get((name, tuple(sorted(labels.items()))))


def of_device(daemon: Daemon, address: str) -> dict[str, str]:
    device = daemon.get(f"/v1/devices/{address}")[1]
    return {"device": address, "gpu": address.rpartition("-")[0], "gpu_uuid": device["gpu_uuid"]}


@pytest.fixture
def textfile(daemon: Daemon) -> Path:
    """Where the daemon, once it runs, is to keep its metrics."""
    daemon.configure(metrics_textfile="/srv/metrics/yunion-mps.prom")
    directory = daemon.host.root / "srv/metrics"
    directory.mkdir(parents=True)
    return directory / "yunion-mps.prom"


def test_the_command_prints_what_is_true(ready_daemon: Daemon) -> None:
    device = of_device(ready_daemon, "00:06.0-1")
    assert value(ready_daemon, "yunion_mps_up") == 1
    assert value(ready_daemon, "yunion_mps_domain_state", domain="host", state="ready") == 1
    assert value(ready_daemon, "yunion_mps_device_memory_limit_bytes", **device) == 5760 << 20
    assert value(ready_daemon, "yunion_mps_device_leased", **device) == 0
    request = f"holder.pid={os.getpid()}&devices=00:06.0-1&allow_unlimited=true"
    take(ready_daemon, request)
    eventually(lambda: value(ready_daemon, "yunion_mps_device_leased", **device) == 1, "the lease")
    assert value(ready_daemon, "yunion_mps_leases", binding="process") == 1


@pytest.mark.gpus({"kind": "h100", "virtual_number": 4})
def test_a_job_over_budget_degrades_the_api_the_metric_and_status_alike(ready_daemon: Daemon) -> None:
    host, daemon = ready_daemon.host, ready_daemon
    with host.popen(["sleep", "60"], env={**daemon.env, "YUNION_MPS_DEVICE": "00:06.0-1"}) as sleeper:
        host.gpus[0].add_process(sleeper.pid, 30_000, "M+C")
        status = daemon.status()
        (problem,) = (one for one in status["problems"] if one["level"] == "problem")
        assert (problem["code"], problem["devices"], problem["pid"]) == (
            "over_budget",
            ["00:06.0-1"],
            sleeper.pid,
        )
        assert status["state"] == "degraded"
        assert value(daemon, "yunion_mps_state", state="degraded") == 1
        assert value(daemon, "yunion_mps_problems", level="problem", reason="over_budget") == 1
        told = json.loads(host.run(["yunion-mps", "status", "-o", "json"], check=True).stdout)
        assert (told["state"], told["problems"]) == (status["state"], status["problems"])
        sleeper.kill()


@pytest.mark.gpus({"kind": "h100", "virtual_number": 4})
def test_a_leases_peak_survives_the_daemon(ready_daemon: Daemon) -> None:
    host, daemon = ready_daemon.host, ready_daemon

    def lease() -> list[object]:
        (one,) = daemon.get("/v1/leases")[1]["leases"]
        (budget,) = one["budgets"]
        return [budget["memory_peak_mib"], budget["sm_utilization"]]

    with host.popen(["yunion-mps", "run", "--device", "00:06.0-1", "--", "sleep", "600"]) as job:
        eventually(lambda: daemon.get("/v1/leases")[1]["leases"], "its lease")
        assert lease() == [None, None]
        host.gpus[0].load(64, 55, 310.5)
        host.gpus[0].add_process(job.pid, 3000, "M+C", sm=37)
        eventually(lambda: daemon.polls() and lease() == [3000, 37], "a poll")
        device = of_device(daemon, "00:06.0-1")
        assert value(daemon, "yunion_mps_device_sm_utilization_ratio", **device) == 0.37
        assert value(daemon, "yunion_mps_device_memory_peak_bytes", **device) == 3000 << 20
        (gpu,) = daemon.get("/v1/gpus")[1]["gpus"]
        measured = [gpu[name] for name in ("utilization", "memory_used_mib", "temperature_c", "power_w")]
        assert measured == [64, 3000, 55, 310.5]
        (client,) = daemon.get("/v1/clients?seen=true")[1]["clients"]
        assert client["sm_utilization_by_gpu"] == [37]
        host.gpus[0].add_process(job.pid, 1000, "M+C")
        eventually(lambda: daemon.polls() and lease() == [3000, None], "another poll")
        daemon.kill()
        daemon.start().wait_ready()
        assert lease() == [3000, None]
        job.kill()


def test_the_file_is_whole_and_goes_where_a_reload_says_until_a_stop(daemon: Daemon, textfile: Path) -> None:
    daemon.start().wait_ready()
    eventually(textfile.exists, "the file", trouble=lambda: daemon.log)
    assert samples(textfile.read_text())["yunion_mps_up", ()] == 1
    assert stat.S_IMODE(textfile.stat().st_mode) == 0o644
    daemon.configure(metrics_textfile="/srv/metrics/other.prom")
    daemon.signal(signal.SIGHUP)
    other = textfile.with_name("other.prom")
    eventually(other.exists, "the other file", 10, lambda: daemon.log)  # and not in 15 s
    eventually(lambda: os.listdir(textfile.parent) == [other.name], "the end of the first file")
    assert daemon.stop() == 0
    assert os.listdir(textfile.parent) == []


def test_a_missing_textfile_directory_is_one_warning(daemon: Daemon, textfile: Path) -> None:
    textfile.parent.rmdir()
    daemon.start().wait_ready()
    wrong = f"cannot write metrics_textfile {textfile}: No such file or directory"
    daemon.wait_log(f"{wrong}; retrying every 15 s")
    assert daemon.warnings()[wrong] == "metrics_file_failed"
    assert daemon.status()["devices"]["available"] == 4
    daemon.signal(signal.SIGHUP)  # the same again
    daemon.wait_log("reload requested by SIGHUP")
    assert daemon.log.count(wrong) == 1
    textfile.parent.mkdir()
    daemon.configure(metrics_textfile="/srv/metrics/yunion-mps.prom", cuda_mps_stop_timeout_s=9)
    daemon.signal(signal.SIGHUP)
    eventually(textfile.exists, "the file", trouble=lambda: daemon.log)
    eventually(lambda: wrong not in daemon.warnings(), "the end of the warning")


def test_no_directory_that_another_user_laid_out_is_followed(daemon: Daemon) -> None:
    theirs, precious = daemon.host.root / "srv/theirs", daemon.host.root / "srv/precious"
    for directory in (theirs, precious):
        directory.mkdir(parents=True)
    (precious / "a.prom").write_text("mine\n")
    (theirs / "metrics").symlink_to(precious)
    os.chown(theirs, STRANGER, STRANGER)  # the link stays root's, as a hard link to one would be
    daemon.configure(metrics_textfile="/srv/theirs/metrics/a.prom")
    daemon.start().wait_ready()
    wrong = f"{theirs}/metrics is a symlink of root, which is not followed"
    warning = eventually(lambda: [one for one in daemon.warnings() if wrong in one], "the warning")
    assert warning == [f"cannot write metrics_textfile {theirs}/metrics/a.prom: {wrong}"]
    assert daemon.stop() == 0
    assert (precious / "a.prom").read_text() == "mine\n"
    assert os.listdir(precious) == ["a.prom"]
