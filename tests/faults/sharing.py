"""Faults while a GPU is split into MIG instances, or time-sliced."""

from __future__ import annotations

import os
import signal

from yunion_mps import reasons

from faults.hands import await_events
from faults.rows import SHARING, fault
from faults.scene import Scene, shown, until
from simhost.gpu import MigDevice
from simhost.host import SHARED

_MIG = [{"kind": "h100"}]
_NEEDS_RESET = [{"kind": "a100"}]
_TWO = [{"kind": "v100"}, {"kind": "v100"}]
_BALANCED = ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]


def _instance(scene: Scene, profile: str) -> MigDevice:
    return next(one for one in scene.host.gpus[0].mig_devices() if one.profile == profile)


def _is_balanced(scene: Scene) -> bool:
    return sorted(one.profile for one in scene.host.gpus[0].mig_devices()) == _BALANCED


def _hold(scene: Scene, addr: str) -> None:
    """Let this process have a certain device."""
    words = f"holder.pid={os.getpid()}&devices={addr}&allow_unlimited=true"
    status, lease = scene.daemon.ask("POST", "/v1/leases", words)
    assert status == 201, lease
    scene.lease = lease["id"]


def _serve(scene: Scene, *entries: object, lease: str) -> None:
    """Serve GPUs that are divided in this way; this process has a device of the instance `lease`."""
    scene.host.divide(*entries)
    scene.daemon.start().wait_ready()
    scene.all_available()
    _hold(scene, f"00:06.0-g{_instance(scene, lease).gpu_instance}")
    await_events(scene)


def _reload(scene: Scene) -> None:
    assert scene.daemon.ask("POST", "/v1/reload")[0] == 200


@fault(SHARING, "the daemon is killed in a driver call while it applies a layout", gpus=_MIG)
def killed_in_a_layout(scene: Scene) -> None:
    """The kills before and after each call: tests/unit/supervisor/test_mig_kills.py."""
    scene.host.divide("mig: all-balanced")
    call = "nvmlDeviceCreateGpuInstanceWithPlacement"
    scene.host.fail(call, "success", times=1, delay_ms=60_000, skip=1)
    scene.daemon.start()
    until(lambda: not scene.host.show()["failures"], "the call", scene.trouble)
    scene.inject(scene.daemon.kill, answers=False)
    scene.daemon.start().wait_ready()
    scene.serves_again(lambda: _is_balanced(scene))
    scene.record_report("created g")
    scene.hold_a_lease()


@fault(SHARING, "another program destroys an instance", takes_s=13, gpus=_MIG)
def instance_destroyed(scene: Scene) -> None:
    _serve(scene, "mig: all-balanced", lease="3g.40gb")
    gone = _instance(scene, "2g.20gb").gpu_instance
    scene.inject(lambda: scene.host.gpus[0].end_instances(gone))
    scene.expect_report("another program changed it")
    scene.note_recovery("; ")
    scene.serves_again(lambda: _is_balanced(scene))


@fault(SHARING, "another program switches MIG mode off; a lease has an instance", takes_s=13, gpus=_MIG)
def mode_switched_off(scene: Scene) -> None:
    _serve(scene, "mig: all-balanced", lease="3g.40gb")
    scene.inject(lambda: setattr(scene.host.gpus[0], "mig", False))
    scene.expect_report("another program changed it")
    scene.note_recovery("; ")
    scene.serves_again(lambda: _is_balanced(scene))


@fault(SHARING, "a process uses an instance that a new layout does not have", takes_s=2, gpus=_MIG)
def instance_in_use(scene: Scene) -> None:
    _serve(scene, "mig: [3g.40gb, 1g.10gb]", lease="1g.10gb")
    big = _instance(scene, "3g.40gb")
    scene.host.gpus[0].add_process(os.getpid(), 100, on=(big.gpu_instance, 0))
    scene.host.divide("mig: [2g.20gb, 2g.20gb, 1g.10gb]")
    scene.inject(lambda: _reload(scene))
    scene.expect_report("waits for the process")
    assert big in scene.host.gpus[0].mig_devices()
    scene.repair(lambda: scene.host.gpus[0].remove_process(os.getpid()), "its end")
    scene.serves_again(lambda: len(scene.host.gpus[0].mig_devices()) == 3)


@fault(SHARING, "a new layout needs the place of an instance of another program", takes_s=2, gpus=_MIG)
def no_place_left(scene: Scene) -> None:
    _serve(scene, "mig: [3g.40gb]", lease="3g.40gb")
    ours = _instance(scene, "3g.40gb")
    devices = scene.host.create_mig_devices(0, "3g.40gb")
    (other,) = (one for one in devices if one.uuid != ours.uuid)
    scene.host.divide("mig: [3g.40gb, 2g.20gb]")
    scene.inject(lambda: _reload(scene))
    scene.expect_report("which another program created, is in the way")
    assert scene.host.gpus[0].mig_devices() == devices
    scene.repair(lambda: scene.host.gpus[0].end_instances(other.gpu_instance), "its end")
    scene.serves_again(lambda: len(scene.host.gpus[0].mig_devices()) == 2)
    assert ours in scene.host.gpus[0].mig_devices()


