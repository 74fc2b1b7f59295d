"""A day of a booted machine with four GPUs: they are missing, come back, are passed through, and updated."""

from __future__ import annotations

from yunion_mps.core.reasons import GPU_GONE

from packages.conftest import NewMachine
from packages.driver import CLIENT
from packages.family import Deb
from packages.machine import UNIT, Machine
from packages.operator import DEVICES, HOST_CONF, PIPE, USER, Operator
from packages.versions import Packages

FOUR = [{"kind": "a10", "pci": f"0000:0{number}:00.0"} for number in (1, 2, 3, 4)]


def available(operator: Operator, number: int) -> None:
    """Wait until so many devices can be leased."""
    operator.machine.wait_until(
        f"{number} devices", lambda: operator.ask("status")["devices"]["available"] == number
    )


def begin_job(machine: Machine, gpu_uuid: str) -> None:
    """Begin a job on a GPU, which has a control daemon of its own."""
    place = f"--setenv=CUDA_MPS_PIPE_DIRECTORY={PIPE}/{gpu_uuid}"
    machine.run("systemd-run", "--unit=job", f"--uid={USER}", place, "python3", "-IS", CLIENT)
    machine.wait_until("the job is attached", lambda: "attached" in machine.journal("job.service"))


def test_gpus_come_and_go_and_no_job_or_daemon_ends(new_machine: NewMachine, current: Packages) -> None:
    with new_machine("bookworm", "four-gpus", FOUR) as machine:
        operator, driver = Operator(machine.boot()), machine.driver
        first, second, _, fourth = driver.host.gpus
        Deb(machine).install(current)
        machine.write(HOST_CONF, "enable_cuda_mps: true\ncuda_mps_scope: gpu\n")
        entry = "- {{path: /dev/dri/renderD{}, type: NVIDIA_MPS, virtual_number: 4}}\n"
        machine.write(DEVICES, "devices:\n" + "".join(map(entry.format, range(128, 132))))
        operator.start()
        available(operator, 16)

        machine.power_off()
        first.remove()
        driver.host.renumber()
        driver.show_bus()
        machine.boot()
        available(operator, 12)
        problems = [one for one in operator.ask("status")["problems"] if one["level"] == "problem"]
        assert [(one["code"], one["subject"]) for one in problems] == [(GPU_GONE, "01:00.0")]
        begin_job(machine, second.uuid)

        first.restore()
        driver.show_bus()
        available(operator, 16)

        fourth.bind("vfio-pci")
        driver.show_bus()
        available(operator, 12)
        fourth.bind("nvidia")
        driver.show_bus()
        available(operator, 16)
        assert operator.is_at_work("job")
        machine.run("systemctl", "stop", "job.service")

        daemon = operator.daemon()
        driver.host.update_driver("550.163.01")
        driver.show_bus()
        machine.wait_until("a re-exec", lambda: "re-executing the program" in machine.journal())
        available(operator, 16)
        assert (operator.daemon(), machine.show("NRestarts")) == (daemon, "0")

        machine.run("systemctl", "stop", UNIT)
        assert driver.modes == ["default"] * 4
        operator.see_no_fault()
