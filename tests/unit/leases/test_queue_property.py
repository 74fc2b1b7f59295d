"""The queue on random hosts, against an exhaustive search: nothing twice, no starvation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from random import Random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.errors import YunionError
from yunion_mps.core.models import Device, DomainPlan, Holder, Lease, PlannedGpu
from yunion_mps.core.reasons import GPU_LOST, OTHER_USER, Reason
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger, needs_mib
from yunion_mps.leases.match import Reservation
from yunion_mps.leases.queue import Queue
from yunion_mps.leases.request import Candidate, Candidates, LeaseRequest, PoolCandidate, QueuedRequest
from yunion_mps.leases.served_users import served_users
from yunion_mps.planning.division import thread_tenths

from unit.leases.lease_builders import GPU_MIB, device, pool, refuse_if_infeasible

LOST = Reason("the GPU is lost", GPU_LOST)
USERS = (1001, 1002)
RESERVED_FOR = "batch"
SLICES = ((600, 300, 300), (900, 300), (400, 800), (300, 300, 300, 300))


class Division(NamedTuple):
    """What a GPU is divided into."""

    devices: list[Candidate]
    pools: list[PoolCandidate]


def equal(gpu: int, random: Random, domain: str) -> Division:
    number = random.randint(1, 4)
    devices = [device(gpu, slot, number)._replace(domain=domain) for slot in range(number)]
    return Division([Candidate(share) for share in devices], [])


def sliced(gpu: int, random: Random, domain: str) -> Division:
    devices: list[Candidate] = []
    for slot, mib in enumerate(random.choice(SLICES)):
        share = device(gpu, slot)._replace(
            domain=domain, memory_limit_mib=mib, thread_percentage=100 * mib / GPU_MIB
        )
        devices.append(Candidate(share, is_slice=True))
    return Division(devices, [])


def units(gpu: int, random: Random, domain: str) -> Division:
    whole = pool(
        gpu,
        reserve_mib=random.choice([0, 50]),
        clients=random.choice([2, 3, 48]),
        thread_percentage=random.choice([0, 0, 20, 40]),
    )

    def make(number: int, slot: int) -> Device:
        return whole.make(number, slot)._replace(domain=domain)

    return Division([], [whole._replace(pool=whole.pool._replace(domain=domain), make=make)])


def instances(gpu: int, random: Random, domain: str) -> Division:
    """Two MIG instances of half the GPU, which have a control daemon each."""
    devices: list[Candidate] = []
    for instance in range(2):
        for slot in range(random.randint(1, 2)):
            share = device(gpu, slot)._replace(
                id=f"id-{gpu}-g{instance}-{slot}",
                addr=f"0{gpu}:00.0-g{instance}-{slot}",
                gpu_uuid=f"MIG-{gpu}-{instance}",
                memory_total_mib=600,
                domain=f"MIG-{gpu}-{instance}",
            )
            devices.append(Candidate(share))
    return Division(devices, [])


def time_sliced(gpu: int, random: Random, domain: str) -> Division:
    devices = [device(gpu, slot, 2)._replace(domain="", sharing="time-slicing") for slot in range(2)]
    return Division([Candidate(share) for share in devices], [])


Divide = Callable[[int, Random, str], Division]


class Host:
    """Random GPUs, and the leases and the queue of their devices."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.ledger = Ledger()
        self.time_s = 1000.0
        self.queue = Queue(Allocator(self.ledger), clock=lambda: self.time_s)
        self.lost: set[str] = set()
        self._last = 0
        self._devices: list[Candidate] = []
        self._pools: list[PoolCandidate] = []
        #: Whether there may be leases of another division.
        self.was_divided_again = False
        self._is_multiuser = random.random() < 0.3
        self._has_domain_each = random.random() < 0.4
        self._gpus = random.randint(1, 3)
        for gpu in range(self._gpus):
            self._divide(gpu, random.choice([equal, sliced, sliced, units, units, instances, time_sliced]))
        self._domains = self._limits()
        self._reserved = {"GPU-0": RESERVED_FOR} if random.random() < 0.2 else {}

    def _divide(self, gpu: int, divide: Divide) -> None:
        division = divide(gpu, self.random, f"gpu-{gpu}" if self._has_domain_each else "host")
        self._devices += division.devices
        self._pools += division.pools

    def divide_again(self) -> None:
        """Divide a GPU that MPS shares as a whole in another way, and refuse what never fits now."""
        gpu = self.random.randrange(self._gpus)
        uuid = f"GPU-{gpu}"
        kept = [candidate for candidate in self._devices if candidate.device.gpu_uuid != uuid]
        pools = [candidate for candidate in self._pools if candidate.pool.gpu_uuid != uuid]
        is_pool = len(pools) < len(self._pools)
        if not is_pool and len(kept) == len(self._devices):
            return
        if any(not candidate.device.domain for candidate in self._devices):
            return
        self._devices = kept
        self._pools = pools
        self._divide(gpu, self.random.choice([equal, sliced, units]))
        self._domains = self._limits()
        self.was_divided_again = True
        for queued in list(self.queue.requests):
            try:
                refuse_if_infeasible(queued.request, self.candidates)
            except YunionError:
                self.queue.requests.remove(queued)

    def _limits(self) -> dict[str, DomainPlan]:
        """Return the domains, which let a process have one or more of their devices."""
        most_mib: dict[str, dict[str, int]] = {}
        combined = self.random.choice([1, 2, 4])
        for candidate in self._devices:
            share = candidate.device
            limits = most_mib.setdefault(share.domain, {})
            limit = combined * (share.memory_limit_mib or 0)
            limits[share.gpu_uuid] = max(limits.get(share.gpu_uuid, 0), limit)
        for candidate_pool in self._pools:
            most_mib.setdefault(candidate_pool.pool.domain, {})[candidate_pool.pool.gpu_uuid] = GPU_MIB
        domains: dict[str, DomainPlan] = {}
        most_mib.pop("", None)
        for name, limits in most_mib.items():
            gpus = tuple(PlannedGpu(uuid, mib) for uuid, mib in limits.items())
            domains[name] = DomainPlan(name, "/pipe", "/log", gpus, 100.0, self._is_multiuser)
        return domains

    @property
    def candidates(self) -> Candidates:
        devices: list[Candidate] = []
        for candidate in self._devices:
            is_lost = physical_gpu(candidate.device.addr) in self.lost
            devices.append(candidate._replace(reason=LOST) if is_lost else candidate)
        pools: list[PoolCandidate] = []
        for candidate_pool in self._pools:
            is_lost = candidate_pool.gpu in self.lost
            pools.append(candidate_pool._replace(reason=LOST) if is_lost else candidate_pool)
        return Candidates(
            devices=devices,
            pools=pools,
            domains=self._domains,
            reserved=self._reserved,
            users=served_users(self.ledger.leases.values(), {}, self._domains),
        )

    def random_request(self) -> LeaseRequest:
        random = self.random
        addresses = [candidate.device.addr for candidate in self._devices]
        reserved_for = random.choice(["", "", "", RESERVED_FOR])
        if addresses and random.random() < 0.2:
            number = random.randint(1, min(3, len(addresses)))
            names = tuple(random.sample(addresses, number))
            return LeaseRequest(devices=names, allow_unlimited=True, reserved_for=reserved_for)
        return LeaseRequest(
            number=random.randint(1, 3),
            across=random.random() < 0.4,
            memory_mib=random.choice([0, 0, 100, 300, 500]),
            thread_percentage=random.choice([0, 0, 0, 25, 50]),
            gpu=random.choice(["", "", "", "00:00.0", "01:00.0"]),
            placement=random.choice(["binpack", "spread"]),
            allow_unlimited=True,
            reserved_for=reserved_for,
        )

    def small_request(self) -> LeaseRequest:
        """Return a request for little, which fits nearly everywhere."""
        return LeaseRequest(
            memory_mib=self.random.choice([0, 100]),
            gpu=self.random.choice(["", "00:00.0", "01:00.0"]),
            allow_unlimited=True,
            reserved_for=self.random.choice(["", RESERVED_FOR]),
        )

    def add(self, request: LeaseRequest) -> QueuedRequest | None:
        """Queue the request of any user; return it if it is feasible."""
        try:
            refuse_if_infeasible(request, self.candidates)
        except YunionError:
            return None
        self._last += 1
        self.time_s += 1
        uid = self.random.choice([*USERS, 0])
        binding = "process" if uid else "container"
        holder = Holder(binding, uid, self._last, 1, unit=f"job-{self._last}.service")
        queued = QueuedRequest(request, holder, position=self._last, since_s=self.time_s)
        self.queue.add(queued)
        return queued

    def serve(self) -> list[int]:
        """Grant what fits; return the positions."""
        positions: list[int] = []
        while fitting := self.queue.next(self.candidates):
            queued, devices = fitting
            assert is_right_answer(queued.request, devices, self.candidates)
            grant = Lease(
                f"lease-{queued.position}",
                devices,
                queued.holder,
                self.time_s,
                requested_s=queued.since_s,
            )
            self.ledger.add(grant)
            self.queue.requests.remove(queued)
            positions.append(queued.position)
        return positions

    def end_any(self, lease_ids: Sequence[str]) -> None:
        if lease_ids:
            self.ledger.remove(self.random.choice(sorted(lease_ids)))
        self.time_s += 1

    def act(self) -> None:
        """Let something happen."""
        kind = self.random.choice(
            ["request", "request", "request", "end", "end", "withdraw", "lose", "find", "divide"]
        )
        if kind == "request":
            self.add(self.random_request())
        elif kind == "end":
            self.end_any(list(self.ledger.leases))
        elif kind == "withdraw" and self.queue.requests:
            self.queue.requests.remove(self.random.choice(self.queue.requests))
        elif kind == "lose" and self.random.random() < 0.3:
            self.lost.add("00:00.0")
        elif kind == "find":
            self.lost.clear()
        elif kind == "divide" and self.random.random() < 0.5:
            self.divide_again()