@fault(SHARING, "the driver hangs for over a minute while a layout is applied", takes_s=70, gpus=_MIG)
def layout_hangs(scene: Scene) -> None:
    """In every call of the layout: tests/unit/supervisor/test_mig_hangs.py."""
    _serve(scene, "mig: [3g.40gb, 2g.20gb]", lease="3g.40gb")
    scene.host.divide("mig: [3g.40gb, 1g.10gb, 1g.10gb]")
    scene.host.fail("nvmlComputeInstanceDestroy", "success", delay_ms=3_600_000)
    scene.inject(lambda: scene.daemon.signal(signal.SIGHUP))
    answered: list[dict[str, object]] = []

    def reported() -> str:
        answered.append(scene.daemon.status())
        return scene.find("did not answer within 60 s")

    until(reported, "the deadline", scene.trouble)
    assert len(answered) > 10, "requests waited for the layout"
    scene.expect_report("did not answer within 60 s")
    scene.repair(scene.host.clear, "the driver's answer")
    scene.serves_again(lambda: len(scene.host.gpus[0].mig_devices()) == 3)
    scene.record_report("did not answer within 60 s")


@fault(SHARING, "MIG mode can be switched on only by a reset of the GPU (A100)", gpus=_NEEDS_RESET)
def reset_required(scene: Scene) -> None:
    scene.host.divide("mig: 3g.20gb\n  mig_restore: true")
    scene.inject(scene.daemon.start, answers=False)
    scene.daemon.wait_ready()
    (gpu,) = scene.daemon.get("/v1/gpus")[1]["gpus"]
    assert gpu["reason_code"] == reasons.MIG_RESET_REQUIRED
    scene.words = gpu["reason"]
    scene.note("reported after {}")

    def reset() -> None:
        assert scene.daemon.stop() == 0
        scene.host.run(["nvidia-smi", "--gpu-reset", "-i", 0], check=True)
        scene.daemon.start().wait_ready()

    scene.repair(reset, "the reset, for which the daemon is stopped")
    scene.serves_again()
    scene.hold_a_lease()


@fault(SHARING, "the daemon starts after a reboot, which has ended all instances", gpus=_MIG)
def reboot(scene: Scene) -> None:
    _serve(scene, "mig: all-balanced", lease="3g.40gb")
    ids = _ids(scene)
    scene.remember_events()
    scene.daemon.kill()
    scene.host.reboot()
    scene.inject(scene.daemon.start, answers=False)
    scene.daemon.wait_ready()
    scene.serves_again(lambda: _is_balanced(scene) and _ids(scene) == ids)
    scene.record_report("created g")


def _ids(scene: Scene) -> set[str]:
    rows = scene.daemon.get("/v1/devices?limit=100")[1]["isolated_devices"]
    return {row["id"] for row in rows}


@fault(SHARING, "a reload makes a leased GPU time-sliced that MPS has served", gpus=_TWO)
def type_changed(scene: Scene) -> None:
    scene.host.divide(4, 4)
    scene.daemon.start().wait_ready()
    scene.all_available()
    _hold(scene, "00:07.0-0")
    other = scene.lease
    _hold(scene, "00:06.0-0")
    scene.host.divide(4, SHARED)
    scene.inject(lambda: _reload(scene))
    rows = scene.daemon.get("/v1/devices?limit=100")[1]["isolated_devices"]
    (why,) = {row["reason"] for row in rows if row["state"] == "pending" and row["addr"] != "00:07.0-0"}
    scene.words = shown(why, scene.host)
    assert scene.host.gpus[1].compute_mode == "exclusive_process", "its job keeps MPS"
    scene.note_recovery("waits for the lease")
    scene.repair(lambda: scene.daemon.ask("DELETE", f"/v1/leases/{other}"), "its end")
    scene.serves_again(lambda: scene.host.gpus[1].compute_mode == "default")


@fault(SHARING, "another program changes the time slice of a GPU", gpus=_TWO)
def time_slice_changed(scene: Scene) -> None:
    """It is compared every five minutes, and at a reload."""
    scene.host.divide(4, f"{SHARED}\n  time_slice: short")
    scene.serve()
    gpu = scene.host.gpus[1]
    scene.inject(lambda: setattr(gpu, "time_slice", "long"))
    scene.note_recovery()
    scene.repair(lambda: _reload(scene), "a reload")
    scene.serves_again(lambda: gpu.time_slice == "short")
    scene.record_report("time slice short")
