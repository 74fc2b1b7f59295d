"""Where a listener of ours may be reached over TCP: an IP address and a port."""

from __future__ import annotations

import re

from yunion_mps.config.document import Node, written
from yunion_mps.config.values import WrongValueError, text

_LARGEST_PORT = 65_535
_LOCALHOST = "127.0.0.1"
_EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - to know them, not to listen there
EXAMPLE = f"an IP address and a port, for example {_LOCALHOST}:9435 or '[::1]:9435'"


def endpoint(key: str, node: Node) -> str:
    """`127.0.0.1:9435`, `[::1]:9435` or `localhost:9435`, normalised; other names can change."""
    try:
        return normalised(text(key, node, "an IP address and a port"))
    except ValueError as error:
        raise WrongValueError(f"{key} is {written(node)}, {error}", f"write {EXAMPLE}") from None


def normalised(value: str) -> str:
    """The same of a text that stands elsewhere; raises ValueError with what is wrong with it."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([a-zA-Z0-9.-]+)):([0-9]{1,5})", value)
    if found is None or not 1 <= int(found[3]) <= _LARGEST_PORT:
        raise ValueError("not an address with a port")
    host, port = found[1] or found[2], int(found[3])
    if host == "localhost":
        return f"{_LOCALHOST}:{port}"
    import ipaddress  # 5 ms, and few hosts listen

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError("whose host is no IP address") from None
    if (address.version == 6) != bool(found[1]):
        raise ValueError("not an address with a port")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def split(listen: str) -> tuple[str, int]:
    """The address and the port of what `endpoint` returned."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def is_public(listen: str) -> bool:
    """Whether other hosts can reach it: every address but those of the loopback device."""
    import ipaddress

    return not ipaddress.ip_address(split(listen)[0]).is_loopback


def overlap(one: str, other: str) -> bool:
    """Whether only one of both can be listened on."""
    (host, port), (other_host, other_port) = split(one), split(other)
    if port != other_port or (":" in host) != (":" in other_host):
        return False
    return host == other_host or not {host, other_host}.isdisjoint(_EVERY_ADDRESS)
