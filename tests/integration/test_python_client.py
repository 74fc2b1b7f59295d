"""`yunion_mps.Client`, on a whole host: every example of its page, and leases over the ends of things."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path

import pytest
import yunion_mps
from yunion_mps.client import (
    AsyncClient,
    Client,
    InfeasibleError,
    NotFoundError,
    NothingFreeError,
    UnreachableError,
)
from yunion_mps.core.errors import HostError, YunionError

from integration.daemon_host import PATIENCE_S, Daemon, eventually

pytestmark = pytest.mark.gpus({"kind": "v100"})

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs/python.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ADDRESSES = [f"00:06.0-{slot}" for slot in range(4)]


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor()
    yield threads
    threads.shutdown(wait=False)  # a test that fails leaves a caller that waits


@pytest.fixture
def client(ready_daemon: Daemon, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("YUNION_MPS_ROOT", str(ready_daemon.host.root))
    return Client(messages.append)


@pytest.fixture
def shared_client(shared_daemon: Daemon, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client of the daemon that all tests share."""
    monkeypatch.setenv("YUNION_MPS_ROOT", str(shared_daemon.host.root))
    return Client(messages.append)


def addresses_leased_by(client: Client) -> list[str]:
    return sorted(address for lease in client.leases() for address in lease.devices)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_of_the_page_runs_and_leaves_nothing_taken(
    shared_daemon: Daemon, shared_client: Client, example: str, tmp_path: Path
) -> None:
    file = tmp_path / "example.py"
    file.write_text(example)
    done = shared_daemon.host.run([sys.executable, file])
    assert (done.returncode, done.stderr) == (0, "")
    eventually(lambda: addresses_leased_by(shared_client) == [], "that all is free")


