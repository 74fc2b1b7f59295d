"""What the web page is told of a moment: each part of a GPU with its state and its holder, in little room."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from yunion_mps.core.enums import FAILED
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import GPU_LOST, Reason
from yunion_mps.service.queries import Queries
from yunion_mps.views.overview import HostAnswers, HostOverview, page

from unit.cli.busy_host import OUTSIDE_MPS, OVER_BUDGET, TWO_DEVICES
from unit.http import fake_services
from unit.http.fake_services import CLIENT, LEASE, status_of
from unit.http.snapshots import H100, IN_MIG_MODE, MIG_ENTRIES, P40, RESERVED_POOL, mig, snapshot

Json = Any


def page_of(*gpus: Gpu, leases: Sequence[Json] = (), clients: Sequence[Json] = (), **domain: Any) -> Json:
    """What the page shows of a host with these GPUs, leases and clients, and a domain in such a state."""
    service: Any = Queries(lambda: snapshot(*gpus, **domain), 0.0, 1)
    devices = service.all_devices()
    seen = fake_services.clients(*clients, servers=(), errors=("domain host: it does not answer",))
    status = status_of(service, *leases, clients=seen)
    answers = HostAnswers(status, service.gpus()["gpus"], devices, leases, (), seen)
    return page(HostOverview.of(answers))


def parts(shown: Json) -> dict[str, Json]:
    return {",".join(one["devices"]) or one["gpu"]: one for one in shown["parts"]}


def test_a_holding_is_free_idle_in_use_over_budget_or_outside_mps() -> None:
    shown = page_of(P40, leases=(LEASE, TWO_DEVICES), clients=(OVER_BUDGET, OUTSIDE_MPS))
    states = {name: one["state"] for name, one in parts(shown).items()}
    assert states == {
        "00:06.0-0": "free",
        "00:06.0-1": "over budget",
        "00:06.0-2,00:06.0-3": "idle",
        "00:06.0": "outside MPS",
    }
    assert shown["state"] == "degraded"
    within = page_of(P40, leases=(LEASE,), clients=(CLIENT,))
    assert within["state"] == "ready"
    assert parts(within)["00:06.0-1"]["state"] == "in use"
    broken = page_of(P40, state=FAILED, reason="it does not start")
    assert parts(broken)["00:06.0-1"]["state"] == "unavailable"


def test_a_part_has_its_holder_use_budget_and_since_when() -> None:
    part = parts(page_of(P40, leases=(LEASE,), clients=(CLIENT,)))["00:06.0-1"]
    assert (part["user"], part["used"], part["budget"], part["since"]) == ("alice", 512, 5760, LEASE["since"])
    assert (part["command"], part["pids"], part["lease"]) == ("python train.py", [4260], LEASE["id"][:8])
    assert "environment" not in json.dumps(part)
    claim: Json = {**LEASE, "name": "claim:default/trainer", "binding": "name", "pid": None, "command": None}
    client: Json = {**CLIENT, "container": "pod default/trainer/main"}
    commands = [
        parts(page_of(P40, leases=(claim,), clients=clients))["00:06.0-1"]["command"]
        for clients in ((), (client,))
    ]
    assert commands == ["claim:default/trainer", "pod default/trainer/main: python train.py"]


@pytest.mark.parametrize(
    ("lease", "client", "holder"),
    [
        ({"command": "torchrun train.py"}, {}, "torchrun train.py"),
        ({"name": "job-17", "command": None}, {}, "job-17: python train.py"),
        ({"container": "trainer", "command": None}, {"container": "trainer"}, "trainer: python train.py"),
        ({"name": "job-17", "command": None}, None, "job-17"),
        ({"command": "x" * 500}, {}, "x" * 199 + "…"),
        (None, {"container": "trainer"}, "trainer: python train.py"),
    ],
)
def test_a_holder_has_its_name_and_the_command_it_was_leased_for(
    lease: Json, client: Json, holder: str
) -> None:
    leases = () if lease is None else ({**LEASE, **lease},)
    clients = () if client is None else ({**CLIENT, **client},)
    assert parts(page_of(P40, leases=leases, clients=clients))["00:06.0-1"]["command"] == holder


def test_a_lease_on_a_device_that_cannot_be_used_any_more_says_so() -> None:
    broken = page_of(P40, leases=(LEASE,), state=FAILED, reason="it does not start")
    assert parts(broken)["00:06.0-1"]["unavailable"] is True


def test_the_memory_used_of_a_lost_gpu_is_unknown_and_not_0() -> None:
    lost = page_of(P40._replace(reason=Reason("the GPU is lost", GPU_LOST)))
    assert [gpu["memory_used_mib"] for gpu in lost["gpus"]] == [None]
    unavailable = page_of(P40, leases=(LEASE,), state=FAILED, reason="the GPU is lost")
    assert "used" not in parts(unavailable)["00:06.0-1"]
    assert parts(page_of(P40, leases=(LEASE,)))["00:06.0-1"]["used"] == 0


def test_the_page_knows_what_a_gpu_is_reserved_for() -> None:
    (gpu,) = page_of(P40, entries=[RESERVED_POOL])["gpus"]
    assert (gpu["memory_free_mib"], gpu["reserved_for"]) == (22528, "kubernetes")


def test_problems_errors_and_counts_are_those_of_status() -> None:
    shown = page_of(P40, leases=(LEASE, TWO_DEVICES), clients=(OVER_BUDGET, OUTSIDE_MPS))
    assert [one["title"] for one in shown["problems"]] == ["Problem", "Problem", "Warning"]
    assert shown["wrong"] == 3
    assert shown["errors"] == ["domain host: it does not answer"]
    served = {"total": 4, "available": 4, "unavailable": 0, "pending": 0, "reserved": 0}
    assert shown["devices"] == {**served, "used": 3, "free": 1}
    assert (shown["leases"], shown["clients"]) == (2, 2)
    assert [(gpu["addr"], gpu["memory_used_mib"]) for gpu in shown["gpus"]] == [("00:06.0", 6300)]


def test_the_hint_about_a_process_names_it() -> None:
    other = {**OUTSIDE_MPS, "pid": 4301}
    found = page_of(P40, clients=(OUTSIDE_MPS, other))["problems"]
    hints = [one["hint"].rpartition(" ")[2] for one in found if "outside MPS" in one["text"]]
    assert sorted(hints) == sorted([str(OUTSIDE_MPS["pid"]), "4301"])


def test_3072_free_devices_take_less_than_300_kib() -> None:
    gpus = [H100._replace(pci_address=f"0000:{n:02x}:00.0", uuid=f"GPU-{n}") for n in range(64)]
    shown = page_of(*gpus, replicas=48, scope="gpu")
    assert len(shown["parts"]) == 3072
    assert len(json.dumps(shown, separators=(",", ":"))) < 300 << 10


def test_memory_used_on_a_mig_instance_is_also_that_of_its_gpu() -> None:
    address = "81:00.0-g2"
    client = {**CLIENT, "gpus": [address], "device": address, "memory_by_gpu_mib": [512]}
    shown = page_of(*mig().inventory.gpus, entries=MIG_ENTRIES, clients=(client,))
    used = {one["addr"]: (one["parent"], one["memory_used_mib"]) for one in shown["gpus"]}
    uuid = IN_MIG_MODE.uuid
    assert used == {
        "00:06.0": (None, 0), "81:00.0": (None, 512), "81:00.0-g1": (uuid, 0), address: (uuid, 512),
    }  # fmt: skip
