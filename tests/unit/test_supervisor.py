"""All domains of a host: compute modes set and put back, GPUs that refuse, are lost and come back."""

from __future__ import annotations

import logging
import time

import pytest
from yunion_mps.errors import DriverError
from yunion_mps.service import devices_json
from yunion_mps.store import Store
from yunion_mps.supervisor.warnings import warnings

from unit.supervised import MakeHost, MakeStandIns, Supervise, attach, modes

TWO = [{"kind": "v100"}, {"kind": "a100", "compute_mode": "prohibited"}]
FIRST, SECOND = "0000:00:06.0", "0000:00:07.0"


def test_compute_modes_are_set_and_on_a_stop_put_back_to_what_each_was(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(TWO)
    made = supervise(host).start()
    assert modes(host) == ["exclusive_process", "exclusive_process"]
    assert [gpu.compute_mode for gpu in made.snapshot.inventory.gpus] == ["Exclusive_Process"] * 2
    made.stop()
    assert modes(host) == ["default", "prohibited"]


def test_modes_are_put_back_by_the_next_daemon_when_one_ended_without_doing_so(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(TWO)
    supervise(host).start().stop(put_back=False)
    assert modes(host) == ["exclusive_process", "exclusive_process"]
    supervise(host).start().stop()
    assert modes(host) == ["default", "prohibited"]


def test_the_mode_from_before_we_first_touched_it_counts_whatever_came_between(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host([{"kind": "v100"}])
    supervise(host).start().stop(put_back=False)
    host.gpus[0].compute_mode = "prohibited"
    supervise(host).start().stop()
    assert modes(host) == ["default"]


def test_the_mode_of_a_gpu_that_is_no_longer_configured_is_put_back_at_the_next_start(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(TWO)
    supervise(host).start().stop(put_back=False)
    entry = f"devices:\n- path: {host.gpus[0].uuid}\n  type: NVIDIA_MPS\n  virtual_number: 2\n"
    (host.root / "etc/yunion/host_container_device.yml").write_text(entry)
    made = supervise(host).start()
    assert modes(host) == ["exclusive_process", "prohibited"]
    made.stop()
    assert modes(host) == ["default", "prohibited"]


def test_keep_changes_no_mode_and_notes_none(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host([{"kind": "v100"}, {"kind": "v100", "compute_mode": "exclusive_process"}],
                     cuda_mps_compute_mode="keep")  # fmt: skip
    made = supervise(host).start()
    assert made.available == 8
    assert modes(host) == ["default", "exclusive_process"]
    made.stop()
    assert modes(host) == ["default", "exclusive_process"]
    store = Store(made.paths)
    assert store.former_modes() == {}
    assert store.domains() == [], "its control daemon has ended"
    store.close()


def test_a_gpu_whose_mode_is_right_already_is_not_touched(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host([{"kind": "v100", "compute_mode": "exclusive_process"}])
    host.fail("nvmlDeviceSetComputeMode", "no_permission")
    made = supervise(host).start()
    assert made.available == 4
    made.stop()
    assert modes(host) == ["exclusive_process"]


@pytest.mark.parametrize("scope", ["host", "gpu"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("no_permission", "NVML does not permit this"),
        ("not_supported", "the driver does not support this on the GPU"),
    ],
)
def test_a_gpu_whose_mode_cannot_be_set_is_not_served_and_the_others_are(
    make_host: MakeHost,
    supervise: Supervise,
    caplog: pytest.LogCaptureFixture,
    scope: str,
    error: str,
    words: str,
) -> None:
    caplog.set_level(logging.INFO)
    host = make_host(TWO, cuda_mps_scope=scope)
    host.fail("nvmlDeviceSetComputeMode", error, gpu=0)
    made = supervise(host).start()
    reason = {FIRST: f"its compute mode cannot be set: {words}"}
    assert made.snapshot.plan.unavailable == reason
    assert {device["gpu_uuid"] for device in devices_json(made.snapshot)} == {host.gpus[1].uuid}
    assert made.available == 4
    assert [domain.plan.gpu_uuids for domain in made.snapshot.domains] == [(host.gpus[1].uuid,)]
    assert any(f"GPU {host.gpus[0].uuid}: compute mode cannot be set: {words}" in m for m in caplog.messages)
    made.rescan()
    assert made.snapshot.plan.unavailable == reason
    made.stop()
    assert modes(host) == ["default", "prohibited"]
    assert not [m for m in caplog.messages if "cannot be put back" in m or "is back" in m]


def test_when_no_gpus_mode_can_be_set_nothing_is_started(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host(TWO)
    host.fail("nvmlDeviceSetComputeMode", "no_permission")
    made = supervise(host)
    with pytest.raises(DriverError) as caught:
        made.supervisor.start(time.monotonic())
    assert caught.value.message == "no GPU's compute mode can be set: NVML does not permit this"
    assert caught.value.hint == "run as root: systemctl start yunion-mps-daemon"
    assert not (host.root / "tmp/nvidia-mps/log/control.log").exists()
    assert modes(host) == ["default", "prohibited"]


def test_a_gpu_that_is_lost_and_back_while_running_shows_in_the_snapshot(
    make_host: MakeHost, supervise: Supervise, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    host = make_host(TWO)
    made = supervise(host).start()
    before = made.snapshot
    assert made.rescan() is before, "nothing has changed"
    host.gpus[1].lose()
    lost = made.rescan()
    words = "the GPU has fallen off the bus or is otherwise inaccessible (GPU is lost)"
    assert lost.version > before.version
    assert [gpu.reason for gpu in lost.inventory.gpus] == ["", words]
    assert [gpu.name for gpu in lost.inventory.gpus] == [gpu.name for gpu in before.inventory.gpus]
    assert {d["gpu_uuid"]: d["reason"] for d in devices_json(lost)} == {
        host.gpus[0].uuid: "",
        host.gpus[1].uuid: words,
    }
    assert made.available == 4
    host.gpus[1].restore()
    made.rescan()
    assert made.available == 8
    assert f"GPU 00:07.0 cannot be used: {words}" in caplog.messages
    assert "GPU 00:07.0 is back" in caplog.messages


def test_a_driver_that_answers_no_more_takes_all_devices_and_coming_back_gives_them_back(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(TWO)
    made = supervise(host).start()
    host.fail("nvmlSystemGetDriverVersion", "driver_not_loaded")
    with pytest.raises(DriverError) as caught:
        made.rescan()
    made.supervisor.lose_driver(caught.value, time.monotonic())
    assert made.available == 0
    assert {device["reason"] for device in devices_json(made.snapshot)} == {
        "the NVIDIA driver's kernel module is not loaded"
    }
    host.clear()
    made.rescan()
    assert made.available == 8


def test_a_mode_that_somebody_changes_meanwhile_is_warned_of(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(TWO)
    made = supervise(host).start()
    assert list(warnings(made.snapshot)) == []
    host.gpus[0].compute_mode = "default"
    (warning,) = warnings(made.rescan())
    assert warning == (
        "GPU 00:06.0 (Tesla V100-SXM2-16GB): its compute mode is Default, not Exclusive_Process; "
        "a process that misses the control daemon would use it without limits"
    )


def test_a_gpu_that_is_lost_at_the_stop_is_put_back_by_the_next_daemon(
    make_host: MakeHost, supervise: Supervise, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host(TWO)
    made = supervise(host).start()
    host.gpus[1].lose()
    made.stop()
    assert f"GPU {host.gpus[1].uuid}: compute mode Prohibited cannot be put back" in caplog.text
    host.gpus[1].restore()
    assert modes(host) == ["default", "exclusive_process"]
    supervise(host).start().stop()
    assert modes(host) == ["default", "prohibited"]


def test_gpus_that_cannot_serve_are_told_and_nothing_is_started(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host([{"kind": "a100", "mig": True}])
    made = supervise(host).start()
    reason = made.snapshot.plan.unavailable[FIRST]
    assert reason.startswith("the GPU is in MIG mode")
    assert made.snapshot.notice == f"no GPU of this host can serve MPS devices ({FIRST}: {reason})"
    assert devices_json(made.snapshot) == []
    assert not (host.root / "tmp/nvidia-mps").exists()


def test_what_was_put_back_is_forgotten_so_that_the_operator_s_own_later_mode_is_kept(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host([{"kind": "v100"}])
    supervise(host).start().stop()
    assert modes(host) == ["default"]
    host.gpus[0].compute_mode = "prohibited"
    supervise(host).start().stop()
    assert modes(host) == ["prohibited"]


def test_no_mode_is_set_any_more_once_a_stop_has_begun(make_host: MakeHost, supervise: Supervise) -> None:
    """A look at the GPUs may be under way on a thread, and come to its end after the modes were put back."""
    host = make_host([{"kind": "v100"}])
    made = supervise(host).start()
    host.gpus[0].compute_mode = "default"
    made.rescan()
    work = made.supervisor.mode_work()
    assert [change.after for change in work.changes] == ["Exclusive_Process"]
    made.stop()
    assert made.supervisor.set_modes(work) == ({}, {})
    assert modes(host) == ["default"]


def test_a_fatal_xid_takes_the_devices_of_its_gpu_until_it_was_reset(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(TWO)
    made = supervise(host).start()
    made.supervisor.note_xid(SECOND, 48)
    assert made.available == 4
    assert made.rescan().inventory.gpus[1].reason.startswith("XID 48 (double bit ECC error): reset it")
    host.gpus[1].lose(xid=None)
    made.rescan()
    host.gpus[1].restore()
    made.rescan()
    assert made.available == 8, "it was away, so it was reset"
    made.supervisor.note_xid("0000:99:00.0", 48)
    made.supervisor.note_xid(FIRST, 31)
    assert made.available == 8
    assert [(event.severity, event.subject, event.what) for event in made.events if "XID" in event.what] == [
        ("error", "00:07.0", "XID 48: double bit ECC error"),
        ("warning", "00:06.0", "XID 31: memory page fault, mostly a fault of a job"),
    ]


def test_a_gpu_that_is_taken_out_keeps_its_devices_unavailable_and_a_new_one_is_told(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(TWO)
    made = supervise(host).start()
    inventory = made.snapshot.inventory
    made.supervisor.rescan(inventory._replace(gpus=inventory.gpus[:1]), time.monotonic())
    assert [gpu.reason for gpu in made.snapshot.inventory.gpus] == ["", "the GPU is not there any more"]
    assert made.available == 4
    made.rescan()
    assert made.available == 8
    assert [event.what for event in made.events if event.kind == "gpu"] == ["unavailable", "available"]


def test_whether_jobs_run_is_believed_only_where_nvml_lists_the_servers(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host([{"kind": "v100"}])
    made = supervise(host).start()
    (domain,) = made.supervisor.domains
    uuid = host.gpus[0].uuid
    for processes, in_use in (({uuid: {1: 10}}, True), ({uuid: {}}, False), ({}, None)):
        made.supervisor.note_processes(processes, time.monotonic())
        assert domain.in_use is in_use
    made.supervisor.note_processes({uuid: {}}, time.monotonic())
    made.supervisor.lose_driver(DriverError("gone"), time.monotonic())
    assert domain.in_use is None


def test_before_volta_nobody_knows_whether_jobs_run(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host([{"kind": "tesla-p40"}])
    made = supervise(host).start()
    made.supervisor.note_processes({host.gpus[0].uuid: {}}, time.monotonic())
    assert made.supervisor.domains[0].in_use is None


def test_a_look_from_before_a_wedge_says_nothing_of_the_jobs_in_its_way(
    make_host: MakeHost, supervise: Supervise
) -> None:
    """A job may have come since; so another look is wanted at once, and none is ended before it."""
    host = make_host([{"kind": "v100"}])
    made = supervise(host).start()
    (domain,) = made.supervisor.domains
    made.supervisor.note_processes({host.gpus[0].uuid: {}}, time.monotonic())
    assert not made.supervisor.take_wants_look()
    assert domain.looked_s < time.monotonic()
    domain.wants_look = True
    assert made.supervisor.take_wants_look()
    assert not made.supervisor.take_wants_look()


@pytest.mark.parametrize("call", ["nvmlDeviceGetComputeMode", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID"])
def test_a_gpu_that_is_lost_in_the_middle_of_a_look_keeps_its_place(
    make_host: MakeHost, supervise: Supervise, call: str
) -> None:
    host = make_host(TWO, cuda_mps_scope="gpu")
    made = supervise(host).start()
    pids = [domain.pid for domain in made.snapshot.domains]
    host.fail(call, "gpu_is_lost", gpu=1)
    made.rescan()
    assert made.available == 4
    assert not any(made.supervisor.mode_work())
    host.clear()
    made.rescan()
    assert made.available == 8
    assert [domain.pid for domain in made.snapshot.domains] == pids


def test_a_gpu_with_a_fatal_xid_stays_out_of_service_over_a_restart_until_a_reload(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(TWO)
    first = supervise(host).start()
    first.supervisor.note_xid(SECOND, 95)
    made = supervise(host).start()
    assert made.available == 4
    assert made.snapshot.inventory.gpus[1].reason.startswith("XID 95 (uncontained memory error)")
    made.reload()
    assert made.available == 8
    assert supervise(host).start().available == 8


def test_a_stop_names_the_jobs_that_it_waits_for_and_then_those_that_were_late(
    make_host: MakeHost, supervise: Supervise, stand_ins: MakeStandIns, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host([{"kind": "v100"}], cuda_mps_stop_timeout_s="1")
    jobs = stand_ins(host)
    made = supervise(host).start()
    client = attach(jobs, host)
    made.supervisor.note_processes({host.gpus[0].uuid: {client.pid: 100}}, time.monotonic())
    made.stop(put_back=False)
    made.supervisor.say_whom_it_ended()
    named = f"(PID {client.pid}, root)"
    told = [message for message in caplog.messages if named in message]
    assert len(told) == 2
    assert told[0].startswith("running jobs have up to 1 s to end: ")
    assert told[1].endswith("did not end in time: its MPS server was ended")
    assert [event.what for event in made.events if event.subject == "stop"] == [told[1].partition(": ")[0]]
