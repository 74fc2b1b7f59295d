"""The kinds of values of our keys: which values are valid, and the messages for all others."""

from __future__ import annotations

import grp
import ipaddress
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from yunion_mps.config.document import Node, ScalarNode, SequenceNode, look_alike, nearest, quote, value_of
from yunion_mps.core.mig import ALL, BALANCED, DISABLED
from yunion_mps.core.units import mebibytes

#: The most devices that any known driver allows on a GPU; planning.MPS_CLIENTS has the details.
MAX_DEVICES_PER_GPU = 60
#: The most devices of a time-sliced GPU: the driver has 2048 channels for each GPU (Linux' nouveau, rm/r535),
#: and a CUDA process takes CUDA_DEVICE_MAX_CONNECTIONS of them, by default 8 (CUDA Programming Guide, section
#: "CUDA Environment Variables"); after that, it gets no context.
MAX_TIME_SLICED_DEVICES = 256

#: Directories of the system, or shared by several programs: hier(7), file-hierarchy(7).
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

#: Keys of device entries that no other software has.
SHARING_KEYS = ("time_slice", "mig", "mig_restore")

#: The operator's override for future drivers is at most this.
MAX_OVERRIDE = 4096

#: Words for true and false: those of Go's strconv.ParseBool, and those that only plain text is.
_TRUE_AND_FALSE = (
    ("1", "0"), ("t", "f"), ("T", "F"), ("true", "false"), ("True", "False"), ("TRUE", "FALSE")
)  # fmt: skip
_PLAIN = (("y", "n"), ("Y", "N"))
#: Numbers in quotes; not so long that their conversion takes time.
_WHOLE = r"[+-]?[0-9]{1,18}"
_DECIMAL = rf"{_WHOLE}(?:\.[0-9]{{1,18}})?"

_MAX_PORT = 65_535
_LOCALHOST = "127.0.0.1"
_EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - to recognise them, not to listen there
ENDPOINT_EXAMPLE = f"an IP address and a port, for example {_LOCALHOST}:9435 or '[::1]:9435'"

#: A profile, perhaps with attributes such as `+me`; in names of layouts, mig-parted writes `.me`.
_PROFILE = r"[1-9]\d*g\.[1-9]\d*gb(?:[+.-][a-z]+(?:\.[a-z]+)*)?"
_LAYOUT = f"{DISABLED}|{BALANCED}|(?:{ALL})?{_PROFILE}"


class InvalidValueError(Exception):
    """An invalid value: the `problem` with it, and a `hint` that says what would be right."""

    def __init__(self, key: str, node: Node, problem: str, hint: str) -> None:
        self.what = f"{key} is {quote(node)}, {problem}"
        look_alikes = look_alike(node.value) if isinstance(node, ScalarNode) else ""
        self.hint = f"remove {look_alikes} from it" if look_alikes else hint
        super().__init__(self.what)


#: Converts the node of a key to its value, or raises InvalidValueError: so do all functions here that accept
#: values.
ValueKind = Callable[[str, Node], Any]


class Key(NamedTuple):
    """One of our keys."""

    kind: ValueKind
    default: Any
    #: Its purpose, for help and documentation.
    help: str


def boolean(key: str, node: Node) -> bool:
    """Accept YAML's words, `y`, and what Go's strconv.ParseBool reads, as Cloudpods: `"true"`, `1`, `T`.

    Raises InvalidValueError, like every kind of value.
    """
    value = value_of(node)
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return value == 1
    if isinstance(value, str) and isinstance(node, ScalarNode):
        words = _TRUE_AND_FALSE if node.style else (*_TRUE_AND_FALSE, *_PLAIN)
        for true, false in words:
            if value in (true, false):
                return value == true
    raise InvalidValueError(key, node, "not true or false", f"write {key}: true or {key}: false")


def whole_number(lowest: int, highest: int) -> ValueKind:
    """Accept whole numbers within inclusive bounds, also in quotes."""

    def kind(key: str, node: Node) -> int:
        value = value_of(node)
        hint = f"write a whole number from {lowest} to {highest}"
        if isinstance(value, str) and re.fullmatch(_WHOLE, value):
            value = int(value)
        if isinstance(value, float) and value % 1 == 0:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidValueError(key, node, "not a whole number", hint)
        if not lowest <= value <= highest:
            raise InvalidValueError(key, node, "out of range", hint)
        return value

    return kind


def decimal_number(lowest: float, highest: float, decimals: int) -> ValueKind:
    """Accept numbers within inclusive bounds, with at most this many decimals, also in quotes."""

    def kind(key: str, node: Node) -> float:
        value = value_of(node)
        precision = "one decimal" if decimals == 1 else f"{decimals} decimals"
        hint = f"write a number from {lowest:g} to {highest:g}, with at most {precision}"
        if isinstance(value, str) and re.fullmatch(_DECIMAL, value):
            value = float(value)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise InvalidValueError(key, node, "not a number", hint)
        if not lowest <= value <= highest:
            raise InvalidValueError(key, node, "out of range", hint)
        if round(value, decimals) != value:
            raise InvalidValueError(key, node, "too precise", hint)
        return float(value)

    return kind


def memory(lowest_mib: int) -> ValueKind:
    """Accept amounts of memory with a unit, `8GiB` or `8192MiB`; the value is in MiB."""

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


def one_of(*choices: str) -> ValueKind:
    """Accept one of these words."""

    def kind(key: str, node: Node) -> str:
        value = value_of(node)
        if value in choices:
            return str(value)
        near = nearest(value, choices) if isinstance(value, str) else None
        allowed = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
        hint = f"did you mean {near}?" if near else ""
        raise InvalidValueError(key, node, f"but must be {allowed}", hint)

    return kind