def is_right_answer(request: LeaseRequest, devices: Sequence[Device], candidates: Candidates) -> bool:
    """Whether the devices are what the request asks for, and can be in one lease."""
    sliced_ids = {candidate.device.id for candidate in candidates.devices if candidate.is_slice}
    pool_uuids = {candidate.pool.gpu_uuid for candidate in candidates.pools}
    for share in devices:
        is_reserved = candidates.reserved.get(share.gpu_uuid, request.reserved_for) != request.reserved_for
        has_no_amounts = share.id not in sliced_ids and share.gpu_uuid not in pool_uuids
        if is_reserved or not request.matches(share) or (request.memory_mib and has_no_amounts):
            return False
    if request.devices:
        if sorted(share.addr for share in devices) != sorted(request.devices):
            return False
    elif len(devices) != request.number:
        return False
    elif request.across:
        if len({physical_gpu(share.addr) for share in devices}) != len(devices):
            return False
    elif len({share.gpu_uuid for share in devices}) != 1:
        return False
    try:
        candidates.environment(request, devices)
    except YunionError:
        return False
    return True


def fits(host: Host, queued: QueuedRequest, reserved: Reservation) -> bool:
    """Whether anything that is neither leased nor reserved would satisfy the request: tries everything."""
    withheld = host.candidates.domains_withheld(queued.holder.user_uid, reserved.users)
    request = queued.request
    if devices_fit(host, request, reserved, withheld):
        return True
    return bool(request.memory_mib and not request.devices) and pools_fit(host, request, reserved, withheld)


