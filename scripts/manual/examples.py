"""The example files in etc/yunion, with every key explained."""

from __future__ import annotations

from textwrap import wrap

from manual.keys import Key, device_file_keys, device_keys, host_keys

_WIDTH = 100

_HOST_CONF = """\
# The configuration of this host, shared with Cloudpods' host agent: the keys below are yunion-mps' own, all
# others are left alone. Try a change before it is used: yunion-mps config check
# The manual has all of this, too: man yunion-mps-host.conf
"""
_DEVICE_FILE = """\
# How the GPUs are divided. A GPU that no entry names offers no devices. Without any entry of type NVIDIA_MPS,
# every GPU is divided into cuda_mps_replicas devices (see host.conf). Try a change before it is used:
# yunion-mps config check
# The manual has all of this, too: man yunion-mps-host_container_device.yml
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
"""


def host_conf() -> str:
    """The file host.conf; what is commented out has its default, or an example where there is none."""
    return _HOST_CONF + "".join(
        f"\n{_comment(key)}# Type: {key.type}. Default: {key.default}.\n{_line(key)}\n" for key in host_keys()
    )


def device_file() -> str:
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
