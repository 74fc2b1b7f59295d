"""The schemas of the API's answers, and their examples.

Every property carries its own example, out of the documentation's reference case; the examples of whole
answers are put together from them, so that the two cannot differ. All properties are always there: what
is unknown is null.
"""

from __future__ import annotations

from typing import Any

from yunion_mps import __version__
from yunion_mps.api.routes import LARGEST_LIMIT, LARGEST_NUMBER
from yunion_mps.models import DEV_TYPE
from yunion_mps.mps.states import LEGAL_CHANGES, READY
from yunion_mps.service import AVAILABLE, DEFAULT_LIMIT, UNAVAILABLE

Schema = dict[str, Any]

_PCI = "([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7]"
_GPU_UUID = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"
_HOST_ID = "c7bb5bd2-3ef5-5c3f-a0ac-0f38a4b7a4b0"
_PIPE_DIRECTORY = "/tmp/nvidia-mps/pipe"


def _text(about: str, example: str | None, **limits: Any) -> Schema:
    return {"type": "string", "description": about, "examples": [example], **limits}


def _number(about: str, example: float | None, kind: str = "integer", **limits: Any) -> Schema:
    return {"type": kind, "description": about, "examples": [example], "minimum": 0, **limits}


def _truth(about: str, *, example: bool) -> Schema:
    return {"type": "boolean", "description": about, "examples": [example]}


def _list_of(about: str, items: Schema, example: list[Any] | None = None) -> Schema:
    found: Schema = {"type": "array", "description": about, "items": items}
    return found if example is None else {**found, "examples": [example]}


def _or_null(schema: Schema) -> Schema:
    """The same, or null where the driver or the system does not tell it."""
    return {**schema, "type": [schema["type"], "null"]}


