"""`simhost-ctl`: change the simulated host that it runs on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from .catalog import COMPUTE_MODES, ERRORS
from .description import PROCESS_TYPES, DescriptionError
from .gpu import SimGpu
from .host import SimHost
from .state import StateError


def main(arguments: list[str]) -> int:
    """Do one command; `arguments` are `--ctl ROOT` and the user's."""
    parser = _parser()
    given = parser.parse_args(arguments[2:])
    try:
        host = SimHost.attach(Path(arguments[1]))
        given.act(host, given)
    except (DescriptionError, StateError, ValueError) as error:
        sys.stderr.write(f"simhost-ctl: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simhost-ctl", description="Change this simulated host.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(
        name: str, text: str, act: Callable[[SimHost, argparse.Namespace], object], *, gpu: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        if gpu:
            command.add_argument(
                "gpu", type=int, metavar="N", help="the GPU, from 0 in the order of PCI addresses"
            )
        return command

    add("lose", "The GPU is lost: every call on it fails.", lambda host, a: _gpu(host, a).lose())
    add("remove", "The GPU is gone from the bus.", lambda host, a: _gpu(host, a).remove())
    add("restore", "A lost or removed GPU is back.", lambda host, a: _gpu(host, a).restore())
    add("xid", "The GPU reports an Xid error.", lambda host, a: _gpu(host, a).xid(a.code)).add_argument(
        "code", type=int, metavar="CODE"
    )
    add("compute-mode", "Set the compute mode from outside.", _compute_mode).add_argument(
        "mode", choices=COMPUTE_MODES
    )
    add("mig", "Switch MIG mode.", _mig).add_argument("mode", choices=["on", "off"])

    process = add("process", "Add a process with its memory in MiB, or remove it.", _process)
    process.add_argument("what", choices=["add", "remove"])
    process.add_argument("pid", type=int, metavar="PID")
    process.add_argument("used_mib", type=int, nargs="?", metavar="MIB")
    process.add_argument(
        "--type", dest="kind", choices=PROCESS_TYPES, default="C", help="as nvidia-smi shows it (C)"
    )

    process.add_argument("--sm", type=int, metavar="PERCENT", help="its SM utilization (no sample of it)")

    load = add("load", "Set what NVML measures of the GPU.", _load)
    load.add_argument("utilization", type=int, metavar="PERCENT")
    load.add_argument("--temperature", type=int, metavar="C")
    load.add_argument("--power", type=float, metavar="W")

    fail = add("fail", "Let an NVML call fail.", _fail, gpu=False)
    fail.add_argument("call", metavar="CALL", help="e.g. nvmlDeviceGetUUID, or a pattern with * and ?")
    fail.add_argument("error", choices=ERRORS, metavar="ERROR", help=", ".join(ERRORS))
    fail.add_argument("--gpu", type=int, metavar="N", help="for this GPU only")
    fail.add_argument("--times", type=int, metavar="K", help="so many calls (until cleared)")
    fail.add_argument("--delay-ms", type=int, default=0, metavar="D", help="after so many milliseconds (0)")
    clear = add(
        "clear", "Take back all failures, or those of one call.", lambda h, a: h.clear(a.call), gpu=False
    )
    clear.add_argument("call", nargs="?", metavar="CALL")

    add(
        "hide-library", "Programs started from now on find no NVML.", lambda h, a: h.hide_library(), gpu=False
    )
    add("show-library", "They find it again.", lambda h, a: h.show_library(), gpu=False)
    add(
        "show",
        "Print the host as JSON.",
        lambda h, a: sys.stdout.write(json.dumps(h.show(), indent=2) + "\n"),
        gpu=False,
    )
    return parser


def _gpu(host: SimHost, given: argparse.Namespace) -> SimGpu:
    number: int = given.gpu
    if not 0 <= number < len(host.gpus):
        raise StateError(f"GPU {number}: the host has GPUs 0 to {len(host.gpus) - 1}")
    return host.gpus[number]


def _compute_mode(host: SimHost, given: argparse.Namespace) -> None:
    _gpu(host, given).compute_mode = given.mode


def _mig(host: SimHost, given: argparse.Namespace) -> None:
    _gpu(host, given).mig = given.mode == "on"


def _process(host: SimHost, given: argparse.Namespace) -> None:
    if given.what == "add":
        _gpu(host, given).add_process(given.pid, given.used_mib, given.kind, given.sm)
    elif not _gpu(host, given).remove_process(given.pid):
        raise StateError(f"no process {given.pid} on GPU {given.gpu}")


def _load(host: SimHost, given: argparse.Namespace) -> None:
    _gpu(host, given).load(given.utilization, given.temperature, given.power)


def _fail(host: SimHost, given: argparse.Namespace) -> None:
    host.fail(given.call, given.error, gpu=given.gpu, times=given.times, delay_ms=given.delay_ms)
