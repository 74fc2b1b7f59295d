"""Where listeners may be: what is accepted, how it is normalised, and who can reach it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.config.values import is_public, split_endpoint

from unit.config.conftest import HOST, Files

EXAMPLE = "write an IP address and a port, for example 127.0.0.1:9435 or '[::1]:9435'"


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("127.0.0.1:9434", "127.0.0.1:9434"),
        ("127.8.9.10:1", "127.8.9.10:1"),
        ("localhost:65535", "127.0.0.1:65535"),
        ("'[::1]:9434'", "[::1]:9434"),
        ("'[0:0:0:0:0:0:0:1]:9434'", "[::1]:9434"),
        ("127.0.0.1:09434", "127.0.0.1:9434"),
    ],
)
def test_an_address_with_a_port_is_read_and_normalised(files: Files, written: str, means: str) -> None:
    files.write(f"metrics_listen: {written}\n")
    assert files.load().metrics_listen == means


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ("9434", "is 9434, not a string"),
        ("127.0.0.1", 'is "127.0.0.1", not an address with a port'),
        (":9434", 'is ":9434", not an address with a port'),
        ("127.0.0.1:0", 'is "127.0.0.1:0", not an address with a port'),
        ("127.0.0.1:65536", 'is "127.0.0.1:65536", not an address with a port'),
        ("'::1:9434'", 'is "::1:9434", not an address with a port'),
        ("'[127.0.0.1]:9434'", 'is "[127.0.0.1]:9434", not an address with a port'),
        ("node7:9434", 'is "node7:9434", not an IP address and a port'),
        ("127.0.0.256:9434", 'is "127.0.0.256:9434", not an IP address and a port'),
    ],
)
def test_an_invalid_address_or_port_is_refused(files: Files, written: str, what: str) -> None:
    files.write(f"web_listen: {written}\n")
    hint = "write web_listen: followed by an IP address and a port" if "string" in what else EXAMPLE
    assert files.messages() == [f"{HOST}:1: web_listen {what}: {hint}"]


@pytest.mark.parametrize(
    ("metrics", "web", "clash"),
    [
        ("127.0.0.1:9434", "localhost:9434", True),
        ("0.0.0.0:9434", "127.0.0.1:9434", True),
        ("'[::]:9434'", "'[::1]:9434'", True),
        ("127.0.0.1:9434", "127.0.0.1:9435", False),
        ("127.0.0.1:9434", "127.0.0.2:9434", False),
        ("127.0.0.1:9434", "'[::1]:9434'", False),
    ],
)
def test_the_page_and_the_metrics_cannot_share_an_address(
    files: Files, metrics: str, web: str, *, clash: bool
) -> None:
    files.write(f"metrics_listen: {metrics}\nweb_listen: {web}\nmetrics_allow_public: true\n")
    where = web.strip("'").replace("localhost", "127.0.0.1")
    told = f"{HOST}:2: web_listen is {where}, which metrics_listen already uses"
    assert files.messages() == ([f"{told}: use a different port for each"] if clash else [])


@pytest.mark.parametrize("key", ["metrics", "web"])
@pytest.mark.parametrize("address", ["0.0.0.0:9434", "10.1.2.3:9434", "'[::]:9434'", "'[fe80::1]:9434'"])
def test_an_address_that_others_can_reach_requires_a_second_key(files: Files, key: str, address: str) -> None:
    files.write(f"enable_cuda_mps: false\n{key}_listen: {address}\n")
    plain = address.strip("'")
    hint = f"write 127.0.0.1:9434, or {key}_allow_public: true if this is intended"
    what = f"{key}_listen is {plain}, which is reachable from other hosts"
    assert files.messages() == [f"{HOST}:2: {what}: {hint}"]
    files.write(f"{key}_listen: {address}\n{key}_allow_public: true\n")
    assert getattr(files.load(), f"{key}_listen") == plain


@given(st.ip_addresses(), st.integers(1, 65_535))
def test_only_the_loopback_device_is_not_public(address: object, port: int) -> None:
    text = f"[{address}]:{port}" if ":" in str(address) else f"{address}:{port}"
    assert split_endpoint(text) == (str(address), port)
    assert is_public(text) == (not (str(address).startswith("127.") or str(address) == "::1"))
