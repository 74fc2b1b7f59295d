"""All domains of a host: GPUs that cannot serve, are lost and come back, and what is known of their jobs."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import pytest
from yunion_mps.core.enums import WEDGED
from yunion_mps.core.errors import DriverError
from yunion_mps.leases.ledger import Ledger
from yunion_mps.mps.health import PROBE_S
from yunion_mps.mps.rollover import SEARCH_AFTER_S
from yunion_mps.views.devices import devices_json

from unit.supervised import MakeHost, StartSupervised, StartWithJob, Supervise

V100 = [{"kind": "v100"}]
TWO = [{"kind": "v100"}, {"kind": "a100", "compute_mode": "prohibited"}]
FIRST, SECOND = "0000:00:06.0", "0000:00:07.0"


def test_a_gpu_that_is_lost_and_back_while_running_shows_in_the_snapshot(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    host, made = start_supervised(TWO)
    before = made.snapshot
    assert made.rescan() is before, "nothing has changed"
    host.gpus[1].lose()
    lost = made.rescan()
    words = "the GPU has fallen off the bus or is otherwise inaccessible (GPU is lost)"
    assert lost.version > before.version
    assert [gpu.reason for gpu in lost.inventory.gpus] == ["", words]
    assert [gpu.name for gpu in lost.inventory.gpus] == [gpu.name for gpu in before.inventory.gpus]
    assert [device["reason"] for device in devices_json(lost, Ledger())] == [""] * 4 + [words] * 4
    assert made.available == 4
    host.gpus[1].restore()
    made.rescan()
    assert made.available == 8
    assert f"GPU 00:07.0 cannot be used: {words}" in caplog.messages
    assert f"GPU 00:07.0 ({lost.inventory.gpus[1].name}): available" in caplog.messages


def test_a_driver_that_stops_answering_makes_all_devices_unavailable(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO)
    host.fail("nvmlSystemGetDriverVersion", "driver_not_loaded")
    with pytest.raises(DriverError) as caught:
        made.rescan()
    made.supervisor.driver_failed(caught.value, time.monotonic())
    assert made.available == 0
    assert {device["reason"] for device in devices_json(made.snapshot, Ledger())} == {
        "the NVIDIA driver's kernel module is not loaded"
    }
    host.clear()
    made.rescan()
    assert made.available == 8


def test_unusable_gpus_are_reported_and_nothing_is_started(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "a100", "mig": True}])
    reason = made.snapshot.plan.unavailable[FIRST]
    assert reason.startswith("the GPU is in MIG mode")
    assert made.snapshot.notice == f"no GPU on this host can serve devices (00:06.0: {reason})"
    assert devices_json(made.snapshot, Ledger()) == []
    assert not (host.root / "tmp/nvidia-mps").exists()


def test_a_fatal_xid_makes_its_gpu_unavailable_until_a_reset(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO)
    made.supervisor.note_xid(SECOND, 48)
    assert made.available == 4
    assert made.rescan().inventory.gpus[1].reason == "Xid 48 (double bit ECC error)"
    host.gpus[1].lose(xid=None)
    made.rescan()
    host.gpus[1].restore()
    made.rescan()
    assert made.available == 8, "it was away, so it was reset"
    made.supervisor.note_xid("0000:99:00.0", 48)
    made.supervisor.note_xid(FIRST, 31)
    assert made.available == 8
    assert [(event.severity, event.subject, event.what) for event in made.events if "Xid" in event.what] == [
        ("error", "00:07.0", "Xid 48: double bit ECC error"),
        ("warning", "00:06.0", "Xid 31: GPU memory page fault, usually caused by a job"),
    ]


def test_a_fatal_xid_outlasts_a_restart_until_a_reload(start_supervised: StartSupervised) -> None:
    _, first = start_supervised(TWO)
    first.supervisor.note_xid(SECOND, 95)
    made = first.start_next()
    assert made.available == 4
    assert made.snapshot.inventory.gpus[1].reason.startswith("Xid 95 (uncontained memory error)")
    made.reload()
    assert made.available == 8
    assert made.start_next().available == 8


def test_a_gpu_that_is_taken_out_keeps_its_devices_unavailable(start_supervised: StartSupervised) -> None:
    _, made = start_supervised(TWO)
    inventory = made.snapshot.inventory
    made.supervisor.update_gpus(inventory._replace(gpus=inventory.gpus[:1]), time.monotonic())
    assert [gpu.reason for gpu in made.snapshot.inventory.gpus] == ["", "the GPU is no longer present"]
    assert made.available == 4
    made.rescan()
    assert made.available == 8
    assert [event.what for event in made.events if event.kind == "gpu"] == ["unavailable", "available"]


def test_running_jobs_are_known_only_if_nvml_lists_the_servers(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(V100)
    (domain,) = made.supervisor.domains
    uuid = host.gpus[0].uuid
    for processes, in_use in (({uuid: {1: 10}}, True), ({uuid: {}}, False), ({}, None)):
        made.supervisor.jobs.update(processes, time.monotonic())
        assert domain.in_use is in_use
    made.supervisor.jobs.update({uuid: {}}, time.monotonic())
    made.supervisor.driver_failed(DriverError("gone"), time.monotonic())
    assert domain.in_use is None


def test_before_volta_it_is_unknown_whether_jobs_run(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "tesla-p40"}])
    made.supervisor.jobs.update({host.gpus[0].uuid: {}}, time.monotonic())
    assert made.supervisor.domains[0].in_use is None


def test_another_poll_is_requested_once_as_soon_as_a_domain_is_wedged(
    start_supervised: StartSupervised,
) -> None:
    """A job may have come since the last one."""
    _, made = start_supervised(V100)
    (domain,) = made.supervisor.domains
    assert not made.supervisor.fleet.take_poll_request()
    os.unlink(f"{domain.in_effect.pipe_directory}/control")
    domain.tick(time.monotonic() + PROBE_S)
    assert domain.state == WEDGED
    assert made.supervisor.fleet.take_poll_request()
    assert not made.supervisor.fleet.take_poll_request()


@pytest.mark.parametrize("call", ["nvmlDeviceGetComputeMode", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID"])
def test_a_gpu_that_is_lost_in_the_middle_of_a_poll_keeps_its_place(
    start_supervised: StartSupervised, call: str
) -> None:
    host, made = start_supervised(TWO, cuda_mps_scope="gpu")
    pids = [domain.pid for domain in made.snapshot.domains]
    host.fail(call, "gpu_is_lost", gpu=1)
    made.rescan()
    assert made.available == 4
    assert made.supervisor.reconciliation.settings_due() is None
    host.clear()
    made.rescan()
    assert made.available == 8
    assert [domain.pid for domain in made.snapshot.domains] == pids


def test_a_stop_names_the_jobs_that_it_awaits_and_those_that_were_late(
    start_with_job: StartWithJob, caplog: pytest.LogCaptureFixture
) -> None:
    host, _, made, client = start_with_job(V100, cuda_mps_stop_timeout_s="1")
    made.supervisor.jobs.update({host.gpus[0].uuid: {client.pid: 100}}, time.monotonic())
    made.stop(restore=False)
    made.supervisor.report_late_jobs()
    told = [message for message in caplog.messages if f"(PID {client.pid}, root)" in message]
    assert len(told) == 2
    assert told[0].startswith("running jobs have up to 1 s to end: ")
    assert told[1].endswith("did not end in time: ended its MPS server")
    assert [event.what for event in made.events if event.subject == "stop"] == [told[1].partition(": ")[0]]


def test_all_domains_share_one_search_for_orphaned_servers(
    start_supervised: StartSupervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each search lists the processes of the host."""
    listed: list[object] = []
    really_list = os.listdir

    def note_and_list(path: Any = ".") -> list[str]:
        listed.append(path)
        return really_list(path)

    _, made = start_supervised(TWO, cuda_mps_scope="gpu")
    monkeypatch.setattr(os, "listdir", note_and_list)
    made.supervisor.tick(time.monotonic() + SEARCH_AFTER_S)
    assert listed.count("/proc") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000], ids=len)
def test_an_invalid_file_of_faults_counts_as_empty(
    make_host: MakeHost, supervise: Supervise, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    host = make_host(V100)
    file = host.root / "run/yunion-mps/gpu-faults.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    assert supervise(host).snapshot.inventory.gpus[0].reason == ""
    assert "fatal GPU errors before this start are not known; see: dmesg | grep -i xid" in caplog.text
