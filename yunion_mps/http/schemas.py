"""The schemas of the API's answers, and their examples.

Every property carries its own example, out of the documentation's reference case; the examples of whole
answers are put together from them, so that the two cannot differ. All properties are always there: what
is unknown is null.
"""

from __future__ import annotations

from typing import Any

from yunion_mps import __version__
from yunion_mps.http.query import LARGEST_NUMBER
from yunion_mps.http.routes import LARGEST_LIMIT
from yunion_mps.http.schema_parts import Schema, list_of, number, object_of, or_null, ref, text, truth
from yunion_mps.http.schemas_running import schemas as running
from yunion_mps.models import DEV_TYPE
from yunion_mps.mps.states import LEGAL_CHANGES, READY
from yunion_mps.service.queries import DEFAULT_LIMIT
from yunion_mps.service.state import AVAILABLE, NOT_USED, PENDING, STATES, UNAVAILABLE

_PCI = "([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7]"
_GPU_UUID = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"
_HOST_ID = "c7bb5bd2-3ef5-5c3f-a0ac-0f38a4b7a4b0"
_PIPE_DIRECTORY = "/tmp/nvidia-mps/pipe"


def example(schema: Schema) -> Any:
    """The example of a whole answer."""
    if "examples" in schema:
        return schema["examples"][0]
    if "properties" in schema:
        return {name: example(inner) for name, inner in schema["properties"].items()}
    if "$ref" in schema:
        return example(schemas()[schema["$ref"].rpartition("/")[2]])
    return [example(schema["items"])]


def _link() -> Schema:
    link = object_of(
        "The most that the GPU's PCI Express link can do.",
        {
            "lane_width": number("Lanes.", 16),
            "throughput": text("Of all lanes together.", "15.76 GB/s", pattern="^[0-9]+\\.[0-9]{2} GB/s$"),
            "transfer_rate_per_lane": text("Per lane.", "8GT/s", pattern="^[0-9.]+GT/s$"),
            "version": text("The version of PCI Express.", "3.0", pattern="^[1-7]\\.0$"),
        },
    )
    return or_null(link)


def _device() -> Schema:
    reason = "Why it is not available, empty if it is; for a pending one, which leases it waits for."
    state = (
        "Whether it can be used now. `pending`: the GPU was divided again while leases of the former "
        "division hold its memory; a device of such a lease is shown as it was given, and can still be used."
    )
    return {
        "id": text("The same after every restart.", "0a2b8a1e-0d3c-5f0e-8f61-7b8f6f2b9d11", format="uuid"),
        "dev_type": {"const": DEV_TYPE, "description": "The kind of device.", "examples": [DEV_TYPE]},
        "model": or_null(text("The GPU's name.", "Tesla P40")),
        "addr": text("The GPU's PCI address and the slot.", "00:06.0-1", pattern=f"^{_PCI}-m?[0-9]+$"),
        "vendor_device_id": or_null(_vendor_device_id()),
        "host_id": text("The host's id.", _HOST_ID, format="uuid"),
        "numa_node": or_null(number("The NUMA node next to the GPU, -1 if there is none.", -1, minimum=-1)),
        "device_path": text("The GPU's UUID.", _GPU_UUID),
        "pcie_info": _link(),
        "index": {"const": -1, "description": "Always -1 for MPS devices.", "examples": [-1]},
        "device_minor": {"const": -1, "description": "Always -1 for MPS devices.", "examples": [-1]},
        "mps_memory_limit": number("What the device may use, in MiB.", 5760),
        "mps_memory_total": number("What the GPU has, in MiB.", 23040),
        "mps_thread_percentage": _percentage("What the device may use of the SM threads."),
        "gpu_uuid": text("The GPU's UUID.", _GPU_UUID),
        "state": text(state, AVAILABLE, enum=[AVAILABLE, UNAVAILABLE, PENDING]),
        "reason": text(reason, ""),
        "budget_enforced": truth("Whether MPS keeps the budget: not before Volta.", example=False),
        "lease": or_null(text("The id of the lease that has it; null where none has.", None)),
        "free": truth(
            "Whether whoever asks can have it: not where leases from before a reload have its memory.",
            example=True,
        ),
    }


def _vendor_device_id() -> Schema:
    return text("The GPU's PCI vendor and device.", "10de:1b38", pattern="^[0-9a-f]{4}:[0-9a-f]{4}$")


def _percentage(about: str) -> Schema:
    return number(about, 25, "number", minimum=0.1, maximum=100)


