"""No command prints what steers a terminal or forges a line, whatever the daemon answers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.cli.output import FORMATS
from yunion_mps.core.errors import NothingFreeError
from yunion_mps.core.models import Event

from unit.cli.busy_host import OUTSIDE_MPS, hold_leases
from unit.cli.conftest import Cli
from unit.hostile_names import READABLE, WORST, steers
from unit.http.fake_services import CLIENT, LEASE, QUEUED_REQUEST, SERVER, WAITING_CLIENT, clients, lease_of
from unit.http.server_host import ServerHost
from unit.http.snapshots import MACHINE_ID, P40, snapshot

#: SQLite, files and arguments have no half of a character.
WHOLE = WORST.replace("\ud800", "")
LISTS = (
    ["who"], ["who", "--clients"], ["gpus"], ["list"], ["isolated-device-list"], ["events"],
    ["show", "00:06.0-1"], ["lease", "list"], ["lease", "show", "b" * 36], ["lease", "renew", "a"],
)  # fmt: skip
#: What to run, and the exit status.
COMMANDS = [
    *(([*command, "-o", output], 0) for command in LISTS for output in FORMATS),
    (["status"], 0),
    (["top", "--once"], 0),
    (["terminate", "4260", "--yes"], 0),
    (["run", "--dry-run", "a"], 0),
    (["run", "--allow-unlimited", WHOLE], 127),
    (["lease", "renew", WHOLE], 0),
    ([WHOLE], 2),
    (["config", "check"], 6),
    (["config", "check", "-o", "json"], 6),
]
ENVIRONMENT = {
    "CUDA_MPS_PIPE_DIRECTORY": "/nowhere",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": WORST,
}


@pytest.fixture(scope="module")
def worst() -> Iterator[Cli]:
    """A host on which all that others may name has the worst name."""
    with ServerHost(snapshot(P40._replace(name=WORST), reason=WORST)) as host:
        names = {"user": WORST, "command": WORST}
        server, waiting = {**SERVER, **names}, {**WAITING_CLIENT, **names, "server_user": WORST}
        names["container"] = WORST
        jobs = {**CLIENT, **names, "device": WORST}, {**OUTSIDE_MPS, **names}
        host.clients.listed = clients(*jobs, servers=(server,), waiting=(waiting,), errors=(WORST,))
        host.clients.how = WORST
        lease = {**LEASE, **names, "name": WORST, "environment": ENVIRONMENT}
        hold_leases(
            host,
            lease,
            {**lease, "id": "b" * 36, **lease_of({"00:06.0-2": 5760})},
            waiting=({**QUEUED_REQUEST, **names},),
        )
        host.leases.granted = lease
        host.record(Event("error", "client", *[WHOLE] * 4))
        os.mkdir(host.paths.under("/etc"))
        os.mkdir(os.path.dirname(host.paths.host_conf))
        Path(host.paths.machine_id).write_text(f"{MACHINE_ID}\n")
        key, value = (json.dumps(text) for text in (f"cuda_mps_{WHOLE}", WHOLE))
        Path(host.paths.host_conf).write_text(f"{key}: 1\ncuda_mps_scope: {value}\n")
        yield Cli(host.paths.root, host)


@pytest.mark.parametrize(("command", "code"), COMMANDS)
def test_a_command_prints_no_control_characters(worst: Cli, command: list[str], code: int) -> None:
    done = worst.process(*command) if command[0] == "run" else worst(*command)
    assert done.code == code, done
    printed = done.out + done.err
    assert printed
    assert steers(printed) == set()
    assert [line for line in printed.split("\n") if line.startswith(("STOPPING=1", "<2>"))] == []


def test_a_refusal_has_no_control_characters(own_cli: Cli) -> None:
    own_cli.host.leases.refusal = NothingFreeError(WORST, WORST)
    done = own_cli("run", "a")
    assert done.code == 5
    assert steers(done.err) == set()
    assert [line for line in done.err.splitlines() if not line.startswith("yunion-mps: ")] == []


def test_events_that_are_followed_are_one_line_each(worst: Cli) -> None:
    with worst.start("events", "--follow", "-o", "json") as process:
        assert process.stdout
        line = process.stdout.readline()
        process.terminate()
    assert steers(line) == set()
    assert json.loads(line)["what"] == WHOLE


def test_readable_names_stay_as_they_are(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients(*({**CLIENT, "user": name, "command": name} for name in READABLE))
    answer, (_, *rows) = own_cli.read("who", "--clients")
    assert [one["user"] for one in answer["clients"]] == [row[1] for row in rows] == READABLE
    table = own_cli.good("who", "--clients")
    assert [name for name in READABLE if f"  {name}  " not in table] == []
    for output in ("json", "yaml"):
        text = own_cli.good("who", "--clients", "-o", output)
        assert [name for name in ("jürgen", "訓練.py", "😀") if name not in text] == []
