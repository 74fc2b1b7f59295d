"""Descriptions of the keys of both configuration files, and the example files that explain every key."""

from __future__ import annotations

import os
from textwrap import wrap
from typing import Any, NamedTuple

import yaml
from yunion_mps.config import KEYS
from yunion_mps.config.values import MAX_DEVICES_PER_GPU, MAX_OVERRIDE, MAX_TIME_SLICED_DEVICES
from yunion_mps.mps.log_file import MAX_BYTES
from yunion_mps.planning.division import MAX_GPUS_PER_DOMAIN, MPS_CLIENTS, VOLTA


def texts(name: str) -> Any:
    """What the file of this name holds."""
    with open(os.path.join(os.path.dirname(__file__), f"{name}.yml"), encoding="utf-8") as file:
        return yaml.safe_load(file)


_NEWER, _SINCE_VOLTA, _BEFORE_VOLTA = MPS_CLIENTS
_NUMBERS = {
    "clients": _SINCE_VOLTA[2],
    "clients_before_volta": _BEFORE_VOLTA[2],
    "clients_newer": _NEWER[2],
    "largest_override": MAX_OVERRIDE,
    "log_mib": MAX_BYTES >> 20,
    "most_devices": MAX_DEVICES_PER_GPU,
    "most_time_sliced": MAX_TIME_SLICED_DEVICES,
    "most_gpus": MAX_GPUS_PER_DOMAIN,
    "newer": _NEWER[1],
    "volta": ".".join(map(str, VOLTA)),
}


class Key(NamedTuple):
    """A key: what may be written, the default as it would be written (None where it must be given), and why.

    `example` is what the example file has; one without stands there as a comment, with its default.
    """

    name: str
    type: str
    default: str | None
    about: list[str]
    example: str | None


def host_keys() -> list[Key]:
    """The keys of host.conf, in the order of the parser's table."""
    about = texts("keys")["host.conf"]
    return [
        _key(name, about[name], f"{key.help[0].upper()}{key.help[1:]}. ", written(key.default))
        for name, key in KEYS.items()
    ]


def device_keys() -> list[Key]:
    """The keys of an entry of the device file."""
    about = texts("keys")["host_container_device.yml"]
    return [_key(name, text, default=text.get("default")) for name, text in about.items()]


def device_file_keys() -> list[Key]:
    """The keys of the device file beside the list of its entries."""
    about = texts("keys")["host_container_device.yml, beside devices"]
    return [_key(name, text, default=text["default"]) for name, text in about.items()]


def written(value: Any) -> str:
    """Format a value as in YAML, or `not set` if there is none."""
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _key(name: str, text: dict[str, str], first: str = "", default: str | None = None) -> Key:
    about = (first + text["more"]).format(**_NUMBERS).split("\n")
    return Key(name, text["type"].format(**_NUMBERS), default, about, text.get("example"))


_WIDTH = 100

_HOST_CONF = """\
# The configuration of this host, shared with Cloudpods' host agent. The keys below belong to yunion-mps; all
# others are ignored. Values in host_local.conf replace those in this file. Check a change before you apply
# it: yunion-mps config check
# This is also documented in: man yunion-mps-host.conf
"""
_DEVICE_FILE = """\
# How the GPUs are divided. A GPU without an entry offers no devices. If there is none of type NVIDIA_MPS or
# NVIDIA_GPU_SHARE, every GPU is divided into cuda_mps_replicas devices (see host.conf). Check a change before
# you apply it: yunion-mps config check
# This is also documented in: man yunion-mps-host_container_device.yml
"""


#: What else an entry may be, as comments: the GPUs are not there.
_OTHER_ENTRIES = """\
#
#  - path: /dev/dri/renderD129
#    type: NVIDIA_MPS
#    slices:
#      - {memory: 8GiB, thread_percentage: 50}
#      - {memory: 4GiB, thread_percentage: 25, priority: below_normal}
#
#  - path: /dev/dri/renderD130
#    type: NVIDIA_MPS
#    memory_unit: 128MiB
#
#  - path: /dev/dri/renderD131
#    type: NVIDIA_GPU_SHARE
#    virtual_number: 4
#    time_slice: short
"""


def host_conf_example() -> str:
    """Return the file host.conf; commented-out keys have their default, or an example if there is none."""
    return _HOST_CONF + "".join(
        f"\n{_comment(key)}# Type: {key.type}. Default: {key.default}.\n{_line(key)}\n" for key in host_keys()
    )


def device_file_example() -> str:
    """The file host_container_device.yml."""
    keys = device_keys()
    about = "".join(f"#\n{_comment(key, _first(key))}" for key in keys)
    beside = "".join(f"#\n{_comment(key, _first(key))}{_line(key)}\n" for key in device_file_keys())
    entry = "\n    ".join(f"{key.name}: {key.example}" for key in keys if key.example)
    return f"{_DEVICE_FILE}{about}{beside}\ndevices:\n  - {entry}\n{_OTHER_ENTRIES}"


def _first(key: Key) -> str:
    default = f"; default: {key.default}" if key.default else ""
    return f"{key.name}: {key.type}{default}. "


def _line(key: Key) -> str:
    if key.default == "not set":
        return f"#{key.name}: {key.example}"
    return f"{key.name}: {key.example}" if key.example else f"#{key.name}: {key.default}"


def _comment(key: Key, first: str = "") -> str:
    lines: list[str] = []
    for paragraph in [first + key.about[0], *key.about[1:]]:
        lines += wrap(paragraph.replace("`", ""), _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)