def path_or_empty(key: str, node: Node) -> str:
    """Accept what `absolute_path` does, and the empty string."""
    return "" if value_of(node) == "" else absolute_path(key, node)


def absolute_path(key: str, node: Node) -> str:
    """Accept absolute paths, except `/`; the value is normalised."""
    value = one_line(key, node)
    if not value.startswith("/"):
        raise InvalidValueError(key, node, "not an absolute path", "write an absolute path")
    normal = "/" + os.path.normpath(value).lstrip("/")
    if normal == "/":
        raise InvalidValueError(key, node, "the root directory", "use a separate directory")
    return normal


def textfile(key: str, node: Node) -> str:
    """Accept paths ending in .prom, as node_exporter requires, so that a slip replaces no other file."""
    path = absolute_path(key, node)
    if not os.path.basename(path).endswith(".prom") or os.path.basename(path) == ".prom":
        hint = "use a separate file that ends in .prom"
        raise InvalidValueError(key, node, "which node_exporter does not read", hint)
    return path


#: Where no program can create a directory.
_KERNEL_FILE_SYSTEMS = ("/proc/", "/sys/")


def own_directory(example: str) -> ValueKind:
    """Accept paths of directories that no other software uses."""

    def kind(key: str, node: Node) -> str:
        path = absolute_path(key, node)
        if path.startswith(_KERNEL_FILE_SYSTEMS):
            hint = f"use a directory of a file system, for example {example}"
            raise InvalidValueError(key, node, "which is a file system of the kernel", hint)
        if os.path.dirname(path) in _ONLY_SHARED_IN or path in _SHARED:
            hint = f"use a separate directory, for example {example}"
            raise InvalidValueError(key, node, "which is shared with other software", hint)
        return path

    return kind


def group(key: str, node: Node) -> str:
    """Accept the name of a group that exists."""
    name = one_line(key, node, "the name of a group")
    try:
        grp.getgrnam(name)
    except KeyError:
        hint = "create it (groupadd --system NAME), or choose one that exists: getent group"
        raise InvalidValueError(key, node, "a group that does not exist", hint) from None
    return name


def layout(key: str, node: Node) -> tuple[str, ...]:
    """Return the name of a MIG layout, or those of profiles, as written; GPUs are not consulted."""
    if isinstance(node, SequenceNode) and node.value:
        return tuple(_profile(key, item) for item in node.value)
    value = value_of(node)
    if not isinstance(value, str) or not re.fullmatch(_LAYOUT, value):
        hint = "write a layout, "
        hint += "for example all-1g.10gb, all-balanced, or a list of profiles such as [3g.40gb, 1g.10gb]"
        if value is False:  # YAML's value of `off`
            hint = f"to switch MIG mode off, write mig: {DISABLED}"
        raise InvalidValueError(key, node, "not a MIG layout", hint)
    return (value,)


def _profile(key: str, node: Node) -> str:
    value = value_of(node)
    if not isinstance(value, str) or not re.fullmatch(_PROFILE, value):
        hint = "write the profiles of instances, for example [3g.40gb, 1g.10gb, 1g.10gb]"
        raise InvalidValueError(key, node, "not a MIG profile", hint)
    return value


def max_devices(override: int | None) -> int:
    """Return the most devices of any GPU; planning, which knows the GPU, may allow fewer."""
    return max(override or 0, MAX_DEVICES_PER_GPU)


def one_line(key: str, node: Node, meaning: str = "a string") -> str:
    """Accept non-empty text on one line; `meaning` says in the hint what to write."""
    value = value_of(node)
    if isinstance(value, (int, float)) and ":" in node.value:
        value = node.value  # in YAML 1.1, the PCI address 00:06.0 is a sexagesimal number
    if not isinstance(value, str) or not value.strip():
        raise InvalidValueError(key, node, "not a string", f"write {key}: followed by {meaning}")
    if not value.isprintable():
        raise InvalidValueError(key, node, "which contains control characters", "remove them")
    return value


def endpoint(key: str, node: Node) -> str:
    """Accept `127.0.0.1:9435`, `[::1]:9435` or `localhost:9435`; other names can change their address."""
    try:
        return normalise_endpoint(one_line(key, node, "an IP address and a port"))
    except ValueError as error:
        raise InvalidValueError(key, node, str(error), f"write {ENDPOINT_EXAMPLE}") from None


def normalise_endpoint(value: str) -> str:
    """Return the address and port in one spelling: `127.0.0.1:9435` or `[::1]:9435`.

    Raises ValueError, which says what is wrong, if the value is something else.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([a-zA-Z0-9.-]+)):([0-9]{1,5})", value)
    if match is None or not 1 <= int(match[3]) <= _MAX_PORT:
        raise ValueError("not an address with a port")
    host = match[1] or match[2]
    port = int(match[3])
    if host == "localhost":
        return f"{_LOCALHOST}:{port}"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError("not an IP address and a port") from None
    if (address.version == 6) != bool(match[1]):
        raise ValueError("not an address with a port")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def split_endpoint(listen: str) -> tuple[str, int]:
    """Return the address, without brackets, and the port of a normalised endpoint."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def is_public(listen: str) -> bool:
    """Return whether other hosts can reach the endpoint: any address except those of the loopback device."""
    return not ipaddress.ip_address(split_endpoint(listen)[0]).is_loopback


def overlap(first: str, other: str) -> bool:
    """Return whether only one of the two endpoints can be listened on."""
    host, port = split_endpoint(first)
    other_host, other_port = split_endpoint(other)
    if port != other_port or (":" in host) != (":" in other_host):
        return False
    return host == other_host or not {host, other_host}.isdisjoint(_EVERY_ADDRESS)
