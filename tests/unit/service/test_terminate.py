"""Which processes are never terminated as jobs, and what may happen while a client is terminated."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from yunion_mps.core.errors import BusyError, ControlError, HostError, NotAllowedError
from yunion_mps.core.models import Event
from yunion_mps.core.reasons import PROCESSES_UNKNOWN
from yunion_mps.core.units import rfc3339
from yunion_mps.host.control_groups import control_groups_of
from yunion_mps.host.proc import is_kernel_thread, started_s
from yunion_mps.mps.conversation import OccupiedError
from yunion_mps.service import terminate as module
from yunion_mps.service.terminate import _refuse_unless_job

from unit.http.by_hand import CLIENT, LEASE, clients

pytestmark = pytest.mark.processes


def test_the_first_process_and_the_daemon_are_not_jobs() -> None:
    for pid, what in ((1, "the init process"), (os.getpid(), "this daemon")):
        with pytest.raises(NotAllowedError) as caught:
            _refuse_unless_job(pid, [])
        assert caught.value.message == f"PID {pid} is {what}, not a job"


@pytest.mark.parametrize(("flags", "is_thread"), [(0x208040, True), (0x400100, False)])
def test_a_kernel_thread_is_recognised_by_its_flags(tmp_path: Path, flags: int, is_thread: bool) -> None:
    (tmp_path / "2").mkdir()
    (tmp_path / "2/stat").write_text(f"2 (kthreadd) S 0 0 0 0 -1 {flags} 0 0 0\n")
    assert is_kernel_thread(2, str(tmp_path)) is is_thread


class Bench:
    """A Terminator of one client, whose server does what `serve` does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job = subprocess.Popen(["sleep", "600"])
        self.serve: Callable[[], bool] = lambda: True
        began_s = started_s(self.job.pid)
        assert began_s is not None
        user = {"uid": os.getuid(), "user": "alice", "started": rfc3339(began_s)}
        self.listed: Any = clients({**CLIENT, **user, "pid": self.job.pid})
        status = SimpleNamespace(plan=SimpleNamespace(name=CLIENT["domain"]))
        self.events: list[Event] = []
        supervisor: Any = SimpleNamespace(
            stopping=False,
            domains=[],
            snapshot=lambda: SimpleNamespace(domains=[status]),
            event_log=SimpleNamespace(record=self.events.append),
        )
        monkeypatch.setattr(module, "find_control_program", str)
        monkeypatch.setattr(module, "terminate", lambda *_: self.serve())
        self._supervisor = supervisor

    def end(self, uid: int = 0, signals: Any = module.TERM) -> Any:
        """The termination of the client."""
        choose = itemgetter("clients")
        return self.of(lambda terminator: terminator.terminate_all(choose, uid, signals=signals))[0]

    def of(self, work: Callable[[module.Terminator], Coroutine[Any, Any, Any]]) -> Any:
        async def run() -> Any:
            clients: Any = SimpleNamespace(conversation=asyncio.Lock(), clients=self._list)
            return await asyncio.wait_for(work(module.Terminator(self._supervisor, clients)), 60)

        return asyncio.run(run())

    async def _list(self) -> Any:
        return self.listed

    def close(self) -> None:
        self.job.kill()
        self.job.wait()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with closing(Bench(monkeypatch)) as bench:
        yield bench


def test_a_client_may_end_by_itself_while_it_is_terminated(bench: Bench) -> None:
    def fail() -> bool:
        bench.close()
        raise ControlError("the MPS server refused to disconnect it", "")

    bench.serve = fail
    one = bench.end()
    assert (one["ended"], one["how"], one["reason_code"]) == (True, "it has ended by itself", "")


def test_a_client_may_have_ended_already(bench: Bench) -> None:
    bench.close()
    assert bench.end()["how"] == "it has ended by itself"


def test_a_reused_pid_is_not_signalled(bench: Bench) -> None:
    bench.listed["clients"][0]["started"] = "2026-01-01T00:00:00.000Z"
    assert bench.end()["how"] == "it has ended by itself"
    assert bench.job.poll() is None


def test_a_process_outside_mps_that_gets_no_signal_causes_no_event(bench: Bench) -> None:
    bench.listed["clients"][0]["server"] = None
    one = bench.end(signals=())
    assert (one["ended"], one["how"], bench.events) == (False, "it is not an MPS client", [])
    assert bench.job.poll() is None


def test_a_client_that_is_not_disconnected_is_signalled_only_to_kill_it(bench: Bench) -> None:
    def refuse() -> bool:
        raise ControlError("the MPS server refused to disconnect it", "")

    bench.serve = refuse
    one = bench.end()
    assert (one["ended"], one["how"]) == (False, "the MPS server refused to disconnect it")
    one = bench.end(signals=module.KILL)
    how = "its MPS server did not disconnect it (the MPS server refused to disconnect it); ended by SIGTERM"
    assert (one["ended"], one["how"]) == (True, how)


