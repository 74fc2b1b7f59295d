"""What a reload says that it has changed, and what the driver refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest
from yunion_mps.answers import ChangeListJson
from yunion_mps.core.errors import NotConfirmedError
from yunion_mps.core.reasons import COMPUTE_MODE_FIXED
from yunion_mps.core.units import rfc3339
from yunion_mps.host.proc import started_s, user_name
from yunion_mps.leases.ledger import Ledger
from yunion_mps.mps.log_file import LOG_NAME
from yunion_mps.service.publisher import CdiPublisher
from yunion_mps.service.reload import LoopControl, confirmed_client
from yunion_mps.service.reload_losses import client_name
from yunion_mps.service.services import Services
from yunion_mps.supervisor.fleet import FleetEndOrder
from yunion_mps.views.devices import devices_json

from integration.daemon_host import is_running
from simhost.host import SHARED
from simhost.mps import CONTROL
from unit.mps.other_processes import no_descriptor_left
from unit.supervised import StartSupervised, StartWithJob, Supervised, attach

pytestmark = pytest.mark.processes  # the control daemon is real

V100 = [{"kind": "v100"}]
TWO = [*V100, *V100]


#: In the place of the front-end: before servers end by force, the log gets a line about a new client.
WRITES_A_LINE = """\
#!/bin/sh
commands=$(cat)
case $commands in *' -f'*)
    client='NEW CLIENT 1000000000 from user {uid}: Server already exists'
    echo "[2026-11-29 08:52:44.510 Control  2984] $client" >>{log}
