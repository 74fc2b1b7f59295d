"""The driver's files on this machine, and the GPU."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBCUDA = "libcuda.so.1"
CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"

_NATIVE = f"{os.uname().machine}-linux-gnu"
#: Where drivers install their libraries if the loader does not find them.
_LIBRARY_FOLDERS = (
    "/usr/local/nvidia/lib64",
    f"/usr/lib/{_NATIVE}/nvidia/current",
    "/usr/lib64",
    f"/run/nvidia/driver/usr/lib/{_NATIVE}",
)
#: Where drivers install their programs if they are not on PATH; at last, what scripts/setup has unpacked.
_PROGRAM_FOLDERS = (
    "/usr/bin",
    "/usr/local/nvidia/bin",
    "/usr/lib/nvidia/current",
    "/run/nvidia/driver/usr/bin",
    f"{CHECKOUT}/.nvidia/usr/bin",
    f"{CHECKOUT}/.nvidia/usr/sbin",
    f"{CHECKOUT}/.nvidia/usr/lib/nvidia/current",
)
#: What nvidia-smi is asked about the first GPU.
_GPU_FIELDS = "name,uuid,driver_version,compute_mode,mig.mode.current,persistence_mode,memory.total"


class Host(NamedTuple):
    """What was found on this machine; a path is empty if it is missing."""

    libcuda: str
    """The library's name if the loader finds it, otherwise its path."""
    control: str
    server: str
    smi: str
    environment: dict[str, str]
    """Of all processes of the run: with only this GPU, and without other variables of CUDA."""
    gpu: dict[str, str]
    """nvidia-smi's answers by field; empty if nvidia-smi is missing or fails."""
    multiprocessors: int = 0
    """The GPU's SMs; 0 until a client has told."""


def find_host(programs: str) -> Host:
    """Search for the driver's files (programs: first in the directory `programs`) and for the first GPU."""
    folders = os.pathsep.join([programs, os.environ.get("PATH", os.defpath), *_PROGRAM_FOLDERS])
    libcuda = _find_libcuda()
    control = shutil.which(CONTROL, path=folders) or ""
    server = shutil.which(SERVER, path=folders) or ""
    smi = shutil.which("nvidia-smi", path=folders) or ""
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith("CUDA_"):
            environment[name] = value
    # A control daemon looks for its server on its own PATH only, and our daemon for all of them.
    places = [os.path.dirname(path) for path in (server, control, smi) if path]
    environment["PATH"] = os.pathsep.join([*places, environment.get("PATH", os.defpath)])
    if "/" in libcuda:
        libraries = [os.path.dirname(libcuda), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environment["CUDA_CACHE_DISABLE"] = "1"  # leave nothing in a home directory
    host = Host(libcuda, control, server, smi, environment, gpu={})
    gpu = ask_gpu(host)
    environment["CUDA_VISIBLE_DEVICES"] = gpu.get("uuid", "0")
    return host._replace(gpu=gpu)


def _find_libcuda() -> str:
    # In a process of its own: those of the questions are forked from this one, which must not have loaded it.
    program = f"import ctypes; ctypes.CDLL({LIBCUDA!r})"
    tried = subprocess.run([sys.executable, "-I", "-S", "-c", program], stderr=subprocess.DEVNULL, timeout=60)
    if tried.returncode == 0:
        return LIBCUDA
    for folder in _LIBRARY_FOLDERS:
        if os.path.exists(f"{folder}/{LIBCUDA}"):
            return f"{folder}/{LIBCUDA}"
    return ""


def ask_smi(host: Host, *arguments: str) -> str:
    """Return what nvidia-smi prints; empty if it is missing, fails or hangs."""
    argv = [host.smi, *arguments]
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=20, env=host.environment)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def has_module(name: str) -> bool:
    """Return whether this Python finds a module."""
    return importlib.util.find_spec(name) is not None


def ask_gpu(host: Host) -> dict[str, str]:
    """Return nvidia-smi's answers about the first GPU by field; empty if it gives none."""
    answer = ask_smi(host, "-i", "0", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader")
    return dict(zip(_GPU_FIELDS.split(","), answer.split(", "))) if answer else {}


def find_missing(host: Host) -> list[str]:
    """Say what is missing on this machine, and which answers that costs."""
    missing = []
    if not host.libcuda:
        searched = ", ".join(("the loader's path", *_LIBRARY_FOLDERS))
        nodes = " ".join(sorted(glob.glob("/dev/nvidia*"))) or "none"
        missing.append(f"{LIBCUDA} (searched: {searched}; device nodes: {nodes}): no answers")
    for name, path in ((CONTROL, host.control), (SERVER, host.server)):
        if not path:
            missing.append(f"{name} (see --programs): no answers about MPS")
    if not host.gpu:
        missing.append("nvidia-smi, or its answer: no answers about UUIDs and yunion-mps-daemon")
    if not has_module("psutil"):
        missing.append("the Python module psutil: processes that are left over are not ended")
    if not has_module("pynvml"):
        missing.append("the Python module pynvml: no answers about NVML and yunion-mps-daemon")
    return missing


def describe_host(host: Host) -> list[str]:
    """Say what a reader of the answers should know about the GPU and the programs."""
    said = [f"{name}: {value}" for name, value in host.gpu.items()]
    said.append(f"{host.multiprocessors} SMs, {os.cpu_count()} CPUs, Linux {os.uname().release}")
    for path in (host.control, host.server):
        if path:
            said.append(f"{path}: release {_release(path)}")
    others = ask_smi(host, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
    if others:
        said.append(f"other processes use the GPU, and were not touched: {others!r}")
    return said


def _release(path: str) -> str:
    """Return the driver release that a program of NVIDIA's was built for."""
    with open(path, "rb") as file:
        found = re.search(rb"\0(\d{3}\.[\d.]+\d)\0", file.read())
    return found[1].decode() if found else "unknown"
