"""The API group resource.k8s.io/v1: the members that are used here of devices and claims.

Source: Kubernetes API, ResourceSlice and ResourceClaim; k8s.io/api/resource/v1/types.go.
"""

from __future__ import annotations

from typing import TypedDict

from yunion_mps.kubernetes.api.objects import ApiObject

API_VERSION = "resource.k8s.io/v1"
#: The first Kubernetes that serves it.
SINCE = "1.34"


class DeviceAttribute(TypedDict, total=False):
    """The value of an attribute: exactly one of these members."""

    string: str
    int: int
    bool: bool
    version: str


class RequestRange(TypedDict, total=False):
    min: str
    max: str
    step: str


class RequestPolicy(TypedDict, total=False):
    default: str
    validRange: RequestRange


class DeviceCapacity(TypedDict, total=False):
    value: str
    requestPolicy: RequestPolicy


class DeviceTaint(TypedDict, total=False):
    key: str
    value: str
    effect: str
    timeAdded: str


class SliceDevice(TypedDict, total=False):
    """The API's `Device`."""

    name: str
    attributes: dict[str, DeviceAttribute]
    capacity: dict[str, DeviceCapacity]
    allowMultipleAllocations: bool
    taints: list[DeviceTaint]


class DeviceIdentity(TypedDict):
    request: str
    driver: str
    pool: str
    device: str


class AllocatedDevice(DeviceIdentity, total=False):
    """The API's `DeviceRequestAllocationResult`."""

    shareID: str
    consumedCapacity: dict[str, str]
    adminAccess: bool


class OpaqueParameters(TypedDict, total=False):
    driver: str


class DeviceParameters(TypedDict, total=False):
    """The API's `DeviceAllocationConfiguration`."""

    opaque: OpaqueParameters


class AllocatedDevices(TypedDict, total=False):
    results: list[AllocatedDevice]
    config: list[DeviceParameters]


class ClaimAllocation(TypedDict, total=False):
    devices: AllocatedDevices


class ClaimConsumer(TypedDict, total=False):
    resource: str
    name: str
    uid: str


class ClaimStatus(TypedDict, total=False):
    allocation: ClaimAllocation
    reservedFor: list[ClaimConsumer]


class ResourceClaim(ApiObject, total=False):
    status: ClaimStatus
