"""Tasks and actors of a real Ray have devices of their own, on two nodes with a daemon each."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engines.ray_cluster import Driver, Ray
from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, await_queue, leases_of, restart, take_all
from simhost import SimHost
from simhost.host import IN_UNITS

DEVICE = "**yunion_mps.ray.options()"
RESTARTED = "max_restarts=-1, max_task_retries=-1"
#: Both nodes have a V100 divided by four; the second one also has one whose 16 GiB are leased in units.
HOSTS = ([{"kind": "v100"}], [{"kind": "v100"}, {"kind": "v100"}])
PLACES = [f"{number}/{address}" for number in range(2) for address in ADDRESSES]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Ray]:
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(SimHost.create(description)) for description in HOSTS]
        hosts[1].divide(4, IN_UNITS)
        daemons = [stack.enter_context(Daemon(host)).start() for host in hosts]
        for daemon in daemons:
            daemon.wait_ready()
        yield stack.enter_context(Ray(daemons)).start()


@pytest.fixture
def ray(cluster: Ray) -> Iterator[Driver]:
    """A driver, at whose end no lease is left."""
    with cluster.driver() as driver:
        yield driver
    eventually(lambda: leased(cluster) == [], "the end of all leases", trouble=cluster.logs)


def leased(cluster: Ray) -> list[str]:
    return sorted(
        f"{number}/{address}"
        for number, daemon in enumerate(cluster.daemons)
        for lease in leases_of(daemon)
        for address in lease["devices"]
    )


def ids(leases: list[dict[str, Any]]) -> set[str]:
    return {lease["id"] for lease in leases}


def test_eight_actors_have_eight_devices_and_the_ninth_waits_for_one(cluster: Ray, ray: Driver) -> None:
    ray(f"actors = [actor({DEVICE}) for _ in range(8)]")
    places = ray("ray.get([actor.here.remote() for actor in actors])")
    assert sorted(places) == leased(cluster) == PLACES
    ray(f"ninth = actor({DEVICE}).here.remote()")
    assert not ray("is_done(ninth)")
    ray("ray.kill(actors[3])")
    assert ray("ray.get(ninth)") == places[3]


def test_the_budget_reaches_a_task_even_if_ray_assigns_a_gpu_too(cluster: Ray, ray: Driver) -> None:
    ray("one = actor(num_gpus=1, **on(1))")
    variables = ray("ray.get(one.variables.remote())")
    device = cluster.daemons[1].get(f"/v1/devices/{variables['YUNION_MPS_DEVICE']}")[1]
    expected = device["client_environment"]
    assert {name: variables.get(name) for name in expected} == expected


def test_memory_is_a_resource_of_the_node_that_leases_it_in_units(cluster: Ray, ray: Driver) -> None:
    ray("actors = [actor(**yunion_mps.ray.options('6GiB')) for _ in range(2)]")
    found = ray("ray.get([one.variables.remote() for one in actors])")
    assert [one["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] for one in found] == ["0=6144M"] * 2
    assert leased(cluster) == ["1/00:07.0-m0", "1/00:07.0-m1"]
    ray("third = actor(**yunion_mps.ray.options('6GiB')).here.remote()")
    assert not ray("is_done(third)")
    ray("ray.kill(actors[0])")
    assert ray("ray.get(third)").startswith("1/00:07.0-m")


def test_a_task_has_a_device_only_while_it_runs(cluster: Ray, ray: Driver) -> None:
    """Ray starts no worker in advance, and an idle one ends."""
    place = ray("ray.get(task(**on(0)).remote())")
    assert leased(cluster) in ([place], [])
    eventually(lambda: leased(cluster) == [], "the end of the idle worker")


def test_tasks_of_an_actor_lease_devices_unless_told_otherwise(cluster: Ray, ray: Driver) -> None:
    ray("one = actor(**on(0))")
    assert ray("ray.get(one.call.remote(task()))") != ray("ray.get(one.here.remote())")
    ray("plain = task(runtime_env={'py_executable': 'python'})")
    assert ray("ray.get(one.call.remote(plain))").endswith("/None")


def test_a_worker_waits_for_a_device_that_is_leased_outside_ray(cluster: Ray, ray: Driver) -> None:
    daemon = cluster.daemons[0]
    take_all(daemon)
    ray("waiting = actor(**on(0)).here.remote()")
    await_queue(daemon, 1)
    for lease in leases_of(daemon):
        daemon.ask("DELETE", f"/v1/leases/{lease['id']}")
    assert ray("ray.get(waiting)") in PLACES


def test_an_actor_whose_worker_is_killed_gets_a_device_again(cluster: Ray, ray: Driver) -> None:
    ray(f"actors = [actor({RESTARTED}, **on(1)) for _ in range(4)]")
    pids = ray("ray.get([one.pid.remote() for one in actors])")
    os.kill(pids[0], signal.SIGKILL)
    assert sorted(ray("ray.get([one.here.remote() for one in actors])")) == leased(cluster) == PLACES[4:]
    assert ray("ray.get([one.pid.remote() for one in actors])")[1:] == pids[1:]


@pytest.mark.parametrize("replace", [restart, Daemon.reexec], ids=["killed", "re-executed"])
def test_no_lease_changes_if_the_daemon_is_replaced(
    cluster: Ray, ray: Driver, replace: Callable[[Daemon], object]
) -> None:
    daemon = cluster.daemons[0]
    ray("actors = [actor(**on(0)) for _ in range(4)]")
    replace(daemon)  # while the workers start
    places = ray("ray.get([one.here.remote() for one in actors])")
    assert sorted(places) == leased(cluster) == PLACES[:4]
    before = [lease["id"] for lease in leases_of(daemon)]
    replace(daemon)
    assert [lease["id"] for lease in leases_of(daemon)] == before
    ray("fifth = actor(**on(0)).here.remote()")
    ray("ray.kill(actors[0])")
    assert ray("ray.get(fifth)") == places[0]


@pytest.mark.parametrize("lost", ["raylet", "node"])
def test_no_lease_is_left_if_a_node_is_lost(cluster: Ray, ray: Driver, lost: str) -> None:
    kept, daemon = cluster.daemons
    ray(f"actors = [actor({RESTARTED}, **on(node)) for node in (0, 1, 1)]")
    ray("ray.get([one.pid.remote() for one in actors])")
    before = [leases_of(kept), leases_of(daemon)]
    cluster.kill_node(1, workers=lost == "node")
    if lost == "node":
        restart(daemon)
    eventually(lambda: leases_of(daemon) == [], "the end of the leases", trouble=cluster.logs)
    cluster.start_node(1)
    places = ray("ray.get([one.here.remote() for one in actors])")
    assert sorted(places) == leased(cluster)
    assert [place[0] for place in places] == ["0", "1", "1"]
    assert ids(leases_of(kept)) == ids(before[0])
    assert not ids(leases_of(daemon)) & ids(before[1])
