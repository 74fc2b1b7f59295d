"""`simhost-ctl`: change the simulated host that it runs on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .catalog import COMPUTE_MODES, ERRORS
from .gpu import SimGpu
from .host import SimHost
from .mig import TIME_SLICES
from .state import PROCESS_TYPES, StateError


def main(arguments: list[str]) -> int:
    given = _parser().parse_args(arguments[2:])
    try:
        given.act(SimHost.attach(Path(arguments[1])), given)
    except (StateError, ValueError) as error:
        sys.stderr.write(f"simhost-ctl: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simhost-ctl", description="Change this simulated host.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, text: str, act: Callable[[SimHost, Any], object]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        return command

    def add_gpu(name: str, text: str, act: Callable[[SimGpu, Any], object]) -> argparse.ArgumentParser:
        command = add(name, text, lambda host, given: act(_gpu(host, given.gpu), given))
        command.add_argument(
            "gpu", type=int, metavar="N", help="index of the GPU in the order of PCI addresses"
        )
        return command

    add_gpu("lose", "Lose the GPU: every call on it fails.", lambda gpu, _: gpu.lose())
    add_gpu("remove", "Remove the GPU from the bus.", lambda gpu, _: gpu.remove())
    add_gpu("restore", "Bring back a lost or removed GPU.", lambda gpu, _: gpu.restore())
    bind = add_gpu("bind", "Give the GPU to another driver of the kernel.", _bind)
    bind.add_argument("driver", metavar="DRIVER", help="nvidia, none, or any other, such as vfio-pci")
    add_gpu("replace", "Put another card into the GPU's slot.", lambda gpu, _: gpu.replace())
    move = add_gpu("move", "Put the card into another slot.", lambda gpu, given: gpu.move(given.address))
    move.add_argument("address", metavar="ADDRESS", help="a PCI address, such as 0000:41:00.0")
    xid = add_gpu("xid", "Report an Xid error of the GPU.", lambda gpu, given: gpu.xid(given.code))
    xid.add_argument("code", type=int, metavar="CODE")
    mode = add_gpu("compute-mode", "Set the compute mode, as another program would.", _set_compute_mode)
    mode.add_argument("mode", choices=COMPUTE_MODES)
    mig = add_gpu(
        "mig", "Enable or disable MIG mode.", lambda gpu, given: setattr(gpu, "mig", given.mode == "on")
    )
    mig.add_argument("mode", choices=["on", "off"])

    add_gpu(
        "reset", "Reset the GPU, even in use, and apply its pending MIG mode.", lambda gpu, _: gpu.reset()
    )
    add_gpu(
        "require-reset", "Refuse MIG changes of the GPU until a reset.", lambda gpu, _: gpu.require_reset()
    )
    end = add_gpu(
        "end-instance", "End a GPU instance with all in it.", lambda gpu, given: gpu.end_instances(given.gi)
    )
    end.add_argument("gi", type=int, metavar="GI", help="id of the GPU instance")
    slice_ = add_gpu(
        "time-slice", "Set the time-slice.", lambda gpu, given: setattr(gpu, "time_slice", given.time_slice)
    )
    slice_.add_argument("time_slice", choices=TIME_SLICES)

    process = add_gpu("process", "Add a process with its memory in MiB, or remove it.", _process)
    process.add_argument("what", choices=["add", "remove"])
    process.add_argument("pid", type=int, metavar="PID")
    process.add_argument("used_mib", type=int, nargs="?", metavar="MIB")
    process.add_argument(
        "--type", choices=PROCESS_TYPES, default="C", help="type, as in nvidia-smi (default: C)"
    )
    process.add_argument("--sm", type=int, metavar="PERCENT", help="its SM utilization (default: no sample)")

    process.add_argument(
        "--on", type=int, nargs=2, metavar=("GI", "CI"), help="the MIG device it runs on, by its two ids"
    )

    load = add_gpu("load", "Set the load that NVML reports for the GPU.", _load)
    load.add_argument("utilization", type=int, metavar="PERCENT")
    load.add_argument("--temperature", type=int, metavar="C")
    load.add_argument("--power", type=float, metavar="W")

    fail = add("fail", "Make an NVML call fail.", _fail)
    fail.add_argument("call", metavar="CALL", help="e.g. nvmlDeviceGetUUID, or a pattern with * and ?")
    fail.add_argument("error", choices=ERRORS, metavar="ERROR", help=", ".join(ERRORS))
    fail.add_argument("--gpu", type=int, metavar="N", help="for this GPU only")
    fail.add_argument(
        "--times", type=int, metavar="K", help="number of calls that fail (default: until cleared)"
    )
    fail.add_argument(
        "--delay-ms", type=int, default=0, metavar="D", help="delay of the call in milliseconds (default: 0)"
    )
    fail.add_argument(
        "--skip", type=int, default=0, metavar="K", help="number of calls that succeed first (default: 0)"
    )
    fail.add_argument("--one-version", action="store_true", help="let other versions of the call go on")
    driver = add("driver", "Load, unload or update NVIDIA's kernel module.", _driver)
    driver.add_argument("what", choices=["on", "off", "version", "library"])
    driver.add_argument(
        "version", nargs="?", metavar="X", help="of the module and library, or the library alone"
    )
    drm = add(
        "drm", "Load or unload nvidia-drm.", lambda host, given: host.set_drm(loaded=given.state == "on")
    )
    drm.add_argument("state", choices=["on", "off"])
    add("renumber", "Number the render nodes as a boot may.", lambda host, _: host.renumber())
    add("reboot", "Do to the GPUs what a reboot does.", lambda host, _: host.reboot())
    add("clear", "Clear all failures.", lambda host, _: host.clear())
    add("show", "Print the host as JSON.", lambda host, _: json.dump(host.show(), sys.stdout, indent=2))
    return parser


def _gpu(host: SimHost, number: int) -> SimGpu:
    if not 0 <= number < len(host.gpus):
        raise StateError(f"GPU {number}: the host has GPUs 0 to {len(host.gpus) - 1}")
    return host.gpus[number]


def _bind(gpu: SimGpu, given: argparse.Namespace) -> None:
    gpu.bind("" if given.driver == "none" else given.driver)


def _driver(host: SimHost, given: argparse.Namespace) -> None:
    if (given.version is not None) != (given.what in {"version", "library"}):
        raise StateError("driver on | off | version X | library X")
    if given.what == "on":
        host.load_driver()
    elif given.what == "off":
        host.unload_driver()
    elif given.what == "version":
        host.update_driver(given.version)
    else:
        host.update_library(given.version)


def _set_compute_mode(gpu: SimGpu, given: argparse.Namespace) -> None:
    gpu.compute_mode = given.mode


def _process(gpu: SimGpu, given: argparse.Namespace) -> None:
    if given.what == "add":
        gpu.add_process(given.pid, given.used_mib, given.type, given.sm, given.on and tuple(given.on))
    elif not gpu.remove_process(given.pid):
        raise StateError(f"no process {given.pid} on GPU {given.gpu}")


def _load(gpu: SimGpu, given: argparse.Namespace) -> None:
    gpu.load(given.utilization, given.temperature, given.power)


def _fail(host: SimHost, given: argparse.Namespace) -> None:
    host.fail(
        given.call,
        given.error,
        gpu=given.gpu,
        times=given.times,
        delay_ms=given.delay_ms,
        skip=given.skip,
        one_version=given.one_version,
    )
