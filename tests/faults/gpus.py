"""Faults of GPUs and of their driver."""

from __future__ import annotations

from faults.fault_table import GPUS, fault
from faults.scene import FORMER_MODE, Scene, until
from faults.tampering import await_events, hang
from simhost import SimGpu

_MANY = [{"kind": "v100", "count": 64, "virtual_number": 4}]
_TWO = [{"kind": "a100", "virtual_number": 4}, {"kind": "a100", "virtual_number": 4}]


def _available(scene: Scene) -> int:
    return int(scene.daemon.status()["devices"]["available"])


@fault(GPUS, "64 GPUs are lost at once, and come back (cuda_mps_scope: gpu)", takes_s=14, gpus=_MANY)
def all_lost(scene: Scene) -> None:
    scene.daemon.configure(cuda_mps_scope="gpu")
    scene.serve()
    await_events(scene)
    controls = {domain["name"]: domain["pid"] for domain in scene.daemon.status()["domains"]}
    assert len(controls) == 64

    scene.inject(lambda: list(map(SimGpu.lose, scene.host.gpus)))
    scene.unavailable()
    scene.expect_report("00:06.0: unavailable")  # they are lost one after another, during a look

    scene.repair(lambda: list(map(SimGpu.restore, scene.host.gpus)), "their return")
    scene.serves_again()
    after = {domain["name"]: domain["pid"] for domain in scene.daemon.status()["domains"]}
    assert controls == after, scene.daemon.log


@fault(GPUS, "one of two GPUs is lost, and comes back", takes_s=12, gpus=_TWO)
def one_lost(scene: Scene) -> None:
    scene.budgets = ["10G", "25.0"]
    scene.serve().job()
    await_events(scene)
    control = scene.control
    scene.inject(scene.host.gpus[1].lose)
    scene.expect_report("GPU is lost")
    assert _available(scene) == 4
    scene.repair(scene.host.gpus[1].restore, "its return")
    scene.serves_again(lambda: scene.control == control)


@fault(GPUS, "one of two GPUs is lost during a poll", takes_s=12, gpus=_TWO)
def lost_in_a_look(scene: Scene) -> None:
    scene.budgets = ["10G", "25.0"]
    scene.daemon.configure(cuda_mps_scope="gpu")
    scene.serve()
    await_events(scene)
    controls = [domain["pid"] for domain in scene.daemon.status()["domains"]]
    scene.host.fail("nvmlDeviceGetMemoryInfo*", "success", gpu=1, times=1, delay_ms=300)
    scene.host.gpus[0].xid(13)  # so that the GPUs are looked at now
    until(lambda: not scene.host.show()["failures"], "the call", scene.trouble)
    scene.inject(scene.host.gpus[1].lose)
    scene.expect_report("GPU is lost")
    scene.repair(scene.host.gpus[1].restore, "its return")
    scene.serves_again()
    assert controls == [domain["pid"] for domain in scene.daemon.status()["domains"]], scene.daemon.log


@fault(GPUS, "one of two GPUs is bound to vfio-pci, and to the NVIDIA driver again", takes_s=12, gpus=_TWO)
def passed_through(scene: Scene) -> None:
    scene.budgets = ["10G", "25.0"]
    scene.daemon.configure(cuda_mps_scope="gpu")
    scene.serve().job()
    control = scene.control
    scene.inject(lambda: scene.host.gpus[1].bind("vfio-pci"))
    scene.expect_report("bound to the driver vfio-pci")
    assert _available(scene) == 4
    scene.repair(lambda: scene.host.gpus[1].bind("nvidia"), "its return")
    scene.serves_again(lambda: scene.control == control)


@fault(
    GPUS,
    "one of two GPUs is missing after a reboot, and render nodes have other numbers",
    takes_s=12,
    gpus=_TWO,
)
def missing_after_reboot(scene: Scene) -> None:
    scene.budgets = ["10G", "25.0"]
    first, second = scene.host.gpus
    scene.serve()
    assert scene.daemon.stop() == 0
    scene.lease = ""

    def reboot() -> None:
        first.remove()
        scene.host.renumber()
        scene.daemon.start().wait_ready()

    scene.inject(reboot, answers=False)
    scene.expect_report("00:06.0: unavailable")
    assert _available(scene) == 4
    assert [gpu.compute_mode for gpu in (first, second)] == [FORMER_MODE, "exclusive_process"]
    scene.hold_a_lease()
    scene.repair(first.restore, "its return")
    scene.serves_again()


@fault(GPUS, "the driver's kernel module is loaded after the daemon was started", takes_s=4)
def late_driver(scene: Scene) -> None:
    scene.serve()
    assert scene.daemon.stop() == 0
    scene.lease = ""
    scene.host.unload_driver()
    scene.host.gpus[0].compute_mode = FORMER_MODE  # as a boot script sets it before the daemon asks
    scene.inject(lambda: scene.daemon.start().wait_ready(), answers=False)
    scene.expect_report("00:06.0: unavailable")
    assert scene.daemon.status()["notice"].startswith("waiting for the NVIDIA driver: ")
    scene.repair(scene.host.load_driver, "it is loaded")
    scene.serves_again()
    scene.hold_a_lease()


@fault(GPUS, "the driver is updated, and its kernel module loaded again, while the daemon runs", takes_s=15)
def driver_updated(scene: Scene) -> None:
    scene.serve().job()
    control = scene.control
    for job in list(scene.jobs):
        scene.forget(job)  # the driver's list of processes is empty after the update

    def update() -> None:
        scene.host.update_driver("550.163.01")
        scene.host.gpus[0].compute_mode = FORMER_MODE

    scene.inject(update)
    scene.record_report("library and its kernel module have different versions")
    scene.serves_again(lambda: "re-executing the program" in scene.daemon.log and scene.control == control)


@fault(GPUS, "a GPU gets a fatal Xid (48, double-bit ECC error)", takes_s=2)
def fatal_xid(scene: Scene) -> None:
    scene.serve()
    await_events(scene)
    scene.inject(lambda: scene.host.gpus[0].xid(48))
    scene.unavailable()
    scene.expect_report("Xid 48 (double bit ECC error)")

    def reset() -> None:
        assert scene.daemon.ask("POST", "/v1/reload")[0] == 200

    scene.repair(reset, "the reset and a reload")
    scene.serves_again()


@fault(GPUS, "MIG mode is enabled on one of two GPUs, and disabled again", takes_s=21, gpus=_TWO)
def mig(scene: Scene) -> None:
    scene.budgets = ["10G", "25.0"]
    scene.serve().job()
    scene.inject(lambda: setattr(scene.host.gpus[1], "mig", True))
    scene.expect_report("MIG mode")
    assert _available(scene) == 4
    scene.repair(lambda: setattr(scene.host.gpus[1], "mig", False), "it is disabled again")
    scene.serves_again()


@fault(GPUS, "NVML hangs for 30 s in a call; meanwhile the control daemon is killed", takes_s=33)
def nvml_hangs(scene: Scene) -> None:
    """Nothing but the look at the GPUs waits for it: requests, and supervision, go on."""
    scene.serve()
    hang(scene, "nvmlDeviceGetMemoryInfo*")
    scene.kill_control_daemon()
    scene.record_report("was killed by signal 9")
    gpu = scene.host.gpus[0]
    gpu.compute_mode = "default"  # what only the next look will notice
    answered: list[dict[str, object]] = []

    def looked() -> bool:
        answered.append(scene.daemon.status())
        return gpu.compute_mode != "default"

    until(looked, "the next look", scene.trouble)
    assert len(answered) > 10, "requests waited for the look, or it did not hang"
