"""Objects of the Kubernetes API: what all have in common, and how an answer is read as one.

A type declares the members that are used here. Reading checks their types; null counts as missing, and other
members are kept unchanged.

Source: Kubernetes API Concepts, section "Resource URIs"; k8s.io/apimachinery, pkg/apis/meta/v1/types.go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from typing import Any, Generic, NewType, TypedDict, TypeVar, cast, get_args, get_origin, get_type_hints
from urllib.parse import quote

from yunion_mps.kubernetes.api.credentials import ApiServerError


class InvalidObjectError(ApiServerError):
    """An object of the API server, or its answer, is not what its type says."""


#: The API's `Time`: 2026-01-31T12:00:00Z.
Time = NewType("Time", str)
#: All integers of the API are smaller.
_INTEGER_LIMIT = 1 << 63


class OwnerReference(TypedDict, total=False):
    apiVersion: str
    kind: str
    name: str
    uid: str
    controller: bool


class ObjectMeta(TypedDict, total=False):
    """The members of `metadata` that are used here."""

    name: str
    generateName: str
    namespace: str
    uid: str
    resourceVersion: str
    labels: dict[str, str]
    annotations: dict[str, str]
    deletionTimestamp: Time
    deletionGracePeriodSeconds: int
    ownerReferences: list[OwnerReference]


class ApiObject(TypedDict, total=False):
    """What all objects have; the type of a resource adds its `spec` and `status`."""

    apiVersion: str
    kind: str
    metadata: ObjectMeta


class BookmarkMeta(TypedDict):
    resourceVersion: str


class Bookmark(TypedDict):
    """The object of a watch event that only says how far the watch has come."""

    metadata: BookmarkMeta


ListMeta = TypedDict("ListMeta", {"resourceVersion": str, "continue": str}, total=False)


class ObjectList(TypedDict):
    """A page of a list; each of `items` is read on its own."""

    kind: str
    metadata: ListMeta
    items: list[object]


T = TypeVar("T")
ObjectT = TypeVar("ObjectT", bound=ApiObject)


@dataclass(frozen=True)
class Resource(Generic[ObjectT]):
    """A type of object, and how it is asked for and read."""

    #: The path of the API group and its version.
    prefix: str
    #: The name of the type in paths.
    plural: str
    type: type[ObjectT]
    #: The first Kubernetes that serves it, if that is a recent one.
    since: str = ""
    #: How many objects are listed at once.
    page: int = 500
    #: Returns what to keep of an object that was read, by default everything.
    keep: Callable[[ObjectT], ObjectT] = lambda stored: stored

    def path(self, name: str = "", namespace: str = "") -> str:
        """Return the path of an object, or of all objects of the namespace or the cluster."""
        path = self.prefix
        if namespace:
            path += f"/namespaces/{quote(namespace, safe='')}"
        path += f"/{self.plural}"
        if name:
            path += f"/{quote(name, safe='')}"
        return path

    def read(self, value: object) -> ObjectT:
        """Return the value as a stored object, which has a name, uid and version.

        Raises InvalidObjectError if it is not one.
        """
        stored = read_as(self.type, value, self.plural)
        base: ApiObject = stored
        missing = {"name", "uid", "resourceVersion"} - base.get("metadata", {}).keys()
        if missing:
            raise _invalid(f"{self.plural}.metadata.{min(missing)}", "missing")
        return self.keep(stored)

    def read_list(self, value: object) -> ObjectList:
        """Return the value as a page of a list; raises InvalidObjectError if it is not one."""
        page = read_as(ObjectList, value, self.plural)
        if not page["kind"].endswith("List") or not page["metadata"].get("resourceVersion"):
            raise _invalid(self.plural, "not a list")
        return page


def read_as(expected: type[T], value: object, path: str) -> T:
    """Return the value if it has the type; raises InvalidObjectError, which says where it differs.

    `path` is what the message calls the value.
    """
    return cast(T, _read(expected, value, path))


def utc_s(time: Time) -> float:
    """Return the time in seconds since 1970; raises ValueError if it is not one."""
    return datetime.strptime(time, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()


def _read(expected: Any, value: Any, path: str) -> Any:
    container = dict if hasattr(expected, "__required_keys__") else get_origin(expected)
    if expected is object:
        return value
    if container is dict and isinstance(value, dict):
        members, others = _members(expected)
        members_read: dict[str, Any] = {}
        for name, member in value.items():
            if member is not None:
                members_read[name] = _read(members.get(name, others), member, f"{path}.{name}")
        missing = set(getattr(expected, "__required_keys__", ())) - members_read.keys()
        if missing:
            raise _invalid(f"{path}.{min(missing)}", "missing")
        return members_read
    if container is list and isinstance(value, list):
        (kind,) = get_args(expected)
        return [_read(kind, element, f"{path}[{index}]") for index, element in enumerate(value)]
    if container or not _is_scalar(expected, value):
        raise _invalid(path, "invalid")
    return value


def _is_scalar(expected: Any, value: Any) -> bool:
    try:
        if expected is Time:
            utc_s(value)
        elif expected is str:
            value.encode()
        elif expected is int:
            return type(value) is int and abs(value) < _INTEGER_LIMIT
        return isinstance(value, str if expected is Time else expected)
    except (AttributeError, TypeError, ValueError):
        return False


@cache
def _members(expected: Any) -> tuple[Mapping[str, Any], Any]:
    """Return the types of the declared members, and that of all others."""
    if get_origin(expected) is dict:
        return {}, get_args(expected)[1]
    return get_type_hints(expected), object


def _invalid(path: str, message: str) -> InvalidObjectError:
    return InvalidObjectError(f"the API server's answer cannot be used: {path} is {message}")
