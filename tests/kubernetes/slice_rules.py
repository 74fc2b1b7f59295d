"""What an API server requires of a ResourceSlice (k8s.io/api/resource/v1/types.go): names and limits."""

from __future__ import annotations

import re
from typing import Any

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_QUALIFIED = rf"({_SUBDOMAIN}/)?[A-Za-z_][A-Za-z0-9_]{{0,31}}"
_TAINT_KEY = rf"{_SUBDOMAIN}/[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
_SEMVER = r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?"
#: A quantity as the API server writes it, so that what is stored equals what was sent.
_QUANTITY = r"[1-9]\d*(m|[KMGT]i|[kMGT])?|0"
_SPEC = {"driver", "nodeName", "pool", "devices"}
_DEVICE = {"name", "attributes", "capacity", "allowMultipleAllocations", "taints"}
_ATTRIBUTES = {"string": str, "version": str, "int": int, "bool": bool}
_SIZES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "m": 1e-3}


def wrong_with(one: dict[str, Any]) -> str:
    """The first thing that is wrong with a slice; empty if nothing is."""
    try:
        _check(one)
    except AssertionError as error:
        return str(error) or "a rule is broken"
    return ""


def _check(one: dict[str, Any]) -> None:
    assert one["apiVersion"] == "resource.k8s.io/v1", "apiVersion"
    assert one["kind"] == "ResourceSlice", "kind"
    assert re.fullmatch(_SUBDOMAIN, one["metadata"]["name"]), "metadata.name"
    assert len(one["metadata"]["name"]) <= 253, "metadata.name"
    spec = one["spec"]
    assert set(spec) == _SPEC, f"spec has {sorted(spec)}"
    assert set(spec["pool"]) == {"name", "generation", "resourceSliceCount"}, "spec.pool"
    assert spec["pool"]["resourceSliceCount"] > 0, "resourceSliceCount"
    names = [device["name"] for device in spec["devices"]]
    assert len(set(names)) == len(names), "names of devices"
    limit = 64 if any("taints" in device for device in spec["devices"]) else 128
    assert len(names) <= limit, f"{len(names)} devices"
    for device in spec["devices"]:
        _check_device(device)


def _check_device(device: dict[str, Any]) -> None:
    assert set(device) <= _DEVICE, f"device has {sorted(device)}"
    assert re.fullmatch(_LABEL, device["name"]), device["name"]
    assert len(device["attributes"]) + len(device["capacity"]) <= 32, "attributes and capacity"
    for name, attribute in device["attributes"].items():
        kind, value = next(iter(attribute.items()))
        assert len(attribute) == 1, name
        assert re.fullmatch(_QUALIFIED, name), name
        assert type(value) is _ATTRIBUTES[kind], name
        assert kind != "version" or re.fullmatch(_SEMVER, str(value)), f"{name} is {value}"
        assert not isinstance(value, str) or 0 < len(value) <= 64, name
    for name, capacity in device["capacity"].items():
        assert re.fullmatch(_QUALIFIED, name), name
        assert re.fullmatch(_QUANTITY, capacity["value"]), capacity["value"]
        check_policy(capacity, is_shared=device.get("allowMultipleAllocations", False))
    for taint in device.get("taints", ()):
        assert re.fullmatch(_TAINT_KEY, taint["key"]), taint["key"]
        assert taint["effect"] in ("None", "NoSchedule", "NoExecute"), taint["effect"]
    assert device.get("taints") != [], "taints"


def check_policy(capacity: dict[str, Any], *, is_shared: bool) -> None:
    if "requestPolicy" not in capacity:
        return
    assert is_shared, "a requestPolicy without allowMultipleAllocations"
    policy = capacity["requestPolicy"]
    value, default = size_of(capacity["value"]), size_of(policy["default"])
    least = size_of(policy["validRange"]["min"])
    most = size_of(policy["validRange"].get("max", capacity["value"]))
    assert least <= default <= most <= value, "default"
    if "step" not in policy["validRange"]:
        return
    step = size_of(policy["validRange"]["step"])
    assert default % step == 0, "default is no multiple of step"
    assert least + step <= value, "step"


def size_of(quantity: str) -> float:
    number, suffix = re.fullmatch(r"(\d+)(.*)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * _SIZES.get(suffix, 1)
