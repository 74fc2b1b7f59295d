"""What is wrong, with a remedy for each sort of it."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps import __version__
from yunion_mps.overview.findings import Finding, folded, of_status, other_version
from yunion_mps.service.queries import Queries
from yunion_mps.supervisor.preflight import WITHOUT_IT
from yunion_mps.supervisor.status import warnings

from unit.http import snapshots


def test_every_warning_of_the_daemon_has_a_remedy_of_its_own() -> None:
    kept = "events are kept elsewhere meanwhile, and nothing can be changed"
    multiuser = "cuda_mps_multiuser is true, and /usr/bin/nvidia-cuda-mps-control does not know it: jobs wait"
    textfile = "metrics_textfile is /srv/a.prom, which cannot be written: No such file or directory"
    public = "host.conf:2: metrics_listen is 0.0.0.0:1, which other hosts can reach: write 127.0.0.1:1"
    public += f"; {WITHOUT_IT}"
    cdi = "containers find no devices: /var/run/cdi/yunion-mps.json: Read-only file system"
    nvidia = "containers get no driver from us: /etc/cdi/nvidia.yaml is passed over: it is no YAML"
    found = snapshots.troubled()._replace(remarks=(kept, multiuser, textfile, public, cdi, nvidia))
    status: Any = Queries(lambda: found, 0.0, 1).status()
    assert len(status["warnings"]) == len(warnings(found)) == 8
    told = [one.remedy for one in of_status(status, []) if one.kind == "Warning"]
    assert len(set(told)) == 8
    assert "look closer: yunion-mps doctor" not in told


def test_findings_that_are_mended_alike_are_folded() -> None:
    many = [Finding("Warning", f"GPU {n}", "reload") for n in range(9)] + [Finding("Problem", "x", "y")]
    assert [one.what for one in folded(many)] == [
        "GPU 0",
        "GPU 1",
        "GPU 2",
        "and 6 more like that (all: yunion-mps status -o json)",
        "x",
    ]


@pytest.mark.parametrize("version", [__version__, "0.0.1"])
def test_a_daemon_of_another_version_than_installed_is_shown(version: str) -> None:
    status: Any = {"version": version}
    said = f"{version} of the daemon runs, and {__version__} is installed"
    assert other_version(status) == ("" if version == __version__ else said)
