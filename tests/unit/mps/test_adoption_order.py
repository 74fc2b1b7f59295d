"""A control daemon that another program has started, and that we were ordered to adopt."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from yunion_mps.core.enums import READY, STOPPED
from yunion_mps.core.errors import HostError
from yunion_mps.core.models import DomainPlan
from yunion_mps.host.proc import environment_of
from yunion_mps.host.processes import Process
from yunion_mps.mps.control_daemon import create_adoption_order, find
from yunion_mps.mps.processes import (
    AdoptionOrder,
    adoption_order,
    control_environment,
    orphaned_servers,
    record_order,
)

from .domain_bench import Bench
from .other_processes import running_here

ONE, TWO = "GPU-00000000-0000-0000-0000-000000000000", "GPU-00000000-0000-0000-0000-000000000001"
OTHER_GPU = "GPU-11111111-0000-0000-0000-000000000000"


def theirs(plan: DomainPlan, **more: str) -> dict[str, str]:
    """The environment of one that serves all GPUs of the host, as Cloudpods has it."""
    ours = control_environment(plan)
    names = ("PATH", "LC_ALL", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    return {**{name: ours[name] for name in names}, **more}


def order_for(plan: DomainPlan, process: Process) -> AdoptionOrder:
    return create_adoption_order(process.pid, environment_of(process.pid), plan.gpu_uuids, plan)


def adopt(plan: DomainPlan, process: Process) -> None:
    """Do what `yunion-mps-daemon --adopt` does with the process, on a host with just the plan's GPUs."""
    record_order(order_for(plan, process))


def test_an_adopted_control_daemon_keeps_its_pid_and_gets_our_limits(bench: Bench) -> None:
    stranger = bench.control(environment=theirs(bench.plan))
    assert running_here(bench.plan) == []
    adopt(bench.plan, stranger)
    run = bench.domain().start().until(READY)
    assert run.pid == stranger.pid
    assert run.pending == []
    asked = ["get_default_device_pinned_mem_limit 0", "get_default_active_thread_percentage"]
    assert bench.ask(*asked) == ["5G", "25.0"]
    assert running_here(bench.plan) == [(stranger.pid, bench.plan.gpu_uuids)], "the next daemon knows it too"
    run.domain.stop(run.now_s, spare_adopted=True)
    again = bench.domain().start().until(READY)
    assert again.pid == stranger.pid
    again.stop().until(STOPPED)
    assert stranger.status() is not None, "a stop ends it like one that we started"
    assert running_here(bench.plan) == []


def test_an_adopted_server_keeps_its_limits_and_the_next_gets_ours(bench: Bench) -> None:
    environment = theirs(bench.plan, PATH=f"{bench.jobs.stand_ins.folder}:{os.environ['PATH']}")
    stranger = bench.control(environment=environment)
    job = bench.jobs.attach()
    adopt(bench.plan, stranger)
    run = bench.serving()
    assert run.pid == stranger.pid
    (server,) = run.domain.server_pids()
    assert run.domain.limits_in_effect.old_servers == (server,)
    assert run.awaited_servers == (server,)
    another = bench.jobs.attach()  # joins it
    bench.jobs.end(job, another)
    run.domain.note_use(in_use=False)
    run.until_true(lambda: run.advance(0.5).until_answered().pending == [])
    assert run.state == READY


def test_servers_that_outlive_an_adopted_one_are_ours_too(bench: Bench) -> None:
    environment = theirs(bench.plan, PATH=f"{bench.jobs.stand_ins.folder}:{os.environ['PATH']}")
    stranger = bench.control(environment=environment)
    job = bench.jobs.attach()
    server = int(bench.ask("get_server_list")[0])
    order = order_for(bench.plan, stranger)
    stranger.kill()
    assert orphaned_servers(bench.plan.pipe_directory) == []
    record_order(order)
    assert orphaned_servers(bench.plan.pipe_directory) == [server]
    assert orphaned_servers(f"{bench.plan.pipe_directory}2") == []
    record_order(order._replace(started_ticks=1 << 60))  # of a later one
    assert orphaned_servers(bench.plan.pipe_directory) == []
    bench.jobs.end(job)
    with contextlib.suppress(ProcessLookupError):  # from 550 on it ends with its last client
        os.kill(server, signal.SIGKILL)