def test_a_busy_control_daemon_is_asked_again(bench: Bench) -> None:
    answers = [OccupiedError("/pipe"), OccupiedError("/pipe")]

    def serve() -> bool:
        if answers:
            raise answers.pop()
        return True

    bench.serve = serve
    assert bench.end()["how"] == "its MPS server disconnected it; ended by SIGTERM"
    assert [event.cause for event in bench.events] == ["requested by root"]


def test_a_client_that_waits_for_its_turn_is_asked_for_again_as_well(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many clients, its turn may come later than the time that a busy control daemon is given."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    answers = [OccupiedError("/pipe")]

    def serve() -> bool:
        if answers:
            raise answers.pop()
        return True

    async def work(terminator: module.Terminator) -> Any:
        loop, lock = asyncio.get_running_loop(), terminator._clients.conversation
        await lock.acquire()
        ending = asyncio.ensure_future(terminator.terminate_all(itemgetter("clients"), 0))
        while not lock._waiters:  # noqa: ASYNC110 - a lock has no event to wait for
            await asyncio.sleep(0.001)
        turn_s = loop.time() + 2 * module.OCCUPIED_S
        monkeypatch.setattr(loop, "time", lambda: turn_s)
        lock.release()
        return await ending

    bench.serve = serve
    assert bench.of(work)[0]["how"] == "its MPS server disconnected it; ended by SIGTERM"


def test_without_signals_a_client_is_only_disconnected(bench: Bench) -> None:
    one = bench.end(signals=())
    assert (one["ended"], one["how"]) == (False, "its MPS server disconnected it")
    assert bench.job.poll() is None


def test_only_root_and_its_owner_may_terminate_a_client(bench: Bench) -> None:
    one = bench.end(uid=12345)
    assert (one["ended"], one["reason_code"]) == (False, "not_allowed")
    assert bench.job.poll() is None


@pytest.mark.parametrize("is_inside", [True, False])
def test_the_owner_of_a_lease_may_terminate_all_in_its_container(bench: Bench, is_inside: bool) -> None:
    """`container` is the one that root has attested; that of the process is what the kernel says."""
    lease: Any = {**LEASE, "id": bench.listed["clients"][0]["lease"]}
    own = control_groups_of(bench.job.pid)[0]
    container = own if is_inside else own._replace(path="/another")
    (one,) = bench.of(lambda terminator: terminator.terminate_lease(lease, 12345, container=container))
    assert (one["ended"], one["reason_code"]) == (is_inside, "" if is_inside else "not_allowed")


def test_the_id_of_a_container_alone_allows_nothing(bench: Bench) -> None:
    """A user can have given it to a control group of their own, or to root's process by its environment."""
    bench.listed["clients"][0].update(container_id="a" * 64, uid=12345, user="mallory")
    lease: Any = {**LEASE, "binding": "container", "container_id": "a" * 64, "uid": 12345}
    (one,) = bench.of(lambda terminator: terminator.terminate_lease(lease, 12345))
    assert (one["ended"], one["reason_code"]) == (False, "not_allowed")
    assert bench.job.poll() is None


BUSY = "domain host: the MPS server (PID 4250) does not list its clients, because one of another user waits"


@pytest.fixture
def unlisted(bench: Bench) -> Bench:
    """Its server does not list the client, because a client of another user waits."""
    bench.listed = clients(errors=(BUSY,))
    return bench


def test_a_client_that_may_be_one_is_terminated_only_by_force(
    unlisted: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIST_S", 0.0)
    pid = unlisted.job.pid
    with pytest.raises(HostError) as refused:
        unlisted.of(lambda terminator: terminator.terminate_client(pid, 0))
    assert refused.value.code == PROCESSES_UNKNOWN
    assert unlisted.job.poll() is None
    one = unlisted.of(lambda terminator: terminator.terminate_client(pid, 0, signals=module.KILL))
    how = "its MPS server disconnected it; ended by SIGTERM"
    assert (one["pid"], one["ended"], one["how"]) == (pid, True, how)


def test_the_holder_of_a_lease_is_terminated_by_force_if_unlisted(
    unlisted: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIST_S", 0.0)
    lease: Any = {**LEASE, "pid": unlisted.job.pid}

    def terminate_lease(terminator: module.Terminator) -> Any:
        return terminator.terminate_lease(lease, 0, signals=module.KILL, even_if_unknown=True)

    (one,) = unlisted.of(terminate_lease)
    assert (one["pid"], one["ended"]) == (unlisted.job.pid, True)


def test_the_holder_of_a_lease_is_terminated_once_by_force_if_listed(bench: Bench) -> None:
    lease: Any = {**LEASE, "pid": bench.job.pid}

    def terminate_lease(terminator: module.Terminator) -> Any:
        return terminator.terminate_lease(lease, 0, signals=module.KILL, even_if_unknown=True)

    (one,) = bench.of(terminate_lease)
    assert (one["pid"], one["ended"]) == (bench.job.pid, True)


def test_while_the_daemon_stops_no_hint_says_to_kill_a_process(bench: Bench) -> None:
    bench._supervisor.stopping = True
    with pytest.raises(BusyError) as refused:
        bench.of(lambda terminator: terminator.terminate_client(bench.job.pid, 0))
    assert refused.value.hint == "wait: it ends their MPS servers after cuda_mps_stop_timeout_s"
