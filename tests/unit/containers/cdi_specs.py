"""Specifications held to the format's own schema and to its grammar of names, and what of a host goes in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator  # type: ignore[import-untyped]
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7
from yunion_mps.containers.nodes import DeviceNode
from yunion_mps.containers.spec import HostFiles, devices_spec
from yunion_mps.core.models import Device, DomainPlan, Snapshot

from unit.http.snapshots import H100, P40

Json = dict[str, Any]

_FOLDER = Path(__file__).parent / "schema"
#: SPEC.md, "CDI Devices": letters and digits at both ends, and between them also _ - . and :
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
#: SPEC.md, "Kind": a domain of DNS labels, and a name that begins with a letter.
_KIND = re.compile(
    r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*/[A-Za-z][A-Za-z0-9_-]*[A-Za-z0-9]"
)

NODES = (DeviceNode("/dev/nvidiactl", "/dev/nvidiactl"), DeviceNode("/dev/nvidia-uvm", "/dev/nvidia-uvm"))
HOST = HostFiles(
    NODES,
    {
        str(gpu.uuid): (DeviceNode(f"/dev/nvidia{gpu.minor}", f"/dev/nvidia{gpu.minor}"),)
        for gpu in (P40, H100)
    },
)


def _document(name: str) -> Json:
    return dict(json.loads((_FOLDER / name).read_text()))


def _validator() -> Draft7Validator:
    schema = _document("schema.json")
    # The format's own schema allows any key; engines refuse one that they do not know.
    schema["additionalProperties"] = schema["properties"]["devices"]["items"]["additionalProperties"] = False
    schema["properties"]["containerEdits"] = {"$ref": "defs.json#/definitions/containerEdits"}
    parts = _document("defs.json")
    for name, part in parts["definitions"].items():
        if "properties" in part and name != "mapStringString":
            part["additionalProperties"] = False
    registry: Registry[Any] = Registry().with_resource("defs.json", Resource.from_contents(parts, DRAFT7))
    return Draft7Validator(schema, registry=registry)


def hold_to_the_format(spec: Json) -> None:
    """Fail where an engine would refuse the specification."""
    errors = [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(spec)]
    assert errors == []
    assert _KIND.fullmatch(spec["kind"])
    names = [device["name"] for device in spec["devices"]]
    assert [name for name in names if not _NAME.fullmatch(name)] == []
    assert len(set(names)) == len(names), "an engine refuses a name that is there twice"
    assert names, "and a file without a device"
    for edits in [spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])]:
        nodes = [node["path"] for node in edits.get("deviceNodes", ())]
        assert len(set(nodes)) == len(nodes)


def plan_of(snapshot: Snapshot) -> tuple[tuple[Device, ...], list[DomainPlan]]:
    return snapshot.plan.devices, [status.plan for status in snapshot.domains]


def spec_of(snapshot: Snapshot, host: HostFiles = HOST) -> Json:
    return held(devices_spec(*plan_of(snapshot), host))


def held(spec: Json | None) -> Json:
    """The specification, of which an engine would refuse nothing."""
    assert spec is not None
    hold_to_the_format(spec)
    return spec


def edits_of(spec: Json, name: str) -> Json:
    return dict(next(device["containerEdits"] for device in spec["devices"] if device["name"] == name))


def environment_of(edits: Json) -> dict[str, str]:
    return dict(entry.partition("=")[::2] for entry in edits["env"])


VALIDATOR = _validator()
