"""Which lease a process belongs to: the kernel's facts come first, its environment only if these agree."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from yunion_mps.containers.lookup import ContainerGroup
from yunion_mps.core.models import Holder, Lease
from yunion_mps.host.control_groups import ControlGroup
from yunion_mps.observe.attribution import Attribution

from unit.leases.lease_builders import device

ROOT, ALICE, MALLORY, SUBUID = 0, 1000, 2000, 100_033
TRAIN, TEST = "yunion-mps-job@train.service", "yunion-mps-job@test.service"
HOST = ControlGroup("", "/system.slice/sshd.service")
DOCKER = ControlGroup("", "/system.slice/docker-a.scope")
INSIDE = ControlGroup("", "/system.slice/docker-a.scope/init")
ROOTLESS = ControlGroup("", "/user.slice/user@1000.service/libpod-a.scope")


class FakeOrigin(NamedTuple):
    """A process, of alice unless the test says otherwise; it started at 7."""

    parent: int = 1
    leaders: tuple[int, ...] = ()
    variable: str = ""
    uid: int | None = ALICE
    users: frozenset[int] = frozenset({ALICE})
    unit: str = ""
    groups: tuple[ControlGroup, ...] = (HOST,)
    container: ContainerGroup | None = None
    started: int | None = 7


def in_group(group: ControlGroup, *, is_made_by_root: bool, uid: int = ALICE) -> FakeOrigin:
    """A process in a container's group."""
    container = ContainerGroup("a", "docker", "", group, is_made_by_root)
    return user(uid)._replace(groups=(group,), container=container)


def user(uid: int) -> FakeOrigin:
    return FakeOrigin(uid=uid, users=frozenset({uid}))


def lease(
    name: str, binding: str, pid: int | None = None, *, uid: int = ALICE, gpu: int = 1, **more: Any
) -> Lease:
    holder = Holder(binding, uid, pid, None if pid is None else 7, **more)
    return Lease(name, (device(gpu, 0),), holder, 0.0)


def attributed(leases: list[Lease], processes: dict[int, FakeOrigin], pid: int) -> str | None:
    return Attribution(leases, lambda pid: processes.get(pid, FakeOrigin())).lease_of(pid, ["01:00.0"])


JOB = lease("job", "process", 10)
NAMED = lease("named", "name")


def test_without_other_evidence_the_environment_names_the_lease() -> None:
    assert attributed([JOB, NAMED], {20: FakeOrigin(variable="named")}, 20) == "named"
    assert attributed([JOB, NAMED], {20: FakeOrigin(variable="ended")}, 20) is None
    assert attributed([JOB, NAMED], {}, 20) is None


def test_a_descendant_without_the_variable_belongs_to_its_ancestor_s_lease() -> None:
    processes = {10: FakeOrigin(variable="job"), 20: FakeOrigin(parent=15), 15: FakeOrigin(parent=10)}
    assert attributed([JOB], processes, 20) == "job"
    assert attributed([JOB], {**processes, 10: FakeOrigin(started=8)}, 20) is None, "the PID was reused"


@pytest.mark.parametrize("leaders", [(10, 1), (15, 10)], ids=["group", "session"])
def test_a_process_whose_parent_ended_first_belongs_to_its_group_s_lease(leaders: tuple[int, int]) -> None:
    assert attributed([JOB], {20: FakeOrigin(leaders=leaders)}, 20) == "job"
    assert attributed([JOB], {20: FakeOrigin(leaders=leaders), 10: FakeOrigin(started=8)}, 20) is None


def test_an_ancestor_s_lease_comes_before_that_of_the_group() -> None:
    inner = lease("inner", "process", 15)
    processes = {20: FakeOrigin(parent=15, leaders=(10, 10)), 15: FakeOrigin(parent=10)}
    assert attributed([JOB, inner], processes, 20) == "inner"


def test_the_orphan_of_an_inner_job_belongs_to_the_inner_lease() -> None:
    """The outer holder is a subreaper (prctl(2)), as tini -s, conmon and slurmstepd are."""
    outer, inner = lease("outer", "process", 5), JOB
    processes = {5: FakeOrigin(), 10: FakeOrigin(parent=5), 20: FakeOrigin(parent=5, leaders=(10, 10))}
    assert attributed([outer, inner], processes, 20) == "job"


@pytest.mark.parametrize(
    ("holder", "process", "found"),
    [
        (ALICE, user(ROOT), None),
        (ALICE, user(MALLORY), None),
        (ALICE, FakeOrigin(uid=ROOT, users=frozenset({ROOT, ALICE})), "job"),
        (ROOT, user(MALLORY), "job"),
    ],
    ids=["became root", "another user", "set-user-ID program", "root's lease"],
)
def test_a_descendant_of_another_user_does_not_belong_to_the_lease(
    holder: int, process: FakeOrigin, found: str | None
) -> None:
    job = lease("job", "process", 10, uid=holder)
    assert attributed([job], {20: process._replace(parent=10), 10: user(holder)}, 20) == found


def test_a_unit_s_lease_has_no_process_of_another_user() -> None:
    job = lease("job", "name", unit=TRAIN)
    assert attributed([job], {20: user(ROOT)._replace(unit=TRAIN)}, 20) is None


def test_a_variable_does_not_hide_use_of_the_holder_s_gpu() -> None:
    other = lease("other", "name", gpu=2)
    processes = {10: FakeOrigin(variable="job"), 20: FakeOrigin(parent=10, variable="other")}
    assert attributed([JOB, other], processes, 20) == "job"