esac
echo "$commands" | {program}
"""


def reload(made: Supervised, *, now: bool = False) -> list[tuple[str, str]]:
    """Reload as `answer_of_reload` does; returns the kind and subject of each change."""
    changes = answer_of_reload(made, now=now)["changes"]
    return sorted((change["kind"], change["subject"]) for change in changes)


def answer_of_reload(made: Supervised, *, now: bool = False) -> ChangeListJson:
    """Reload as a client does, with all that a plan lists."""
    supervisor = made.supervisor

    async def answer() -> ChangeListJson:
        loop = asyncio.get_running_loop()

        def tick() -> None:
            supervisor.tick(loop.time())
            loop.call_later(0.002, tick)

        control = LoopControl((), asyncio.Event(), tick, lambda: None)
        publisher = CdiPublisher(made.paths, supervisor)
        services = Services.of(made.paths, supervisor, publisher, control, started_s=0.0)
        confirmation = (await services.reloader.plan())["confirmation"] if now else ""
        return await services.reloader.reload(now=now, confirmation=confirmation)

    return asyncio.run(answer())


def test_a_compute_mode_that_the_driver_refused_is_no_change(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4)
    host.fail("nvmlDeviceSetComputeMode", "not_supported")
    host.divide(4, 4)
    assert reload(made) == [("budget", "00:07.0"), ("control daemon", "host"), ("control daemon", "host")]
    assert host.gpus[1].compute_mode == "default"
    assert "compute mode 00:07.0" not in {event.subject for event in made.events}


def test_a_gpu_that_cannot_be_used_in_its_mode_changes_nothing(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4)
    host.fail("nvmlDeviceSetComputeMode", "not_supported")
    host.gpus[1].compute_mode = "prohibited"
    made.rescan()
    host.divide(4, 4)
    assert reload(made) == []
    assert made.available == 4
    (reason,) = made.snapshot.plan.unavailable.values()
    assert reason.code == COMPUTE_MODE_FIXED


def test_devices_have_the_reason_of_their_gpu_before_the_next_poll(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.fail("nvmlDeviceSetComputeMode", "not_supported")
    host.gpus[1].compute_mode = "prohibited"
    made.rescan()
    reload(made)
    devices = [one for one in devices_json(made.snapshot, Ledger()) if one["gpu_uuid"] == host.gpus[1].uuid]
    assert {one["reason_code"] for one in devices} == {COMPUTE_MODE_FIXED}


def test_a_time_slice_that_was_refused_is_no_change(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "tesla-m60"}, {"kind": "v100"}], f"{SHARED[:-1]}2", 4)
    host.divide(f"{SHARED[:-1]}2; time_slice: long", 4)
    assert reload(made) == []


def test_nothing_of_a_gpu_that_is_not_there_changes_but_its_removal(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.gpus[0].bind("vfio-pci")
    made.rescan()
    host.divide(f"{SHARED[:-1]}2; time_slice: long", 4)
    assert [subject for _, subject in reload(made)] == ["host", "host"]
    host.divide("type: OTHER", 4)
    assert reload(made) == [("budget", "00:06.0")]


def once_applied(made: Supervised, act: Callable[[], object]) -> None:
    """Do this once when the reload has applied new limits, before it ends the servers with the old ones."""
    before = len(made.events)
    left = [act]

    def act_at_new_limits() -> None:
        if left and "applying -> ready" in {event.what for event in made.events[before:]}:
            left.pop()()

    made.supervisor.event_log.listen(act_at_new_limits)


def test_now_ends_no_server_if_a_job_began_after_the_reload_was_accepted(
    start_with_job: StartWithJob,
) -> None:
    """All else is in effect; the operator is told, and can list the jobs again."""
    host, jobs, made, job = start_with_job(V100, 4)
    later = []
    once_applied(made, lambda: later.append(attach(jobs, host)))
    host.divide(2)
    what = r"the configuration was reloaded, but no MPS server was ended, because .*: PID (\d+) of "
    with pytest.raises(NotConfirmedError, match=what) as refused:
        reload(made, now=True)
    assert f"PID {later[0].pid} of " in refused.value.message
    assert f"PID {job.pid} of " not in refused.value.message
    (server,) = jobs.servers()
    attach(jobs, host)
    assert (jobs.servers(), is_running(job.pid)) == ([server], True), "it is not drained"
    assert len(made.supervisor.desired.plan.devices) == 2
    assert made.snapshot.domains[0].pending, "the new budgets wait for the server"


@pytest.mark.parametrize("has_ended", [True, False])
def test_now_forces_no_server_whose_clients_have_ended(start_with_job: StartWithJob, has_ended: bool) -> None:
    """A job that attaches just then continues."""
    host, _, made, job = start_with_job(V100, 4)
    end_servers = made.supervisor.fleet.end_servers
    orders = []

    def note_and_end(now_s: float, order: FleetEndOrder) -> None:
        orders.append(order)
        end_servers(now_s, order)

    made.supervisor.fleet.end_servers = note_and_end  # type: ignore[method-assign]
    if has_ended:
        once_applied(made, job.end)
    host.divide(2)
    reload(made, now=True)
    (order,) = orders
    forced = set() if has_ended else {"host"}
    assert (order.with_all_clients, order.with_clients) == (set(), forced)


def test_now_ends_no_job_that_attached_after_the_last_look(start_with_job: StartWithJob) -> None:
    """Nor by a raw client, which has no lease that could be seen before."""
    host, jobs, made, job = start_with_job(V100, 4)
    end_servers = made.supervisor.fleet.end_servers
    later = []

    def attach_and_end(now_s: float, order: FleetEndOrder) -> None:
        later.append(attach(jobs, host))
        end_servers(now_s, order)

    made.supervisor.fleet.end_servers = attach_and_end  # type: ignore[method-assign]
    (server,) = jobs.servers()
    host.divide(2)
    what = rf"but the MPS server \(PID {server}\) ends only after its jobs, because .*: PID (\d+) of "
    with pytest.raises(NotConfirmedError, match=what) as refused:
        reload(made, now=True)
    assert f"PID {later[0].pid} of " in refused.value.message
    assert f"PID {job.pid} of " not in refused.value.message
    assert (is_running(job.pid), is_running(later[0].pid), jobs.servers()) == (True, True, [server])


def test_a_job_that_may_have_ended_without_a_confirmation_is_told(start_with_job: StartWithJob) -> None:
    """Here, its line in the log is another user's, written between the last look and the end."""
    host, jobs, made, job = start_with_job(V100, 4)
    end_servers = made.supervisor.fleet.end_servers
    (server,) = jobs.servers()
    (domain,) = made.supervisor.domains
    log = f"{domain.in_effect.log_directory}/{LOG_NAME}"
    writes_a_line = host.root / "writes-a-line"
    writes_a_line.write_text(WRITES_A_LINE.format(log=log, uid=os.getuid(), program=jobs.folder / CONTROL))
    writes_a_line.chmod(0o755)

    def end_with_that_line(now_s: float, order: FleetEndOrder) -> None:
        (domain,) = made.supervisor.fleet.domains
        domain.configure(str(writes_a_line), 10)
        end_servers(now_s, order)

    made.supervisor.fleet.end_servers = end_with_that_line  # type: ignore[method-assign]
    host.divide(2)
    answer = answer_of_reload(made, now=True)
    assert job.says() == "server gone"
    name = user_name(os.getuid())
    what = (
        f"PID 1000000000 of {name} may have ended with the MPS server (PID {server}) without a confirmation"
    )
    assert answer["errors"] == [f"{what}: attached after the clients were listed for the last time"]
    assert [event.what for event in made.events if event.severity == "error"] == [what]


def test_a_client_may_end_if_it_is_confirmed_or_has_ended() -> None:
    me = os.getpid()
    name = client_name(me, rfc3339(started_s(me) or 0.0))
    assert confirmed_client({name})(me)
    assert not confirmed_client({client_name(me, None)})(me), "its PID was that of another process"
    assert confirmed_client(set())(1_000_000_000), "there is no such process"
    assert not confirmed_client({client_name(0, None)})(0), "any of another PID namespace"


def test_without_a_descriptor_no_client_counts_as_ended() -> None:
    with no_descriptor_left():
        assert not confirmed_client(set())(os.getpid())
