"""The status counts what jobs do, and each problem names what it is about."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.core.enums import BACKOFF, FAILED, STARTING
from yunion_mps.core.reasons import (
    CONTROL_DAEMON_BUSY,
    LEASES_PENDING,
    LIMITS_PENDING,
    MIG_IN_USE,
    PROGRAM_MISSING,
    SHORTAGE,
    Reason,
    hint_of,
)
from yunion_mps.service.queries import Queries

from unit.cli.busy_host import OUTSIDE_MPS, OVER_BUDGET, TWO_DEVICES
from unit.http.fake_services import CLIENT, LEASE, SERVER, WAITING_CLIENT, clients, status_of
from unit.http.snapshots import H100, IN_MIG_MODE, MIG_ENTRIES, P40, in_instances, snapshot, with_conditions


def queries(**domain: Any) -> Queries:
    gpu = H100._replace(pci_address="0000:00:06.0", compute_mode="Exclusive_Process")
    host = snapshot(gpu, **domain)
    plan = host.plan._replace(devices=tuple(one._replace(memory_limit_mib=5760) for one in host.plan.devices))
    divided = with_conditions(host._replace(plan=plan))
    return Queries(lambda: divided, 0.0, 1)


def test_a_job_over_budget_or_outside_mps_degrades_the_state() -> None:
    within = status_of(queries(), LEASE, clients=clients(CLIENT))
    assert (within["state"], within["problems"]) == ("ready", [])
    found = status_of(queries(), LEASE, TWO_DEVICES, clients=clients(OVER_BUDGET, OUTSIDE_MPS))
    told = [(one["code"], one["gpu"], one["devices"], one["pid"]) for one in found["problems"]]
    assert told == [
        ("over_budget", "00:06.0", ["00:06.0-1"], 4260),
        ("process_outside_mps", "00:06.0", [], 4711),
    ]
    assert found["state"] == "degraded"
    assert (found["clients"], found["outside_mps"]) == (1, 1)
    assert (found["devices"]["used"], found["devices"]["free"]) == (3, 1)


def test_a_warning_does_not_degrade_the_state() -> None:
    found = status_of(queries(), clients=clients(waiting=(WAITING_CLIENT,)))
    assert [one["level"] for one in found["problems"]] == ["warning"]
    assert found["state"] == "ready"


def test_a_host_that_serves_nothing_is_failed_whatever_its_jobs_do() -> None:
    broken = queries(state=FAILED, reason="it does not start")
    assert status_of(broken, clients=clients(OUTSIDE_MPS))["state"] == "failed"


@pytest.mark.parametrize(
    ("state", "code"), [(STARTING, CONTROL_DAEMON_BUSY), (BACKOFF, SHORTAGE), (FAILED, PROGRAM_MISSING)]
)
def test_a_domain_that_is_not_ready_has_the_hint_of_its_reason(state: str, code: str) -> None:
    (problem,) = (
        problem
        for problem in status_of(queries(state=state, reason="why", code=code))["problems"]
        if problem["text"].startswith("domain host ")
    )
    assert (problem["code"], problem["hint"]) == (code, hint_of(code))


ELSEWHERE = {**SERVER, "pid": 4251}
FROM_OUTSIDE = {**CLIENT, "mps": False, "server": None}
UNKNOWN = {**CLIENT, "server": None}


@pytest.mark.parametrize(
    ("found", "is_idle"),
    [
        (clients(), True),
        (clients(FROM_OUTSIDE), True),
        (clients({**CLIENT, "server": 4251}, servers=(SERVER, ELSEWHERE)), True),
        (clients(CLIENT), False),
        (clients(UNKNOWN), False),
        (clients(errors=("domain host: it does not answer",)), False),
        (clients(servers=(ELSEWHERE,)), False),
    ],
)
def test_a_change_that_waits_for_an_idle_server_says_what_ends_it(found: Any, is_idle: bool) -> None:
    host = snapshot(H100)
    (domain,) = host.domains
    changed = domain._replace(pending="new limits", waits_for=(4250,))
    changing = with_conditions(host._replace(domains=(changed,)))
    waiting = Queries(lambda: changing, 0.0, 1)
    hints = {
        one["hint"] for one in status_of(waiting, clients=found)["problems"] if one["level"] == "pending"
    }
    idle = "wait a moment, or run: yunion-mps reload --drain; "
    idle += "the driver lists no job of the MPS server (PID 4250)"
    assert hints == {idle if is_idle else hint_of(LIMITS_PENDING)}


def test_an_instance_that_waits_with_its_gpus_layout_is_one_problem() -> None:
    host = snapshot(P40, *in_instances(IN_MIG_MODE, "3g.40gb", "3g.40gb"), entries=MIG_ENTRIES)
    instance = next(gpu for gpu in host.inventory.gpus if gpu.is_instance)
    waits = {str(instance.uuid): Reason("its MIG layout waits for lease job of root to end", LEASES_PENDING)}
    layout = {IN_MIG_MODE.pci_address: Reason("removing it waits for lease job of root to end", MIG_IN_USE)}

    def reported(unavailable: dict[str, Reason]) -> list[tuple[str, str | None]]:
        others = tuple(one for one in host.plan.devices if one.gpu_uuid != instance.uuid)
        plan = host.plan._replace(pending=waits, unavailable=unavailable, devices=others)
        waiting = with_conditions(host._replace(plan=plan))
        problems = status_of(Queries(lambda: waiting, 0.0, 1))["problems"]
        return [(one["code"], one["gpu"]) for one in problems if one["level"] == "pending"]

    assert reported({}) == [(LEASES_PENDING, instance.address)]
    assert reported(layout) == [(MIG_IN_USE, IN_MIG_MODE.address)]
