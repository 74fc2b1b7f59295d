"""The names by which clients may call this host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from yunion_mps.gateway.server import HostNames
from yunion_mps.paths import Paths

NODE = os.uname().nodename.lower()
HOSTS = f"""\
127.0.0.1 localhost localhost.localdomain
127.0.1.1 {NODE}.Example.COM {NODE}   # monitored.example
10.0.0.9  other.example
"""


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        (f"{NODE}:9434", True), (f"{NODE}.example.com:9434", True), ("localhost.localdomain", True),
        ("192.0.2.1:9434", True), ("[::1]:9434", True),
        (f"{NODE}.example.org", False), ("other.example", False), ("monitored.example", False),
        ("127.0.1.1.example", False), ("", False),
    ],
)  # fmt: skip
def test_names_of_this_host_are_its_own_and_those_beside_them_in_hosts(
    tmp_path: Path, host: str, is_ours: bool
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hosts").write_text(HOSTS)
    refusal = HostNames(Paths(str(tmp_path))).refusal(host, "the metrics are")
    assert (refusal and refusal.status) == (None if is_ours else 421)
