"""What an operator does in a machine, and sees: by systemd, the socket, nvidia-smi, the control daemon."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any

from packages.driver import CLIENT
from packages.machine import UNIT, Machine, MachineError
from simhost.mps import CONTROL, PING, is_rejected

SOCKET = "/run/yunion-mps/yunion-mps.sock"
PIPE = "/tmp/nvidia-mps/pipe"
HOST_CONF = "/etc/yunion/host.conf"
DEVICES = "/etc/yunion/host_container_device.yml"
#: A user whose jobs these are.
USER = 65534

Json = dict[str, Any]

_CONF = f"""\
# Cloudpods' host agent owns most keys of this file.
hostname: tested
enable_cuda_mps: true
container_device_config_file: {DEVICES}
"""
_GPU = """\
devices:
- path: /dev/dri/renderD128
  type: NVIDIA_MPS
  virtual_number: {number}
"""


class Operator:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    # -- what he does

    def configure(self, number: object = 4, more: str = "") -> None:
        """Write both files: the GPU in `number` devices, and `more` lines of host.conf."""
        self.machine.write(HOST_CONF, f"{_CONF}{more}\n")
        self.machine.write(DEVICES, _GPU.format(number=number))

    def start(self) -> None:
        self.machine.run("systemctl", "enable", "--now", UNIT)

    def begin_job(self, name: str, *, attached: bool = True) -> int:
        """Begin a job of an ordinary user, and wait until it is at work; its PID."""
        self.machine.run(
            "systemd-run",
            f"--unit={name}",
            f"--uid={USER}",
            f"--setenv=CUDA_MPS_PIPE_DIRECTORY={PIPE}",
            "python3",
            "-IS",
            CLIENT,
        )
        pid = int(self.machine.show("MainPID", f"{name}.service"))
        self.machine.driver.host.gpus[0].add_process(pid, 64, "M+C")
        if attached:
            self.machine.wait_until(
                f"{name} is attached", lambda: "attached" in self.machine.journal(f"{name}.service")
            )
        return pid

    def end_job(self, name: str, pid: int) -> None:
        self.machine.run("systemctl", "stop", f"{name}.service", check=False)
        self.machine.driver.host.gpus[0].remove_process(pid)

    def is_at_work(self, name: str) -> bool:
        said = self.machine.journal(f"{name}.service")
        ended = ("server gone", "terminated", "refused")
        running = self.machine.show("ActiveState", f"{name}.service") == "active"
        return running and "attached" in said and not any(word in said for word in ended)

    @contextlib.contextmanager
    def restarted_at_once(self, more: str = "") -> Iterator[None]:
        """Let systemd start the daemon again without its pause; `more` are other settings of the unit."""
        machine, drop_ins = self.machine, f"/etc/systemd/system/{UNIT}.d"
        assert machine.show("RestartUSec") == "5s"
        machine.write(f"{drop_ins}/test.conf", f"[Service]\nRestartSec=100ms\n{more}\n")
        machine.run("systemctl", "daemon-reload")
        yield
        machine.run("rm", "-r", drop_ins)
        machine.run("systemctl", "daemon-reload")

    # -- what he sees

    def ask(self, path: str) -> Json:
        done = self.machine.run(
            "curl", "--silent", "--fail", "--unix-socket", SOCKET, f"http://localhost/v1/{path}"
        )
        answer: Json = json.loads(done.stdout)
        return answer

    def daemon(self) -> int:
        return int(self.machine.show("MainPID"))

    def control_daemon(self) -> int:
        (domain,) = self.ask("status")["domains"]
        return int(domain["pid"] or 0)

    def control(self, *commands: str) -> list[str]:
        """What the control daemon answers; it is asked again while another front-end is connected.

        Not for `quit`, after which the front-end prints nothing, whatever it was answered before.
        """
        lines = "\n".join([PING, *commands])
        script = f"printf '%s\\n' '{lines}' | CUDA_MPS_PIPE_DIRECTORY={PIPE} {CONTROL}"

        def answer() -> list[str]:
            done = self.machine.run("sh", "-c", script, check=False)
            if is_rejected(done.stdout + done.stderr):
                return []
            if done.returncode != 0:
                raise MachineError(f"{CONTROL}: status {done.returncode}\n{done.stdout}{done.stderr}")
            return done.stdout.splitlines()

        return self.machine.wait_until("the end of another front-end's connection", answer)[1:]

    def servers(self) -> list[int]:
        return [int(line) for line in self.control("get_server_list")]

    def has_disconnected(self, pid: int) -> bool:
        """Whether the MPS server of this client has disconnected it."""
        events = self.ask("events?kind=client")["events"]
        return any(f"(PID {pid})" in one["what"] and "disconnected it" in one["what"] for one in events)

    def modes(self) -> list[str]:
        query = ["--query-gpu=compute_mode", "--format=csv,noheader"]
        return self.machine.run("nvidia-smi", *query).stdout.splitlines()

    def processes(self, name: str) -> list[int]:
        found = self.machine.run("pidof", name, check=False).stdout
        return [int(word) for word in found.split()]

    def control_daemons(self) -> list[int]:
        """The PIDs of all control daemons, whosever; a front-end has the same name, and no option."""
        return [
            pid
            for pid in self.processes("nvidia-cuda-mps-control")
            if self.machine.run("cat", f"/proc/{pid}/cmdline", check=False).stdout.count("\0-") == 1
        ]

    # -- what must be so

    def see_it_serves(self, number: int = 4) -> None:
        """All of them say that the GPU is divided by `number`."""
        machine = self.machine
        shown = [machine.show(name) for name in ("ActiveState", "SubState", "Result")]
        assert shown == ["active", "running", "success"], machine.journal()
        machine.wait_until("ready", lambda: self.ask("status")["state"] == "ready")
        served = f"{number} of {number} devices available"
        machine.wait_until(served, lambda: served in machine.show("StatusText"))
        devices = self.ask("devices")
        assert devices["total"] == number
        assert {device["memory_mib"] for device in devices["isolated_devices"]} == {23040 // number}
        assert self.modes() == ["Exclusive_Process"]
        limits = self.control("get_default_device_pinned_mem_limit 0", "get_default_active_thread_percentage")
        assert limits == [f"{23040 // number // 1024}G", f"{100 / number:.1f}"]
        self.see_no_fault()

    def see_it_rests(self) -> None:
        """Nothing of it runs, and the GPU is as it was."""
        machine = self.machine
        assert machine.show("ActiveState") == "inactive", machine.journal()
        assert self.processes("nvidia-cuda-mps-control") == self.processes("nvidia-cuda-mps-server") == []
        assert machine.run("test", "-e", SOCKET, check=False).returncode == 1
        assert self.modes() == ["Default"]
        self.see_no_fault()

    def see_no_fault(self) -> None:
        """Neither a traceback of ours, nor a line of our files that systemd does not understand."""
        said = self.machine.run("journalctl", "--boot", "--no-pager", "--output=cat").stdout
        assert "Traceback" not in said, said
        ours = [line for line in said.splitlines() if "yunion" in line]
        assert [line for line in ours if "Unknown key" in line or "Failed to parse" in line] == []

    def kill(self, pid: int) -> None:
        """End a process as the kernel does when memory is short."""
        self.machine.kill(pid, signal.SIGKILL)
