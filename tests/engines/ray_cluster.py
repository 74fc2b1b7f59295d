"""A real Ray cluster on 127.0.0.1, with a node on each of several simulated hosts, and drivers of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.processes import ENGINES, children_of, kill_all_of, processes_of, with_engines
from integration.daemon_host import PATIENCE_S, Daemon, eventually, is_running
from integration.gateway_host import free_port
from simhost.environment import CHECKOUT
from simhost.host import Closes
from waiting import readable

#: A node takes minutes to start on a machine under load: five processes import Ray, one after another.
_START_S = 15 * PATIENCE_S
#: `ray`, whose nodes have the address 127.0.0.1, which it would replace by the machine's own. It waits longer
#: than 30 s for a node to start, and writes the file with the agent's port in advance, because a raylet exits
#: if that file does not exist within 15 s.
_RAY = f"""\
#!{ENGINES}/python
import inspect
import sys
import time
from pathlib import Path
from ray._private import services
from ray.scripts.scripts import main

def get_node(*arguments, get=services.get_node, end_s=time.monotonic() + {_START_S}):
    while True:
        try:
            return get(*arguments)
        except RuntimeError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)

def start_raylet(*arguments, start=services.start_raylet, **named):
    given = inspect.signature(start).bind(*arguments, **named).arguments
    file = "dashboard_agent_listen_port_" + given["node_id"]
    Path(given["session_dir"], file).write_text(str(given["dashboard_agent_listen_port"]))
    return start(*arguments, **named)

services.get_node = get_node
services.start_raylet = start_raylet
services.get_node_ip_address = lambda address=None: "127.0.0.1"
sys.exit(main())
"""
_OPTIONS = (
    "--node-ip-address=127.0.0.1",
    "--num-gpus=1",
    "--num-cpus=2",
    "--object-store-memory=80000000",
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--include-log-monitor=false",
    "--disable-usage-stats",
)
#: A node's ports; the raylet also waits only 15 s to learn one that is not given.
_PORTS = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
#: A node that is lost is noticed soon, and one that is slow is not taken for lost.
_SETTINGS = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "2",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_gcs_server_port_wait_time_s": f"{_START_S:.0f}",
    "RAY_gcs_rpc_server_connect_timeout_s": f"{_START_S:.0f}",
    "RAY_py_gcs_connect_timeout_s": f"{_START_S:.0f}",
    "RAY_agent_register_timeout_ms": f"{_START_S:.0f}000",
    "RAY_worker_register_timeout_seconds": f"{_START_S:.0f}",
}


class Ray(Closes):
    """A context manager for a cluster; each of its nodes belongs to a daemon, by its place in the list."""

    def __init__(self, daemons: Sequence[Daemon]) -> None:
        self.daemons = daemons
        self.folder = daemons[0].host.root / "ray"
        (self.folder / "bin").mkdir(parents=True)
        (self.folder / "bin/ray").write_text(_RAY)
        (self.folder / "bin/ray").chmod(0o755)
        self._token = secrets.token_hex(16)

    def env(self, number: int) -> dict[str, str]:
        """The environment of the node: its host's, in which the programs of Ray are found first."""
        return {
            **with_engines(self.daemons[number].host.env, self.folder / "bin"),
            "NODE": str(number),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            **_SETTINGS,
        }

    @property
    def address(self) -> str:
        return (self.folder / "ray_current_cluster").read_text()

    def start(self) -> Ray:
        self._start(
            0, "--head", "--port=0", "--no-monitor", "--include-dashboard=false", f"--temp-dir={self.folder}"
        )
        for number in range(1, len(self.daemons)):
            self.start_node(number)
        return self

    def start_node(self, number: int) -> None:
        """Start a node that has a resource of its own: `node1`."""
        self._start(number, f"--address={self.address}")

    def _start(self, number: int, *options: str) -> None:
        own = f'--resources={{"node{number}": 8}}'
        ports = [f"--{name}-port={free_port()}" for name in _PORTS]
        command = ["yunion-mps", "ray", "start", own, *_OPTIONS, *ports, *options]
        log = self.folder / "start.log"
        with log.open("a") as file, contextlib.suppress(subprocess.TimeoutExpired):
            done = self.daemons[number].host.run(
                command,
                env=self.env(number),
                capture_output=False,
                stdout=file,
                stderr=file,
                timeout=_START_S,
            )
            if done.returncode == 0:
                return
        raise AssertionError(f"{log.read_text()}\n{self.logs()}")

    def raylet(self, number: int) -> int:
        """The PID of the node's raylet, the parent of its workers."""
        mark = f"YUNION_MPS_ROOT={self.daemons[number].host.root}".encode()
        for pid in processes_of(self.folder):
            with contextlib.suppress(OSError):
                program = os.readlink(f"/proc/{pid}/exe")
                if program.endswith("/raylet") and mark in Path(f"/proc/{pid}/environ").read_bytes():
                    return pid
        raise AssertionError(f"node {number} has no raylet")

    def kill_node(self, number: int, *, workers: bool = False) -> None:
        """Kill the raylet, whose workers then end, or all of them at once, as if the machine was lost."""
        raylet = self.raylet(number)
        killed = [raylet, *(children_of(raylet) if workers else ())]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(map(is_running, killed)), "their end")

    def driver(self) -> Driver:
        return Driver(self)

    def close(self) -> None:
        kill_all_of(self.folder)

    def logs(self) -> str:
        found = sorted(self.folder.glob("session_latest/logs/*.*"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in found)


class Driver(Closes):
    """A driver, by default on the first node: call it with Python code; see driver.py for what it has."""

    def __init__(self, ray: Ray) -> None:
        self.ray = ray
        libraries = [str(CHECKOUT), *map(str, CHECKOUT.glob(".venv/lib/python3*/site-packages"))]
        command = [
            str(ENGINES / "python"),
            str(Path(__file__).with_name("driver.py")),
            ray.address,
            *libraries,
        ]
        with (ray.folder / "driver.log").open("a") as log:
            self._process = subprocess.Popen(
                command, text=True, env=ray.env(0), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )

    def __call__(self, code: str) -> Any:
        """Run code; return its value if it is an expression. Fails if it raises an error or hangs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        assert readable(self._process.stdout, 4 * PATIENCE_S), f"{code}\n{self.ray.logs()}"
        line = self._process.stdout.readline()
        assert line, (self.ray.folder / "driver.log").read_text()
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer.get("value")

    def close(self) -> None:
        """End the driver, and wait for the end of its workers."""
        self._process.communicate(timeout=PATIENCE_S)
