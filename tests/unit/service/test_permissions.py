"""Who may take a lease for which process."""

from __future__ import annotations

import os

import pytest
from yunion_mps.containers.lookup import ContainerGroup, Containers
from yunion_mps.core.errors import NotAllowedError, NotFoundError
from yunion_mps.core.models import Holder, Owner
from yunion_mps.core.paths import Paths
from yunion_mps.host.control_groups import ControlGroup
from yunion_mps.host.proc import started_ticks
from yunion_mps.service import permissions
from yunion_mps.service.permissions import Caller, attested_container, process_holder

ALICE = 1000


def test_the_holder_is_the_process_and_its_user_the_owner() -> None:
    holder = process_holder(Caller(0, 1, ""), "process", os.getpid())
    assert (holder.pid, holder.owner) == (os.getpid(), Owner(os.geteuid(), ""))


def test_a_process_of_another_user_is_refused() -> None:
    with pytest.raises(NotAllowedError, match="belongs to another user"):
        process_holder(Caller(ALICE, 1, ""), "process", os.getpid())


def test_a_process_whose_unit_is_unknown_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes an exiting process out of its control group before it is gone."""
    monkeypatch.setattr(permissions, "job_unit_of", lambda _: None)
    with pytest.raises(NotFoundError, match=f"PID {os.getpid()} has ended"):
        process_holder(Caller(0, 1, ""), "process", os.getpid())


CONTAINER = Holder("container", ALICE, os.getpid(), started_ticks(os.getpid()), is_attested=True)


class OneContainer(Containers):
    """The containers of a host on which every process is in the same one."""

    def __init__(self, *, is_made_by_root: bool | None) -> None:
        super().__init__(Paths("/nowhere"))
        self.group = ContainerGroup("a" * 64, "docker", "", ControlGroup("", "/docker"), is_made_by_root)

    def group_of(self, pid: int) -> ContainerGroup:
        return self.group


def test_an_owner_has_a_right_over_a_container_only_if_root_attests_it() -> None:
    roots = OneContainer(is_made_by_root=True)
    assert attested_container(CONTAINER, roots) == ControlGroup("", "/docker")
    assert attested_container(CONTAINER._replace(is_attested=False), roots) is None, "the owner says so"
    for holder in (CONTAINER._replace(started=1), CONTAINER._replace(pid=None, started=None)):
        assert attested_container(holder, roots) is None, "it does not run"
    for is_made_by_root in (False, None):
        assert attested_container(CONTAINER, OneContainer(is_made_by_root=is_made_by_root)) is None


def test_a_caller_whose_unit_is_unknown_owns_nothing_unless_it_is_root() -> None:
    assert Caller(0, 1, None).owner == Owner(0, "")
    with pytest.raises(NotAllowedError, match="its unit is unknown"):
        assert Caller(ALICE, 1, None).owner
