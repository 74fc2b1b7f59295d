"""Find the driver's library and programs, and a GPU that a client can use."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import time
from typing import Any, NamedTuple

from gpu_check.clients import Client
from gpu_check.values import Host, StepContext, StepError

LIBCUDA = "libcuda.so.1"
CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
SMI = "nvidia-smi"

#: Where drivers install their programs if not on PATH: mounts in containers, Debian's versioned directories.
PROGRAM_FOLDERS = (
    "/usr/bin",
    "/usr/sbin",
    "/usr/local/bin",
    "/usr/local/nvidia/bin",
    "/usr/lib/nvidia/current",
    "/run/nvidia/driver/usr/bin",
    "/opt/nvidia/bin",
)
_SETTINGS = {
    "compute_mode": "compute_mode",
    "driver_version": "driver",
    "persistence_mode": "persistence",
    "mig.mode.current": "mig",
    "memory.total": "memory_total",
    "memory.used": "memory_used",
    "utilization.gpu": "utilization",
    "clocks.sm": "clock_sm",
    "pci.bus_id": "pci",
    "name": "name",
}


def library_folders(machine: str = os.uname().machine) -> tuple[str, ...]:
    """Return the directories in which drivers install the libraries of an architecture."""
    native = f"{machine}-linux-gnu"
    return (
        "/usr/local/nvidia/lib64",
        "/usr/local/nvidia/lib",
        f"/usr/lib/{native}",
        "/usr/lib64",
        f"/usr/lib/{native}/nvidia/current",
        "/usr/lib/wsl/lib",
        f"/run/nvidia/driver/usr/lib/{native}",
        "/run/nvidia/driver/usr/lib64",
    )


class NoGpu(Exception):  # noqa: N818 - it is what most machines say
    """There is no GPU to measure; the text says what was searched for."""


class DriverFiles(NamedTuple):
    """The driver's library and programs; a path is empty if it is missing."""

    libcuda: str
    """Its name if the loader finds it, otherwise its path."""
    control: str
    server: str
    smi: str
    looked_in: list[str]


def find_driver(folder: str = "") -> DriverFiles:
    """Search for the driver's files, first in `folder` if one is given; raises NoGpu without libcuda."""
    library, path = _library()
    if not library:
        tried = ", ".join(("the loader's path", *library_folders()))
        devices = ", ".join(sorted(glob.glob("/dev/nvidia*"))) or "none"
        raise NoGpu(f"{LIBCUDA} was not found (searched {tried}; device nodes /dev/nvidia*: {devices})")
    first = [part for part in (folder, *os.environ.get("PATH", "").split(os.pathsep)) if part.startswith("/")]
    smi_path = _program(SMI, [*first, *PROGRAM_FOLDERS])
    near = [os.path.dirname(path), os.path.normpath(f"{os.path.dirname(path)}/../bin")]
    near += [os.path.dirname(os.path.realpath(smi_path))] if smi_path else []
    places = [*first, *PROGRAM_FOLDERS, *near]
    control = _program(CONTROL, places)
    server = _program(SERVER, [*places, *([os.path.dirname(os.path.realpath(control))] if control else [])])
    return DriverFiles(library, control, server, smi_path, places)


def _library() -> tuple[str, str]:
    """Return what to load, and its path; both are empty if it was not found.

    A separate process loads it, because the steps are forked from this one, which must not have loaded it.
    """
    program = (
        f"import ctypes; ctypes.CDLL({LIBCUDA!r})\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libcuda.so' in line})"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60
    )
    if result.returncode == 0:
        return LIBCUDA, (result.stdout.split() or [LIBCUDA])[0]
    paths = [f"{folder}/{LIBCUDA}" for folder in library_folders()]
    path = next((path for path in paths if os.path.exists(path)), "")
    return path, os.path.realpath(path) if path else ""


