"""Our UUIDs are the standard's."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.core.identity import NAMESPACE, random_uuid, uuid5


@given(st.uuids(), st.text())
def test_a_uuid_equals_that_of_the_standard_library(namespace: uuid.UUID, name: str) -> None:
    name = name.encode(errors="replace").decode()
    assert uuid5(str(namespace), name) == str(uuid.uuid5(namespace, name))


def test_our_namespace_is_derived_from_our_name() -> None:
    assert str(uuid.uuid5(uuid.NAMESPACE_DNS, "yunion-mps")) == NAMESPACE


def test_random_uuids_are_version_4_and_differ() -> None:
    some = {random_uuid() for _ in range(100)}
    assert len(some) == 100
    for one in some:
        read = uuid.UUID(one)
        assert (str(read), read.version, read.variant) == (one, 4, uuid.RFC_4122)