def test_the_examples_pass_a_strict_type_check_with_the_installed_package(tmp_path: Path) -> None:
    for number, example in enumerate(EXAMPLES):
        (tmp_path / f"example{number}.py").write_text(example)
    shutil.copy(CHECKOUT / "docs/examples/llm_servers.py", tmp_path)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from yunion_mps import Client\nwith Client().lease() as lease:\n    lease.nothing\n")
    files: list[str | Path] = sorted(tmp_path.glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    lines = done.stdout.splitlines()
    assert lines[0] == 'wrong.py:3: error: "HeldLease" has no attribute "nothing"  [attr-defined]'
    assert lines[1].startswith("Found 1 error in 1 file"), done.stdout


def test_any_python_finds_it_beside_h11_without_our_environment(
    shared_daemon: Daemon, shared_client: Client, tmp_path: Path
) -> None:
    """As the packages lay it out; `-IS` keeps everything else away."""
    spec = find_spec("h11")
    assert spec
    assert spec.origin
    (tmp_path / "vendor").mkdir()
    (tmp_path / "yunion_mps").symlink_to(Path(yunion_mps.__file__).parent)
    (tmp_path / "vendor/h11").symlink_to(Path(spec.origin).parent)
    code = (
        f"import sys; sys.path += [{str(tmp_path)!r}, {str(tmp_path / 'vendor')!r}]\n"
        "from yunion_mps import Client\nprint(Client().lease().devices)"
    )
    base = sys._base_executable  # type: ignore[attr-defined]
    done = shared_daemon.host.run([base, "-IS", "-c", code])
    assert (done.stdout, done.stderr) == (f"('{ADDRESSES[0]}',)\n", "")


def modules_loaded_by(code: str) -> list[str]:
    code = f"import sys; before = {{*sys.modules}}; {code}; print(*({{*sys.modules}} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout.split()


def test_only_what_is_needed_of_the_client_is_loaded() -> None:
    assert modules_loaded_by("import yunion_mps") == ["yunion_mps"]
    found = modules_loaded_by("from yunion_mps import Client")
    others = {"asyncio", "click", "email", "http.client", "logging", "pynvml", "random", "sqlite3", "ssl"}
    assert found
    assert others.union({"subprocess", "urllib.parse", "yaml"}).intersection(found) == set()
    with pytest.raises(AttributeError, match="no attribute 'Cliemt'"):
        yunion_mps.Cliemt  # type: ignore[attr-defined] # noqa: B018


def test_a_lease_ends_with_its_block_however_that_is_left(shared_client: Client) -> None:
    with contextlib.suppress(ZeroDivisionError), shared_client.lease(devices=[ADDRESSES[2]]) as lease:
        (record,) = shared_client.leases()
        assert (record.id, record.pid, record.binding) == (lease.id, os.getpid(), "process")
        assert lease.devices == (ADDRESSES[2],)
        assert (lease.memory_mib, lease.thread_percentage, lease.gpus) == (4096, 25, ("00:06.0",))
        assert lease.environ() == {**os.environ, **record.environment}
        assert lease.environ({"A": "b"}) == {"A": "b", **record.environment}
        assert len(shared_client.devices(unused=True)) == 3
        counts = shared_client.status().devices
        assert (counts.total, counts.used, counts.free) == (4, 1, 3)
        1 / 0  # noqa: B018
    assert addresses_leased_by(shared_client) == []
    lease.release()
    assert len(shared_client.devices(unused=True)) == 4


def test_unavailable_infeasible_and_unknown_have_their_own_errors(shared_client: Client) -> None:
    with shared_client.lease(devices=[ADDRESSES[0]]):
        with pytest.raises(NothingFreeError, match="1 of 1 leased"):
            shared_client.lease(devices=[ADDRESSES[0]])
        with pytest.raises(InfeasibleError, match="can never be allocated"):
            shared_client.lease(count=2, across=True, wait_s=math.inf)
    with pytest.raises(NotFoundError, match="there is no device nosuch"):
        shared_client.device("nosuch")


def test_a_caller_that_waits_gets_the_device_once_it_is_free(
    shared_client: Client, messages: list[str], background: ThreadPoolExecutor
) -> None:
    first = shared_client.lease(devices=[ADDRESSES[0]])
    second = background.submit(shared_client.lease, devices=[ADDRESSES[0]], wait_s=math.inf)
    eventually(lambda: messages, "that it waits")
    (message,) = messages
    assert message.startswith(f"waiting: device {ADDRESSES[0]} ")
    first.release()
    second.result(PATIENCE_S).release()


def test_a_lease_is_given_back_to_the_next_daemon_if_its_own_is_away(
    ready_daemon: Daemon, client: Client, messages: list[str], background: ThreadPoolExecutor
) -> None:
    lease = client.lease()
    ready_daemon.kill()
    released = background.submit(lease.release)
    eventually(lambda: messages, "that it waits for the daemon")
    ready_daemon.start().wait_ready()
    released.result(PATIENCE_S)
    assert addresses_leased_by(client) == []


def test_a_fork_of_the_process_gives_nothing_back(shared_client: Client) -> None:
    with shared_client.lease() as lease:
        child = os.fork()
        if not child:
            lease.release()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert addresses_leased_by(shared_client) == [ADDRESSES[0]]


def test_an_exception_of_the_block_is_not_replaced_by_the_daemons(
    ready_daemon: Daemon, client: Client, messages: list[str]
) -> None:
    with contextlib.suppress(ZeroDivisionError), client.lease():
        ready_daemon.kill()
        1 / 0  # noqa: B018
    (why,) = messages
    assert why.startswith(f"the lease of {ADDRESSES[0]} could not be released: the daemon is not running")


def test_a_lease_lives_through_a_reexec_of_the_daemon(ready_daemon: Daemon, client: Client) -> None:
    with client.lease() as lease, client.lease(name="job-17", ttl_s=1) as named:
        ready_daemon.reexec()
        then = client.leases()[1].since + timedelta(seconds=4)
        eventually(lambda: (client.leases()[1].expires or then) > then, "a renewal by the next daemon")
        lease.check()
        named.check()
    assert addresses_leased_by(client) == []


def test_a_lease_stays_in_its_process_and_its_record_travels(shared_client: Client) -> None:
    with shared_client.lease() as lease:
        with pytest.raises(
            TypeError, match="a HeldLease cannot be passed to another process: pass its record"
        ):
            pickle.dumps(lease)
        assert pickle.loads(pickle.dumps(lease.record)) == lease.record


def test_a_lease_whose_gpu_is_lost_says_so_and_can_be_released(ready_daemon: Daemon, client: Client) -> None:
    with client.lease() as lease:
        lease.check()
        ready_daemon.host.gpus[0].lose()
        error = eventually(lambda: error_of(lease.check), "the loss of the GPU")
        assert isinstance(error, HostError)
        assert error.code in ("gpu_lost", "gpu_fault")  # which of these is noticed first differs
        assert error.message.startswith(f"device {ADDRESSES[0]} is unavailable: ")
        lease.release()
        error = error_of(lease.check)
        assert isinstance(error, NotFoundError)
        assert error.message == f"the lease of {ADDRESSES[0]} has ended"


def error_of(call: Callable[[], None]) -> YunionError | None:
    try:
        call()
    except YunionError as error:
        return error
    return None


def test_threads_share_a_client(shared_client: Client, background: ThreadPoolExecutor) -> None:
    leases = list(background.map(lambda _: shared_client.lease(wait_s=60), range(4)))
    assert sorted(lease.devices[0] for lease in leases) == ADDRESSES == addresses_leased_by(shared_client)
    list(background.map(lambda lease: lease.release(), leases))
    assert addresses_leased_by(shared_client) == []


def test_a_lease_with_a_name_is_renewed_until_it_is_given_back(shared_client: Client) -> None:
    with shared_client.lease(name="job-17", ttl_s=1) as lease:
        (first,) = shared_client.leases()
        assert (first.name, first.pid, lease.name) == ("job-17", None, "job-17")
        third = first.since + timedelta(seconds=3)
        eventually(lambda: (shared_client.leases()[0].expires or third) > third, "a third renewal")
        assert lease.lost == ""
    assert addresses_leased_by(shared_client) == []


def test_a_lease_with_a_name_says_that_another_caller_has_ended_it(
    shared_daemon: Daemon, shared_client: Client, messages: list[str]
) -> None:
    with shared_client.lease(name="job-17", ttl_s=1) as lease:
        assert shared_daemon.ask("DELETE", f"/v1/leases/{lease.id}")[0] == 200
        assert eventually(lambda: lease.lost).startswith("there is no lease")
        assert messages == [f"the lease of {ADDRESSES[0]} is lost: {lease.lost}"]


def test_a_control_daemon_that_this_user_cannot_reach_gets_no_lease(
    ready_daemon: Daemon, client: Client, as_nobody: Callable[[], None]
) -> None:
    ready_daemon.socket_path.chmod(0o666)
    ready_daemon.pipe_directory.chmod(0o700)
    as_nobody()
    with pytest.raises(HostError, match="cannot be reached by this user"):
        client.lease(name="a", ttl_s=600)
    assert addresses_leased_by(client) == []


@pytest.fixture
def as_nobody() -> Iterator[Callable[[], None]]:
    """Go on as another user, until the end of the test."""
    if os.geteuid() != 0:
        pytest.skip("becomes another user, which needs root")
    groups = os.getgroups()

    def become() -> None:
        os.setgroups([])
        os.setegid(65534)
        os.seteuid(65534)

    yield become
    os.seteuid(0)
    os.setegid(0)
    os.setgroups(groups)


def test_events_since_a_time_continue_across_a_restart(ready_daemon: Daemon, client: Client) -> None:
    began = datetime.now(timezone.utc)
    client.lease(devices=[ADDRESSES[1]]).release()
    told = [event.what.partition(" ")[0] for event in client.events(since=began, kind="lease")]
    assert told == ["granted", "released"]
    assert list(client.events(since=timedelta(seconds=-60))) == []
    following = client.events(since=began, kind="lease", follow=True)
    assert [next(following).subject, next(following).subject] == [ADDRESSES[1]] * 2
    ready_daemon.kill()
    ready_daemon.start().wait_ready()
    client.lease(devices=[ADDRESSES[3]]).release()
    assert next(following).subject == ADDRESSES[3]


def test_devices_are_watched_also_past_a_restart(ready_daemon: Daemon, client: Client) -> None:
    watched = client.watch_devices()
    assert next(watched) == client.devices()
    with client.lease(devices=[ADDRESSES[1]]) as lease:
        assert [device.lease for device in next(watched)] == [None, lease.id, None, None]
        ready_daemon.kill()
        ready_daemon.start().wait_ready()
    changed = next(devices for devices in watched if all(device.free for device in devices))
    assert [device.addr for device in changed] == ADDRESSES


def test_without_a_daemon_both_clients_say_so_at_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YUNION_MPS_ROOT", str(daemon.host.root))
    with pytest.raises(UnreachableError, match="the daemon is not running"):
        Client().lease()
    with pytest.raises(UnreachableError, match="the daemon is not running"):
        asyncio.run(AsyncClient().devices())
