"""`yunion-mps status`: one screen, to the letter, with what is wrong first and its hint."""

from __future__ import annotations

import json
import re

import pytest
from yunion_mps.core.models import PlannedGpu, Snapshot
from yunion_mps.core.reasons import GPU_LOST, LIMITS_PENDING, Reason

from unit.cli.busy_host import hold_leases, make_busy
from unit.cli.conftest import Cli, Serve
from unit.http import snapshots
from unit.http.fake_services import LEASE, SERVER, clients
from unit.http.snapshots import with_conditions

MIG = "the GPU is in MIG mode, so MPS cannot serve it as a whole"


def test_a_server_that_has_failed_is_shown(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients(servers=({**SERVER, "state": "FAULT"},))
    assert own_cli.good("status").splitlines()[:3] == [
        "State:    degraded",
        "Problem:  MPS server (PID 4250), domain host: its jobs have failed",
        "Hint:     wait for its jobs to end; it then accepts new ones; list them: yunion-mps who --clients",
    ]


@pytest.mark.parametrize(
    ("limits", "percentage", "shown"),
    [
        ([15360, 5760, 11520], 33.3, "5760-15360 MiB, 33.3 %"),
        ([5760, 5760], 25, "5760 MiB, 25 %"),
        ([None, 5760, None], 25, "5760 MiB, 25 %"),
        ([None], 25, "-"),
    ],
)
def test_a_domain_shows_the_range_of_the_default_limits_of_its_gpus(
    serve: Serve, limits: list[int | None], percentage: float, shown: str
) -> None:
    found = snapshots.reference()
    gpus = tuple(PlannedGpu(f"GPU-{number}", limit) for number, limit in enumerate(limits))
    plan = found.domains[0].plan._replace(gpus=gpus, thread_percentage=percentage)
    cli = serve(found._replace(domains=(found.domains[0]._replace(plan=plan),)))
    lines = cli.good("status").splitlines()
    assert f"  {shown}  " in lines[-1]
    assert json.loads(cli.good("status", "-o", "json"))["domains"][0]["memory_limits_mib"] == limits


def test_pending_changes_are_shown_once_per_domain(serve: Serve) -> None:
    found = snapshots.reference()
    later = "its control daemon waits for the one that now serves its GPUs to end"
    domains = (
        found.domains[0]._replace(pending="the change of limits waits for its MPS server to end"),
        found.domains[0]._replace(
            plan=found.domains[0].plan._replace(name="00:06.0"),
            state="stopped",
            reason=Reason(later, LIMITS_PENDING),
            pending=later,
        ),
    )
    lines = serve(with_conditions(found._replace(domains=domains))).good("status").splitlines()
    assert [line for line in lines if later in line or "Pending" in line] == [
        "Pending:  host: the change of limits waits for its MPS server to end",
        f"Pending:  00:06.0: {later}",
    ]


def test_the_status_of_a_troubled_host_says_what_is_amiss_and_what_to_do(troubled_cli: Cli) -> None:
    lines = troubled_cli.good("status").splitlines()
    assert lines[:7] == [
        "State:    failed",
        "Problem:  domain host is failed: nvidia-cuda-mps-control is missing",
        "Hint:     install it; for MPS: nvidia-cuda-mps-control",
        "Problem:  GPU 10000:00:07.0: the GPU is lost",
        "Hint:     repair or reset the GPU, then: yunion-mps reload; run the diagnostics: yunion-mps doctor",
        f"Problem:  GPU 81:00.0 (NVIDIA H100): {MIG}",
        (
            f"Hint:     disable MIG mode: nvidia-smi -i {snapshots.IN_MIG_MODE.uuid} -mig 0; "
            "then: yunion-mps reload; or write mig in its entry"
        ),
    ]
    assert "Devices:  0 of 6 available, 1 used, 0 free" in lines
    assert "GPUs:     4, 4 unavailable" in lines
    assert sum(line.startswith("Warning:  GPU 0001:e1:00.0") for line in lines) == 1


def test_the_memory_in_use_of_a_lost_gpu_is_unknown(serve: Serve) -> None:
    reason = Reason("the GPU is lost", GPU_LOST)
    found = snapshots.reference()
    gpus = (snapshots.P40._replace(reason=reason),)
    lost = serve(with_conditions(found._replace(inventory=found.inventory._replace(gpus=gpus))))
    hold_leases(lost.host, LEASE)
    lost.host.clients.listed = clients()
    (gpu,) = (line.split() for line in lost.good("status").splitlines() if " unavailable  " in line)
    assert gpu[-1] == "-"
    assert " - / 5760 MiB " in lost.good("who")
    answer, (header, row) = lost.read("who")
    assert answer["uses"][0]["memory_used_mib"] is None
    assert row[header.index("memory_used_mib")] == ""
    assert " - " in next(line for line in lost.good("top", "--once").splitlines() if "of 4" in line)


def test_the_status_of_a_host_without_mps_says_why(serve: Serve) -> None:
    cli = serve(snapshots.disabled())
    hold_leases(cli.host)
    cli.host.clients.listed = clients()
    assert cli.good("status").splitlines()[:7] == [
        "State:    disabled",
        "Notice:   enable_cuda_mps is false",
        "Hint:     set enable_cuda_mps: true in host.conf or host_local.conf, then: yunion-mps reload",
        "Devices:  0 of 0 available",
        "Leases:   0; 0 processes",
        "GPUs:     0",
        "Driver:   not queried",
    ]


def test_a_gpu_that_its_control_daemon_does_not_serve_degrades_the_host(serve: Serve) -> None:
    found = snapshots.snapshot(snapshots.P40, snapshots.H100)
    served = found.domains[0].plan.for_gpus((snapshots.P40.uuid or "",))
    cli = serve(with_conditions(found._replace(domains=(found.domains[0]._replace(plan=served),))))
    assert cli.host.ask("GET", "/v1/status").json()["state"] == "degraded"
    lines = cli.good("status").splitlines()
    assert lines[0] == "State:    degraded"
    assert lines[1].startswith(
        "Problem:  GPU 0001:e1:00.0 (NVIDIA H100): the running control daemon does not"
    )


@pytest.mark.parametrize(
    ("snapshot", "is_busy", "state", "code"),
    [
        (snapshots.reference(), False, "ready", 0),
        (snapshots.disabled(), False, "disabled", 0),
        (snapshots.reference(), True, "degraded", 1),
        (snapshots.gone(), False, "degraded", 1),
        (snapshots.troubled(), False, "failed", 1),
    ],
    ids=["ready", "disabled", "ready but for its jobs", "degraded", "failed"],
)
def test_the_exit_code_tells_the_state_if_that_is_asked_for(
    serve: Serve, snapshot: Snapshot, is_busy: bool, state: str, code: int
) -> None:
    cli = serve(snapshot)
    hold_leases(cli.host)
    if is_busy:
        make_busy(cli.host)
    told = cli("status", "--exit-code", "-o", "json")
    assert (told.code, told.err, json.loads(told.out)["state"]) == (code, "", state)


def test_every_way_of_sharing_is_seen_at_a_glance(serve: Serve) -> None:
    shown = serve(snapshots.every_way()).good("status").splitlines()
    assert "GPUs:     5 (3 mig, 1 mps, 1 time-slicing)" in shown
    first = next(place for place, line in enumerate(shown) if line.startswith("GPU "))
    ways = [re.split("  +", line)[2] for line in shown[first + 1 : first + 6]]
    assert ways == [
        "mps",
        "time-slicing (short)",
        "mig (2 x 1g.10gb + 1 x 2g.20gb + 1 x 3g.40gb)",
        "mig with mps (2 x 3g.40gb)",
        "mig with time-slicing (2 x 3g.40gb)",
    ]
    devices = [re.split("  +", line)[4] for line in shown[first + 1 : first + 6]]
    assert devices == ["4", "3", "4", "4", "4"], "those of instances are their GPU's"


def test_a_few_mig_instances_have_rows_of_their_own(serve: Serve) -> None:
    shown = serve(snapshots.mig()).good("status").splitlines()
    rows = [re.split("  +", line) for line in shown if line.startswith("81:00.0")]
    assert [(row[0], row[2], row[4]) for row in rows] == [
        ("81:00.0", "mig", "2"),
        ("81:00.0-g1", "none", "1"),
        ("81:00.0-g2", "none", "1"),
    ]


def test_a_host_of_many_gpus_is_one_screen_too(serve: Serve) -> None:
    lines = serve(snapshots.large(3072)).good("status").splitlines()
    assert len(lines) < 24
    assert [line for line in lines if line.startswith("64 GPUs")] == [
        "64 GPUs  NVIDIA H100  available     3072       0  3072  0 / 5219776 MiB"
    ]
    assert lines[-1] == "Domains:  64 of 64 ready (list all: -o json)"


def test_a_program_reads_what_the_daemon_answers_or_a_line_for_each_value(own_cli: Cli) -> None:
    make_busy(own_cli.host)
    answer, rows = own_cli.read("status")
    assert answer == own_cli.host.ask("GET", "/v1/status").json()
    pairs = dict(rows)
    assert (pairs["field"], pairs["state"], pairs["domains.0.memory_limits_mib"]) == (
        "value",
        "degraded",
        "[5760]",
    )


@pytest.mark.parametrize("command", ["status", "who", "who --clients", "top --once"])
def test_what_is_incomplete_is_named_in_the_last_line(own_cli: Cli, command: str) -> None:
    own_cli.host.clients.listed = clients(errors=("domain host: it does not answer",))
    assert own_cli.good(*command.split()).splitlines()[-1] == "Incomplete: domain host: it does not answer"
