"""The names of the leases of the kubelet's containers.

The kubelet allocates the same devices again to a container that it starts again. So a name is made of the
resource's name and of the kubelet's ids, as hashes: both may be too long for a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecordJson

#: The beginning of the names of all of these leases.
PREFIX = "k8s-"
_RESOURCE_HASH_LENGTH = 6
_IDS_HASH_LENGTH = 16


def lease_name(resource: str, ids: Iterable[str]) -> str:
    """Return the name of the lease of a container with these ids: no other container has the same ones."""
    digest = sha256(" ".join(sorted(ids)).encode()).hexdigest()
    return lease_prefix(resource) + digest[:_IDS_HASH_LENGTH]


def lease_prefix(resource: str) -> str:
    """Return the beginning of the names of a resource's leases."""
    return f"{PREFIX}{resource_digest(resource)}-"


def resource_digest(resource: str) -> str:
    """Return a short name of the resource, which tells it from others."""
    return sha256(resource.encode()).hexdigest()[:_RESOURCE_HASH_LENGTH]


def is_container_lease(lease: LeaseRecordJson, prefix: str = PREFIX) -> bool:
    """Return whether it is the lease of a container of the kubelet's, of the resource with this prefix."""
    return lease["binding"] == "container" and (lease["name"] or "").startswith(prefix)
