"""MIG layouts after a stop: what is restored, what stays, and how a reset brings a mode."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest
from yunion_mps.core import reasons

from integration.conftest import MakeDivided
from integration.daemon_host import Daemon, control_daemons, eventually
from integration.lease_host import end_job, start_job
from integration.mig_devices import devices, free, gpu, instances
from integration.test_mig import MIG, daemon
from simhost import SimHost

__all__ = ["daemon"]


def compute_mode(host: SimHost) -> str:
    done = host.run(["nvidia-smi", "-i", 0, "--query-gpu=compute_mode", "--format=csv,noheader"], check=True)
    return done.stdout.strip()


def wait_restored(daemon: Daemon) -> None:
    """Wait until the GPU has its original compute mode, Prohibited, again."""
    eventually(lambda: daemon.polls() and compute_mode(daemon.host) == "Prohibited", "the original mode")


@pytest.mark.parametrize("original", ["Default", "Exclusive_Process", "Prohibited"])
def test_a_stop_restores_the_layout_if_so_configured(daemon: Daemon, original: str) -> None:
    daemon.host.run(["nvidia-smi", "-c", original.upper()], check=True)
    daemon.host.divide(f"{MIG}\n  mig_restore: true")
    daemon.start().wait_ready()
    assert daemon.host.gpus[0].mig
    assert daemon.stop(signal.SIGTERM) == 0
    assert (daemon.host.gpus[0].mig, compute_mode(daemon.host)) == (False, original)
    daemon.host.divide(MIG)
    daemon.start().wait_ready()
    events = daemon.host.run(["yunion-mps", "events", "--output", "json"], check=True).stdout
    causes = [one["cause"] for one in json.loads(events)["events"] if one["kind"] == "mig"]
    required = "the configuration requires it"
    assert causes == [required, "the original layout was restored", required]


def test_a_start_with_mps_disabled_keeps_the_mode_of_a_leased_instance(daemon: Daemon) -> None:
    daemon.host.run(["nvidia-smi", "-i", 0, "-c", "PROHIBITED"], check=True)
    daemon.host.divide(MIG)
    daemon.start().wait_ready()
    job = start_job(daemon.host)
    daemon.configure(enable_cuda_mps=False)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    assert daemon.stop(signal.SIGTERM) == 0
    daemon.start().wait_ready()
    for _ in range(2):
        assert daemon.polls()
    (device,) = devices(daemon).values()
    assert (compute_mode(daemon.host), device["reason"]) == ("Default", "")
    assert daemon.stop(signal.SIGTERM) == 0
    assert compute_mode(daemon.host) == "Default"
    daemon.start().wait_ready()
    end_job(job)
    wait_restored(daemon)


@pytest.mark.parametrize(
    "entry", ["mig: [2g.20gb, 2g.20gb]\n  mig_restore: true", "mig: all-disabled\n  virtual_number: 2"]
)
def test_a_job_that_delays_a_layout_keeps_its_compute_mode(daemon: Daemon, entry: str) -> None:
    daemon.host.run(["nvidia-smi", "-i", 0, "-c", "PROHIBITED"], check=True)
    daemon.host.divide(MIG)
    daemon.start().wait_ready()
    job = start_job(daemon.host)
    daemon.host.divide(f"type: NVIDIA_GPU_SHARE\n  {entry}")
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    daemon.kill()
    assert daemon.run("--restore") == 1
    assert compute_mode(daemon.host) == "Default"
    daemon.configure(enable_cuda_mps=False)
    daemon.start().wait_ready()
    assert daemon.polls()
    assert compute_mode(daemon.host) == "Default"
    end_job(job)
    wait_restored(daemon)


def test_a_leased_device_with_mps_keeps_the_mode_of_its_instance(daemon: Daemon) -> None:
    daemon.host.run(["nvidia-smi", "-i", 0, "-c", "PROHIBITED"], check=True)
    daemon.host.divide(f"{MIG}\n  virtual_number: 2")
    daemon.start().wait_ready()
    job = start_job(daemon.host)
    daemon.host.divide("virtual_number: 2")
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    assert daemon.polls()
    assert compute_mode(daemon.host) == "Default"
    daemon.configure(enable_cuda_mps=False)
    before = control_daemons(daemon.host.root)
    daemon.kill()
    daemon.start().wait_ready()
    assert daemon.polls()
    assert (compute_mode(daemon.host), control_daemons(daemon.host.root)) == ("Default", before)
    end_job(job)
    wait_restored(daemon)


def test_an_exclusive_mode_waits_until_mig_mode_is_off(daemon: Daemon) -> None:
    daemon.host.run(["nvidia-smi", "-i", 0, "-c", "EXCLUSIVE_PROCESS"], check=True)
    daemon.start().wait_ready()
    daemon.configure(enable_cuda_mps=False)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    assert daemon.polls()
    assert daemon.stop(signal.SIGTERM) == 0
    impossible = "the driver does not support Exclusive_Process in MIG mode"
    assert (daemon.log.count(impossible), daemon.log.count("ERROR")) == (1, 0), daemon.log
    assert daemon.run("--restore") == 0
    assert "everything else is restored" in daemon.log
    daemon.host.gpus[0].mig = False
    assert daemon.run("--restore") == 0
    assert compute_mode(daemon.host) == "Exclusive_Process"


def test_a_kept_mode_that_a_layout_resets_is_restored_with_the_layout(daemon: Daemon) -> None:
    daemon.host.run(["nvidia-smi", "-i", 0, "-c", "PROHIBITED"], check=True)
    daemon.host.divide(f"{MIG}\n  mig_restore: true")
    daemon.configure(cuda_mps_compute_mode="keep")
    daemon.start().wait_ready()
    assert compute_mode(daemon.host) == "Default", "which MIG requires"
    assert daemon.stop(signal.SIGTERM) == 0
    assert (daemon.host.gpus[0].mig, compute_mode(daemon.host)) == (False, "Prohibited")


def test_a_mode_that_a_start_resets_by_leaving_mig_mode_is_restored(daemon: Daemon) -> None:
    daemon.host.divide(MIG)
    daemon.start().wait_ready()
    assert daemon.stop(signal.SIGTERM) == 0
    daemon.host.run(["nvidia-smi", "-i", 0, "-c", "PROHIBITED"], check=True)
    daemon.host.divide("mig: all-disabled\n  virtual_number: 2")
    daemon.start().wait_ready()
    assert (daemon.host.gpus[0].mig, compute_mode(daemon.host)) == (False, "Exclusive_Process")
    assert daemon.stop(signal.SIGTERM) == 0
    assert compute_mode(daemon.host) == "Prohibited"


def test_a_leased_instance_keeps_its_mode_if_the_driver_fails_at_a_start(daemon: Daemon) -> None:
    daemon.host.run(["nvidia-smi", "-i", 0, "-c", "PROHIBITED"], check=True)
    daemon.host.divide(MIG)
    daemon.start().wait_ready()
    job = start_job(daemon.host)
    daemon.configure(enable_cuda_mps=False)
    daemon.kill()
    daemon.host.fail("nvmlInit*", "driver_not_loaded", times=1)
    daemon.start().wait_ready()
    assert "the GPUs of leases are not known" in daemon.log
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    assert compute_mode(daemon.host) == "Default"
    assert daemon.stop(signal.SIGTERM) == 0
    assert compute_mode(daemon.host) == "Default"
    end_job(job)
    assert daemon.run("--restore") == 0, daemon.log
    assert compute_mode(daemon.host) == "Prohibited"


def test_a_leased_instance_keeps_its_mode_if_the_driver_fails_in_restore(daemon: Daemon) -> None:
    daemon.host.run(["nvidia-smi", "-i", 0, "-c", "PROHIBITED"], check=True)
    daemon.host.divide(MIG)
    daemon.start().wait_ready()
    job = start_job(daemon.host)
    daemon.kill()
    daemon.host.fail("nvmlInit*", "driver_not_loaded", times=1)  # until the mode would be restored
    assert daemon.run("--restore") == 1, daemon.log
    assert compute_mode(daemon.host) == "Default"
    end_job(job)
    assert daemon.run("--restore") == 0, daemon.log
    assert compute_mode(daemon.host) == "Prohibited"


def test_restore_looks_at_the_gpus_once_for_layouts_and_settings(daemon: Daemon) -> None:
    """Two looks may differ, if a GPU comes or goes in between."""
    daemon.host.divide(f"{MIG}\n  mig_restore: true")
    daemon.start().wait_ready()
    daemon.kill()
    daemon.host.fail("nvmlInit*", "driver_not_loaded", skip=1)
    assert daemon.run("--restore") == 0, daemon.log
    assert not daemon.host.gpus[0].mig


def reset_gpu(host: SimHost) -> None:
    host.run(["nvidia-smi", "--gpu-reset", "-i", host.gpus[0].uuid], check=True)


@pytest.mark.parametrize(
    ("original", "restores", "how"),
    [("Default", "", SimHost.reboot), ("Exclusive_Process", "\n  mig_restore: true", reset_gpu)],
)
def test_the_hint_of_a_mode_that_needs_a_reset_leads_to_the_layout(
    make_divided: MakeDivided, original: str, restores: str, how: Callable[[SimHost], None]
) -> None:
    daemon = daemon_before_reset(make_divided, restores, original)
    assert (daemon.host.gpus[0].mig_pending, compute_mode(daemon.host)) == (True, original)
    how(daemon.host)
    daemon.start().wait_ready()
    eventually(lambda: free(daemon) == 2, "its devices")


def daemon_before_reset(make_divided: MakeDivided, restores: str = "", original: str = "Default") -> Daemon:
    """A daemon that has ended before the reset that its layout waits for."""
    daemon = make_divided([{"kind": "a100"}], f"mig: all-3g.20gb{restores}")
    daemon.host.run(["nvidia-smi", "-c", original.upper()], check=True)
    daemon.start().wait_ready()
    eventually(lambda: gpu(daemon)["reason_code"] == reasons.MIG_RESET_REQUIRED, "the reason")
    assert daemon.stop(signal.SIGTERM) == 0
    return daemon


def test_restore_cancels_a_mode_that_needs_a_reset(make_divided: MakeDivided) -> None:
    daemon = daemon_before_reset(make_divided, "\n  mig_restore: true")
    assert daemon.log.count("cancel this: yunion-mps-daemon --restore") == 1
    assert daemon.run("--restore") == 0, daemon.log
    assert not daemon.host.gpus[0].mig_pending


def test_restore_cancels_a_mode_that_no_entry_has_anymore(make_divided: MakeDivided) -> None:
    daemon = daemon_before_reset(make_divided)
    daemon.host.divide(4)
    assert daemon.run("--restore") == 0, daemon.log
    assert not daemon.host.gpus[0].mig_pending


def test_restore_after_a_kill_restores_the_layout_if_so_configured(daemon: Daemon) -> None:
    daemon.host.run(["nvidia-smi", "-i", 0, "-c", "EXCLUSIVE_PROCESS"], check=True)
    daemon.host.divide(f"{MIG}\n  mig_restore: true")
    daemon.start().wait_ready()
    daemon.kill()
    (big,) = [one for one in instances(daemon) if one.profile == "3g.40gb"]
    daemon.host.gpus[0].add_process(os.getpid(), 100, on=(big.gpu_instance, 0))
    assert daemon.run("--restore") == 1, daemon.log
    what = f"that would end the process (PID {os.getpid()}) on instance g{big.gpu_instance} (3g.40gb)"
    assert f"the MIG layout of GPU 00:06.0 is not restored: {what}" in daemon.log
    daemon.host.gpus[0].remove_process(os.getpid())
    assert daemon.run("--restore") == 0, daemon.log
    assert not daemon.host.gpus[0].mig
    assert "everything is restored" in daemon.log
    assert "GPU 00:06.0: compute mode Exclusive_Process was restored" in daemon.log


def test_restore_restores_the_layout_even_if_mps_is_disabled(daemon: Daemon) -> None:
    daemon.host.run(["nvidia-smi", "-i", 0, "-c", "PROHIBITED"], check=True)
    daemon.host.divide(f"{MIG}\n  mig_restore: true")
    daemon.start().wait_ready()
    daemon.configure(enable_cuda_mps=False)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    assert daemon.stop(signal.SIGTERM) == 0
    assert daemon.host.gpus[0].mig
    assert daemon.run("--restore") == 0, daemon.log
    assert (daemon.host.gpus[0].mig, compute_mode(daemon.host)) == (False, "Prohibited")


def test_a_lease_whose_process_has_ended_does_not_prevent_a_restore(daemon: Daemon) -> None:
    daemon.host.divide(f"{MIG}\n  mig_restore: true")
    daemon.start().wait_ready()
    job = start_job(daemon.host)
    daemon.kill()
    assert daemon.run("--restore") == 1, daemon.log
    assert "not restored: that would end lease" in daemon.log
    end_job(job)
    assert daemon.run("--restore") == 0, daemon.log
    assert not daemon.host.gpus[0].mig


def test_restore_names_a_layout_whose_entry_cannot_be_read(daemon: Daemon) -> None:
    daemon.host.divide(f"{MIG}\n  mig_restore: true")
    daemon.start().wait_ready()
    daemon.kill()
    daemon.host.divide(f"{MIG}\n  mig_restore: 7")
    assert daemon.run("--restore") == 1, daemon.log
    assert "is to be restored, because the configuration has errors" in daemon.log
    daemon.host.divide(f"{MIG}\n  mig_restore: true")
    assert daemon.run("--restore") == 0, daemon.log
    assert not daemon.host.gpus[0].mig