def _program(name: str, folders: list[str]) -> str:
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def environment(found: DriverFiles, directory: str) -> dict[str, str]:
    """The environment of the run's processes: without CUDA's variables, and with the run's mark."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CUDA_") or name == "CUDA_VISIBLE_DEVICES"
    }
    variables.setdefault("PATH", os.defpath)
    if "/" in found.libcuda:
        libraries = [os.path.dirname(found.libcuda), variables.get("LD_LIBRARY_PATH", "")]
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(part for part in libraries if part)
    variables["GPU_CHECK_RUN"] = directory
    variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    variables["CUDA_CACHE_DISABLE"] = "1"  # leave nothing in a home directory
    return variables


def probe(found: DriverFiles, directory: str, device: int) -> Host:
    """Return the host after a first client has used the GPU; raises NoGpu if no client can."""
    variables = environment(found, directory)
    host = Host(found.libcuda, found.control, found.server, found.smi, variables, device, {}, {})
    try:
        gpu = _first_client(host, directory)
    except StepError as error:
        settings = smi_settings(host, "")
        if settings.get("compute_mode") in ("Prohibited", "Exclusive_Process"):
            gpu = {"name": settings.get("name", "GPU"), "uuid": "", "unusable": str(error)}
            return host._replace(gpu=gpu, settings=settings)
        raise NoGpu(f"{found.libcuda} was found, but no GPU can be used with it: {error}") from None
    if gpu["devices_seen"] > 1 or "CUDA_VISIBLE_DEVICES" in variables:
        # One GPU is measured: the control daemon and its clients see only that one, as device 0.
        host = host._replace(device=0, environment={**variables, "CUDA_VISIBLE_DEVICES": gpu["uuid"]})
    return host._replace(gpu=gpu, settings=smi_settings(host, gpu["uuid"]))


def _first_client(host: Host, directory: str) -> dict[str, Any]:
    context = StepContext(host, directory, time.monotonic() + 120)
    with Client(context, "first") as client:
        facts = client.ready(90)
        gpu = {key: value for key, value in facts.items() if key not in ("event", "t")}
        gpu["seconds_until_ready"] = round(facts["t"] - client.started_s, 3)
        sizes = host._replace(gpu=gpu)
        for key, blocks in (("iterations", sizes.small_blocks), ("iterations_large", sizes.large_blocks)):
            gpu[key] = client.ask("calibrate", 30, blocks=blocks)["iterations"]
        gpu["memory"] = client.ask("memory")
    return gpu


def smi_settings(host: Host, uuid: str) -> dict[str, str]:
    """The GPU's settings according to nvidia-smi; empty if it is missing or fails."""
    fields = ",".join(_SETTINGS)
    text = smi(host, "-i", uuid or str(host.device), f"--query-gpu={fields}", "--format=csv,noheader")
    values = text.strip().split(", ")
    return dict(zip(_SETTINGS.values(), values)) if len(values) == len(_SETTINGS) else {}


def smi(host: Host, *arguments: str, timeout_s: float = 20.0) -> str:
    """What nvidia-smi prints; empty if it is missing, fails or hangs."""
    if not host.smi:
        return ""
    try:
        result = subprocess.run(
            [host.smi, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=host.environment,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def notes(host: Host) -> list[str]:
    """What a reader should know about the state of the GPU before the run."""
    said = []
    mode = host.settings.get("compute_mode", "")
    if mode not in ("", "Default"):
        said.append(f"The GPU's compute mode is {mode}; it was not changed.")
    if host.settings.get("mig", "").lower() == "enabled":
        said.append("The GPU is in MIG mode: the results are those of one of its MIG devices.")
    others = smi(host, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader").strip()
    if others:
        said.append(
            f"Other processes were using the GPU when the run started, and were not touched: {others!r}."
        )
    pipes = [path for path in ("/tmp/nvidia-mps", os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")) if path]
    said += [
        f"{path} has the socket of another control daemon, which was not touched."
        for path in pipes
        if os.path.exists(f"{path}/control")
    ]
    for name, path in ((CONTROL, host.control), (SERVER, host.server)):
        if not path:
            said.append(f"{name} was not found, so all steps that need MPS were skipped.")
    if shutil.disk_usage("/tmp").free < 1 << 24:
        said.append("/tmp is nearly full.")
    return said
