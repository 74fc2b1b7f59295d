"""The simulated libnvidia-ml.so.1 and `simhost-ctl`, and putting both into a host's root."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from .compiled import LIBRARY, compiled
from .environment import CHECKOUT
from .layout import c_header

SONAME = "libnvidia-ml.so.1"
_SOURCES = Path(__file__).with_name("libnvidia-ml")
_FLAGS = (*LIBRARY, "-fvisibility=hidden", "-pthread", "-Wl,-Bsymbolic", f"-Wl,-soname,{SONAME}")

_CTL = """\
#!/bin/sh
exec {python} -I {program} --ctl {root} "$@"
"""


def built_library(checkout: Path = CHECKOUT) -> Path:
    return compiled("nvml", sorted(_SOURCES.glob("*.c")), _FLAGS, {"layout.h": c_header()}, checkout)


def library_path(root: Path) -> Path:
    return root / "lib" / SONAME


def install(root: Path, library: Path) -> None:
    """Install both; a library that is hidden stays so.

    A copy, not a link: the library finds its state beside itself, and two hosts that one process loads
    must be two files to the loader.
    """
    temporary = library_path(root).with_name(f".{SONAME}.{os.getpid()}")
    shutil.copyfile(library, temporary)
    hidden = library_path(root).with_name(f"hidden-{SONAME}")
    temporary.replace(hidden if hidden.exists() else library_path(root))
    ctl = root / "bin/simhost-ctl"
    words = {
        "python": sys.executable,
        "program": str(CHECKOUT / "tests/simhost/__main__.py"),
        "root": str(root),
    }
    ctl.write_text(_CTL.format(**{key: shlex.quote(word) for key, word in words.items()}))
    ctl.chmod(0o755)
