"""What the commands print on one realistic host, at several widths, in a pipe and as JSON.

The files of `golden/` are what people review. To write them again, set YUNION_MPS_WRITE_GOLDEN=1.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import click
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from yunion_mps import __version__, answers
from yunion_mps.cli.config import ConfigRecord, PlanRecord
from yunion_mps.cli.output import display_width
from yunion_mps.cli.root import COMMANDS, cli
from yunion_mps.cli.who import UseList
from yunion_mps.doctor.report import ReportRecord

from unit.cli.conftest import Cli, Done
from unit.cli.golden_host import LEASES, golden_host, leasing

GOLDEN = Path(__file__).with_name("golden")


class Golden(NamedTuple):
    """A command's exit status, and what its JSON is: an answer of the API by name, or a type."""

    answer: str | type = ""
    code: int = 0
    widths: tuple[int, ...] = (80, 120, 200)


TEXT = Golden()
VARIABLES = Golden(dict[str, str])


def failure(code: int) -> Golden:
    return Golden(code=code, widths=(80,))


GOLDENS = {
    "list": Golden("DeviceList"),
    "list --free": Golden("DeviceList"),
    "list -o wide": TEXT,
    "list --gpu 99": failure(1),
    "isolated-device-list": Golden("DeviceList"),
    "show 17:00.0-1": Golden("DeviceDetails"),
    "gpus": Golden("GpuList"),
    "gpus -o wide": TEXT,
    "env 17:00.0-1": VARIABLES,
    "env 17:00.0-1 -o dotenv": TEXT,
    "env 17:00.0-1 -o docker": TEXT,
    "env 17:00.0-1 -o systemd": TEXT,
    "run --dry-run": TEXT,
    "run --print-env": VARIABLES,
    "run --count 3 ./simulate": failure(1),
    "run --device 17:00.0-0 ./simulate": failure(5),
    "run --count 5 ./simulate": failure(1),
    "run --gpu b3:00.0 ./simulate": failure(1),
    "run --gpu-mem 2GiB ./simulate": failure(1),
    "lease list": Golden("LeaseList"),
    "lease list -o wide": TEXT,
    "lease show job-17": Golden("LeaseDetails"),
    "lease take job-17 --ttl 1h": Golden("LeaseRecord"),
    "lease renew job-17": Golden("LeaseRecord"),
    "lease release job-17": Golden("LeaseRecord"),
    "who": Golden(UseList),
    "who -o wide": TEXT,
    "who --clients": Golden("ClientList"),
    "who --clients -o wide": TEXT,
    "terminate 61102 --yes": TEXT,
    "terminate 9999 --yes": failure(1),
    "status": Golden("Status"),
    "events": Golden("EventList"),
    "events --since 5m": Golden("EventList"),
    "doctor": Golden(ReportRecord, code=1),
    "config check": Golden(PlanRecord),
    "config show": Golden(ConfigRecord),
    "plan": Golden("ChangeList"),
    "reload": Golden("ChangeList"),
    "reload --now --yes": TEXT,
    "ray resources": TEXT,
    "top --once": TEXT,
    "metrics": TEXT,
    "completion bash": TEXT,
}
#: Commands that print the same JSON as another one.
SAME_JSON = {
    "isolated-device-list": "list",
    "lease renew job-17": "lease take job-17 --ttl 1h",
    "lease release job-17": "lease take job-17 --ttl 1h",
}
#: What is started on a device, and the place of its lease.
STARTED = {
    "run printenv YUNION_MPS_DEVICE": 1,
    "run --allow-unlimited --gpu b3:00.0 printenv YUNION_MPS_DEVICE": 3,
}
#: What asks before it ends jobs.
ASKING = ("terminate 61102", "reload --now")


def commands(group: click.Group, *path: str) -> Iterator[str]:
    yield " ".join(path)
    context = click.Context(group)
    for name in COMMANDS if group is cli else group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield " ".join([*path, name])


@pytest.fixture(scope="module")
def host() -> Iterator[Cli]:
    with golden_host() as cli:
        yield cli


@pytest.mark.parametrize("command", GOLDENS)
def test_a_command_prints_what_was_reviewed(host: Cli, command: str) -> None:
    is_as_reviewed(host, command, GOLDENS[command])


@pytest.mark.parametrize("command", STARTED)
def test_a_command_that_is_started_prints_what_was_reviewed(host: Cli, command: str) -> None:
    with leasing(host, LEASES[STARTED[command]]):
        is_as_reviewed(host, command, TEXT)