def _object(about: str, properties: Schema) -> Schema:
    return {
        "type": "object",
        "description": about,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def example(schema: Schema) -> Any:
    """The example of a whole answer."""
    if "examples" in schema:
        return schema["examples"][0]
    if "properties" in schema:
        return {name: example(inner) for name, inner in schema["properties"].items()}
    if "$ref" in schema:
        return example(schemas()[schema["$ref"].rpartition("/")[2]])
    return [example(schema["items"])]


def ref(name: str, kind: str = "schemas") -> Schema:
    """A reference to one of the document's components."""
    return {"$ref": f"#/components/{kind}/{name}"}


def _link() -> Schema:
    link = _object(
        "The most that the GPU's PCI Express link can do.",
        {
            "lane_width": _number("Lanes.", 16),
            "throughput": _text("Of all lanes together.", "15.76 GB/s", pattern="^[0-9]+\\.[0-9]{2} GB/s$"),
            "transfer_rate_per_lane": _text("Per lane.", "8GT/s", pattern="^[0-9.]+GT/s$"),
            "version": _text("The version of PCI Express.", "3.0", pattern="^[1-7]\\.0$"),
        },
    )
    return _or_null(link)


def _device() -> Schema:
    reason = "Why it cannot be used, empty where it can."
    return {
        "id": _text("The same after every restart.", "0a2b8a1e-0d3c-5f0e-8f61-7b8f6f2b9d11", format="uuid"),
        "dev_type": {"const": DEV_TYPE, "description": "The kind of device.", "examples": [DEV_TYPE]},
        "model": _or_null(_text("The GPU's name.", "Tesla P40")),
        "addr": _text("The GPU's PCI address and the slot.", "00:06.0-1", pattern=f"^{_PCI}-[0-9]+$"),
        "vendor_device_id": _or_null(_vendor_device_id()),
        "host_id": _text("The host's id.", _HOST_ID, format="uuid"),
        "numa_node": _or_null(_number("The NUMA node next to the GPU.", None)),
        "device_path": _text("The GPU's UUID.", _GPU_UUID),
        "pcie_info": _link(),
        "index": {"const": -1, "description": "Always -1 for MPS devices.", "examples": [-1]},
        "device_minor": {"const": -1, "description": "Always -1 for MPS devices.", "examples": [-1]},
        "mps_memory_limit": _number("What the device may use, in MiB.", 5760),
        "mps_memory_total": _number("What the GPU has, in MiB.", 23040),
        "mps_thread_percentage": _percentage("What the device may use of the SM threads."),
        "gpu_uuid": _text("The GPU's UUID.", _GPU_UUID),
        "state": _text("Whether it can be used now.", AVAILABLE, enum=[AVAILABLE, UNAVAILABLE]),
        "reason": _text(reason, ""),
        "budget_enforced": _truth("Whether MPS keeps the budget: not before Volta.", example=False),
    }


def _vendor_device_id() -> Schema:
    return _text("The GPU's PCI vendor and device.", "10de:1b38", pattern="^[0-9a-f]{4}:[0-9a-f]{4}$")


def _percentage(about: str) -> Schema:
    return _number(about, 25, "number", minimum=0.1, maximum=100)


def _device_details() -> Schema:
    environment = {
        "CUDA_DEVICE_ORDER": _text("CUDA's order of GPUs.", "PCI_BUS_ID"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": _text("The share of SM threads.", "25"),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": _text("The memory limit.", "0=5760M"),
        "CUDA_MPS_PIPE_DIRECTORY": _text("Where the control daemon is.", _PIPE_DIRECTORY),
        "CUDA_VISIBLE_DEVICES": _text("The GPU.", _GPU_UUID),
    }
    needed = "What a process sets to use the device; empty while no control daemon is meant to serve it."
    whole = _object(needed, environment)
    del whole["required"]
    return {
        **_device(),
        "slot": _number("Which share of the GPU it is, from 0.", 1),
        "domain": _text("The control daemon that serves it.", "host"),
        "client_environment": whole,
    }


def _gpu() -> Schema:
    return {
        "uuid": _or_null(_text("Its UUID.", _GPU_UUID)),
        "name": _or_null(_text("Its name.", "Tesla P40")),
        "addr": _text("The PCI address, without domain 0000.", "00:06.0", pattern=f"^{_PCI}$"),
        "pci_address": _text("The whole PCI address.", "0000:00:06.0", pattern=f"^{_PCI}$"),
        "memory_total": _or_null(_number("In MiB.", 23040)),
        "compute_mode": _or_null(_text("As nvidia-smi names it.", "Exclusive_Process")),
        "compute_capability": _or_null(_text("Major and minor.", "6.1", pattern="^[0-9]+\\.[0-9]+$")),
        "mig_enabled": _or_null({**_truth("Whether it is in MIG mode.", example=False), "examples": [None]}),
        "vendor_device_id": _or_null(_vendor_device_id()),
        "numa_node": _or_null(_number("The NUMA node next to it.", None)),
        "pcie_info": _link(),
        "render_node": _or_null(_text("Its render node.", "/dev/dri/renderD128")),
        "index": _or_null(_number("NVML's index.", 0)),
        "device_minor": _or_null(_number("The N of /dev/nvidiaN.", 0)),
        "devices": _number("The devices that it is divided into.", 4),
        "state": _text("Whether it serves devices.", AVAILABLE, enum=[AVAILABLE, UNAVAILABLE, "not used"]),
        "reason": _text("Why it cannot be used, empty where it can.", ""),
        "budget_enforced": _truth("Whether MPS keeps budgets on it: not before Volta.", example=False),
    }


def _domain() -> Schema:
    return {
        "name": _text("`host`, or with one control daemon a GPU its address.", "host"),
        "state": _text("What it is at.", READY, enum=list(LEGAL_CHANGES)),
        "reason": _text("Why it does not serve, empty where it does.", ""),
        "pid": _or_null(_number("The control daemon's PID.", 4242, minimum=1)),
        "restarts": _number("How often it had to be started again.", 0),
        "pipe_directory": _text("Where its clients find it.", _PIPE_DIRECTORY),
        "log_directory": _text("Where its log is.", "/tmp/nvidia-mps/log"),
        "gpus": _list_of("UUIDs of its GPUs, in CUDA's order.", {"type": "string"}, [_GPU_UUID]),
        "memory_limits": _list_of(
            "A client's memory in MiB, for each GPU; null for one that is not in the configuration any more.",
            {"type": ["integer", "null"], "minimum": 0},
            [5760],
        ),
        "thread_percentage": _percentage("What a client may use of the SM threads."),
    }


def _status() -> Schema:
    driver = {
        "version": _or_null(_text("Null where the driver was not looked at.", "535.261.03")),
        "cuda_version": _or_null(_text("That of the CUDA driver API.", "12.2")),
    }
    devices = {name: _number("Devices.", 4) for name in ("total", AVAILABLE)}
    devices[UNAVAILABLE] = _number("Devices.", 0)
    states = "`degraded`: something that should serve does not; `failed`: nothing does."
    return {
        "state": _text(states, "ready", enum=["ready", "degraded", "failed", "disabled"]),
        "notice": _text("Why the host offers no devices at all, where that is so.", ""),
        "warnings": _list_of("What an operator must know although all runs.", {"type": "string"}, []),
        "version": _text("The daemon's version.", __version__),
        "pid": _number("The daemon's PID.", 4200, minimum=1),
        "started": _number("When it started, in seconds since 1970.", 1788000000.25, "number"),
        "host_id": _text("The host's id.", _HOST_ID, format="uuid"),
        "driver": _object("The NVIDIA driver.", driver),
        "devices": _object("How many devices there are.", devices),
        "gpus": _object(
            "How many GPUs there are.", {"total": _number("GPUs.", 1), UNAVAILABLE: _number("GPUs.", 0)}
        ),
        "domains": _list_of("The control daemons.", ref("Domain")),
    }


def schemas() -> Schema:
    """The schemas by name."""
    page = {
        "isolated_devices": _list_of("The devices of this page, in PCI order.", ref("Device")),
        "total": _number("The devices that the filters take, on all pages.", 1),
        "limit": _number("As asked for.", DEFAULT_LIMIT, maximum=LARGEST_LIMIT),
        "offset": _number("As asked for.", 0, maximum=LARGEST_NUMBER),
    }
    gpus = {
        "gpus": _list_of("The host's GPUs in PCI order.", ref("Gpu")),
        "total": _number("Their number.", 1),
    }
    problem = _object(
        "What is wrong (RFC 9457).",
        {
            "type": {
                "const": "about:blank",
                "description": "It is no more than its status.",
                "examples": ["about:blank"],
            },
            "title": _text("The status in words.", "Not Found"),
            "status": _number("The HTTP status.", 404, minimum=400, maximum=599),
            "detail": _text("One line of what is wrong.", "there is no device 00:06.0-9"),
            "hint": _text("One line of what to do.", "list the devices with: yunion-mps list"),
        },
    )
    problem["required"].remove("hint")
    return {
        "Device": _object("One MPS device: a share of a GPU.", _device()),
        "DeviceDetails": _object("One MPS device, and how to use it.", _device_details()),
        "DeviceList": _object("One page of the devices.", page),
        "Gpu": _object("One physical GPU.", _gpu()),
        "GpuList": _object("All GPUs of the host, the broken ones with their reason.", gpus),
        "Domain": _object("One control daemon of NVIDIA's, its GPUs and the limits in force.", _domain()),
        "Status": _object("How the daemon, the control daemons and the devices are.", _status()),
        "Problem": problem,
    }
