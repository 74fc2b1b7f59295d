"""What the commands print on one realistic host, at several widths, in a pipe and as JSON.

The files of `golden/` are what people review. To write them again, set YUNION_MPS_WRITE_GOLDEN=1.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from yunion_mps import __version__
from yunion_mps.cli.output import columns_of

from unit.cli.conftest import Cli
from unit.cli.golden_host import golden_host

GOLDEN = Path(__file__).with_name("golden")
WIDTHS = (80, 120, 200)
#: The commands, and the schema of what they print as JSON, empty if it is none of the API's.
COMMANDS = {
    "list": "DeviceList",
    "list --free": "DeviceList",
    "list -o wide": "",
    "isolated-device-list": "DeviceList",
    "show 17:00.0-1": "DeviceDetails",
    "gpus": "GpuList",
    "gpus -o wide": "",
    "lease list": "LeaseList",
    "lease list -o wide": "",
    "lease show job-17": "LeaseRecord",
    "lease take job-17 --ttl 1h": "LeaseRecord",
    "lease renew job-17": "LeaseRecord",
    "lease release job-17": "LeaseRecord",
    "who": "",
    "who -o wide": "",
    "who --clients": "ClientList",
    "who --clients -o wide": "",
    "terminate 61102 --yes": "",
    "status": "",
    "events": "EventList",
    "plan": "ChangeList",
    "top --once": "",
}
#: Without JSON of their own.
NO_JSON = ("wide", "top", "terminate")


@pytest.fixture(scope="module")
def host() -> Iterator[Cli]:
    with golden_host() as cli:
        yield cli


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_what_was_reviewed(host: Cli, command: str) -> None:
    words = command.split()
    printed = {f"{width} columns": "\n".join(host.on_terminal(width, *words)) + "\n" for width in WIDTHS}
    printed["piped"] = host.good(*words)
    wide = [line for line in printed["80 columns"].splitlines() if columns_of(line) > 80]
    assert [line for line in wide if not re.fullmatch(r" *\S+", line)] == [], "but a path or a variable"
    places: dict[str, list[str]] = {}
    for place, text in printed.items():
        places.setdefault(text.replace(f" {__version__}", " 1.2.3"), []).append(place)
    compare(
        f"{name_of(command)}.txt",
        "\n".join(f"==> {command} ({', '.join(where)}) <==\n{text}" for text, where in places.items()),
    )


@pytest.mark.parametrize("command", [one for one in COMMANDS if not any(word in one for word in NO_JSON)])
def test_a_command_prints_the_reviewed_json_and_what_the_api_answers(host: Cli, command: str) -> None:
    text = host.good(*command.split(), "-o", "json")
    answer = json.loads(text)
    if COMMANDS[command]:
        SCHEMAS[COMMANDS[command]].validate(answer)
    compare(f"{name_of(command)}.json", text.replace(f'"{__version__}"', '"1.2.3"'))


def name_of(command: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", command)


def compare(name: str, text: str) -> None:
    if os.environ.get("YUNION_MPS_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text(), "if that is better: YUNION_MPS_WRITE_GOLDEN=1"


def schemas() -> dict[str, Any]:
    """A validator for each schema, which finds those that it refers to in the document itself."""
    found = json.loads(files("yunion_mps.http").joinpath("schemas.json").read_text())
    return {
        name: Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": found}})
        for name in found
    }


SCHEMAS = schemas()