def devices_fit(host: Host, request: LeaseRequest, reserved: Reservation, withheld: set[str]) -> bool:
    candidates = host.candidates
    free: list[Device] = []
    for candidate in candidates.devices:
        share = candidate.device
        is_taken = share.id in host.ledger.lease_of or share.id in reserved.devices
        if not candidate.reason and not is_taken and share.domain not in withheld:
            free.append(share)
    for devices in combinations(free, len(request.devices) or request.number):
        if fit_beside(devices, host.ledger, reserved) and is_right_answer(request, devices, candidates):
            return True
    return False


def pools_fit(host: Host, request: LeaseRequest, reserved: Reservation, withheld: set[str]) -> bool:
    candidates = host.candidates
    served: list[PoolCandidate] = []
    for candidate in candidates.pools:
        if not candidate.reason and candidate.pool.domain not in withheld:
            served.append(candidate)
    each = 1 if request.across else request.number
    for pools in combinations(served, request.number if request.across else 1):
        devices = tuple(new_devices(pools, request, each))
        if not devices or not is_right_answer(request, devices, candidates):
            continue
        if all(fits_into(candidate, devices, host.ledger, reserved) for candidate in pools):
            return True
    return False


def fit_beside(devices: Sequence[Device], ledger: Ledger, reserved: Reservation) -> bool:
    """Whether the GPUs have memory for the devices beside all leases and reservations."""
    used_mib = Counter(reserved.memory_mib)
    for lease in ledger.leases.values():
        for share in lease.devices:
            used_mib[share.gpu_uuid] += needs_mib(share)
    for share in devices:
        used_mib[share.gpu_uuid] += needs_mib(share)
    return all(used_mib[share.gpu_uuid] <= (share.memory_total_mib or 0) for share in devices)


