"""Our UUIDs of version 5 are the standard's."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.identity import NAMESPACE, uuid5


@given(st.uuids(), st.text())
def test_a_uuid_is_the_one_that_the_standard_library_makes(namespace: uuid.UUID, name: str) -> None:
    name = name.encode(errors="replace").decode()
    assert uuid5(str(namespace), name) == str(uuid.uuid5(namespace, name))


def test_our_namespace_is_derived_from_our_name() -> None:
    assert str(uuid.uuid5(uuid.NAMESPACE_DNS, "yunion-mps")) == NAMESPACE
