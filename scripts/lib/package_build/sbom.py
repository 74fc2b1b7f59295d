"""The list of bundled libraries in CycloneDX: names, versions, licences, and the hash of every file."""

from __future__ import annotations

import hashlib
import json
import uuid
from datetime import datetime, timezone
from typing import Any

from package_build.source import Source
from package_build.vendor import Bundled

_VENDOR = "/usr/lib/yunion-mps/vendor"

Json = dict[str, Any]


def sbom(source: Source, package: str, bundle: list[Bundled]) -> str:
    """Return the package's list: CycloneDX 1.5 as JSON, which depends only on the sources."""
    made_at = datetime.fromtimestamp(source.epoch_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    us = f"pkg:generic/{package}@{source.version}"
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{us}?revision={source.revision}')}",
        "version": 1,
        "metadata": {
            "timestamp": made_at,
            "component": {
                "type": "application",
                "bom-ref": us,
                "name": package,
                "version": source.version,
                "purl": us,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "properties": [{"name": "yunion-mps:revision", "value": source.revision}],
            },
        },
        "components": [_component(one) for one in bundle],
        "dependencies": [
            {"ref": us, "dependsOn": [_purl(one) for one in bundle]},
            *({"ref": _purl(one)} for one in bundle),
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def _purl(one: Bundled) -> str:
    return f"pkg:pypi/{one.component.name}@{one.version}"


def _component(one: Bundled) -> Json:
    """A dependency with the hash of the published file and those of the installed files."""
    return {
        "type": "library",
        "bom-ref": _purl(one),
        "name": one.component.name,
        "version": one.version,
        "purl": _purl(one),
        "licenses": [{"license": {"id": one.component.licence}}],
        "hashes": [{"alg": "SHA-256", "content": one.sha256}],
        "components": [
            {
                "type": "file",
                "name": f"{_VENDOR}/{name}",
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
            }
            for name, data in one.files.items()
        ],
    }
