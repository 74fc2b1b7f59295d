"""The kinds of values that our keys have: what is accepted, and what is said of everything else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from yunion_mps.config.document import Node, nearest, value_of, written
from yunion_mps.units import mebibytes

#: The most devices that any known driver allows on one GPU; see planning.MPS_CLIENTS for which allows what.
MAX_DEVICES = 60

#: Directories that belong to the system or to many, though nothing in them need: hier(7), file-hierarchy(7).
_ONLY_SHARED_IN = ("/", "/usr", "/dev", "/proc", "/sys")
_SHARED = (
    "/run/lock",
    "/run/systemd",
    "/run/user",
    "/var/cache",
    "/var/lib",
    "/var/lock",
    "/var/log",
    "/var/run",
    "/var/spool",
    "/var/tmp",
)

#: How far a number may be raised by the operator for drivers that we do not know yet.
MAX_OVERRIDE = 4096

_MAX_PORT = 65_535
_LOCALHOST = "127.0.0.1"
_EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - to know them, not to listen there
ENDPOINT_EXAMPLE = f"an IP address and a port, for example {_LOCALHOST}:9435 or '[::1]:9435'"


class InvalidValueError(Exception):
    """A value that cannot be used: what is wrong with it, and what would be right."""

    def __init__(self, key: str, node: Node, what: str, hint: str) -> None:
        self.what = f"{key} is {written(node)}, {what}"
        self.hint = hint
        super().__init__(self.what)


#: A kind turns the node of a key into its value or raises InvalidValueError.
Kind = Callable[[str, Node], Any]


class Key(NamedTuple):
    """A key of ours: the kind of its value, its default, and what it is for (help and documentation)."""

    kind: Kind
    default: Any
    help: str


def boolean(key: str, node: Node) -> bool:
    """`true` or `false`."""
    value = value_of(node)
    if not isinstance(value, bool):
        raise InvalidValueError(key, node, "not true or false", f"write {key}: true or {key}: false")
    return value


def whole_number(lowest: int, highest: int) -> Kind:
    """A whole number within bounds, both included."""

    def kind(key: str, node: Node) -> int:
        value = value_of(node)
        quotes = ", without quotes" if isinstance(value, str) else ""
        hint = f"write a whole number from {lowest} to {highest}{quotes}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidValueError(key, node, "not a whole number", hint)
        if not lowest <= value <= highest:
            raise InvalidValueError(key, node, "out of range", hint)
        return value

    return kind


def number(lowest: float, highest: float, decimals: int) -> Kind:
    """A number within bounds, both included, with at most so many decimals."""

    def kind(key: str, node: Node) -> float:
        value = value_of(node)
        some = "one decimal" if decimals == 1 else f"{decimals} decimals"
        quotes = " and without quotes" if isinstance(value, str) else ""
        hint = f"write a number from {lowest:g} to {highest:g}, with at most {some}{quotes}"
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise InvalidValueError(key, node, "not a number", hint)
        if not lowest <= value <= highest:
            raise InvalidValueError(key, node, "out of range", hint)
        if round(value, decimals) != value:
            raise InvalidValueError(key, node, "too precise", hint)
        return float(value)

    return kind


def memory(lowest_mib: int) -> Kind:
    """An amount of memory with its unit, `8GiB` or `8192MiB`; the value is in MiB."""

    def kind(key: str, node: Node) -> int:
        value = value_of(node)
        mib = mebibytes(value) if isinstance(value, str) else None
        hint = "write a whole number of MiB or GiB, for example 8192MiB or 8GiB"
        if mib is None:
            raise InvalidValueError(key, node, "not an amount of memory", hint)
        if mib < lowest_mib:
            raise InvalidValueError(key, node, "too little", f"write at least {lowest_mib}MiB")
        return mib

    return kind


def one_of(*choices: str) -> Kind:
    """One of a few words."""

    def kind(key: str, node: Node) -> str:
        value = value_of(node)
        if value not in choices:
            near = nearest(str(value), choices) if isinstance(value, str) else None
            allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise InvalidValueError(
                key, node, f"but must be {allowed}", f"did you mean {near}?" if near else ""
            )
        return str(value)

    return kind


def absolute_path(key: str, node: Node) -> str:
    """The path of a file or directory, from `/`; normalised."""
    value = text(key, node)
    if not value.startswith("/"):
        raise InvalidValueError(key, node, "not an absolute path", "write an absolute path")
    normal = "/" + os.path.normpath(value).lstrip("/")
    if normal == "/":
        raise InvalidValueError(key, node, "the root directory", "use a separate directory")
    return normal


def textfile(key: str, node: Node) -> str:
    """The path of a file as node_exporter reads them; so a slip replaces no file of other software."""
    path = absolute_path(key, node)
    if not os.path.basename(path).endswith(".prom") or os.path.basename(path) == ".prom":
        hint = "use a separate file that ends in .prom"
        raise InvalidValueError(key, node, "which node_exporter does not read", hint)
    return path


def own_directory(example: str) -> Kind:
    """The path of a directory that no other software uses, and so none that the system has."""

    def kind(key: str, node: Node) -> str:
        path = absolute_path(key, node)
        if os.path.dirname(path) in _ONLY_SHARED_IN or path in _SHARED:
            hint = f"use a separate directory, for example {example}"
            raise InvalidValueError(key, node, "which is shared with other software", hint)
        return path

    return kind


def group(key: str, node: Node) -> str:
    """The name of a group that the host has."""
    import grp  # few hosts set it

    name = text(key, node, "the name of a group")
    try:
        grp.getgrnam(name)
    except KeyError:
        hint = "create it (groupadd --system NAME), or choose one that exists: getent group"
        raise InvalidValueError(key, node, "a group that does not exist", hint) from None
    return name


def most_devices(override: int | None) -> int:
    """The most devices that any GPU may have; planning, which knows the GPU, may allow fewer."""
    return max(override or 0, MAX_DEVICES)


def text(key: str, node: Node, what: str = "a text") -> str:
    """A text of one line that is not empty; `what` says in the hint what it should name."""
    value = value_of(node)
    if isinstance(value, (int, float)) and ":" in node.value:
        value = node.value  # the PCI address 00:06.0 is a number to the base of 60 in YAML 1.1
    if not isinstance(value, str) or not value.strip():
        raise InvalidValueError(key, node, "not a string", f"write {key}: followed by {what}")
    if not value.isprintable():
        raise InvalidValueError(key, node, "which contains control characters", "remove them")
    return value


def endpoint(key: str, node: Node) -> str:
    """`127.0.0.1:9435`, `[::1]:9435` or `localhost:9435`, normalised; other names can change."""
    try:
        return normal_endpoint(text(key, node, "an IP address and a port"))
    except ValueError as error:
        raise InvalidValueError(key, node, str(error), f"write {ENDPOINT_EXAMPLE}") from None


def normal_endpoint(value: str) -> str:
    """The address and port, normalised; raises ValueError with what is wrong with the text."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([a-zA-Z0-9.-]+)):([0-9]{1,5})", value)
    if found is None or not 1 <= int(found[3]) <= _MAX_PORT:
        raise ValueError("not an address with a port")
    host, port = found[1] or found[2], int(found[3])
    if host == "localhost":
        return f"{_LOCALHOST}:{port}"
    import ipaddress  # 5 ms, and few hosts listen

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError("whose host is not an IP address") from None
    if (address.version == 6) != bool(found[1]):
        raise ValueError("not an address with a port")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def split_endpoint(listen: str) -> tuple[str, int]:
    """The address and the port of what `endpoint` returned."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def is_public(listen: str) -> bool:
    """Whether other hosts can reach it: every address but those of the loopback device."""
    import ipaddress

    return not ipaddress.ip_address(split_endpoint(listen)[0]).is_loopback


def overlap(one: str, other: str) -> bool:
    """Whether only one of both can be listened on."""
    (host, port), (other_host, other_port) = split_endpoint(one), split_endpoint(other)
    if port != other_port or (":" in host) != (":" in other_host):
        return False
    return host == other_host or not {host, other_host}.isdisjoint(_EVERY_ADDRESS)
