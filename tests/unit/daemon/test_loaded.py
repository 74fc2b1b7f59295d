"""What the daemon has loaded when it is READY, and once it serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yunion_mps

#: What only other processes need: the command line, and what the daemon's start has done with by then.
ELSEWHERE = (
    "yunion_mps.answers",
    "yunion_mps.cli",
    "yunion_mps.containers.command",
    "yunion_mps.container_hook",
    "yunion_mps.client",
    "yunion_mps.answers.fields",
    "yunion_mps.http.client",
    "yunion_mps.http.transport",
    "yunion_mps.kubernetes",
    "yunion_mps.doctor",
    "yunion_mps.gateway.client",
    "yunion_mps.gateway.server",
    "yunion_mps.host.malloc",
    "yunion_mps.views.overview",
    "yunion_mps.service.offline",
    "yunion_mps.core.program",
    "yunion_mps.frameworks",
    "yunion_mps.ray",
    "yunion_mps.slurm",
    "yunion_mps.ray",
)

#: What takes more than 20 ms to load, and is loaded while the control daemons start, or never.
LATER = {"asyncio", "click", "h11", "hashlib", "http", "inspect", "pathlib", "ssl", "uuid"}


def test_control_daemons_start_before_what_serves_requests_is_loaded() -> None:
    assert LATER & _modules_after("from yunion_mps.daemon import options, run") == set()


def test_a_daemon_that_serves_has_not_loaded_openssl() -> None:
    """It would take 4 MiB."""
    loaded = _modules_after("from yunion_mps.daemon import options, run; run.load_event_loop()")
    assert loaded & {"_hashlib", "_ssl", "hashlib", "ssl"} == set()


def test_a_daemon_that_serves_reads_none_of_its_modules_any_more() -> None:
    """An upgrade puts other ones in their place; the daemon of before may go on for long."""
    package = Path(yunion_mps.__file__).parent
    parts = [path.relative_to(package.parent).with_suffix("").parts for path in package.rglob("*.py")]
    names = {".".join(part for part in one if part != "__init__") for one in parts}
    loaded = _modules_after("from yunion_mps.daemon import options, run; run.load_event_loop()")
    missing = {name for name in names - loaded if not name.endswith("__main__")}
    assert {name for name in missing if not name.startswith(ELSEWHERE)} == set()


def test_no_thread_keeps_the_event_loop_waiting_for_python_s_default() -> None:
    main = "import sys, yunion_mps.daemon as d; sys.argv[1:] = ['--check']"
    end = "sys.exit = lambda code: print(sys.getswitchinterval())"
    command = [sys.executable, "-c", f"{main}; {end}; d.main()"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert float(done.stdout.split()[-1]) <= 0.001


def _modules_after(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    return set(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split())
