"""GPUs that change while the daemon runs: it looks at them every ten seconds, and says what it sees."""

from __future__ import annotations

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon, eventually


def reasons(daemon: Daemon) -> list[str]:
    return [device["reason"] for device in daemon.get("/v1/devices?limit=0")[1]["isolated_devices"]]


def test_the_driver_is_lost_and_back_and_the_control_daemon_goes_on(
    make_host: MakeHost, make_daemon: MakeDaemon
) -> None:
    host = make_host([{"kind": "h100", "count": 2, "virtual_number": 2}])
    daemon = make_daemon(host).start().wait_ready()
    control = daemon.control_pid()
    assert reasons(daemon) == [""] * 4

    host.fail("nvmlSystemGetDriverVersion", "driver_not_loaded")
    gone = "the NVIDIA driver's kernel module is not loaded"
    eventually(lambda: reasons(daemon) == [gone] * 4, "the driver's loss", patience_s=60)
    daemon.wait_log(f"the GPUs cannot be looked at: {gone}")
    host.clear()
    eventually(lambda: reasons(daemon) == [""] * 4, "the driver's return", patience_s=60)

    assert daemon.control_pid() == control
    assert daemon.stop() == 0
