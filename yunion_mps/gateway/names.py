"""The names by which clients may call this host.

A page of another origin must not read what is served here. Browsers see to that, unless the owner of a name
lets it point to this host (DNS rebinding). So only those names are answered that no other party can hold.
"""

from __future__ import annotations

import os
import re

from yunion_mps.http.query import Response, problem
from yunion_mps.paths import Paths


class HostNames:
    """`localhost`, the host's name, the names next to these in /etc/hosts, and every IP address."""

    def __init__(self, paths: Paths) -> None:
        self._hosts_file = paths.hosts
        node = os.uname().nodename.lower()
        self._names = {"localhost", node, node.partition(".")[0]}

    def refusal(self, host: str, what: str) -> Response | None:
        """The answer to a request with this Host header for `what`, None if the name is one of ours."""
        name = re.sub(r":[0-9]{1,5}$", "", host).lower()
        if _is_address(name) or name in self._names or name in self._aliases():
            return None
        ours = ", ".join(sorted(self._names))
        hint = f"use an IP address or one of {ours}; add other names next to one of these in /etc/hosts"
        return problem(421, f"{what} not served under that name", hint)

    def _aliases(self) -> set[str]:
        """All names in the lines of /etc/hosts that hold one of ours; read again whenever one is unknown."""
        found: set[str] = set()
        try:
            with open(self._hosts_file, encoding="utf-8", errors="replace") as file:
                for line in file:
                    names = line.partition("#")[0].lower().split()[1:]
                    if not self._names.isdisjoint(names):
                        found.update(names)
        except OSError:
            pass  # then there are no other names
        return found


def _is_address(name: str) -> bool:
    if name.startswith("[") and name.endswith("]"):
        return re.fullmatch(r"[0-9a-f:.]+", name[1:-1]) is not None
    return re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3}){3}", name) is not None
