"""The schemas that the package carries are those of the answers' types and know all that these may say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.core.enums import DEV_TYPES
from yunion_mps.http.operations import OPERATIONS
from yunion_mps.mps.states import LEGAL_CHANGES
from yunion_mps.observe.usage import MINUTES, STEP_S

from unit.generated import CHECKOUT

CARRIED = CHECKOUT / "yunion_mps" / "http" / "schemas.json"


def field(schema: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CARRIED.read_text())[schema]["properties"][name]
    return found


@pytest.mark.skipif(sys.version_info < (3, 10), reason="pydantic cannot read `X | None` there")
def test_the_schemas_are_those_of_the_types(tmp_path: Path) -> None:
    made = tmp_path / "schemas.json"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT / "scripts" / "lib")}
    subprocess.run([sys.executable, "-m", "api_schemas", str(made)], env=environment, check=True)
    assert made.read_text() == CARRIED.read_text(), "run scripts/schemas"


def test_a_schema_names_all_states_of_a_domain() -> None:
    assert field("Domain", "state")["enum"] == list(LEGAL_CHANGES)


def test_a_schema_has_the_constants_of_the_program() -> None:
    assert field("Device", "dev_type")["enum"] == list(DEV_TYPES.values())
    assert field("Usage", "step_s")["const"] == STEP_S
    assert field("Usage", "polled")["minItems"] == MINUTES


def test_every_amount_of_memory_has_its_unit_in_its_name() -> None:
    schemas = json.loads(CARRIED.read_text()).values()
    names = {name for schema in schemas for name in schema.get("properties", {})}
    names |= {one.name for operation in OPERATIONS for one in operation.parameters}
    without = {name for name in names if "memory" in name and not name.endswith("_mib")}
    assert without == {"memory_units", "mps_memory_limit", "mps_memory_total"}  # the last two are Cloudpods'
