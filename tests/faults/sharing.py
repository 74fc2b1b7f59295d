"""Faults while a GPU is split into MIG instances, or time-sliced."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Mapping

from yunion_mps.core import reasons

from faults.fault_table import SHARING, fault
from faults.scene import FORMER_MODE, Scene, shown, until
from faults.tampering import await_events
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
    """The kills before and after each call: tests/unit/gpus/test_mig_kills.py."""
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


#: How often the daemon is killed; more take longer: YUNION_MPS_MIG_KILLS=200.
_KILLS = int(os.environ.get("YUNION_MPS_MIG_KILLS", "24"))
#: Each has room for the leased 1g.10gb, wherever it is.
_LAYOUTS = ("[3g.40gb, 1g.10gb]", "[2g.20gb, 2g.20gb, 1g.10gb]", "all-1g.10gb", "[2g.20gb, 1g.10gb]")
Files = Mapping[str, bytes]


class _StateFile:
    """The state file of a daemon that was killed, with what belongs to it, and how it is lost or damaged."""

    def __init__(self, scene: Scene, chance: random.Random) -> None:
        self._directory = scene.host.root / "var/lib/yunion-mps"
        self._chance = chance
        self._older: list[Files] = []

    def harm(self, number: int) -> str:
        """Do what is due after kill `number`; return what was done."""
        content = {path.name: path.read_bytes() for path in self._directory.glob("state.db*")}
        size = len(content.get("state.db", b""))  # there is none if the daemon was killed early
        ways = ("remove", "truncate", "zero", "roll_back")
        way = ways[number % len(ways)]
        if way == "roll_back":
            self._put(self._chance.choice(self._older))
        elif way == "remove":
            self._put({})
        else:
            kept = content.get("state.db", b"")[: self._chance.choice((0, size // 2))]
            self._put({"state.db": kept if way == "truncate" else bytes(size)})
        if size:
            self._older.append(content)
        return way

    def _put(self, content: Files) -> None:
        for path in self._directory.glob("state.db*"):
            path.unlink()
        for name, data in content.items():
            (self._directory / name).write_bytes(data)


@fault(
    SHARING,
    "the daemon is killed at random moments of layouts, and its state file lost or damaged each time",
    takes_s=60,
    gpus=_MIG,
)
def killed_without_a_state_file(scene: Scene) -> None:
    """Removed, truncated, zeroed or rolled back; the next daemon knows all that is ours, or was before us."""
    chance, gpu = random.Random(35), scene.host.gpus[0]
    entry = "mig: {}\n  mig_restore: true"
    _serve(scene, entry.format(_LAYOUTS[0]), lease="1g.10gb")
    leased, state_file = _instance(scene, "1g.10gb"), _StateFile(scene, chance)
    _delay_creations(scene)
    scene.remember_events()
    scene.daemon.kill()
    for number in range(_KILLS):
        layout = chance.choice(_LAYOUTS)
        scene.host.divide(entry.format(layout))
        scene.daemon.start()
        if chance.random() < 0.3:
            scene.daemon.wait_ready()
            until(lambda: _has_layout(scene), f"{layout} after {number} kills", scene.trouble)
            assert scene.keeps_the_lease
        elif chance.random() < 0.5:
            time.sleep(chance.uniform(0, 2.5))  # the moment of its death, which is what varies
        else:
            _wait_for_a_creation(scene)
            time.sleep(chance.uniform(0, 0.02))
        assert scene.daemon.running, scene.daemon.log
        scene.daemon.kill()
        assert leased in gpu.mig_devices(), "a leased instance was destroyed"
        state_file.harm(number)
    scene.inject(lambda: scene.daemon.start().wait_ready(), answers=False)
    scene.serves_again(lambda: _has_layout(scene))
    scene.recovery = f"after each of {_KILLS} kills the next daemon continues; {scene.recovery}"
    scene.record_report("the state file was missing")
    _is_restored(scene)


def _delay_creations(scene: Scene) -> None:
    """Let more kills meet the driver's calls, before and after they have their effect."""
    scene.host.fail("nvmlDeviceCreateGpuInstanceWithPlacement", "success", delay_ms=60)
    scene.host.fail("nvmlGpuInstanceCreateComputeInstance", "success", delay_ms=20)
    scene.host.fail("nvmlGpuInstanceGetInfo", "success", delay_ms=10)


def _wait_for_a_creation(scene: Scene) -> None:
    """Wait until the driver has created an instance, or nothing needs one."""
    gpu, last_s = scene.host.gpus[0], time.monotonic() + 4
    while not gpu.has_empty_instance and time.monotonic() < last_s:
        time.sleep(0.001)


def _has_layout(scene: Scene) -> bool:
    """Whether the configured layout is in effect, by itself: nothing waits for `reload --now`."""
    (row,) = scene.daemon.get("/v1/gpus")[1]["gpus"][:1]
    assert row["reason_code"] != reasons.MIG_FOREIGN_INSTANCE, f"{row['reason']}\n{scene.daemon.log}"
    entry = (scene.host.root / "etc/yunion/host_container_device.yml").read_text()
    profiles = re.findall(r"\b[1-7]g\.\d+gb", entry)
    expected = profiles * 7 if "all-1g" in entry else profiles
    return not row["reason"] and sorted(one.profile for one in scene.host.gpus[0].mig_devices()) == sorted(
        expected
    )


def _is_restored(scene: Scene) -> None:
    """A stop restores the layout and the compute mode from before the first of all these daemons."""
    scene.host.clear()
    assert scene.daemon.ask("DELETE", f"/v1/leases/{scene.lease}")[0] == 200
    assert scene.daemon.stop() == 0, scene.daemon.log
    gpu = scene.host.gpus[0]
    assert (gpu.mig, gpu.compute_mode) == (False, FORMER_MODE), scene.daemon.log
    scene.lease = ""
    scene.serve()


@fault(SHARING, "another program destroys an instance", takes_s=13, gpus=_MIG)
def instance_destroyed(scene: Scene) -> None:
    _serve(scene, "mig: all-balanced", lease="3g.40gb")
    gone = _instance(scene, "2g.20gb").gpu_instance
    scene.inject(lambda: scene.host.gpus[0].end_instances(gone))
    scene.expect_report("another program changed it")
    scene.serves_again(lambda: _is_balanced(scene))


@fault(SHARING, "another program switches MIG mode off; a lease has an instance", takes_s=13, gpus=_MIG)
def mode_switched_off(scene: Scene) -> None:
    _serve(scene, "mig: all-balanced", lease="3g.40gb")
    scene.inject(lambda: setattr(scene.host.gpus[0], "mig", False))
    scene.expect_report("another program changed it")
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
