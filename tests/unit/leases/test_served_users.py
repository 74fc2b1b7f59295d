"""MPS serves one user at a time: on each control daemon, devices are granted to one user only."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.core.errors import NothingFreeError
from yunion_mps.core.models import DomainPlan, Holder, Lease, ServedUser
from yunion_mps.core.reasons import GPU_LOST, OTHER_USER, SERVER_START_FAILED, Reason
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.queue import Queue
from yunion_mps.leases.request import Candidate, Candidates, LeaseRequest, QueuedRequest
from yunion_mps.leases.served_users import served_users

from unit.leases.lease_builders import device, lease, pool

ALICE, BOB, CAROL = 1001, 1002, 1003
SLOTS = 2
ONE_DEVICE = LeaseRequest()


class Host:
    """GPUs with a control daemon each, or one for all, and the leases and the queue of their devices."""

    def __init__(self, gpus: int, *, each: bool = True, multiuser: bool = False) -> None:
        self.ledger = Ledger()
        self.queue = Queue(Allocator(self.ledger), clock=lambda: 0.0)
        self.jobs: dict[str, list[ServedUser]] = {}
        names = [f"gpu-{gpu}" if each else "host" for gpu in range(gpus)]
        self._domains = {
            name: DomainPlan(name, f"/{name}", "/log", (), 100.0, multiuser=multiuser) for name in names
        }
        self._devices = [
            Candidate(device(gpu, slot, SLOTS)._replace(domain=name))
            for gpu, name in enumerate(names)
            for slot in range(SLOTS)
        ]
        #: The users whose MPS servers do not start, by domain.
        self.failing_users: dict[str, dict[int, Reason]] = {}
        self._positions = count(1)

    def break_gpu(self, number: int, code: str = GPU_LOST) -> None:
        """Let a GPU be lost, or unavailable for another reason."""
        lost = Reason("it is lost", code)
        self._devices = [
            one._replace(reason=lost) if one.device.gpu_uuid == f"GPU-{number}" else one
            for one in self._devices
        ]

    @property
    def candidates(self) -> Candidates:
        users = served_users(self.ledger.leases.values(), self.jobs, self._domains)
        return Candidates(self._devices, domains=self._domains, users=users, failing_users=self.failing_users)

    def request(self, user: int, request: LeaseRequest = ONE_DEVICE, binding: str = "process") -> int:
        """Queue a request of the user; return its position."""
        holder = Holder(binding, user, 1)
        queued = QueuedRequest(request, holder, position=next(self._positions))
        self.queue.add(queued)
        return queued.position

    def serve(self) -> list[int]:
        """Grant what fits now; return the positions."""
        granted = []
        while found := self.queue.next(self.candidates):
            queued, devices = found
            made = lease(str(queued.position), *devices)
            self.ledger.add(made._replace(holder=queued.holder))
            self.queue.requests.remove(queued)
            granted.append(queued.position)
        return granted

    def why_waiting(self, position: int) -> NothingFreeError:
        (queued,) = [one for one in self.queue.requests if one.position == position]
        return self.queue.why_not(queued, self.candidates)


def users_by_domain(leases: Iterable[Lease]) -> dict[str, set[int]]:
    users: dict[str, set[int]] = {}
    for one in leases:
        users.setdefault(one.devices[0].domain, set()).add(one.holder.uid)
    return users


def test_another_user_waits_for_the_control_daemon_of_all_gpus() -> None:
    host = Host(2, each=False)
    first, second = host.request(ALICE), host.request(BOB, LeaseRequest(gpu="GPU-1"))
    assert host.serve() == [first]
    error = host.why_waiting(second)
    assert error.code == OTHER_USER
    assert str(error).startswith(
        "1 device of GPU GPU-1 cannot be allocated now: GPU 01:00.0: its control daemon serves one user at a "
        f"time, now uid {ALICE} (lease {first} on 00:00.0-0, since "
    )
    host.ledger.remove(str(first))
    assert host.serve() == [second]


def test_a_request_is_told_only_of_those_before_it() -> None:
    host = Host(2, each=False)
    host.request(ALICE)
    host.serve()
    first, later = host.request(BOB, LeaseRequest(gpu="GPU-1")), host.request(ALICE)
    assert host.serve() == []
    assert "earlier" not in str(host.why_waiting(first))
    assert f"next uid {BOB}, whose request is earlier" in str(host.why_waiting(later))


def test_another_user_gets_a_gpu_with_a_control_daemon_of_its_own() -> None:
    host = Host(2)
    both = [host.request(ALICE), host.request(BOB)]
    assert host.serve() == both
    assert sorted(users_by_domain(host.ledger.leases.values()).values()) == [{ALICE}, {BOB}]


def test_in_multiuser_mode_users_share_a_control_daemon() -> None:
    host = Host(1, multiuser=True)
    both = [host.request(ALICE), host.request(BOB)]
    assert host.serve() == both


def test_a_user_whose_servers_fail_waits_alone_until_one_starts() -> None:
    host = Host(1)
    host.failing_users = {"gpu-0": {BOB: Reason("MPS servers of bob fail to start: no", SERVER_START_FAILED)}}
    waiting, other = host.request(BOB), host.request(ALICE)
    assert host.serve() == [other], "the domain is not kept for a user who cannot use it"
    host.ledger.remove(str(other))
    error = host.why_waiting(waiting)
    assert error.code == SERVER_START_FAILED
    assert "(GPU 00:00.0: MPS servers of bob fail to start: no)" in str(error)
    host.failing_users = {}
    assert host.serve() == [waiting]


def test_a_request_for_a_degraded_domain_has_its_code_and_log() -> None:
    host = Host(1)
    host.break_gpu(0, SERVER_START_FAILED)
    error = host.why_waiting(host.request(ALICE))
    assert (error.code, error.exit_code) == (SERVER_START_FAILED, 5)
    assert "see the end of /log/server.log" in error.hint


def test_a_request_waits_for_the_user_if_the_other_domain_is_degraded() -> None:
    host = Host(2)
    host.break_gpu(1, SERVER_START_FAILED)
    host.request(ALICE)
    assert host.serve()
    assert host.why_waiting(host.request(BOB)).code == OTHER_USER


def test_jobs_without_a_lease_keep_other_users_out() -> None:
    host = Host(1)
    host.jobs = {"gpu-0": [ServedUser(ALICE, 0.0, server=77)]}
    waiting = host.request(BOB)
    assert host.serve() == []
    assert "jobs on the MPS server (PID 77), since 1970-01-01" in str(host.why_waiting(waiting))
    assert host.serve() == []
    own = host.request(ALICE)
    assert host.serve() == [], "nobody gets ahead of an earlier request"
    host.jobs = {}
    assert host.serve() == [waiting]
    host.ledger.remove(str(waiting))
    assert host.serve() == [own]


def test_a_stream_of_jobs_of_one_user_does_not_starve_another() -> None:
    host = Host(1)
    first = host.request(ALICE)
    assert host.serve() == [first]
    waiting = host.request(BOB)
    later = host.request(ALICE)
    assert host.serve() == [], "one device is free, but it is bob's turn"
    assert "next uid 1002, whose request is earlier" in str(host.why_waiting(later))
    host.ledger.remove(str(first))
    assert host.serve() == [waiting]
    host.ledger.remove(str(waiting))
    assert host.serve() == [later]


def test_a_long_job_on_one_gpu_keeps_nobody_from_the_next_one() -> None:
    """Which GPU is the first to be free is not known, so no later job of the other user gets any."""
    host = Host(2)
    long, short = (host.request(ALICE, LeaseRequest(gpu=f"GPU-{gpu}")) for gpu in (0, 1))
    assert host.serve() == [long, short]
    waiting = host.request(BOB)
    host.request(ALICE, LeaseRequest(gpu="GPU-1"))
    assert host.serve() == []
    host.ledger.remove(str(short))
    assert host.serve() == [waiting]


def test_a_control_daemon_without_a_user_is_kept_for_the_first_who_waits() -> None:
    """A pod has GPU 0, so alice waits; bob would get GPU 1, and with it the control daemon of both."""
    host = Host(2, each=False)
    pod = host.request(0, LeaseRequest(2, gpu="GPU-0"), binding="container")
    assert host.serve() == [pod]
    waiting = host.request(ALICE, LeaseRequest(2, gpu="GPU-0"))
    later = host.request(BOB, LeaseRequest(gpu="GPU-1"))
    own = host.request(ALICE, LeaseRequest(gpu="GPU-1"))
    assert host.serve() == []
    host.ledger.remove(str(pod))
    assert host.serve() == [waiting]
    assert [queued.position for queued in host.queue.requests] == [later, own]


def test_later_requests_of_the_next_user_do_not_delay_the_user_after() -> None:
    host = Host(2, each=False)
    pod = host.request(0, LeaseRequest(2, gpu="GPU-0"), binding="container")
    host.serve()
    first = host.request(ALICE, LeaseRequest(2, gpu="GPU-0"))
    second = host.request(BOB, LeaseRequest(gpu="GPU-1"))
    later = host.request(ALICE, LeaseRequest(gpu="GPU-1"))
    assert host.serve() == [], "GPU 1 is free, but then bob would wait for alice's later job, too"
    assert f"next uid {BOB}, whose request is earlier" in str(host.why_waiting(later))
    host.ledger.remove(str(pod))
    assert host.serve() == [first]
    host.ledger.remove(str(first))
    assert host.serve() == [second]


def test_pods_do_not_take_what_a_user_needs_of_another_user_s_gpu() -> None:
    host = Host(1)
    own = host.request(ALICE)
    host.serve()
    waiting = host.request(BOB, LeaseRequest(2))
    host.request(0, binding="container")
    assert host.serve() == []
    host.ledger.remove(str(own))
    assert host.serve() == [waiting]


def test_what_cannot_be_satisfied_now_reserves_no_control_daemon() -> None:
    """As if a GPU were lost: the ends of other users' jobs would not help."""
    host = Host(2, each=False)
    host.break_gpu(1)
    first = host.request(ALICE)
    assert host.serve() == [first]
    waiting = host.request(BOB, LeaseRequest(2, across=True))
    assert host.serve() == []
    own = host.request(ALICE)
    assert host.serve() == [own]
    assert [one.position for one in host.queue.requests] == [waiting]


