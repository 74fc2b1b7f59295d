"""GPUs and instances that have to go: no new leases, leases that exist keep their control daemon."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from yunion_mps.core.conditions import shown
from yunion_mps.core.enums import ABOUT_MIG_LAYOUT, FREE, LEASED, PENDING
from yunion_mps.core.models import Holder, Lease
from yunion_mps.core.reasons import MIG_IN_USE, MIG_PENDING
from yunion_mps.leases.request import LeaseRequest, candidates_of
from yunion_mps.service.queries import Queries
from yunion_mps.supervisor.preflight import run_preflight
from yunion_mps.views.devices import devices_json, unusable_reasons

from simhost import Description, SimHost
from unit.supervised import MakeHost, MakeStandIns, Supervise, Supervised
from unit.supervisor.test_mig_devices import apply_layouts, configured, waits

H100 = [{"kind": "h100"}]
TWO = "type: NVIDIA_MPS; virtual_number: 2"
MIG = "type: NVIDIA_MPS; mig: all-3g.40gb; virtual_number: 2"
MIG_SLICED = "type: NVIDIA_GPU_SHARE; mig: all-3g.40gb; virtual_number: 3"
SLICED = "type: NVIDIA_GPU_SHARE; virtual_number: 3"
SMALLER = "type: NVIDIA_MPS; mig: [2g.20gb, 2g.20gb, 2g.20gb]; virtual_number: 2"


class Work:
    """A supervisor with MPS jobs, and leases of devices."""

    def __init__(self, host: SimHost, made: Supervised, stand_ins: MakeStandIns) -> None:
        self.host, self.made, self.jobs = host, made, stand_ins(host)
        self.ledger = made.supervisor.ledger

    def start(self) -> Work:
        self.made.start()
        self.apply()
        return self

    def apply(self, *, now: bool | None = None) -> None:
        apply_layouts(self.made, now=now)

    def reload(self, *entries: str, now: bool = False) -> None:
        configured(self.host, *entries)
        self.made.accept()
        self.made.supervisor.layouts.confirm(self.made.losses() if now else {})
        self.made.supervisor.apply(time.monotonic())
        self.made.until(lambda: self.made.supervisor.fleet.settled)
        self.made.reconcile()
        self.apply()

    def lease(self, number: int = 0) -> str:
        """Lease a device by name, and return its address."""
        device = self.made.snapshot.plan.devices[number]
        self.ledger.add(Lease("0" * 36, (device,), Holder("name", 0, name="job"), time.time()))
        return device.addr

    def attach(self) -> int:
        """Start a job on the first control daemon; return the PID of its server."""
        self.job = self.jobs.attached(Path(self.made.snapshot.domains[0].plan.pipe_directory))
        self.made.until(lambda: bool(self.made.supervisor.domains[0].server_pids()))
        return self.made.supervisor.domains[0].server_pids()[0]

    def states(self) -> dict[str, str]:
        return {row["addr"]: row["state"] for row in devices_json(self.made.snapshot, self.ledger)}

    def offered(self) -> set[str]:
        """The addresses of the devices that a request may get."""
        found = candidates_of(self.made.snapshot, unusable_reasons(self.made.snapshot))
        request = LeaseRequest(allow_unlimited=True)
        return {one.device.addr for one in found.suitable(request) if not one.reason}


StartWork = Callable[..., Work]


@pytest.fixture
def start_supervised(make_host: MakeHost, supervise: Supervise, stand_ins: MakeStandIns) -> StartWork:
    def make(*entries: str, description: Description = H100, **keys: str) -> Work:
        host = make_host(description, cuda_mps_pipe_directory="/run/mps", **keys)
        configured(host, *entries)
        return Work(host, supervise(host), stand_ins).start()

    return make


@pytest.mark.parametrize(("before", "after"), [(TWO, MIG), (MIG, SMALLER), (MIG, TWO)])
def test_what_has_to_go_is_not_leased_again(start_supervised: StartWork, before: str, after: str) -> None:
    work = start_supervised(before)
    first = work.made.snapshot.plan.devices[0].gpu_uuid
    of_first = {one.addr for one in work.made.snapshot.plan.devices if one.gpu_uuid == first}
    work.attach()
    work.reload(after if after != TWO else f"{TWO}; mig: all-disabled")
    assert not work.offered() & of_first
    assert {work.states()[address] for address in of_first} == {PENDING}
    work.job.end()
    work.made.supervisor.fleet.drain(time.monotonic())
    work.made.until(lambda: not work.offered() & of_first and not work.jobs.servers())
    work.apply()
    work.apply()
    assert set(work.states().values()) == {FREE}
    assert waits(work.made) == ""


def test_a_layout_keeps_the_leased_instance_if_it_can(start_supervised: StartWork) -> None:
    work = start_supervised("type: NVIDIA_MPS; mig: all-1g.10gb")
    gpu = work.made.snapshot.inventory.gpus[0]
    (leased,) = [f"{gpu.address}-g{one.id}" for one in gpu.mig_instances if one.start == 2]
    work.lease([one.addr for one in work.made.snapshot.plan.devices].index(leased))
    work.reload("type: NVIDIA_MPS; mig: all-balanced")
    assert waits(work.made) == ""
    assert work.states()[leased] == LEASED
    assert len(work.states()) == 4


@pytest.mark.parametrize(("before", "after"), [(TWO, MIG), (MIG, SMALLER)])
def test_a_leased_device_keeps_its_control_daemon_until_the_lease_ends(
    start_supervised: StartWork, before: str, after: str
) -> None:
    work = start_supervised(before)
    address, count = work.lease(), len(work.made.snapshot.domains)
    mode = work.host.gpus[0].compute_mode
    pid = work.made.snapshot.domains[0].pid
    work.reload(after)
    assert work.made.snapshot.domains[0].pid == pid
    assert work.states()[address] == LEASED
    assert work.host.gpus[0].compute_mode == mode
    assert waits(work.made).code == MIG_IN_USE
    assert "lease job of root" in waits(work.made)
    work.ledger.remove("0" * 36)
    for _ in range(3):
        work.apply()
        work.made.until(lambda: work.made.supervisor.fleet.started)
    assert waits(work.made) == ""
    assert set(work.states().values()) == {FREE}
    assert len(work.made.snapshot.domains) != count


@pytest.mark.parametrize(("before", "after"), [(TWO, MIG), (MIG, SMALLER)])
def test_reload_now_does_not_wait_for_an_idle_lease(
    start_supervised: StartWork, before: str, after: str
) -> None:
    work = start_supervised(before)
    work.lease()
    work.reload(after, now=True)
    work.apply()
    assert waits(work.made) == ""


def test_reload_now_leaves_a_layout_in_effect_to_its_leases(start_supervised: StartWork) -> None:
    """Also later, when another program has taken one of its instances."""
    work = start_supervised(MIG, TWO, description=[{"kind": "h100", "count": 2}])
    address, leased = work.lease(), work.made.snapshot.plan.devices[0].gpu_uuid
    work.reload(f"{MIG_SLICED}; mig_restore: true", MIG, now=True)
    assert work.states()[address] == LEASED
    assert leased in {uuid for one in work.made.snapshot.domains for uuid in one.plan.gpu_uuids}
    assert len(work.host.gpus[1].mig_devices()) == 2
    (free,) = (one for one in work.host.gpus[0].mig_devices() if one.uuid != leased)
    work.host.gpus[0].end_instances(free.gpu_instance)
    others = {one.uuid for one in work.host.create_mig_devices(0, "1g.10gb")}
    work.apply()
    assert others <= {one.uuid for one in work.host.gpus[0].mig_devices()}


def test_a_plan_lists_no_losses_of_a_gpu_that_was_just_lost(start_supervised: StartWork) -> None:
    work = start_supervised(TWO, TWO, description=[{"kind": "h100", "count": 2}])
    supervisor = work.made.supervisor
    work.host.gpus[1].lose()  # since the last poll
    configured(work.host, MIG, MIG)
    preflight = run_preflight(work.made.paths, supervisor.nvml)
    plan, _ = supervisor.desired.plan_for(preflight)
    due = supervisor.layouts.looks_for(plan, preflight.inventory)
    observed = supervisor.layouts.observe(due, supervisor.nvml)
    losses = supervisor.layouts.forecast(plan, due, observed).losses
    assert plan.layouts[1].gpu_uuid == work.host.gpus[1].uuid
    assert losses.keys() == {work.host.gpus[0].uuid}


def test_a_drain_ends_also_the_server_of_a_client_that_waited(start_supervised: StartWork) -> None:
    work = start_supervised(MIG)
    first = work.attach()
    configured(work.host, SMALLER)
    work.made.reload()
    domain = work.made.supervisor.domains[0]
    domain.drain(time.monotonic())
    work.made.until(lambda: domain.server_pids() == [first])
    earlier, place = work.job, Path(domain.in_effect.pipe_directory)
    late = work.jobs.client(place)
    assert late.says() == "asking"
    earlier.end()
    assert late.says() == "attached"
    late.end()
    work.made.until(lambda: domain not in work.made.supervisor.domains)


def test_a_drain_of_a_control_daemon_that_is_replaced_has_no_new_leases(start_supervised: StartWork) -> None:
    work = start_supervised(TWO, TWO, description=[{"kind": "h100", "count": 2}])
    work.attach()
    work.reload(MIG, TWO)
    assert work.offered() == {"00:07.0-0", "00:07.0-1"}
    work.made.supervisor.fleet.drain(time.monotonic())
    assert work.offered() == set()
    work.job.end()
    work.made.until(lambda: not work.jobs.servers())
    work.apply()
    work.apply()
    assert len(work.offered()) == 6


def test_a_layout_names_the_server_of_another_gpu_that_it_waits_for(start_supervised: StartWork) -> None:
    """A server may open all GPUs that its control daemon sees."""
    work = start_supervised(TWO, TWO, description=[{"kind": "h100", "count": 2}])
    server = work.attach()
    work.reload(MIG, TWO)
    what = f"the MPS server (PID {server}) of GPUs 00:06.0, 00:07.0"
    assert waits(work.made) == f"the switch to MIG mode waits for {what} to end"
    assert work.made.snapshot.notice == ""


def test_a_leased_time_sliced_gpu_that_has_to_go_is_no_failure(start_supervised: StartWork) -> None:
    work = start_supervised(SLICED)
    address = work.lease()
    work.reload(MIG)
    assert work.made.snapshot.notice == ""
    assert work.states()[address] == LEASED
    assert set(work.states().values()) == {LEASED, PENDING}


def test_an_end_of_mps_is_no_change_of_the_compute_mode(start_supervised: StartWork) -> None:
    work = start_supervised(TWO)
    work.attach()
    work.reload(SLICED)
    assert work.made.supervisor.domains
    assert work.made.warnings == []


@pytest.mark.parametrize("leased", [False, True])
def test_a_layout_names_leases_and_servers_rather_than_their_processes(
    start_supervised: StartWork, leased: bool
) -> None:
    work = start_supervised(MIG)
    if leased:
        work.lease()
    pid, (number, *_) = work.attach(), [one.id for one in work.made.snapshot.inventory.gpus[0].mig_instances]
    work.host.gpus[0].add_process(pid, 100, on=(number, 0))
    work.reload(SMALLER)
    lease = "lease job of root and " if leased else ""
    expected = (
        f"its MIG layout waits for {lease}the MPS server (PID {pid}) on instance g{number} (3g.40gb) to end"
    )
    assert waits(work.made) == expected


def test_a_layout_names_no_leases_where_there_are_none(start_supervised: StartWork) -> None:
    work = start_supervised(MIG)
    configured(work.host, SMALLER)
    work.made.accept()
    work.ledger.set_unreadable({"a": ()})
    work.apply()
    why = waits(work.made)
    assert (why, why.code) == ("its MIG layout waits until the leases are known", MIG_PENDING)


@pytest.mark.parametrize("before", [MIG, f"{TWO}; mig: all-disabled", TWO])
def test_a_withdrawn_layout_is_no_longer_pending(start_supervised: StartWork, before: str) -> None:
    work = start_supervised(before)
    work.lease()
    work.reload(SMALLER)
    assert waits(work.made).code == MIG_IN_USE
    configured(work.host, before)
    shown = [change.effect for change in work.made.accept() if change.kind == "MIG layout"]
    assert shown == ["at once"] * len(shown)
    assert (waits(work.made), work.made.snapshot.plan.pending) == ("", {})
    work.apply()
    events = [event for event in work.made.events if event.kind == "mig"]
    assert events[-1].what == "no longer pending"
    assert events[-1].cause.startswith("it was pending: ")
    assert waits(work.made) == ""
    work.reload(SMALLER)
    assert [event.what for event in work.made.events if event.kind == "mig"][-1] == "pending"


@pytest.mark.parametrize("before", [TWO, "type: NVIDIA_MPS; mig: all-3g.40gb"], ids=["gpu", "instance"])
def test_processes_that_come_and_go_make_no_event_each(start_supervised: StartWork, before: str) -> None:
    work = start_supervised(before)
    on = None if before == TWO else (work.host.gpus[0].mig_devices()[0].gpu_instance, 0)
    gpu, made = work.host.gpus[0], work.made
    gpu.add_process(50001, 100, on=on)
    work.reload(SMALLER)
    events = len(made.events)
    assert "PID 50001" in waits(made)
    for pid in range(50001, 50004):
        gpu.remove_process(pid)
        gpu.add_process(pid + 1, 100, on=on)
        work.apply()
        assert f"PID {pid + 1}" in waits(made)
    assert len(made.events) == events


@pytest.mark.parametrize("before", [TWO, SLICED, MIG, MIG_SLICED])
def test_a_lease_that_a_layout_waits_for_is_shown_once(start_supervised: StartWork, before: str) -> None:
    work = start_supervised(before)
    work.lease()
    work.reload(SMALLER)
    queries = Queries(lambda: work.made.snapshot, 0.0, 4200, ledger=work.ledger)
    conditions = queries.conditions()
    assert [condition.kind for condition in shown(conditions)] == [ABOUT_MIG_LAYOUT]
    others = {condition.follows_from for condition in conditions if condition.follows_from}
    assert others == {f"{ABOUT_MIG_LAYOUT} 00:06.0"}
    work.ledger.clear()