def _device_details() -> Schema:
    environment = {
        "CUDA_DEVICE_ORDER": text("CUDA's order of GPUs.", "PCI_BUS_ID"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": text("The share of SM threads.", "25"),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": text("The memory limit.", "0=5760M"),
        "CUDA_MPS_PIPE_DIRECTORY": text("Where the control daemon is.", _PIPE_DIRECTORY),
        "CUDA_VISIBLE_DEVICES": text("The GPU.", _GPU_UUID),
        "YUNION_MPS_DEVICE": text("The device, so that its processes can be told.", "00:06.0-1"),
    }
    needed = "What a process sets to use the device; empty while no control daemon is meant to serve it."
    whole = object_of(needed, environment)
    del whole["required"]
    return {
        **_device(),
        "slot": number("Which share of the GPU it is, from 0.", 1),
        "domain": text("The control daemon that serves it.", "host"),
        "client_environment": whole,
    }


def _gpu() -> Schema:
    return {
        "uuid": or_null(text("Its UUID.", _GPU_UUID)),
        "name": or_null(text("Its name.", "Tesla P40")),
        "addr": text("The PCI address, without domain 0000.", "00:06.0", pattern=f"^{_PCI}$"),
        "pci_address": text("The whole PCI address.", "0000:00:06.0", pattern=f"^{_PCI}$"),
        "memory_total": or_null(number("In MiB.", 23040)),
        "memory_free": or_null(
            number("MiB that can still be had of it in units; null where it is not handed out so.", None)
        ),
        "compute_mode": or_null(text("As nvidia-smi names it.", "Exclusive_Process")),
        "compute_capability": or_null(text("Major and minor.", "6.1", pattern="^[0-9]+\\.[0-9]+$")),
        "mig_enabled": or_null({**truth("Whether it is in MIG mode.", example=False), "examples": [None]}),
        "vendor_device_id": or_null(_vendor_device_id()),
        "numa_node": or_null(number("The NUMA node next to it, -1 if there is none.", -1, minimum=-1)),
        "pcie_info": _link(),
        "render_node": or_null(text("Its render node.", "/dev/dri/renderD128")),
        "index": or_null(number("NVML's index.", 0)),
        "device_minor": or_null(number("The N of /dev/nvidiaN.", 0)),
        "devices": number("The devices that it is divided into.", 4),
        "state": text("Whether it serves devices.", AVAILABLE, enum=[AVAILABLE, UNAVAILABLE, NOT_USED]),
        "reason": text("Why it cannot be used, empty where it can.", ""),
        "budget_enforced": truth("Whether MPS keeps budgets on it: not before Volta.", example=False),
    }


def _domain() -> Schema:
    return {
        "name": text("`host`, or with one control daemon a GPU its address.", "host"),
        "state": text("What it is at.", READY, enum=list(LEGAL_CHANGES)),
        "reason": text("Why it does not serve, empty where it does.", ""),
        "pending": text("What is still to become of it, and what that waits for.", ""),
        "waits_for": list_of("PIDs of the MPS servers that this waits for.", {"type": "integer"}, []),
        "pid": or_null(number("The control daemon's PID.", 4242, minimum=1)),
        "restarts": number("How often it had to be started again.", 0),
        "pipe_directory": text("Where its clients find it.", _PIPE_DIRECTORY),
        "log_directory": text("Where its log is.", "/tmp/nvidia-mps/log"),
        "gpus": list_of("UUIDs of its GPUs, in CUDA's order.", {"type": "string"}, [_GPU_UUID]),
        "memory_limits": list_of(
            "A client's default memory limit on each GPU, in MiB; null for one no longer configured.",
            {"type": ["integer", "null"], "minimum": 0},
            [5760],
        ),
        "thread_percentage": _percentage("What a client may use of the SM threads by default."),
    }


def _status() -> Schema:
    driver = {
        "version": or_null(text("Null where the driver was not looked at.", "535.261.03")),
        "cuda_version": or_null(text("That of the CUDA driver API.", "12.2")),
    }
    devices = {name: number("Devices.", 4) for name in ("total", AVAILABLE)}
    devices.update({name: number("Devices.", 0) for name in (UNAVAILABLE, PENDING)})
    states = "`degraded`: something that should serve does not; `failed`: nothing does."
    return {
        "state": text(states, "ready", enum=list(STATES)),
        "notice": text("Why the host offers no devices at all, where that is so.", ""),
        "warnings": list_of("What an operator must know although all runs.", {"type": "string"}, []),
        "version": text("The daemon's version.", __version__),
        "pid": number("The daemon's PID.", 4200, minimum=1),
        "started": number("When it started, in seconds since 1970.", 1788000000.25, "number"),
        "host_id": text("The host's id.", _HOST_ID, format="uuid"),
        "driver": object_of("The NVIDIA driver.", driver),
        "devices": object_of("How many devices there are.", devices),
        "gpus": object_of(
            "How many GPUs there are.", {"total": number("GPUs.", 1), UNAVAILABLE: number("GPUs.", 0)}
        ),
        "domains": list_of("The control daemons.", ref("Domain")),
    }


def schemas() -> Schema:
    """The schemas by name."""
    page = {
        "isolated_devices": list_of("The devices of this page, in PCI order.", ref("Device")),
        "total": number("The devices that the filters take, on all pages.", 1),
        "limit": number("As asked for.", DEFAULT_LIMIT, maximum=LARGEST_LIMIT),
        "offset": number("As asked for.", 0, maximum=LARGEST_NUMBER),
    }
    gpus = {
        "gpus": list_of("The host's GPUs in PCI order.", ref("Gpu")),
        "total": number("Their number.", 1),
    }
    problem = object_of(
        "What is wrong (RFC 9457).",
        {
            "type": {
                "const": "about:blank",
                "description": "It is no more than its status.",
                "examples": ["about:blank"],
            },
            "title": text("The status in words.", "Not Found"),
            "status": number("The HTTP status.", 404, minimum=400, maximum=599),
            "detail": text("One line of what is wrong.", "there is no device 00:06.0-9"),
            "hint": text("One line of what to do.", "list the devices with: yunion-mps list"),
            "code": text("A reason code for programs, if the status does not say enough.", "infeasible"),
        },
    )
    for optional in ("hint", "code"):
        problem["required"].remove(optional)
    return {
        "Device": object_of("One MPS device: a share of a GPU.", _device()),
        "DeviceDetails": object_of("One MPS device, and how to use it.", _device_details()),
        "DeviceList": object_of("One page of the devices.", page),
        "Gpu": object_of("One physical GPU.", _gpu()),
        "GpuList": object_of("All GPUs of the host, the broken ones with their reason.", gpus),
        "Domain": object_of("One control daemon of NVIDIA's, its GPUs and the limits in force.", _domain()),
        "Status": object_of("How the daemon, the control daemons and the devices are.", _status()),
        **running(),
        "Problem": problem,
    }
