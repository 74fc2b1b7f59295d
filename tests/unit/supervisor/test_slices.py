"""Unequal devices and pools, from the files to what is in effect on NVIDIA's real control daemon."""

from __future__ import annotations

import json
import time

from yunion_mps.core.models import DomainPlan, PlannedGpu, Pool, Slice
from yunion_mps.mps.control_daemon import in_running_order, with_recorded_limits
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.service.queries import Queries

from simhost import SimHost
from unit.supervised import MakeHost, MakeStandIns, StartSupervised, Supervise, attach

V100 = [{"kind": "v100"}]
V100_MIB = 16384
SLICES = "slices: [{memory: 8GiB, thread_percentage: 50}, {memory: 4GiB, thread_percentage: 25}]"

A, B = "GPU-a", "GPU-b"
PLAN = DomainPlan(
    "host",
    "/pipe",
    "/log",
    (
        PlannedGpu(A, 8192, 2, 50.0, (Slice(8192, 50.0), Slice(4096, 25.0, "below_normal"))),
        PlannedGpu(B, 16384, 0, 100.0, pool=Pool(B, "host", 1024, 16384, 16384, 0, 48, None)),
    ),
    100.0,
)


def write(host: SimHost, division: str) -> None:
    """Divide the host's one GPU so."""
    entry = f"- path: {host.gpus[0].uuid}\n  type: NVIDIA_MPS\n  {division}\n"
    (host.root / "etc/yunion/host_container_device.yml").write_text(f"devices:\n{entry}")


def test_recorded_slices_and_pools_are_read_unchanged() -> None:
    recorded = json.loads(json.dumps(LimitsInEffect(PLAN, (5,)).to_json()))
    assert LimitsInEffect.from_json(recorded) == LimitsInEffect(PLAN, (5,))
    read = LimitsInEffect.from_json(recorded)
    assert read is not None
    assert isinstance(read.plan.gpus[0].slices[0], Slice)
    assert isinstance(read.plan.gpus[1].pool, Pool)
    del recorded["plan"]["gpus"]  # what cannot be understood says nothing
    assert LimitsInEffect.from_json(recorded) is None


def test_slices_and_pools_stay_with_their_gpus_if_these_are_reordered() -> None:
    running = PLAN.for_gpus((B, A))
    served = in_running_order(PLAN, running)
    assert [(gpu.memory_limit_mib, gpu.device_count) for gpu in served.gpus] == [(16384, 0), (8192, 2)]
    assert in_running_order(served, PLAN) == PLAN
    assert in_running_order(PLAN, PLAN.for_gpus((B,))).gpus == PLAN.gpus[1:]


def test_a_gpu_that_is_lost_for_now_keeps_its_slices_or_its_pool() -> None:
    for lost in (A, B):
        left = in_running_order(PLAN, PLAN.for_gpus({A, B} - {lost}))
        known = in_running_order(left, PLAN)
        assert None in known.memory_limits_mib
        assert with_recorded_limits(known, PLAN) == PLAN


def test_slices_take_effect_with_the_largest_as_the_limit(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(V100, 4)
    write(host, SLICES)
    (change,) = made.reload()
    after = "1 x 8192 MiB, 50 % + 1 x 4096 MiB, 25 %"
    assert change == ("budget", "00:06.0", "4 x 4096 MiB, 25 %", after, "at once")
    devices = made.snapshot.plan.devices
    assert [(one.memory_limit_mib, one.thread_percentage) for one in devices] == [(8192, 50.0), (4096, 25.0)]
    (domain,) = made.snapshot.domains
    assert (domain.plan.memory_limits_mib, domain.plan.thread_percentage) == ((8192,), 50.0)
    assert domain.pending == ""


def test_a_pool_takes_effect_with_its_whole_memory_as_the_limit(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(V100, 4)
    write(host, "memory_unit: 128MiB")
    (change,) = made.reload()
    assert change[2:] == ("4 x 4096 MiB, 25 %", "128 units of 128 MiB", "at once")
    snapshot = made.snapshot
    assert (snapshot.plan.devices, len(snapshot.plan.pools)) == ((), 1)
    (domain,) = snapshot.domains
    assert (domain.plan.memory_limits_mib, domain.plan.thread_percentage) == ((V100_MIB,), 100.0)
    (shown,) = Queries(lambda: snapshot, 0.0, 1).gpus()["gpus"]
    assert (shown["state"], shown["devices"], shown["reason"]) == ("available", 0, "")


def test_a_pool_with_a_job_stays_across_a_daemon_restart(
    make_host: MakeHost, supervise: Supervise, stand_ins: MakeStandIns
) -> None:
    host = make_host(V100)
    write(host, "memory_unit: 1GiB")
    jobs = stand_ins(host)
    first = supervise(host).start()
    (pool,) = first.snapshot.plan.pools
    client = attach(jobs, host)
    write(host, SLICES)
    (change,) = first.reload()
    assert change.effect == f"once the MPS server (PID {jobs.servers()[0]}) has ended"
    for made in (first, first.start_next()):
        assert made.snapshot.domains[0].pending
        assert (made.snapshot.plan.pools, made.snapshot.plan.devices) == ((pool,), ())
    client.end()
    for server in jobs.servers():
        made.supervisor.jobs.update({host.gpus[0].uuid: {server: 30}}, time.monotonic())
    made.until(lambda: not made.snapshot.domains[0].pending)
    assert (made.snapshot.plan.pools, len(made.snapshot.plan.devices)) == ((), 2)


def test_slices_with_a_job_are_not_pending_for_the_next_daemon(
    make_host: MakeHost, supervise: Supervise, stand_ins: MakeStandIns
) -> None:
    host = make_host(V100)
    write(host, SLICES)
    jobs = stand_ins(host)
    first = supervise(host).start()
    attach(jobs, host)
    again = first.start_next()
    assert again.snapshot.domains[0].pid == first.snapshot.domains[0].pid
    assert again.snapshot.domains[0].pending == ""
    assert again.snapshot.plan == first.snapshot.plan
