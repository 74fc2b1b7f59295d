"""Which processes are never terminated as jobs, and what may happen while a client is terminated."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.answers import ClientListJson
from yunion_mps.core.errors import BusyError, HostError, NotAllowedError, NotFoundError
from yunion_mps.core.models import Event
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import PROCESSES_UNKNOWN
from yunion_mps.core.units import rfc3339
from yunion_mps.host.control_groups import control_groups_of
from yunion_mps.host.proc import is_kernel_thread, started_s
from yunion_mps.observe.clients import ClientService
from yunion_mps.service import terminate as module

from integration.daemon_host import is_running
from integration.mps_jobs import STUBBORN_JOB
from unit.described_supervisor import DescribedSupervisor
from unit.http.fake_services import CLIENT, LEASE, SERVER, clients
from unit.mps.domain_bench import Bench, private_bench

pytestmark = pytest.mark.processes  # the control daemon is real

BY_TERM = "its MPS server disconnected it; ended by SIGTERM"


class Turns(asyncio.Lock):
    """The lock of the conversation with control daemons; calls `asked` with how often it was asked for."""

    def __init__(self, asked: Callable[[int], None]) -> None:
        super().__init__()
        self._asked = asked
        self._count = 0

    async def acquire(self) -> bool:  # type: ignore[override]
        self._count += 1
        self._asked(self._count)
        return await super().acquire()


class ListedClients(ClientService):
    """The clients that `listed` returns, without an observer of processes."""

    def __init__(self, conversation: asyncio.Lock, listed: Callable[[], ClientListJson]) -> None:
        # Without super().__init__(), which needs the observer.
        self.conversation = conversation
        self.listed = listed

    async def clients(self, *, seen: bool = False) -> ClientListJson:
        return self.listed()


class Scene:
    """A control daemon with a server and its client `job`, and a Terminator that is told of `listed`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.run = bench.serving()
        self.job = bench.jobs.attach().pid
        self.run.advance(1)
        #: Called whenever a conversation with the control daemon is about to begin, with its number.
        self.on_turn: Callable[[int], None] = lambda _: None
        self.supervisor = DescribedSupervisor(paths=Paths.from_environment(), domains=[self.run.domain])
        bench.stack.callback(self.supervisor.release)
        self.listed: Any = None
        self.list(self.job)

    @property
    def events(self) -> Sequence[Event]:
        return [record.event for record in self.supervisor.event_log.newest(0.0, 100)]

    def list(self, pid: int, **fields: Any) -> None:
        """List this process as the only client of the server."""
        began_s = started_s(pid)
        assert began_s is not None
        own = {"pid": pid, "uid": os.getuid(), "started": rfc3339(began_s), "server": self.run.server}
        self.listed = clients({**CLIENT, **own, **fields})

    def list_none(self) -> None:
        """List no client, because the server does not say which ones it has."""
        server = {**SERVER, "pid": self.run.server}
        self.listed = clients(servers=(server,), errors=(BUSY,))

    def list_stranger(self) -> subprocess.Popen[bytes]:
        """List a process that the server does not know, so it refuses to disconnect it."""
        stranger = self.bench.stack.enter_context(subprocess.Popen(["sleep", "600"]))
        self.bench.stack.callback(stranger.kill)
        self.list(stranger.pid)
        return stranger

    def refusal(self) -> str:
        how = "refused to disconnect it (the control daemon answered: 1)"
        return f"the MPS server (PID {self.run.server}) {how}"

    def end(self, uid: int = 0, signals: Any = module.TERM) -> Any:
        """The termination of the client."""
        choose = itemgetter("clients")
        return self.of(lambda terminator: terminator.terminate_all(choose, uid, signals=signals))[0]

    def of(self, work: Callable[[module.Terminator], Coroutine[Any, Any, Any]]) -> Any:
        async def run() -> Any:
            lock = Turns(lambda count: self.on_turn(count))
            return await asyncio.wait_for(self.within(lock, work), 60)

        return asyncio.run(run())

    async def within(
        self, lock: asyncio.Lock, work: Callable[[module.Terminator], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Do this with a Terminator, whose conversations wait for the lock."""
        return await work(module.Terminator(self.supervisor, ListedClients(lock, lambda: self.listed)))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with private_bench(monkeypatch) as bench:
        program = Path(bench.jobs.program)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        yield Scene(bench)


def test_processes_of_the_system_and_of_mps_are_not_jobs(scene: Scene) -> None:
    ours = {1: "the init process", os.getpid(): "this daemon"}
    ours[scene.run.pid] = "a control daemon"
    ours[scene.run.server] = "an MPS server"
    for pid, what in ours.items():
        scene.list(pid, server=None)
        one = scene.end(signals=())
        assert (one["ended"], one["how"]) == (False, f"PID {pid} is {what}, not a job")
        assert one["reason_code"] == NotAllowedError.code


@pytest.mark.parametrize(("flags", "is_thread"), [(0x208040, True), (0x400100, False)])
def test_a_kernel_thread_is_recognised_by_its_flags(tmp_path: Path, flags: int, is_thread: bool) -> None:
    (tmp_path / "2").mkdir()
    (tmp_path / "2/stat").write_text(f"2 (kthreadd) S 0 0 0 0 -1 {flags} 0 0 0\n")
    assert is_kernel_thread(2, str(tmp_path)) is is_thread


def test_a_client_may_end_by_itself_while_it_is_terminated(scene: Scene) -> None:
    stranger = scene.list_stranger()

    def end_by_itself(_: int) -> None:
        stranger.kill()
        stranger.wait()

    scene.on_turn = end_by_itself
    one = scene.end()
    assert (one["ended"], one["how"], one["reason_code"]) == (True, "it has ended by itself", "")


def test_a_client_may_have_ended_already(scene: Scene) -> None:
    stranger = scene.list_stranger()
    stranger.kill()
    stranger.wait()
    assert scene.end()["how"] == "it has ended by itself"


def test_a_reused_pid_is_not_signalled(scene: Scene) -> None:
    scene.list(scene.job, started="2026-01-01T00:00:00.000Z")
    assert scene.end()["how"] == "it has ended by itself"
    assert is_running(scene.job)


def test_a_client_that_was_listed_with_another_start_is_not_terminated(scene: Scene) -> None:
    """It has ended since, and its PID is another client's now."""
    started = "2026-01-01T00:00:00.000Z"
    with pytest.raises(NotFoundError, match="has just ended"):
        scene.of(lambda terminator: terminator.terminate_client(scene.job, 0, started=started))
    assert is_running(scene.job)


def test_a_process_outside_mps_that_gets_no_signal_causes_no_event(scene: Scene) -> None:
    scene.list(scene.job, server=None)
    one = scene.end(signals=())
    assert (one["ended"], one["how"], scene.events) == (False, "it is not an MPS client", [])
    assert is_running(scene.job)


def test_a_client_that_is_not_disconnected_is_signalled_only_to_kill_it(scene: Scene) -> None:
    scene.list_stranger()
    one = scene.end()
    assert (one["ended"], one["how"]) == (False, scene.refusal())
    one = scene.end(signals=module.KILL)
    how = f"its MPS server did not disconnect it ({scene.refusal()}); ended by SIGTERM"
    assert (one["ended"], one["how"]) == (True, how)


def test_a_busy_control_daemon_is_asked_again(scene: Scene) -> None:
    leave = scene.bench.hold_front_end()
    turns = []

    def leave_at_the_third(count: int) -> None:
        turns.append(count)
        if count == 3:
            leave()

    scene.on_turn = leave_at_the_third
    assert scene.end()["how"] == BY_TERM
    assert turns[:3] == [1, 2, 3]
    assert [event.cause for event in scene.events] == ["requested by root"]


def test_a_client_that_waits_for_its_turn_is_asked_for_again_as_well(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many clients, its turn may come later than the time that a busy control daemon is given."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    leave = scene.bench.hold_front_end()

    async def work() -> Any:
        waits = asyncio.Event()

        def let_it_wait_then_leave(count: int) -> None:
            if count == 2:  # the first is our own
                waits.set()
            elif count == 3:
                leave()

        loop, lock = asyncio.get_running_loop(), Turns(let_it_wait_then_leave)
        await lock.acquire()
        ending = scene.within(lock, lambda terminator: terminator.terminate_all(itemgetter("clients"), 0))
        ended = asyncio.ensure_future(ending)
        await asyncio.wait_for(waits.wait(), 60)
        turn_s = loop.time() + 2 * module.OCCUPIED_S
        monkeypatch.setattr(loop, "time", lambda: turn_s)
        lock.release()
        return await ended

    assert asyncio.run(work())[0]["how"] == BY_TERM


def test_without_signals_a_client_is_only_disconnected(scene: Scene) -> None:
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": scene.bench.plan.pipe_directory}
    job = subprocess.Popen(STUBBORN_JOB, env=environment, stdout=subprocess.PIPE)
    with job, ExitStack() as stack:
        stack.callback(job.kill)
        assert job.stdout
        assert [job.stdout.readline() for _ in range(2)] == [b"asking\n", b"attached\n"]
        scene.list(job.pid)
        one = scene.end(signals=())
        assert (one["ended"], one["how"]) == (False, "its MPS server disconnected it")
        assert job.stdout.readline() == b"terminated\n"
        assert job.poll() is None


def test_only_root_and_its_owner_may_terminate_a_client(scene: Scene) -> None:
    one = scene.end(uid=12345)
    assert (one["ended"], one["reason_code"]) == (False, "not_allowed")
    assert is_running(scene.job)


@pytest.mark.parametrize("is_inside", [True, False])
def test_the_owner_of_a_lease_may_terminate_all_in_its_container(scene: Scene, is_inside: bool) -> None:
    """`container` is the one that root has attested; that of the process is what the kernel says."""
    lease: Any = {**LEASE, "id": scene.listed["clients"][0]["lease"]}
    own = control_groups_of(scene.job)[0]
    container = own if is_inside else own._replace(path="/another")
    (one,) = scene.of(lambda terminator: terminator.terminate_lease(lease, 12345, container=container))
    assert (one["ended"], one["reason_code"]) == (is_inside, "" if is_inside else "not_allowed")


def test_the_id_of_a_container_alone_allows_nothing(scene: Scene) -> None:
    """A user can have given it to a control group of their own, or to root's process by its environment."""
    scene.list(scene.job, container_id="a" * 64, uid=12345, user="mallory")
    lease: Any = {**LEASE, "binding": "container", "container_id": "a" * 64, "uid": 12345}
    (one,) = scene.of(lambda terminator: terminator.terminate_lease(lease, 12345))
    assert (one["ended"], one["reason_code"]) == (False, "not_allowed")
    assert is_running(scene.job)


BUSY = "domain host: the MPS server (PID 4250) does not list its clients, because one of another user waits"


def test_a_client_that_may_be_one_is_terminated_only_by_force(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIST_S", 0.0)
    scene.list_none()
    with pytest.raises(HostError) as refused:
        scene.of(lambda terminator: terminator.terminate_client(scene.job, 0))
    assert refused.value.code == PROCESSES_UNKNOWN
    assert is_running(scene.job)
    one = scene.of(lambda terminator: terminator.terminate_client(scene.job, 0, signals=module.KILL))
    assert (one["pid"], one["ended"], one["how"]) == (scene.job, True, BY_TERM)


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_holder_of_a_lease_is_terminated_once_by_force(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    monkeypatch.setattr(module, "LIST_S", 0.0)
    if not is_listed:
        scene.list_none()
    lease: Any = {**LEASE, "pid": scene.job}

    def terminate_lease(terminator: module.Terminator) -> Any:
        return terminator.terminate_lease(lease, 0, signals=module.KILL, even_if_unknown=True)

    (one,) = scene.of(terminate_lease)
    assert (one["pid"], one["ended"]) == (scene.job, True)


def test_while_the_daemon_stops_no_hint_says_to_kill_a_process(scene: Scene) -> None:
    scene.supervisor.stopping = True
    with pytest.raises(BusyError) as refused:
        scene.of(lambda terminator: terminator.terminate_client(scene.job, 0))
    assert refused.value.hint == "wait: it ends their MPS servers after cuda_mps_stop_timeout_s"