def test_a_request_of_an_unknown_user_neither_waits_nor_keeps_others_out() -> None:
    host = Host(1)
    pod, own = host.request(0, binding="container"), host.request(ALICE)
    assert host.serve() == [pod, own]


@given(
    st.lists(
        st.tuples(st.sampled_from([ALICE, BOB, CAROL]), st.integers(1, SLOTS), st.sampled_from([0, 1, None])),
        max_size=20,
    ),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_users_are_never_mixed_and_all_are_served_in_the_end(
    asked: list[tuple[int, int, int | None]], each: bool, random: Random
) -> None:
    """Requests come while others wait, and leases end in any order."""
    host = Host(2, each=each)
    to_come = [
        (user, LeaseRequest(number, gpu="" if gpu is None else f"GPU-{gpu}")) for user, number, gpu in asked
    ]
    granted: list[int] = []
    for _ in range(3 * len(asked) + 1):
        if to_come:
            host.request(*to_come.pop(0))
        granted += host.serve()
        assert all(len(users) == 1 for users in users_by_domain(host.ledger.leases.values()).values())
        if host.ledger.leases:
            host.ledger.remove(random.choice([*host.ledger.leases]))
    assert sorted(granted) == list(range(1, len(asked) + 1))


@given(st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_user_is_served_although_another_user_never_stops(gpus: int, random: Random) -> None:
    """At the latest once the leases that were there before have ended, each followed by another one."""
    host = Host(gpus)
    for _ in range(SLOTS * gpus):
        host.request(ALICE)
    before = host.serve()
    bob = host.request(BOB)
    granted: list[int] = []
    random.shuffle(before)
    for position in before:
        host.request(ALICE)
        host.ledger.remove(str(position))
        granted += host.serve()
    assert bob in granted


def test_the_reason_names_the_user_who_keeps_a_free_device() -> None:
    host = Host(1)
    host.request(ALICE)
    host.serve()
    with pytest.raises(NothingFreeError) as refusal:
        host.queue.choose(QueuedRequest(ONE_DEVICE, Holder("process", BOB, 1)), host.candidates)
    assert refusal.value.code == OTHER_USER


def test_memory_of_a_pool_is_kept_for_the_next_user_of_its_control_daemon() -> None:
    queue = Queue(Allocator(Ledger()), clock=lambda: 0.0)
    there = Candidates(pools=[pool(0)], users={"host": [ServedUser(ALICE, 0.0, server=77)]})
    waiting = QueuedRequest(LeaseRequest(memory_mib=100), Holder("process", BOB, 1))
    queue.add(waiting)
    assert queue.next(there) is None
    assert queue.promised == {"host": (BOB,)}
    error = queue.why_not(waiting, there)
    assert error.code == OTHER_USER
    assert f"now uid {ALICE} (jobs on the MPS server (PID 77)" in str(error)


def test_a_server_that_ends_for_another_user_serves_nobody_new() -> None:
    host = Host(1)
    next_user = ServedUser(BOB, 0.0, server=77, is_next=True)
    host.jobs = {"gpu-0": [ServedUser(ALICE, 0.0, server=77), next_user]}
    own, of_next = host.request(ALICE), host.request(BOB)
    assert host.serve() == []
    assert f"next uid {BOB}, for whose client the MPS server (PID 77) ends" in str(host.why_waiting(own))
    assert f"now uid {ALICE} (jobs on the MPS server (PID 77)" in str(host.why_waiting(of_next))
    host.jobs = {}
    assert host.serve() == [own]


def test_a_user_is_listed_with_the_first_of_their_leases() -> None:
    """Thousands of leases are not looked through for each request."""
    domains = {"host": DomainPlan("host", "/host", "/log", (), 100.0)}
    leases = [lease(str(slot), device(0, slot)) for slot in range(3)]
    bobs = lease("3", device(0, 3))._replace(holder=Holder("process", BOB, 1))
    (users,) = served_users([*leases, bobs], {}, domains).values()
    assert [user.because_of for user in users] == [
        ServedUser(leases[0].holder.uid, leases[0].since_s, leases[0]).because_of,
        ServedUser(BOB, bobs.since_s, bobs).because_of,
    ]
