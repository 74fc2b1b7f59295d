"""A leased device without a CUDA process at the moment, whose GPU is to be shared in another way.

tests/unit/supervisor/test_leased_idle.py has each change, with each scope of a control daemon.
"""

from __future__ import annotations

import pytest

from integration.daemon_host import Daemon, eventually
from integration.lease_host import leases_of, take

ADDRESS = "00:07.0"
SLICED = "type: NVIDIA_GPU_SHARE\n  virtual_number: 2"
MIG = "mig: all-3g.40gb"
#: What becomes of both GPUs; the second one is no longer divided, or split into instances.
REMOVED, SPLIT = (2,), (2, MIG)

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "h100", "count": 2})]


@pytest.fixture
def leased(daemon: Daemon) -> Daemon:
    daemon.configure(cuda_mps_pipe_directory="/run/nvidia-mps/pipe")
    daemon.host.divide(2, 2)
    daemon.start().wait_ready()
    take(daemon, f"holder.name=job&holder.ttl_s=600&devices={ADDRESS}-0")
    return daemon


def states(daemon: Daemon) -> dict[str, str]:
    devices = daemon.get("/v1/devices")[1]["isolated_devices"]
    return {device["addr"]: device["state"] for device in devices if device["addr"].startswith(ADDRESS)}


def control_daemon(daemon: Daemon) -> int:
    """The PID of the control daemon that serves the leased device, where its lease says."""
    (lease,) = leases_of(daemon)
    directory = lease["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
    (domain,) = [one for one in daemon.status()["domains"] if one["pipe_directory"] == directory]
    assert daemon.control("get_default_active_thread_percentage", pipe_directory=directory) == ["50.0"]
    return int(domain["pid"])


@pytest.mark.parametrize("after", [REMOVED, SPLIT])
def test_a_leased_device_keeps_its_control_daemon_until_the_lease_ends(
    leased: Daemon, after: tuple[object, ...]
) -> None:
    pid = control_daemon(leased)
    leased.host.divide(*after)
    assert leased.ask("POST", "/v1/reload")[0] == 200
    check_that_it_is_kept(leased, pid)
    assert leased.host.run(("yunion-mps", "reload", "--drain", "--timeout", "1")).returncode == 1
    check_that_it_is_kept(leased, pid)


def test_a_reload_without_leases_is_in_effect_when_it_returns(leased: Daemon) -> None:
    (lease,) = leases_of(leased)
    assert leased.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    leased.host.divide(*SPLIT)
    status, answer = leased.ask("POST", "/v1/reload")
    assert (status, answer["pending"]) == (200, [])
    assert {change["effect"] for change in answer["changes"]} == {"at once"}
    assert set(states(leased).values()) == {"free"}


def test_a_restart_after_a_crash_keeps_the_control_daemon_of_a_lease(leased: Daemon) -> None:
    pid = control_daemon(leased)
    leased.host.divide(2, SLICED)
    assert leased.ask("POST", "/v1/reload")[0] == 200
    leased.kill()
    leased.start().wait_ready()
    check_that_it_is_kept(leased, pid)
    (lease,) = leases_of(leased)
    assert leased.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    done = leased.host.run(("yunion-mps", "reload", "--drain"))
    assert done.returncode == 0, done.stderr
    assert set(states(leased).values()) == {"free"}


def test_a_lease_taken_after_a_reload_now_is_kept_by_the_next_reload(daemon: Daemon) -> None:
    daemon.configure(cuda_mps_scope="gpu", cuda_mps_pipe_directory="/run/nvidia-mps/pipe")
    daemon.host.divide(2, f"{MIG}\n  virtual_number: 2")
    daemon.start().wait_ready()
    daemon.host.run(("yunion-mps", "reload", "--now", "--yes"), check=True)
    take(daemon, f"holder.name=job&holder.ttl_s=600&devices={ADDRESS}-g1-0")
    pid = control_daemon(daemon)
    daemon.host.divide(2, "mig: all-1g.10gb\n  virtual_number: 2")
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    for _ in range(3):
        assert daemon.polls()
        assert control_daemon(daemon) == pid
    assert states(daemon)[f"{ADDRESS}-g1-0"] == "leased"


def check_that_it_is_kept(daemon: Daemon, pid: int) -> None:
    for _ in range(3):  # a poll could end it, too
        assert daemon.polls()
        assert control_daemon(daemon) == pid
    assert states(daemon)[f"{ADDRESS}-0"] == "leased"
    assert daemon.host.gpus[1].compute_mode == "exclusive_process"
    eventually(lambda: daemon.status()["problems"], "the reason")