def test_a_variable_that_the_holder_has_inherited_does_not_count() -> None:
    """Its job was started within another one, and took a lease of its own, as by the Python client."""
    outer, inner = lease("outer", "process", 5), lease("inner", "process", 10)
    processes = {
        5: FakeOrigin(variable="outer"),
        10: FakeOrigin(parent=5, variable="outer"),
        20: FakeOrigin(parent=10, variable="outer"),
    }
    assert attributed([outer, inner], processes, 20) == "inner"
    assert attributed([outer, inner], processes, 10) == "inner"
    assert attributed([outer, inner], processes, 5) == "outer"


def test_a_job_may_give_a_process_another_lease_of_its_user() -> None:
    """A program with a lease that starts jobs, each with a lease taken for it."""
    processes = {10: FakeOrigin(variable="job"), 20: FakeOrigin(parent=10, variable="named")}
    assert attributed([JOB, NAMED], processes, 20) == "named"


@pytest.mark.parametrize(
    ("process", "holder", "found"),
    [
        (user(MALLORY), ALICE, None),
        (user(MALLORY), ROOT, "named"),
        (user(ROOT), ALICE, "named"),
        (FakeOrigin(uid=SUBUID, users=frozenset({SUBUID, ALICE})), ALICE, "named"),
    ],
    ids=["another user", "root's lease", "root's process", "user namespace"],
)
def test_a_lease_of_another_user_cannot_be_named(process: FakeOrigin, holder: int, found: str | None) -> None:
    named = lease("named", "name", uid=holder)
    assert attributed([named], {20: process._replace(variable="named")}, 20) == found


def test_root_s_lease_for_a_user_is_that_user_s() -> None:
    named = lease("named", "name", uid=ROOT, job_uid=ALICE)
    for process, found in ((user(ALICE), "named"), (user(MALLORY), None)):
        assert attributed([named], {20: process._replace(variable="named")}, 20) == found


def test_a_process_of_a_unit_belongs_to_the_unit_s_lease() -> None:
    train, test = lease("train", "process", 10, unit=TRAIN), lease("test", "process", 11, unit=TEST)
    leases = [train, test]
    assert attributed(leases, {20: FakeOrigin(unit=TRAIN)}, 20) == "train"
    assert attributed(leases, {20: FakeOrigin(unit=TRAIN, variable="test")}, 20) == "train"
    assert attributed([test], {20: FakeOrigin(unit=TRAIN, variable="test")}, 20) is None


def test_a_unit_s_lease_is_not_guessed_if_it_has_several() -> None:
    leases = [lease("one", "process", 10, unit=TRAIN), lease("two", "process", 11, unit=TRAIN)]
    assert attributed(leases, {20: FakeOrigin(unit=TRAIN)}, 20) is None
    assert attributed(leases, {20: FakeOrigin(unit=TRAIN, variable="two")}, 20) == "two"


def test_a_holder_of_several_leases_has_that_of_the_gpu_it_uses() -> None:
    one, other = lease("one", "process", 10), lease("other", "process", 10, gpu=2)
    assert attributed([one, other], {20: FakeOrigin(parent=10)}, 20) == "one"
    same = lease("same", "process", 10)
    assert attributed([one, same], {20: FakeOrigin(parent=10)}, 20) is None
    assert attributed([one, same], {20: FakeOrigin(parent=10, variable="same")}, 20) == "same"


def test_processes_in_a_container_of_root_s_engine_belong_to_its_lease() -> None:
    """They need not descend from its first process (`docker exec`), nor know the lease."""
    first = in_group(DOCKER, is_made_by_root=True)
    inside = FakeOrigin(uid=33, users=frozenset({33}), groups=(INSIDE,))
    for owner, is_attested, found in ((ROOT, False, "box"), (ALICE, True, "box"), (ALICE, False, None)):
        box = lease("box", "container", 10, uid=owner, is_attested=is_attested)
        assert attributed([box], {10: first, 20: inside}, 20) == found


def test_a_container_that_a_user_made_has_only_that_user_s_processes() -> None:
    box = lease("box", "container", 10)
    first = in_group(ROOTLESS, is_made_by_root=False)
    inside = FakeOrigin(groups=(ROOTLESS,))
    assert attributed([box], {10: first, 20: inside}, 20) == "box"
    for process in (user(ROOT), user(MALLORY)):
        assert attributed([box], {10: first, 20: process._replace(groups=(ROOTLESS,))}, 20) is None


def test_a_group_of_the_same_name_elsewhere_is_not_the_container() -> None:
    box = lease("box", "container", 10, uid=MALLORY)
    fake = ControlGroup("", "/user.slice/user@2000.service/docker-a.scope")
    first = in_group(fake, is_made_by_root=False, uid=MALLORY)
    victim = in_group(DOCKER, is_made_by_root=True, uid=ROOT)
    assert attributed([box], {10: first, 20: victim}, 20) is None


def test_an_ancestor_outside_the_container_says_less_than_the_container() -> None:
    box = lease("box", "container", 11, uid=ROOT)
    processes = {
        10: FakeOrigin(variable="job"),
        11: in_group(DOCKER, is_made_by_root=True),
        20: FakeOrigin(parent=10, groups=(INSIDE,)),
        21: FakeOrigin(parent=12, groups=(INSIDE,)),
        12: FakeOrigin(parent=11, groups=(INSIDE,)),
    }
    assert attributed([JOB, box], processes, 20) == "box"
    inner = lease("inner", "process", 12)
    assert attributed([JOB, box, inner], processes, 21) == "inner"