def new_devices(pools: Sequence[PoolCandidate], request: LeaseRequest, each: int) -> Iterator[Device]:
    for candidate in pools:
        if request.thread_percentage and not candidate.pool.thread_percentage:
            return
        number = -(-request.memory_mib // candidate.pool.unit_mib)
        for slot in range(100, 100 + each):
            share = candidate.make(number, slot)
            percentage = float(request.thread_percentage) or share.thread_percentage
            yield share._replace(thread_percentage=percentage)


def fits_into(
    candidate: PoolCandidate, devices: Sequence[Device], ledger: Ledger, reserved: Reservation
) -> bool:
    """Whether the pool has the devices left beside all leases and reservations."""
    gpu = candidate.pool.gpu_uuid
    leased = [share for lease in ledger.leases.values() for share in lease.devices]
    clients = [share for share in [*leased, *devices] if share.gpu_uuid == gpu]
    mib = sum(map(needs_mib, clients)) + reserved.memory_mib[gpu]
    tenths = sum(round(10 * share.thread_percentage) for share in clients) + reserved.thread_tenths[gpu]
    has_threads = not candidate.pool.thread_percentage or tenths <= thread_tenths(candidate.pool)
    has_clients = len(clients) + reserved.clients[gpu] <= candidate.pool.clients
    return mib <= candidate.pool.memory_total_mib and has_threads and has_clients


def check_budgets(host: Host) -> None:
    """Nothing is leased twice or beyond a budget, and a control daemon serves one user."""
    used_mib: Counter[str] = Counter()
    ids: Counter[str] = Counter()
    users: dict[str, set[int]] = {}
    candidates = host.candidates
    for lease in host.ledger.leases.values():
        for share in lease.devices:
            used_mib[share.gpu_uuid] += needs_mib(share)
            ids[share.id] += 1
        domain = candidates.domains.get(lease.devices[0].domain)
        if domain and domain.name and not domain.multiuser and lease.holder.user_uid is not None:
            users.setdefault(domain.name, set()).add(lease.holder.user_uid)
    assert all(mib <= GPU_MIB for mib in used_mib.values())
    assert set(ids.values()) <= {1}
    assert all(len(uids) == 1 for uids in users.values())
    nothing = Queue(Allocator(host.ledger)).reservation(candidates)
    assert host.was_divided_again or all(
        fits_into(candidate, [], host.ledger, nothing) for candidate in candidates.pools
    )


def check_turns(host: Host) -> None:
    """Every queued request lacks something that is there, and none reserves more than it needs."""
    candidates = host.candidates
    reserved = host.queue.reservation(candidates, before=host.queue.requests[0])
    for queued, following in zip(host.queue.requests, [*host.queue.requests[1:], None]):
        assert not fits(host, queued, reserved), f"{queued.request} is free"
        check_reason(host, queued, reserved)
        after = host.queue.reservation(candidates, before=following)
        check_needed(queued.request, candidates, reserved, after)
        reserved = after


def check_needed(
    request: LeaseRequest, candidates: Candidates, before: Reservation, after: Reservation
) -> None:
    number = len(request.devices) or request.number
    devices = after.devices - before.devices
    clients = after.clients - before.clients
    gpus = {candidate.device.gpu_uuid for candidate in candidates.devices if candidate.device.id in devices}
    assert len(devices) + sum(clients.values()) <= number
    if not request.devices:
        assert len(gpus | set(clients)) <= (number if request.across else 1)
    reserves = {candidate.pool.gpu_uuid: candidate.pool.reserve_mib for candidate in candidates.pools}
    for gpu, mib in (after.memory_mib - before.memory_mib).items():
        if gpu in reserves:
            most = -(-request.memory_mib // 100) * 100 + reserves[gpu]
            assert mib <= (1 if request.across else number) * most


def check_reason(host: Host, queued: QueuedRequest, reserved: Reservation) -> None:
    """What the request says it waits for is there."""
    error = host.queue.why_not(queued, host.candidates)
    assert "no such device" not in error.message
    leased = re.search(r"(\d+) of (\d+) leased", error.message)
    assert not leased or int(leased[1]) <= min(int(leased[2]), len(host.ledger.lease_of))
    kept = re.search(r"(\d+) reserved for earlier", error.message)
    assert not kept or int(kept[1]) <= len(reserved.devices)
    kept_mib = re.findall(r"(\d+) MiB reserved for earlier", error.message)
    assert {int(mib) for mib in kept_mib} <= set(reserved.memory_mib.values())
    assert ("is lost" in error.message) <= bool(host.lost)
    served = {str(user.uid) for users in host.candidates.users.values() for user in users}
    assert set(re.findall(r"now uid (\d+)", error.message)) <= served
    promised = {str(uid) for uids in reserved.users.values() for uid in uids}
    assert set(re.findall(r"next uid (\d+)", error.message)) <= promised
    if error.code == OTHER_USER:
        assert served or reserved.users
    else:
        assert host.ledger.leases or host.lost or any(reserved)


@settings(max_examples=1000)
@given(st.integers(0, 2**32))
def test_the_queue_grants_what_an_exhaustive_search_finds(seed: int) -> None:
    host = Host(Random(seed))
    for _ in range(14):
        host.act()
        host.serve()
        check_budgets(host)
        if host.queue.requests:
            check_turns(host)


@settings(max_examples=400)
@given(st.integers(0, 2**32))
def test_a_request_waits_at_most_for_the_leases_of_earlier_ones(seed: int) -> None:
    """However many later ones come, of which none ever ends.

    A lost GPU is not waited for: what was leased while it was lost counts as earlier, too.
    """
    host = Host(Random(seed))
    for _ in range(10):
        host.add(host.small_request())
        host.act()
        host.serve()
    host.lost.clear()
    for _ in range(3):
        host.add(host.random_request())
    host.serve()
    host.queue.requests[:] = host.queue.requests[:3]
    if not host.queue.requests:
        return
    last = host.random.choice(host.queue.requests)
    before = set(host.ledger.leases)
    granted: list[int] = []
    for _ in range(100):
        earlier = [
            lease.id
            for lease in host.ledger.leases.values()
            if lease.id in before or lease.requested_s < last.since_s
        ]
        if not earlier:
            break
        for _ in range(5):
            host.add(host.small_request())
        granted += host.serve()
        host.end_any(earlier)
        granted += host.serve()
    assert last.position in granted, last.request
