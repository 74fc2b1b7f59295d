"""Devices that an entry reserves for Kubernetes: nothing else gets them, and everything says so."""

from __future__ import annotations

import pytest
from yunion_mps.core.reasons import RESERVED

from integration.daemon_host import Daemon
from integration.lease_host import leased_addresses, needs_root, reason_code, run_job, stranger, take
from simhost.host import IN_UNITS, SHARED

pytestmark = pytest.mark.gpus({"kind": "v100", "count": 2})

FIRST, SECOND = "00:06.0-0", "00:07.0-0"


@pytest.fixture
def reserving(daemon: Daemon) -> Daemon:
    """A daemon that reserves the second GPU."""
    path = daemon.host.root / "etc/yunion/host_container_device.yml"
    path.write_text(path.read_text().rstrip("\n") + "\n  reserved_for: kubernetes\n")
    return daemon.start().wait_ready()


def test_run_takes_no_reserved_device_and_says_why(reserving: Daemon) -> None:
    host = reserving.host
    for _ in range(4):
        assert take(reserving, "holder.kind=process")["gpus"] == ["00:06.0"]
    done = run_job(host, "--", "true")
    assert (done.returncode, "4 of 4 leased" in done.stderr) == (5, True), done.stderr
    done = run_job(host, "--device", SECOND, "--", "true")
    assert (done.returncode, reason_code(done.stderr.splitlines()[0])) == (1, RESERVED)
    assert take(reserving, f"devices={SECOND}&reserved_for=kubernetes")["devices"] == [SECOND]


def test_reserved_devices_are_listed_and_counted(reserving: Daemon) -> None:
    devices = {one["addr"]: one for one in reserving.get("/v1/devices")[1]["isolated_devices"]}
    assert [(devices[name]["state"], devices[name]["reserved_for"]) for name in (FIRST, SECOND)] == [
        ("free", None),
        ("reserved", "kubernetes"),
    ]
    assert devices[SECOND]["reason"] == "reserved for kubernetes"
    counts = reserving.status()["devices"]
    assert (counts["available"], counts["free"], counts["reserved"]) == (8, 4, 4)
    host = reserving.host
    assert "8 of 8 available, 4 reserved, 0 used, 4 free" in host.run(["yunion-mps", "status"]).stdout
    listed = host.run(["yunion-mps", "list"]).stdout
    assert "00:07.0: reserved for kubernetes" in listed
    assert SECOND not in host.run(["yunion-mps", "list", "--free"]).stdout
    take(reserving, f"devices={SECOND}&reserved_for=kubernetes")
    assert reserving.get(f"/v1/devices/{SECOND}")[1]["state"] == "leased"
    assert reserving.status()["devices"]["reserved"] == 3


def test_a_reload_shows_and_changes_the_reservation_at_once(reserving: Daemon) -> None:
    path = reserving.host.root / "etc/yunion/host_container_device.yml"
    path.write_text(path.read_text().replace("  reserved_for: kubernetes\n", ""))
    (change,) = reserving.get("/v1/plan")[1]["changes"]
    assert change == {
        "kind": "reservation", "subject": "00:07.0", "before": "kubernetes", "after": "",
        "effect": "at once", "at_once": True,
    }  # fmt: skip
    assert reserving.ask("POST", "/v1/reload")[0] == 200
    assert take(reserving, f"devices={SECOND}")["devices"] == [SECOND]


def test_the_memory_of_a_reserved_pool_is_shown_as_reserved(daemon: Daemon) -> None:
    host = daemon.host
    host.divide(IN_UNITS, f"{IN_UNITS}\n  reserved_for: kubernetes")
    daemon.start().wait_ready()
    assert [one["reserved_for"] for one in daemon.get("/v1/gpus")[1]["gpus"]] == [None, "kubernetes"]
    for command in ("gpus", "list", "status"):
        shown = host.run(["yunion-mps", command]).stdout
        assert "00:07.0: reserved for kubernetes; 16384 of 16384 MiB are free\n" in shown
        assert ("00:06.0: 16384 of 16384 MiB can be leased" in shown, shown.count("can be leased")) == (
            True,
            1,
        )


@needs_root
def test_only_root_may_ask_for_what_is_reserved(reserving: Daemon) -> None:
    with stranger(reserving) as connection:
        status, answer = connection.ask("POST", "/v1/leases", "reserved_for=kubernetes")
    assert (status, answer["code"]) == (403, "not_allowed")
    assert leased_addresses(reserving) == []


@pytest.mark.gpus({"kind": "h100", "count": 2})
def test_a_gpu_stays_reserved_while_its_layout_is_pending(daemon: Daemon) -> None:
    daemon.host.divide("mig: all-1g.10gb; reserved_for: slurm", SHARED)
    daemon.host.run(["nvidia-smi", "-i", 0, "-mig", 1], check=True)
    daemon.host.create_mig_devices(0, "7g.80gb")
    daemon.start().wait_ready()
    assert [one["reserved_for"] for one in daemon.get("/v1/gpus")[1]["gpus"]] == ["slurm", "slurm", None]
    done = daemon.host.run(["yunion-mps", "slurm", "gres-conf"])
    assert (done.returncode, done.stdout) == (1, ""), "not the devices of the other GPU"
    assert "[mig_foreign_instance]" in done.stderr
    done = run_job(daemon.host, "--", "true")
    assert (done.returncode, "--allow-unlimited" in done.stderr) == (1, True), done.stderr
