"""The keys of the two files for a reader: `yunion_mps.config.KEYS`, and what `keys.yml` says beyond it."""

from __future__ import annotations

from typing import Any, NamedTuple

from yunion_mps.config import KEYS
from yunion_mps.config.values import LARGEST_OVERRIDE, MOST_DEVICES
from yunion_mps.mps.log_file import LARGEST_BYTES
from yunion_mps.planning.division import MOST_GPUS_OF_A_DOMAIN, MPS_CLIENTS, VOLTA

from manual.texts import texts

_NEWER, _SINCE_VOLTA, _BEFORE_VOLTA = MPS_CLIENTS
_NUMBERS = {
    "clients": _SINCE_VOLTA[2],
    "clients_before_volta": _BEFORE_VOLTA[2],
    "clients_newer": _NEWER[2],
    "largest_override": LARGEST_OVERRIDE,
    "log_mib": LARGEST_BYTES >> 20,
    "most_devices": MOST_DEVICES,
    "most_gpus": MOST_GPUS_OF_A_DOMAIN,
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
    """A value as it is written in YAML; `not set` where there is none."""
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _key(name: str, text: dict[str, str], first: str = "", default: str | None = None) -> Key:
    about = (first + text["more"]).format(**_NUMBERS).split("\n")
    return Key(name, text["type"].format(**_NUMBERS), default, about, text.get("example"))
