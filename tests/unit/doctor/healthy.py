"""A host on which every check is content, and the doctor's word on it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from simhost import Description, SimHost
from simhost.mps import StandIns

CONTROL = "nvidia-cuda-mps-control"
#: nobody: a user who is neither root nor us.
STRANGER = 65534


class Seen(NamedTuple):
    """What the doctor said: its exit status, and for each check the lines."""

    code: int
    checks: dict[str, list[dict[str, str]]]

    def bad(self) -> dict[str, str]:
        """All lines that are not ok, by check and level, joined."""
        lines = [(name, one) for name, found in self.checks.items() for one in found if one["level"] != "ok"]
        return {f"{one['level']} {name}": one["what"] for name, one in lines}

    def one(self, check: str, level: str) -> dict[str, str]:
        """The one line of a check, which has this level and, if it is bad, a hint."""
        (found,) = self.checks[check]
        assert found["level"] == level, found
        assert level in ("ok", "skipped") or found["hint"], found
        return found


def program_version() -> str:
    """The release of NVIDIA's control program here, so that a driver of the same can be simulated."""
    with SimHost.create() as host:
        program = shutil.which(CONTROL, path=host.env["PATH"])
    assert program
    with open(program, "rb") as file:
        found = re.search(rb"\0(\d{3}\.[\d.]+\d)\0", file.read())
    assert found
    return found[1].decode()


def described(*gpus: Mapping[str, Any], version: str = "") -> Description:
    """A host with these GPUs (two T4 without any) and a driver of the control program's version."""
    return {
        "driver": {"version": version or program_version(), "cuda": "12.2"},
        "gpus": [dict(gpu) for gpu in gpus] or [{"kind": "t4", "count": 2}],
    }


@contextmanager
def healthy(*gpus: Mapping[str, Any], version: str = "") -> Iterator[SimHost]:
    """The host, its MPS server a stand-in, and what a driver's installation adds to the simulated tree."""
    with SimHost.create(described(*gpus, version=version)) as host, StandIns(host):
        finish(host)
        yield host


def finish(host: SimHost) -> None:
    """Add what a driver's installation and a boot add."""
    library = host.root / f"lib/libcuda.so.{host.description.driver_version}"
    library.touch()
    (host.root / "lib/libcuda.so.1").symlink_to(library.name)


def look(
    host: SimHost, *arguments: str, command: tuple[str, ...] = (), before: tuple[str, ...] = (), **given: Any
) -> Seen:
    """Run the doctor on the host, perhaps behind other words (`unshare`); never with words of its own."""
    behind = ("--", *command) if command else ()
    words = [*before, "yunion-mps", "doctor", "-o", "json", *arguments, *behind]
    done: subprocess.CompletedProcess[str] = host.run(words, **given)
    assert done.stderr == "", done.stderr
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == done.returncode
    checks: dict[str, list[dict[str, str]]] = {}
    for line in answer["checks"]:
        checks.setdefault(line["check"], []).append(line)
    return Seen(done.returncode, checks)
