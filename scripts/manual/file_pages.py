"""The manual pages of the two configuration files, from the one table of their keys."""

from __future__ import annotations

from collections.abc import Iterable

from manual import examples
from manual.keys import Key, device_file_keys, device_keys, host_keys
from manual.roff import Page

_CHECK = """\
`yunion-mps config check` tries both files, tells every problem with its line, and touches nothing. The
daemon reads them when it starts, and at `systemctl reload yunion-mps-daemon`. With a problem in them it
does not start, and a reload changes nothing."""
_HOST_CONF = """\
A YAML file of keys and values, one a line. On a host with Cloudpods it is shared with Cloudpods' host
agent; the keys below are those of yunion-mps, and all others are left alone. What is nearly one of these,
or begins with `cuda_mps_` and is none of them, is taken for a mistake."""
_DEVICE_FILE = """\
A YAML file with the key `devices`: a list of entries, each of which divides one GPU. On a host with
Cloudpods it is shared with Cloudpods' host agent. `container_device_config_file` in
`yunion-mps-host.conf`(5) may name another file."""
_NO_ENTRY = """\
A GPU that no entry names offers no devices. Where there is no entry of type NVIDIA_MPS at all, every GPU is
divided into `cuda_mps_replicas` devices. An entry has `path`, `type` and one of `virtual_number`, `slices`
and `memory_unit`:"""
_BESIDE = """\
Beside `devices` the file may have:"""


def host_conf(date: str) -> str:
    """The source of yunion-mps-host.conf(5)."""
    made = Page("yunion-mps-host.conf", 5, date, "the keys of yunion-mps in /etc/yunion/host.conf")
    made.section("Synopsis")
    made.paragraph("`/etc/yunion/host.conf`")
    made.section("Description")
    made.paragraph(_HOST_CONF)
    made.paragraph(_CHECK)
    made.section("Keys")
    _add_keys(made, host_keys())
    return _finished(made, examples.host_conf(), "yunion-mps-host_container_device.yml(5)")


def device_file(date: str) -> str:
    """The source of yunion-mps-host_container_device.yml(5)."""
    title = "how GPUs are divided into MPS devices"
    made = Page("yunion-mps-host_container_device.yml", 5, date, title)
    made.section("Synopsis")
    made.paragraph("`/etc/yunion/host_container_device.yml`")
    made.section("Description")
    made.paragraph(_DEVICE_FILE)
    made.paragraph(_CHECK)
    made.section("Keys")
    made.paragraph(_NO_ENTRY)
    _add_keys(made, device_keys())
    made.paragraph(_BESIDE)
    _add_keys(made, device_file_keys())
    return _finished(made, examples.device_file(), "yunion-mps-host.conf(5)")


def _add_keys(made: Page, keys: Iterable[Key]) -> None:
    for key in keys:
        default = f"; default: {key.default}" if key.default else ""
        first, *more = key.about
        made.term(f"`{key.name}`: {key.type}{default}", first, *more)


def _finished(made: Page, example: str, other: str) -> str:
    made.section("Example")
    made.verbatim(line for line in example.splitlines() if line and not line.startswith("#"))
    made.see_also(["yunion-mps(1)", "yunion-mps-daemon(8)", other])
    return str(made)
