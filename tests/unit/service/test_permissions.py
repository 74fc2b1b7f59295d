"""Who may take a lease for which process."""

from __future__ import annotations

import os

import pytest
from yunion_mps.errors import NotAllowedError, NotFoundError
from yunion_mps.models import Owner
from yunion_mps.service import permissions
from yunion_mps.service.permissions import Caller, process_holder

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


def test_a_caller_whose_unit_is_unknown_owns_nothing_unless_it_is_root() -> None:
    assert Caller(0, 1, None).owner == Owner(0, "")
    with pytest.raises(NotAllowedError, match="its unit is unknown"):
        assert Caller(ALICE, 1, None).owner
