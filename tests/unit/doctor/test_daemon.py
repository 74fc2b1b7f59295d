"""What the daemon says of itself and its domains, and the two files that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from yunion_mps.core.reasons import CONTROL_DAEMON_EXITED, Reason
from yunion_mps.doctor.checks import Host
from yunion_mps.doctor.report import run_checks, select_checks

from unit.doctor.hosts import finding_of, host_of, write
from unit.http.snapshots import P40, disabled, reference, snapshot, with_conditions

WAITS = "the change of limits waits for the MPS server (PID 4250) to end"


def with_domain(root: Path, **changed: Any) -> Host:
    """A host whose one domain is changed like this."""
    taken = reference()
    domain = taken.domains[0]._replace(**changed)
    return host_of(root, P40, snapshot=with_conditions(taken._replace(domains=(domain,))))


@pytest.mark.parametrize(
    ("changed", "level", "what"),
    [
        (
            {"state": "backoff", "reason": Reason("it ended", CONTROL_DAEMON_EXITED)},
            "problem",
            "domain host is backoff: it ended",
        ),
        ({"pending": WAITS}, "warning", f"host: {WAITS}"),
        ({"restarts": 1}, "warning", "the control daemon of domain host was restarted once"),
        ({"restarts": 3}, "warning", "the control daemon of domain host was restarted 3 times"),
    ],
    ids=["state", "pending", "one restart", "restarts"],
)
def test_the_problem_of_a_domain_is_reported(
    tmp_path: Path, changed: dict[str, Any], level: str, what: str
) -> None:
    assert finding_of(with_domain(tmp_path, **changed), "daemon", level).what == what


def test_a_daemon_of_another_version_is_found(tmp_path: Path) -> None:
    host = host_of(tmp_path, P40, snapshot=reference())
    host.status()["version"] = "0.0.1"
    assert finding_of(host, "daemon", "warning").what.startswith(
        "the daemon runs version 0.0.1, but this command is version "
    )


def test_a_stopped_daemon_is_a_problem_only_if_mps_is_enabled(tmp_path: Path) -> None:
    assert finding_of(host_of(tmp_path), "daemon", "problem").what == "the daemon is not running"
    off = host_of(tmp_path, enable_cuda_mps="false")
    assert finding_of(off, "daemon", "ok").what.startswith("not running; enable_cuda_mps is false")
    off = host_of(tmp_path, snapshot=disabled(), enable_cuda_mps="false")
    assert "enable_cuda_mps is false, so this host offers no devices" in finding_of(off, "daemon", "ok").what


@pytest.mark.parametrize(
    ("keys", "devices", "level", "what"),
    [
        ({}, "", "ok", "the configuration is valid; 10 devices on 1 GPU"),
        ({}, "  virtual_number: 1\n", "ok", "the configuration is valid; 1 device on 1 GPU"),
        ({"enable_cuda_mps": "false"}, "", "ok", "the configuration is valid; enable_cuda_mps is false"),
        ({"cuda_mps_scope": "hots"}, "", "problem", "/etc/yunion/host.conf:2: cuda_mps_scope is"),
        ({}, "  virtual_number: 0\n  memory_unit: 1GiB\n", "ok", "1 memory pool"),
        ({}, "  virtual_number: many\n", "problem", "/etc/yunion/host_container_device.yml:4: "),
    ],
    ids=["right", "one device", "off", "host.conf", "units", "device file"],
)
def test_the_files_are_checked_with_the_gpus(
    tmp_path: Path, keys: dict[str, Any], devices: str, level: str, what: str
) -> None:
    if devices:
        entry = f"devices:\n- path: {P40.uuid}\n  type: NVIDIA_MPS\n{devices}"
        write(tmp_path / "etc/yunion/host_container_device.yml", entry)
    assert what in finding_of(host_of(tmp_path, P40, **keys), "configuration", level).what


def test_a_value_of_host_local_conf_is_checked_in_that_file(tmp_path: Path) -> None:
    write(tmp_path / "etc/yunion/host_local.conf", "\ncuda_mps_scope: hots\n")
    what = finding_of(host_of(tmp_path, P40), "configuration", "problem").what
    assert what.startswith(f"{tmp_path}/etc/yunion/host_local.conf:2: cuda_mps_scope is")


@pytest.mark.processes
@pytest.mark.parametrize("served", [True, False])
def test_no_check_breaks_whether_driver_and_daemon_are_there_or_not(tmp_path: Path, *, served: bool) -> None:
    host = host_of(tmp_path, P40, snapshot=snapshot(P40)) if served else host_of(tmp_path)
    every = select_checks({}, None, (), selftest_too=True)
    found = run_checks(every, host)
    assert {line.check for line in found.lines} == {check.name for check in every}
    assert [line for line in found.lines if line.finding.level == "unknown"] == []
