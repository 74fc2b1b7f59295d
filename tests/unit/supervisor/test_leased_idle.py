"""A leased device without a CUDA process at the moment, whose GPU is to be shared in another way."""

from __future__ import annotations

import pytest
from yunion_mps.core.enums import FREE, LEASED, READY

from unit.supervised import MakeHost, Supervise
from unit.supervisor.test_transitions import ChangingGpu

MIG = "mig: all-3g.40gb"
SLICED = "type: NVIDIA_GPU_SHARE; virtual_number: 2"
#: What becomes of the second GPU: time-sliced, split into instances, no longer divided.
CHANGES = [SLICED, MIG, None]
GPUS = [{"kind": "h100", "count": 2}]


@pytest.fixture(params=["gpu", "host"])
def leased(make_host: MakeHost, supervise: Supervise, request: pytest.FixtureRequest) -> ChangingGpu:
    """Both GPUs have two devices, and one of the second GPU is leased."""
    host = make_host(GPUS, cuda_mps_scope=request.param, cuda_mps_pipe_directory="/run/mps")
    host.divide(2, 2)
    gpu = ChangingGpu(supervise(host), "default")
    gpu.lease()
    return gpu


def control_daemon(gpu: ChangingGpu) -> int:
    """The PID of the control daemon that serves the leased device."""
    (lease,) = gpu.ledger.leases.values()
    uuid = lease.devices[0].gpu_uuid
    (domain,) = (domain for domain in gpu.made.snapshot.domains if uuid in domain.plan.gpu_uuids)
    assert domain.state == READY
    assert domain.pid
    return domain.pid


def check_that_it_is_kept(gpu: ChangingGpu, pid: int) -> None:
    (lease,) = gpu.ledger.leases.values()
    for _ in range(3):  # a poll could end it, too
        gpu.poll()
        assert control_daemon(gpu) == pid
    assert gpu.rows()[lease.devices[0].addr]["state"] == LEASED
    assert gpu.host.gpus[1].compute_mode == "exclusive_process"


def check_that_all_is_free(gpu: ChangingGpu, after: str | None) -> None:
    assert {row["state"] for row in gpu.rows().values()} == ({FREE} if after else set())


@pytest.mark.parametrize("after", CHANGES)
def test_a_leased_device_keeps_its_control_daemon_until_the_lease_ends(
    leased: ChangingGpu, after: str | None
) -> None:
    pid = control_daemon(leased)
    leased.reload(after)
    check_that_it_is_kept(leased, pid)
    leased.release()
    leased.settle()
    check_that_all_is_free(leased, after)


@pytest.mark.parametrize("after", CHANGES)
def test_a_reload_without_leases_is_in_effect_when_it_returns(leased: ChangingGpu, after: str | None) -> None:
    leased.release()
    changes = leased.reload(after)
    # The daemon tells of a layout afterwards: see tests/integration/test_leased_idle.py.
    assert {change.effect for change in changes if change.kind != "MIG layout"} == {"at once"}
    check_that_all_is_free(leased, after)


@pytest.mark.parametrize("reloads", [True, False])
@pytest.mark.parametrize("after", CHANGES)
def test_a_restart_after_a_crash_keeps_the_control_daemon_of_a_lease(
    leased: ChangingGpu, after: str | None, reloads: bool
) -> None:
    pid = control_daemon(leased)
    if reloads:
        leased.reload(after)
    leased.host.divide(2, *([after] if after else []))
    leased.restart(is_crash=True)
    check_that_it_is_kept(leased, pid)
    leased.release()
    leased.settle()
    check_that_all_is_free(leased, after)


@pytest.mark.parametrize(
    "after",
    [None, f"{MIG}; {SLICED}", "mig: all-disabled; virtual_number: 2", "mig: all-1g.10gb; virtual_number: 2"],
)
def test_a_lease_taken_after_a_reload_now_is_kept_by_the_next_reload(
    make_host: MakeHost, supervise: Supervise, after: str | None
) -> None:
    host = make_host(GPUS, cuda_mps_scope="gpu", cuda_mps_pipe_directory="/run/mps")
    entry = f"{MIG}; virtual_number: 2"
    host.divide(2, entry)
    gpu = ChangingGpu(supervise(host), "default")
    gpu.poll()
    gpu.reload(entry, now=True)
    address = gpu.lease().addr
    pid = control_daemon(gpu)
    gpu.reload(after)
    for _ in range(3):
        gpu.poll()
        assert control_daemon(gpu) == pid
    assert gpu.rows()[address]["state"] == LEASED
