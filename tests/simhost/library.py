"""Building the simulated libnvidia-ml.so.1, once for each state of its sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .layout import c_header

SONAME = "libnvidia-ml.so.1"
_SOURCES = Path(__file__).with_name("libnvidia-ml")
_FLAGS = [
    "-std=gnu11",
    "-O1",
    "-g0",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
    "-Wl,-Bsymbolic",
]


class BuildError(RuntimeError):
    """The library could not be compiled."""


def built_library(checkout: Path) -> Path:
    """Return the compiled library under `.cache/` of the checkout; compiles it when its sources are new.

    Several builders at once are safe: each compiles to a name of its own and renames; all results are alike.
    """
    header = c_header()
    parts = [path.read_bytes() for path in sorted(_SOURCES.iterdir())] + [
        header.encode(),
        " ".join(_FLAGS).encode(),
    ]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    target = checkout / ".cache" / "simhost" / f"nvml-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile(header, target)
    return target


def _compile(header: str, target: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise BuildError("simhost needs a C compiler: apt-get install gcc libc6-dev")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        Path(folder, "layout.h").write_text(header)
        result = Path(folder, SONAME)
        command = [
            compiler,
            *_FLAGS,
            f"-I{folder}",
            f"-Wl,-soname,{SONAME}",
            *map(str, sorted(_SOURCES.glob("*.c"))),
            "-o",
            str(result),
            "-ldl",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(f"simhost: {' '.join(command)} failed:\n{done.stderr}")
        os.replace(result, target)
