"""The real Prometheus scrapes the real daemon through the real gateway, and alerts fire on real faults."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from faults.scene import Scene
from integration.gateway_host import Gateway, free_port
from monitoring.tools import RULES, Prometheus, promtool

_NO_GPU_ENFORCES = "YunionMpsBudgetNotEnforced"
_FAULTS = (
    "YunionMpsDomainDown",
    "YunionMpsGpuLost",
    "YunionMpsOverBudget",
    "YunionMpsProcessOutsideMps",
    "YunionMpsRestartBackoff",
)


def at_once(folder: Path) -> Path:
    """The alert rules, with each alert firing as soon as it is so."""
    found = folder / "rules.yml"
    text, count = re.subn(r"(?m)^    for: \w+$", "    for: 0s", RULES.read_text())
    assert count == text.count("- alert: ")
    found.write_text(text)
    return found


def test_each_alert_fires_on_its_fault(tmp_path: Path) -> None:
    port = free_port()
    with Scene([{"kind": "v100", "virtual_number": 4}, {"kind": "tesla-p40"}]) as scene:
        scene.daemon.configure(metrics_listen=f"127.0.0.1:{port}")
        scene.serve()
        with Gateway(scene.daemon) as gateway, Prometheus(tmp_path, at_once(tmp_path), port) as prometheus:
            gateway.start().serves(port)
            prometheus.wait_for(_NO_GPU_ENFORCES)
            assert (
                prometheus.value("count(yunion_mps_device_available==1)")
                == scene.daemon.status()["devices"]["total"]
            )

            address = scene.daemon.get("/v1/devices")[1]["isolated_devices"][0]["addr"]
            env = {**scene.daemon.env, "YUNION_MPS_DEVICE": address}
            with contextlib.ExitStack() as end:
                greedy = end.enter_context(scene.host.popen(["sleep", "600"], env=env))
                end.callback(greedy.kill)
                wild = end.enter_context(scene.host.popen(["sleep", "600"]))
                end.callback(wild.kill)
                scene.host.gpus[0].add_process(greedy.pid, 15_000, "M+C")
                scene.host.gpus[0].add_process(wild.pid, 100, "C")
                scene.host.gpus[1].lose()
                broken = scene.control_program.with_name("broken")
                broken.write_text("#!/bin/sh\nexit 1\n")
                broken.chmod(0o755)
                broken.replace(scene.control_program)
                os.kill(scene.control, signal.SIGKILL)
                told = prometheus.wait_for(_NO_GPU_ENFORCES, *_FAULTS, poll=scene.daemon.polls)
            assert (
                f"Device {address} on 127.0.0.1:{port} uses more memory"
                in told["YunionMpsOverBudget"]["summary"]
            )
            assert "14.65GiB" in told["YunionMpsOverBudget"]["summary"]
            assert "Domain host on" in told["YunionMpsDomainDown"]["summary"]

            lately = "YunionMpsRestartBackoff"  # which looks back for 15 minutes
            scene.daemon.kill()
            told = prometheus.wait_for("YunionMpsDaemonDown", perhaps=lately)
            assert "systemctl start yunion-mps-daemon" in told["YunionMpsDaemonDown"]["action"]
            gateway.end()
            prometheus.wait_for("YunionMpsGatewayAbsent", perhaps=lately)


def test_a_stopped_control_daemon_does_not_alert_a_lost_gpu(tmp_path: Path) -> None:
    port = free_port()
    with Scene([{"kind": "v100", "count": 2}]) as scene:
        scene.daemon.configure(metrics_listen=f"127.0.0.1:{port}")
        scene.host.fail("nvmlDeviceGetComputeRunningProcesses*", "unknown", gpu=1)
        scene.daemon.start().wait_ready()
        with Gateway(scene.daemon) as gateway, Prometheus(tmp_path, at_once(tmp_path), port) as prometheus:
            gateway.start().serves(port)
            prometheus.wait_for("YunionMpsUseUnknown", poll=scene.daemon.polls)
            scene.host.clear()
            prometheus.wait_for(poll=scene.daemon.polls)
            broken = scene.control_program.with_name("broken")
            broken.write_text("#!/bin/sh\nexit 1\n")
            broken.chmod(0o755)
            broken.replace(scene.control_program)
            os.kill(scene.control, signal.SIGKILL)
            prometheus.wait_for("YunionMpsDomainDown", "YunionMpsRestartBackoff")
            assert prometheus.value('sum(yunion_mps_gpu_state{state="unavailable"})') == 2


def test_promtool_accepts_the_metrics(tmp_path: Path) -> None:
    with Scene([{"kind": "v100", "virtual_number": 4}]) as scene:
        scene.serve()
        scene.daemon.get("/v1/status")
        done = scene.host.run(["yunion-mps", "metrics"], env=scene.daemon.env)
        assert promtool("check", "metrics", text=done.stdout) == ""
