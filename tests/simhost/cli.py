"""`simhost [--gpus FILE] [--root DIR] -- COMMAND...`: run a command on a simulated host."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .description import REFERENCE, DescriptionError
from .host import SimHost
from .install import BuildError
from .mps import StandIns, program_version
from .runner import hold_signals, run
from .state import StateError

_EPILOG = """\
The host has the GPUs that FILE describes (YAML; tests/simhost/README.md has all keys), or one Tesla P40:

  driver: {version: 535.261.03, cuda: "12.2"}
  gpus:
  - {kind: h100, count: 8, numa_node: 1}
  - {kind: tesla-p40, pci: "10000:e1:00.0", virtual_number: 2}

Programs find it under $YUNION_MPS_ROOT. On it, simhost-ctl changes it while programs run. Examples:

  scripts/simhost -- nvidia-smi -L
  scripts/simhost --gpus eight.yml -- sh -c 'simhost-ctl lose 3; nvidia-smi -L'
  scripts/simhost --jobs -- bash
"""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status; 2 for a wrong use, 126 and 127 as in a shell."""
    parser = argparse.ArgumentParser(
        prog="simhost",
        usage="simhost [--gpus FILE] [--jobs] [--root DIR] -- COMMAND...",
        description="Run a command on a host with simulated GPUs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=Path, metavar="FILE", help="the GPUs (default: one Tesla P40)")
    parser.add_argument(
        "--jobs", action="store_true",
        help="with stand-ins for libcuda and the MPS server, so that CUDA programs run, "
        "and a driver of the release of NVIDIA's programs here",
    )  # fmt: skip
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="keep the host's files here and use them again"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no COMMAND")
    try:
        mask = hold_signals()
        description = None if given.gpus is None else _read(given.gpus)
        if given.jobs:
            gpus = REFERENCE if description is None else description
            description = {"driver": {"version": program_version()}, **gpus}
        with SimHost.create(description, given.root) as host, ExitStack() as stack:
            if given.jobs:
                stack.enter_context(StandIns(host)).install_libcuda()
            return run(command, host.env, mask)
    except (DescriptionError, StateError, BuildError) as error:
        where = f"{given.gpus}: " if given.gpus and isinstance(error, DescriptionError) else ""
        sys.stderr.write(f"simhost: {where}{error}\n")
        return 2


def _read(path: Path) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        with path.open("rb") as file:
            return yaml.load(file, Loader=loader)
    except OSError as error:
        raise DescriptionError(f"cannot be read ({error.strerror}): give a readable file") from error
    except yaml.YAMLError as error:
        mark: Any | None = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise DescriptionError(f"{line}not YAML: {getattr(error, 'problem', error)}") from error
