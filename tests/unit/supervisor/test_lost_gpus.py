"""A GPU that served and is lost when a daemon starts: its devices are listed until it is back or given up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.core.errors import ConfigError, DriverError
from yunion_mps.core.reasons import GPU_REPLACED
from yunion_mps.leases.ledger import Ledger
from yunion_mps.views.devices import devices_json

from simhost import SimHost
from unit.supervised import MakeHost, StartSupervised, StartWithJob, Supervise, Supervised, configure, modes

TWO = [{"kind": "v100"}, {"kind": "a100"}]
LOST = "the GPU has fallen off the bus or is otherwise inaccessible (GPU is lost)"
GONE = "the GPU is no longer present"

Entry = Callable[[SimHost, int], str]


def by_uuid(host: SimHost, slot: int) -> str:
    return host.gpus[slot].uuid


def by_address(host: SimHost, slot: int) -> str:
    return str(host.gpus[slot].description.address)


def by_render_node(host: SimHost, slot: int) -> str:
    return f"/dev/dri/renderD{host.gpus[slot].description.render}"


def name(host: SimHost, *paths: str) -> None:
    file = host.root / "etc/yunion/host_container_device.yml"
    entry = "- path: {}\n  type: NVIDIA_MPS\n  virtual_number: 4\n"
    text = "devices:\n" + "".join(entry.format(path) for path in paths)
    file.write_text(text) if paths else file.unlink()


def shown(made: Supervised) -> dict[str, str]:
    """The reason of each device, by its id."""
    return {device["id"]: device["reason"] for device in devices_json(made.snapshot, Ledger())}


def reasons(made: Supervised) -> list[str]:
    return list(shown(made).values())


def served_file(host: SimHost) -> Path:
    return host.root / "var/lib/yunion-mps/served-gpus.json"


def kept(host: SimHost) -> Any:
    return json.loads(served_file(host).read_text())


def reboot(host: SimHost) -> None:
    """As if the file were from before a reboot."""
    served_file(host).write_text(json.dumps({**kept(host), "boot_id": "another"}))


@pytest.mark.parametrize(
    ("entry", "scope"),
    [(None, "host"), (None, "gpu"), (by_uuid, "gpu"), (by_address, "host"), (by_render_node, "host")],
)
@pytest.mark.parametrize("lookup", ["gpu_is_lost", "success", "removed"])
def test_a_lost_gpu_keeps_its_devices_and_serves_them_on_return(
    make_host: MakeHost, supervise: Supervise, entry: Entry | None, lookup: str, scope: str
) -> None:
    host = make_host(TWO, cuda_mps_scope=scope, cuda_mps_replicas="4")
    name(host, *([entry(host, 0), entry(host, 1)] if entry else []))
    first = supervise(host).start()
    ids = list(shown(first))
    first.end()
    host.gpus[0].remove() if lookup == "removed" else host.gpus[0].lose(lookup=lookup)
    made = first.start_next()
    served = [uuid for domain in made.snapshot.domains for uuid in domain.plan.gpu_uuids]
    assert served == [host.gpus[1].uuid], "no control daemon is told of a GPU that is not there"
    for poll in (lambda: None, made.rescan, made.reload):
        poll()
        assert list(shown(made)) == ids
        assert reasons(made) == [GONE if lookup == "removed" else LOST] * 4 + [""] * 4
    host.gpus[0].restore()
    again = made
    if lookup == "removed":
        made.end()
        again = made.start_next()
    again.rescan()
    again.until(lambda: again.available == 8)
    assert list(shown(again)) == ids
    again.reconcile()
    assert modes(host) == ["exclusive_process"] * 2


def test_a_lost_gpus_running_control_daemon_is_kept(start_with_job: StartWithJob) -> None:
    host, _, first, _ = start_with_job(TWO)
    ids, pid = list(shown(first)), first.snapshot.domains[0].pid
    host.gpus[1].lose()
    made = first.start_next()
    assert list(shown(made)) == ids
    assert (made.snapshot.domains[0].pid, reasons(made)) == (pid, [""] * 4 + [LOST] * 4)
    assert made.snapshot.domains[0].pending == ""


def test_a_gpu_that_fails_every_call_is_listed(start_supervised: StartSupervised) -> None:
    host, first = start_supervised(TWO)
    first.stop()
    host.fail("nvmlDeviceGetUUID", "unknown", gpu=0)
    made = first.start_next()
    assert list(shown(made)) == list(shown(first))
    assert reasons(made) == ["NVML error: Unknown Error"] * 4 + [""] * 4


def test_a_gpu_switched_to_mig_mode_is_listed(start_supervised: StartSupervised) -> None:
    host, first = start_supervised(TWO)
    first.stop()
    host.gpus[1].mig = True
    made = first.start_next()
    assert list(shown(made)) == list(shown(first))
    assert reasons(made)[4].startswith("the GPU is in MIG mode")
    host.gpus[1].mig = False
    made.rescan()
    made.until(lambda: made.available == 8)


def test_a_gpu_that_never_could_serve_has_no_devices(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host(TWO)
    host.gpus[1].mig = True
    for _ in range(2):
        made = supervise(host).start()
        assert reasons(made) == [""] * 4
        made.stop()


def test_the_start_is_refused_if_the_only_gpu_refuses_its_mode(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO)
    made.stop()
    host.gpus[1].lose()
    host.fail("nvmlDeviceSetComputeMode", "no_permission")
    with pytest.raises(DriverError, match="no GPU's compute mode can be set"):
        made.start_next()


def test_if_all_are_lost_all_devices_are_listed(start_supervised: StartSupervised) -> None:
    host, first = start_supervised(TWO)
    first.stop()
    for gpu in host.gpus:
        gpu.lose()
    for _ in range(2):
        made = first.start_next()
        assert (list(shown(made)), reasons(made)) == (list(shown(first)), [LOST] * 8)
        assert LOST in made.snapshot.notice


def test_a_gpu_removed_from_the_file_is_not_listed(start_supervised: StartSupervised) -> None:
    host, first = start_supervised(TWO, 4, 4)
    first.stop()
    host.gpus[1].remove()
    made = first.start_next()
    assert len(shown(made)) == 8
    host.divide(4)
    made.reload()
    made.rescan()
    assert [gpu.uuid for gpu in made.snapshot.inventory.gpus] == [host.gpus[0].uuid]
    made.until(lambda: reasons(made) == [""] * 4)
    made.stop()
    assert len(kept(host)["gpus"]) == 1
    assert reasons(made.start_next()) == [""] * 4


def test_a_gpu_removed_while_the_daemon_was_stopped_is_not_listed(start_supervised: StartSupervised) -> None:
    host, first = start_supervised(TWO, 4, 4)
    first.stop()
    host.gpus[1].remove()
    host.divide(4)
    made = first.start_next()
    assert reasons(made) == [""] * 4
    assert [gpu.uuid for gpu in made.snapshot.inventory.gpus] == [host.gpus[0].uuid]


def test_disabling_mps_for_a_while_forgets_no_gpu(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO)
    configure(host, enable_cuda_mps="false")
    made.reload()
    made.stop()
    made.start_next().stop()
    host.gpus[1].remove()
    configure(host)
    assert reasons(made.start_next()) == [""] * 4 + [GONE] * 4


@pytest.mark.parametrize(
    ("field", "before", "lost", "count"),
    [
        ("uuid", "GPU-00000000-0000-0000-0000-000000000001", False, 8),
        ("pci_address", "0000:42:00.0", False, 8),
        ("vendor_device_id", "10de:0000", True, 4),
    ],
    ids=["another in its place", "at another place now", "a lost one of another model"],
)
def test_a_replaced_gpu_is_forgotten(
    start_supervised: StartSupervised, field: str, before: str, lost: bool, count: int
) -> None:
    host, first = start_supervised(TWO)
    first.stop()
    name(host, by_address(host, 0), by_address(host, 1))
    served = kept(host)
    served["gpus"][1][field] = before
    served_file(host).write_text(json.dumps(served))
    if lost:
        host.gpus[1].lose()
    made = first.start_next()
    assert reasons(made) == [""] * count
    assert len(made.snapshot.inventory.gpus) == 2


def test_after_a_reboot_a_gone_gpu_is_listed_only_if_the_file_names_it(
    start_supervised: StartSupervised,
) -> None:
    host, first = start_supervised(TWO, 4, 4)
    first.stop()
    host.gpus[1].remove()
    reboot(host)
    made = first.start_next()
    assert reasons(made) == [""] * 4 + [GONE] * 4
    made.stop()
    reboot(host)
    name(host)
    assert len(shown(made.start_next())) == 10, "cuda_mps_replicas of the one that is there"


def test_an_absent_gpu_that_never_served_is_missing_and_the_others_serve(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO, 4)
    made.stop()
    host.gpus[1].remove()
    name(host, by_uuid(host, 0), by_uuid(host, 1))
    again = made.start_next()
    assert again.available == 4
    (missing,) = again.snapshot.plan.missing
    assert (missing.path, missing.reason) == (
        host.gpus[1].uuid,
        "this host has no GPU with this UUID now",
    )


def test_an_original_mode_is_restored_once_it_is_back_and_not_before(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, first = start_supervised(TWO)
    first.stop(restore=False)
    host.gpus[1].lose()
    made = first.start_next()
    made.rescan()
    assert made.supervisor.reconciliation.settings_due() is None
    assert "cannot be restored" not in caplog.text
    made.stop()
    host.gpus[1].restore()
    configure(host, enable_cuda_mps="false")
    made.start_next()
    assert modes(host) == ["default"] * 2


def test_a_gpu_lost_while_the_daemon_runs_is_remembered(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO)
    host.gpus[0].lose()
    made.rescan()
    made.supervisor.apply(time.monotonic())
    made.stop()
    assert len(shown(made.start_next())) == 8


# -- an entry keeps its meaning


def test_what_the_entries_mean_is_recorded_before_a_compute_mode_is_set(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO)
    records = kept(host)["entries"]
    assert {key: row["uuid"] for key, row in records.items()} == {
        by_render_node(host, slot): host.gpus[slot].uuid for slot in (0, 1)
    }
    made.stop()
    served_file(host).unlink()
    host.fail("nvmlDeviceSetComputeMode", "no_permission")
    with pytest.raises(DriverError):
        made.start_next()
    assert kept(host)["entries"] == records


def test_a_record_that_was_removed_is_written_again_at_the_next_poll(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO)
    name(host, by_render_node(host, 0))
    made.reload()
    before = kept(host)["entries"]
    served_file(host).unlink()
    made.rescan()
    assert kept(host)["entries"] == before


def test_after_a_reboot_with_other_render_nodes_no_other_gpu_is_touched(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised([*TWO, {"kind": "a10"}])
    name(host, by_render_node(host, 0), by_render_node(host, 1))
    made.reload()
    made.end()
    host.gpus[0].remove()
    host.renumber()
    again = made.start_next()
    assert again.snapshot.plan.gpu_uuids == {host.gpus[0].uuid, host.gpus[1].uuid}
    assert modes(host)[1:] == ["exclusive_process", "default"]
    again.reload()
    assert modes(host)[1:] == ["exclusive_process", "default"], "a reload confirms no renumbering"


def test_a_replaced_card_behind_a_render_node_serves_after_a_reload(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO)
    made.end()
    host.gpus[1].replace()
    again = made.start_next()
    (missing,) = again.snapshot.plan.missing
    assert (missing.path, missing.reason.code) == (by_render_node(host, 1), GPU_REPLACED)
    assert modes(host)[1] == "default"
    again.reload()
    assert again.available == 8
    assert again.snapshot.plan.missing == ()


def test_a_missing_gpu_is_recorded_once_and_so_is_its_return(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO)
    made.end()
    host.gpus[1].remove()
    served_file(host).unlink()
    name(host, by_address(host, 0), by_address(host, 1))
    again = made.start_next()
    again.rescan()
    again.rescan()
    host.gpus[1].restore()
    assert again.preflight.nvml is not None
    assert again.preflight.nvml.initialise_again()
    again.rescan()
    told = [(event.subject, event.what) for event in again.events if event.subject.startswith("entry")]
    subject = f"entry {by_address(host, 1)}"
    assert told == [(subject, "missing"), (subject, "no longer missing")]
    again.until(lambda: again.available == 8)


def test_an_entry_that_does_not_fit_keeps_only_its_gpu_from_serving(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO)
    made.stop()
    file = host.root / "etc/yunion/host_container_device.yml"
    file.write_text(file.read_text().replace("virtual_number: 4", "virtual_number: 49", 1))
    again = made.start_next()
    assert again.available == 4
    assert list(again.snapshot.plan.unavailable) == [by_address(host, 0)]
    with pytest.raises(ConfigError, match="virtual_number is 49, more than the 48 clients"):
        again.reload()
    assert again.available == 4
