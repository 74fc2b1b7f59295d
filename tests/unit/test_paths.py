from __future__ import annotations

import pytest
from yunion_mps.core.paths import MAX_SOCKET_PATH, ROOT_VARIABLE, Paths

PLACES = {
    "host_conf": "/etc/yunion/host.conf",
    "machine_id": "/etc/machine-id",
    "run_directory": "/run/yunion-mps",
    "socket": "/run/yunion-mps/yunion-mps.sock",
    "lock": "/run/yunion-mps/daemon.lock",
    "state_directory": "/var/lib/yunion-mps",
    "store": "/var/lib/yunion-mps/state.db",
    "pci_devices": "/sys/bus/pci/devices",
    "render_nodes": "/dev/dri/by-path",
}


@pytest.mark.parametrize(("name", "place"), PLACES.items())
def test_every_path_lies_where_the_design_says_below_any_root(name: str, place: str) -> None:
    assert getattr(Paths(), name) == place
    assert getattr(Paths("/srv/image"), name) == f"/srv/image{place}"


def test_the_boot_id_is_the_kernel_s_whatever_the_root() -> None:
    assert Paths("/srv/image").boot_id == Paths().boot_id == "/proc/sys/kernel/random/boot_id"


@pytest.mark.parametrize("given", [None, "", "/"])
def test_the_root_is_the_host_s_own_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(ROOT_VARIABLE, given)
    assert Paths.from_environment().host_conf == PLACES["host_conf"]


def test_the_environment_names_another_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, "/srv/image/")
    assert Paths.from_environment().host_conf == "/srv/image/etc/yunion/host.conf"


def test_the_api_s_socket_fits_a_socket_s_address() -> None:
    assert len(Paths().socket) <= MAX_SOCKET_PATH == 107
