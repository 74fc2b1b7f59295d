"""What scripts/generate writes, for tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent.parent
EPOCH = "1790000000"
DATE = "2026-09-21"


def run(*arguments: str, epoch: str = EPOCH, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(CHECKOUT / "scripts/generate"), *arguments]
    env = {**os.environ, "SOURCE_DATE_EPOCH": epoch, **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def generate(directory: Path, epoch: str = EPOCH, **variables: str) -> Path:
    done = run(str(directory), epoch=epoch, **variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return directory