@pytest.mark.parametrize("command", ASKING)
def test_a_command_asks_what_was_reviewed(host: Cli, command: str) -> None:
    words, text = command.split(), ""
    for answer in ("n", "y"):
        code, printed = host.answered(f"{answer}\n".encode(), *words, columns=80)
        text += f"==> {command} (answered {answer}) <==\n{shown(Done(code, printed, ''))}\n"
    text += f"==> {command} (without a terminal) <==\n{shown(host.process(*words, stdin=subprocess.DEVNULL))}"
    compare(f"{name_of(command)}.txt", text)


def is_as_reviewed(host: Cli, command: str, golden: Golden) -> None:
    """Whether the command's output is the golden one at every width."""
    words = command.split()
    done = {f"{width} columns": host.done_on_terminal(width, *words) for width in golden.widths}
    wide = [line for line in done["80 columns"].out.splitlines() if display_width(line) > 80]
    if words[0] not in ("completion", "metrics", "isolated-device-list") and "wide" not in words:
        assert [line for line in wide if not re.fullmatch(r" *\S+", line)] == [], "but a path or a variable"
    done["piped"] = host(*words)
    places: dict[str, list[str]] = {}
    for place, one in done.items():
        assert one.code == golden.code, one
        places.setdefault(shown(one), []).append(place)
    compare_places(command, places)


@pytest.mark.parametrize("command", list(commands(cli)))
def test_help_is_what_was_reviewed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command.split(), "--help"]
    places: dict[str, list[str]] = {}
    for columns in (80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert cli.main(words, prog_name="yunion-mps", standalone_mode=False) == 0
        places.setdefault(capsys.readouterr().out, []).append(f"{columns} columns")
    compare_places(" ".join(words), places)


@pytest.mark.parametrize("command", [command for command, golden in GOLDENS.items() if golden.answer])
def test_a_command_prints_the_reviewed_json_and_what_the_api_answers(host: Cli, command: str) -> None:
    golden = GOLDENS[command]
    done = host(*command.split(), "-o", "json")
    assert (done.code, done.err) == (golden.code, "")
    kind = golden.answer
    schema = {"$ref": f"#/components/schemas/{kind}"} if isinstance(kind, str) else schema_of(kind)
    Draft202012Validator({**schema, **COMPONENTS}).validate(json.loads(done.out))
    name = name_of(SAME_JSON.get(command, command))
    compare(f"{name}.json", done.out.replace(f'"{__version__}"', '"1.2.3"'))


def shown(done: Done) -> str:
    """What a command prints, and how it ends if it does not succeed."""
    text = re.sub(rf"([ \"]){re.escape(__version__)}", r"\g<1>1.2.3", done.out)
    text += f"-- on standard error --\n{done.err}" if done.err else ""
    return text + (f"-- exit status {done.code} --\n" if done.code else "")


def name_of(command: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", command).strip("-")


def compare_places(command: str, places: dict[str, list[str]]) -> None:
    """Compare each different output, named after the places where it is printed."""
    texts = [f"==> {command} ({', '.join(where)}) <==\n{text}" for text, where in places.items()]
    compare(f"{name_of(command)}.txt", "\n".join(texts))


def compare(name: str, text: str) -> None:
    if os.environ.get("YUNION_MPS_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text(), "if that is better: YUNION_MPS_WRITE_GOLDEN=1"


def schema_of(kind: Any) -> Any:
    """The schema of a type's JSON; of the API's answers in it, their own."""
    if kind is object:
        return {}
    if kind in (str, int, float, bool, type(None)):
        names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
        return {"type": names[kind]}
    of = get_args(kind)
    if get_origin(kind) is list:
        return {"type": "array", "items": schema_of(of[0])}
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": schema_of(of[1])}
    if of:
        return {"anyOf": [schema_of(one) for one in of]}
    if kind.__module__.startswith("yunion_mps.answers"):
        return {"$ref": f"#/components/schemas/{kind.__name__.removesuffix('Json')}"}
    assert kind.__required_keys__, "a TypedDict"
    return {
        "type": "object",
        "properties": {
            name: schema_of(one) for name, one in get_type_hints(kind, None, vars(answers)).items()
        },
        "required": sorted(kind.__required_keys__),
        "additionalProperties": False,
    }


#: Where the schemas of the API's answers refer to each other.
COMPONENTS = {
    "components": {"schemas": json.loads(files("yunion_mps.http").joinpath("schemas.json").read_text())}
}
