"""C programs and libraries of the tests, compiled on demand and kept under `.cache/` of the checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .environment import CHECKOUT

_FLAGS = ("-std=gnu11", "-O1", "-g0", "-Wall", "-Wextra")
LIBRARY = ("-fPIC", "-shared")


class BuildError(RuntimeError):
    """Something could not be compiled."""


def compiled(
    name: str,
    sources: Sequence[Path],
    flags: Sequence[str] = (),
    headers: Mapping[str, str] = {},
    checkout: Path = CHECKOUT,
) -> Path:
    """Return what the sources (and generated headers, by name) compile to; compiles if they are new.

    Several builders at once are safe: each compiles to a name of its own and renames; all results are alike.
    """
    options = [*_FLAGS, *flags]
    near = [path for source in sources for path in sorted(source.parent.glob("*.h"))]
    parts = [path.read_bytes() for path in (*sources, *near)]
    parts += [text.encode() for text in (*headers.values(), " ".join(options))]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    target = checkout / ".cache/simhost" / f"{name}-{key}"
    if target.exists():
        return target
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise BuildError("simhost needs a C compiler: apt-get install gcc libc6-dev")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        for header, text in headers.items():
            Path(folder, header).write_text(text)
        made = Path(folder, "made")
        command = [compiler, f"-I{folder}", *map(str, sources), *options, "-ldl", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(f"simhost: {' '.join(command)} failed:\n{done.stderr}")
        os.replace(made, target)
    return target


def libcuda() -> Path:
    """The stand-in of the CUDA driver's library, for `scripts/gpu-check` and the doctor's self-test."""
    return compiled("libcuda", [Path(__file__).with_name("libcuda.c")], LIBRARY)
