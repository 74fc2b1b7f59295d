"""A node's objects at the API server: the node itself, its pods, claims and slices."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import yaml

from cluster.control_plane import NODE, ControlPlane, Object
from containers.image import IMAGE
from integration.daemon_host import eventually
from kubernetes.kubelet import RESOURCE
from simhost.environment import CHECKOUT

_NODE = f"/api/v1/nodes/{NODE}"
_PODS = "/api/v1/namespaces/default/pods"
_DRA = "/apis/resource.k8s.io/v1"
_CLAIMS, _TEMPLATES = (f"{_DRA}/namespaces/default/resourceclaim{end}" for end in ("s", "templates"))
#: The image of the examples.
EXAMPLE_IMAGE = "docker.io/library/debian:13-slim"
_EXAMPLES = CHECKOUT / "etc/kubernetes/examples"


class NodeObjects:
    """What the API server says about the node, and changes of it."""

    def __init__(self, cluster: ControlPlane) -> None:
        self.cluster = cluster

    def wait_ready(self, trouble: Callable[[], str] = str) -> None:
        eventually(self._is_ready, "the node", trouble=trouble)

    def _is_ready(self) -> bool:
        nodes = self.cluster.get("/api/v1/nodes")["items"]
        conditions = [one for node in nodes for one in node["status"].get("conditions", ())]
        return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)

    def allocatable(self, resource: str = RESOURCE) -> int:
        return int(self.cluster.get(_NODE)["status"]["allocatable"].get(resource, -1))

    def wait_allocatable(self, number: int, resource: str = RESOURCE) -> None:
        eventually(lambda: self.allocatable(resource) == number, f"{number} of {resource}")

    def devices(self) -> list[Object]:
        """The devices of all slices."""
        slices = self.cluster.get(f"{_DRA}/resourceslices")["items"]
        return [device for one in slices for device in one["spec"].get("devices") or ()]

    def published(self) -> int:
        """How many devices without a taint are published."""
        return sum("taints" not in device for device in self.devices())

    def wait_published(self, number: int) -> None:
        eventually(lambda: self.published() == number, f"{number} devices in slices")

    def label(self, **labels: str | None) -> None:
        self.cluster.patch(_NODE, {"metadata": {"labels": labels}})

    # -- its pods

    def create(self, made: Object) -> None:
        self.cluster.create(_PODS, made)

    def create_example(self, file: str) -> Object:
        """Create what a file of the examples has besides its pod; returns that pod."""
        *others, made = yaml.safe_load_all((_EXAMPLES / f"{file}.yaml").read_text())
        for one in others:
            self.cluster.create(_TEMPLATES if one["kind"].endswith("Template") else _CLAIMS, one)
        made["spec"]["terminationGracePeriodSeconds"] = 1
        return dict(made)

    def create_claim(self, name: str, *classes: str) -> Object:
        """Create a claim for a device of each class; returns a pod of that name which has it."""
        requests = [
            {"name": f"gpu-{number}", "exactly": {"deviceClassName": one}}
            for number, one in enumerate(classes)
        ]
        made = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": {"devices": {"requests": requests}},
        }
        self.cluster.create(_CLAIMS, made)
        container = {"name": "main", "image": IMAGE, "resources": {"claims": [{"name": "gpus"}]}}
        claims = [{"name": "gpus", "resourceClaimName": name}]
        spec = {"containers": [container], "resourceClaims": claims, "terminationGracePeriodSeconds": 1}
        return {"metadata": {"name": name}, "spec": spec}

    def claims(self) -> int:
        return len(self.cluster.get(_CLAIMS)["items"])

    def pod(self, name: str) -> Object:
        return self.cluster.get(f"{_PODS}/{name}")

    def wait_containers(self, name: str, without: str = "-") -> list[str]:
        """The ids of a pod's containers, once all run; `without` is the id of one that is not to be there."""

        def ids() -> list[str]:
            found = self.pod(name)["status"].get("containerStatuses", [])
            running = [one["containerID"] for one in found if "running" in one["state"]]
            return running if len(running) == len(found) and without not in "".join(running) else []

        found = eventually(ids, f"pod {name}", trouble=lambda: self.why(name))
        return [one.rpartition("/")[2] for one in found]

    def wait_pending(self, name: str, reason: str) -> None:
        """Wait until the status or the events of a pod give this reason."""
        eventually(lambda: reason in self.why(name), reason, trouble=lambda: self.why(name))

    def why(self, name: str) -> str:
        """Why a pod does not run: its status and its events."""
        events = self.cluster.get(
            f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={name}"
        )
        return "\n".join([json.dumps(self.pod(name)["status"]), *(one["message"] for one in events["items"])])

    def phase(self, name: str) -> str:
        return str(self.pod(name)["status"]["phase"])

    def delete(self, name: str, *, wait: bool = True, **query: int) -> None:
        """Delete a pod; as kubectl does, wait until it is gone."""
        self.cluster.delete(f"{_PODS}/{name}", **query)
        if wait:
            self.wait_gone(name)

    def wait_gone(self, name: str) -> None:
        eventually(lambda: name not in self.names(), f"the end of pod {name}", trouble=lambda: self.why(name))

    def names(self) -> set[str]:
        return {one["metadata"]["name"] for one in self.cluster.get(_PODS)["items"]}

    def forget(self) -> None:
        """Delete the node, all pods, claims and slices."""
        self.cluster.delete(_NODE)
        for name in self.names():
            self.cluster.delete(f"{_PODS}/{name}", gracePeriodSeconds=0)
        for collection in (_TEMPLATES, _CLAIMS, f"{_DRA}/resourceslices"):
            self.cluster.delete(collection)
        eventually(lambda: not self.claims(), "the end of all claims")


def named(made: Object, name: str) -> Object:
    """The same pod with another name."""
    return {**made, "metadata": {"name": name}}


def pod(name: str, devices: int = 1, *, resource: str = RESOURCE, **spec: Any) -> Object:
    """A pod of one container with so many devices; `spec` are other members."""
    container = {"name": "main", "image": IMAGE, "resources": {"limits": {resource: devices}}}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1, **spec},
    }
