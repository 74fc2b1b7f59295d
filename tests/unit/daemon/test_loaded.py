"""What the daemon has loaded once it serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yunion_mps

#: What only other processes need: the command line, and what the daemon's start has done with by then.
ELSEWHERE = (
    "yunion_mps.answers",
    "yunion_mps.cli",
    "yunion_mps.containers.hook",
    "yunion_mps.client",
    "yunion_mps.http.asynchronous",
    "yunion_mps.http.client",
    "yunion_mps.doctor",
    "yunion_mps.gateway.client",
    "yunion_mps.gateway.server",
    "yunion_mps.overview",
    "yunion_mps.service.offline",
)


def test_a_daemon_that_serves_reads_none_of_its_modules_any_more() -> None:
    """An upgrade puts other ones in their place; the daemon of before may go on for long."""
    package = Path(yunion_mps.__file__).parent
    parts = [path.relative_to(package.parent).with_suffix("").parts for path in package.rglob("*.py")]
    names = {".".join(part for part in one if part != "__init__") for one in parts}
    code = "from yunion_mps.daemon import options, run; run._load_event_loop()"
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    loaded = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    missing = {name for name in names - set(loaded) if not name.endswith("__main__")}
    assert {name for name in missing if not name.startswith(ELSEWHERE)} == set()
