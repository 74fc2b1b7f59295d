"""Objects of the API server's answers, read by their declared types."""

from __future__ import annotations

import pytest
from yunion_mps.kubernetes.api.credentials import ApiServerError
from yunion_mps.kubernetes.api.server import NODES
from yunion_mps.kubernetes.pod_deletions import PODS

META = {"name": "a", "uid": "1", "resourceVersion": "1"}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({}, "pods.metadata.name is missing"),
        ({"metadata": {}}, "pods.metadata.name is missing"),
        ({"metadata": {**META, "uid": 5}}, "pods.metadata.uid is invalid"),
        ({"metadata": {**META, "deletionTimestamp": "soon"}}, "pods.metadata.deletionTimestamp is invalid"),
        (
            {"metadata": {**META, "deletionGracePeriodSeconds": 1 << 64}},
            "deletionGracePeriodSeconds is invalid",
        ),
        ({"metadata": {**META, "labels": {"a": 1}}}, "pods.metadata.labels.a is invalid"),
        ({"metadata": META, "status": "x"}, "pods.status is invalid"),
        ({"metadata": META, "status": {"containerStatuses": [5]}}, r"containerStatuses\[0\] is invalid"),
        (5, "pods is invalid"),
    ],
)
def test_a_malformed_object_is_explained(wrong: object, where: str) -> None:
    with pytest.raises(ApiServerError, match=where):
        PODS.read(wrong)


def test_null_is_no_value_and_unknown_members_are_kept() -> None:
    read = NODES.read({"metadata": META, "status": None, "spec": {"nodeName": "a"}})
    assert read == {"metadata": META, "spec": {"nodeName": "a"}}


def test_only_what_is_used_of_a_pod_is_kept() -> None:
    annotations = {"kubernetes.io/config.mirror": "a", "notes": "many"}
    statuses = {
        kind: [{"containerID": f"containerd://{kind}", "image": "large"}]
        for kind in ("containerStatuses", "initContainerStatuses")
    }
    metadata = {**META, "deletionGracePeriodSeconds": 30, "annotations": annotations, "managedFields": [{}]}
    assert PODS.read({"metadata": metadata, "spec": {}, "status": {"phase": "Running", **statuses}}) == {
        "metadata": {
            **META,
            "deletionGracePeriodSeconds": 30,
            "annotations": {"kubernetes.io/config.mirror": ""},
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [{"containerID": one} for one in sorted(statuses)],
        },
    }