def test_an_adoption_order_applies_to_one_process_only(bench: Bench) -> None:
    stranger = bench.control(environment=theirs(bench.plan))
    adopt(bench.plan, stranger)
    order = adoption_order(stranger.pid)
    assert order is not None
    record_order(
        order._replace(started_ticks=order.started_ticks + 1)
    )  # as where its PID is another's by now
    assert adoption_order(stranger.pid) is None
    with pytest.raises(HostError, match="not started by yunion-mps"):
        find(bench.plan)
    record_order(order._replace(pipe_directory="/elsewhere"))
    with pytest.raises(HostError, match="not started by yunion-mps"):
        find(bench.plan)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_torn_file_is_not_an_order(place: Path, text: str) -> None:
    file = place / "root/run/yunion-mps/adopted.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert adoption_order(os.getpid()) is None


@pytest.mark.parametrize(
    ("limits", "environment", "order"),
    [
        pytest.param((5760,), {}, (ONE,), id="one GPU"),
        pytest.param((5760, 1024), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (ONE, TWO), id="in PCI order"),
        pytest.param((5760, 1024), {"CUDA_VISIBLE_DEVICES": f"{TWO},{ONE}"}, (TWO, ONE), id="by UUID"),
        pytest.param((5760, 5760), {}, (ONE, TWO), id="in any order with equal limits"),
    ],
)
def test_a_control_daemon_with_a_certain_gpu_order_is_adopted(
    bench: Bench, limits: tuple[int, ...], environment: dict[str, str], order: tuple[str, ...]
) -> None:
    plan = bench.planned(limits)
    found = create_adoption_order(os.getpid(), theirs(plan, **environment), plan.gpu_uuids, plan)
    assert found.gpu_uuids == order
    assert found.can_serve(bench.planned((5760, 2048)[: len(limits)])) == (limits != (5760, 5760))


@pytest.mark.parametrize(
    ("environment", "gpus", "why"),
    [
        pytest.param({}, (ONE, TWO), "CUDA_DEVICE_ORDER is not PCI_BUS_ID", id="in an order of its own"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "1,0"}, (ONE, TWO), "only UUIDs identify", id="by number"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, (ONE, TWO), "only UUIDs identify", id="none"),
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": ONE}, (ONE, TWO), "does not serve exactly the GPUs", id="too few"
        ),
        pytest.param({}, (ONE, TWO, OTHER_GPU), "does not serve exactly the GPUs", id="too many"),
        pytest.param({}, (ONE, None), "has no known UUID", id="one unknown"),
        pytest.param({"CUDA_MPS_PIPE_DIRECTORY": "/b"}, (ONE, TWO), "started for /b", id="elsewhere"),
    ],
)
def test_a_control_daemon_is_refused_with_the_reason(
    bench: Bench, environment: dict[str, str], gpus: tuple[str | None, ...], why: str
) -> None:
    plan = bench.planned((5760, 1024))
    with pytest.raises(HostError, match=why) as raised:
        create_adoption_order(os.getpid(), theirs(plan, **environment), gpus, plan)
    assert "cannot be adopted: " in raised.value.message


def test_a_single_user_control_daemon_is_not_adopted_for_multiuser(plan: DomainPlan) -> None:
    with pytest.raises(HostError, match="cuda_mps_multiuser"):
        create_adoption_order(os.getpid(), theirs(plan), plan.gpu_uuids, plan._replace(multiuser=True))


def test_an_uncertain_order_refuses_unequal_limits_later_too(bench: Bench) -> None:
    stranger = bench.control(bench.planned((5760, 5760)), theirs(bench.planned((5760, 5760))))
    adopt(bench.planned((5760, 5760)), stranger)
    found = find(bench.planned((1024, 1024)))
    assert found is not None
    found.process.close()
    with pytest.raises(HostError, match="their memory limits differ"):
        find(bench.planned((5760, 1024)))
