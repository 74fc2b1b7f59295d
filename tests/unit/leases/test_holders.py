"""The pods and claims that hold leases, as the metrics name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from yunion_mps.containers.lookup import Container, Containers
from yunion_mps.core.models import Holder
from yunion_mps.core.paths import Paths
from yunion_mps.leases.holders import kubernetes_labels

CLAIM = Holder("name", 0, name="claim:ml/shared@0123")


@pytest.mark.parametrize(
    ("holder", "claim"),
    [
        (CLAIM, "shared"),
        (CLAIM._replace(uid=1000), None),
        (CLAIM._replace(binding="container"), None),
        (CLAIM._replace(name="job"), None),
        (CLAIM._replace(name="claim:shared"), None),
    ],
)
def test_only_a_lease_of_root_is_named_as_a_claim(tmp_path: Path, holder: Holder, claim: Any) -> None:
    labels = kubernetes_labels(holder, Containers(Paths(str(tmp_path))))
    assert labels == (claim and {"namespace": "ml", "pod": "", "container": "", "claim": claim})


def test_only_a_container_of_a_pod_has_its_three_names() -> None:
    assert Container("a", "pod ml/trainer-0/main").pod == ("ml", "trainer-0", "main")
    for name in ("pod 0123-4567/a1b2", "trainer", "pod", "a/b/c", ""):
        assert Container("a", name).pod == ()
