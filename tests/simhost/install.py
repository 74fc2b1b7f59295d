"""C programs and libraries, compiled on demand under `.cache/`, and what of them a host's root has."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .environment import CHECKOUT
from .layout import c_header

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


SONAME = "libnvidia-ml.so.1"
_SOURCES = Path(__file__).with_name("libnvidia-ml")
_NVML_FLAGS = (*LIBRARY, "-fvisibility=hidden", "-pthread", "-Wl,-Bsymbolic", f"-Wl,-soname,{SONAME}")

_CTL = """\
#!/bin/sh
exec {python} -I {program} --ctl {root} "$@"
"""


def built_library(checkout: Path = CHECKOUT) -> Path:
    return compiled("nvml", sorted(_SOURCES.glob("*.c")), _NVML_FLAGS, {"layout.h": c_header()}, checkout)


def library_path(root: Path) -> Path:
    return root / "lib" / SONAME


def hidden_library_path(root: Path) -> Path:
    return root / "lib" / f"hidden-{SONAME}"


def found_library(root: Path) -> Path:
    """Return the library, hidden or not."""
    hidden = hidden_library_path(root)
    return hidden if hidden.exists() else library_path(root)


#: Where libnvidia-ml/library.c has its version.
_VERSION = b"simhost: version of this library".ljust(80, b"\0")


def install(root: Path, library: Path, version: str) -> None:
    """Install both, the library as that of a driver of this version; a library that is hidden stays so.

    A copy, not a link: the library finds its state beside itself, and two hosts that one process loads
    must be two files to the loader.
    """
    temporary = library_path(root).with_name(f".{SONAME}.{os.getpid()}")
    before, _, after = library.read_bytes().partition(_VERSION)
    temporary.write_bytes(before + version.encode().ljust(len(_VERSION), b"\0") + after)
    temporary.replace(found_library(root))
    ctl = root / "bin/simhost-ctl"
    words = {
        "python": sys.executable,
        "program": str(CHECKOUT / "tests/simhost/__main__.py"),
        "root": str(root),
    }
    ctl.write_text(_CTL.format(**{key: shlex.quote(word) for key, word in words.items()}))
    ctl.chmod(0o755)
