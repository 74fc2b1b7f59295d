"""`yunion-mps top`: what a frame shows, whatever its size, and what is printed if nothing can be drawn."""

from __future__ import annotations

import os
import pty
import subprocess
from typing import Any

import pytest
from yunion_mps import __version__
from yunion_mps.cli.output import display_width
from yunion_mps.cli.top.frame import VIEWS, Outage, ViewState, bar, clock, frame
from yunion_mps.cli.top.rows import ORDERS, Poll, Scene, scene, sort_devices
from yunion_mps.core.models import Event, Snapshot
from yunion_mps.core.units import rfc3339
from yunion_mps.observe.holdings import NO_CLIENTS
from yunion_mps.service.queries import Queries
from yunion_mps.views.overview import HostAnswers, ShownProblem

from unit.cli.busy_host import OUTSIDE_MPS, OVER_BUDGET, TWO_DEVICES, hold_leases
from unit.cli.conftest import Cli
from unit.http import snapshots
from unit.http.fake_services import CLIENT, LEASE, clients, lease_of, status_of

NOW_S = 1788007260.0
INSTEAD = (
    "yunion-mps: print everything once: yunion-mps top --once; "
    "or follow the events: yunion-mps events --follow\n"
)


def poll(snapshot: Snapshot, *leases: Any, clients: Any = NO_CLIENTS, events: int = 0) -> Poll:
    service: Any = Queries(lambda: snapshot, NOW_S - 60, 4200)
    devices = service.all_devices()
    event: Any = {
        "id": 1,
        "time": rfc3339(NOW_S - 30),
        "last_time": rfc3339(NOW_S - 30),
        **Event("info", "gpu", "00:06.0", "available")._asdict(),
    }
    gpus = service.gpus()["gpus"]
    status = status_of(service, *leases, clients=clients)
    told = HostAnswers(status, gpus, devices, list(leases), [], clients)
    return Poll(NOW_S, told, [event] * events, (), 0.0)


BUSY = scene(
    poll(snapshots.reference(), LEASE, TWO_DEVICES, clients=clients(OVER_BUDGET, OUTSIDE_MPS), events=9)
)
MANY = scene(poll(snapshots.large(480), events=9))
TROUBLED = scene(poll(snapshots.troubled()))
DISABLED = scene(poll(snapshots.disabled()))
AWAY = Outage(NOW_S - 60, "the daemon is not running", "start it")


def lines_of(scene: Scene, columns: int, rows: int, outage: Outage | None = None, **look: Any) -> list[str]:
    shown = frame(scene, ViewState(columns, rows, **look), outage=outage, now_s=NOW_S, interval_s=2)
    return ["".join(text for text, _ in line) for line in shown.lines]


@pytest.mark.parametrize(
    "scene", [BUSY, MANY, TROUBLED, DISABLED], ids=["busy", "many", "troubled", "disabled"]
)
@pytest.mark.parametrize("view", VIEWS)
def test_a_frame_never_has_more_lines_or_columns_than_the_terminal(scene: Scene, view: str) -> None:
    for columns in (1, 2, 5, 11, 19, 20, 33, 39, 47, 58, 64, 79, 80, 100, 200):
        for rows in (1, 2, 3, 4, 5, 7, 9, 12, 16, 24, 50, 100):
            for utf8 in (True, False):
                lines = lines_of(scene, columns, rows, AWAY, view=view, utf8=utf8)
                assert len(lines) <= rows
                assert all(display_width(line) <= columns for line in lines)
                assert utf8 or "".join(lines).isascii()


@pytest.mark.parametrize(
    "scene", [BUSY, MANY, TROUBLED, DISABLED], ids=["busy", "many", "troubled", "disabled"]
)
def test_from_80_x_24_on_every_part_is_there_and_the_keys_are_last(scene: Scene) -> None:
    for columns, rows in ((80, 24), (120, 40), (200, 60)):
        lines = lines_of(scene, columns, rows)
        assert len(lines) == rows
        assert lines[-1].startswith(" q  quit  s  sort: busiest  v  view: all ")
        begins = [
            word for word in ("GPU", "DEVICE", "EVENTS") if any(line.startswith(word) for line in lines)
        ]
        assert begins == ["GPU", "DEVICE", *(["EVENTS"] if scene.events else [])]


def test_the_events_that_the_daemon_ranks_first_have_room_before_others() -> None:
    (event, *_) = BUSY.events
    xid: Any = {**event, "id": 2, "severity": "warning", "what": "Xid 48", "rank": 1}
    old: Any = {**event, "id": 1, "severity": "warning", "what": "Xid 31", "rank": 4}
    of_users: Any = {**event, "severity": "warning", "kind": "client", "what": "terminated", "rank": 3}
    events: list[Any] = [old, xid, *({**of_users, "id": number} for number in range(4, 20))]
    text = "\n".join(lines_of(BUSY._replace(events=events), 80, 24))
    assert "Xid 48" in text
    assert "Xid 31" not in text
    assert "terminated" in text


def test_rows_that_have_no_room_are_counted_in_the_heading() -> None:
    lines = lines_of(MANY, 80, 24)
    assert any(line.startswith("GPU 1-2/10 ") for line in lines)
    assert any(line.startswith("DEVICE 1-7/480 ") for line in lines)
    assert any(line.startswith("DEVICE 5-11/480 ") for line in lines_of(MANY, 80, 24, offset=4))
    last = frame(MANY, ViewState(80, 24), outage=None, now_s=NOW_S, interval_s=2).last_offset
    assert any(line.startswith("DEVICE 474-480/480 ") for line in lines_of(MANY, 80, 24, offset=last))


@pytest.mark.parametrize(
    ("columns", "gpu", "device", "hidden"),
    [
        (120, "USED GiB TOTAL POWER W TEMP C UTIL % IN USE PROCS NAME",
         "USED GiB BUDGET PEAK SM % UTIL % USER PID AGE COMMAND", ""),
        (80, "USED GiB TOTAL POWER W UTIL % IN USE PROCS NAME",
         "USED GiB BUDGET PEAK UTIL % USER PID COMMAND", "(hidden: TEMP C, SM %, AGE; show all: "),
        (60, "USED GiB TOTAL POWER W UTIL % IN USE NAME", "USED GiB BUDGET PEAK UTIL % USER COMMAND",
         "(5 columns hidden; show all: "),
        (40, "USED GiB TOTAL POWER W", "USED GiB BUDGET PEAK", "(10 columns hidden; show all: "),
    ],
)  # fmt: skip
def test_memory_peak_and_power_stay_and_hidden_columns_are_named(
    columns: int, gpu: str, device: str, hidden: str
) -> None:
    lines = lines_of(BUSY, columns, 24)
    assert next(line.split() for line in lines if line.startswith("GPU ")) == ["GPU", *gpu.split()]
    assert next(line.split() for line in lines if line.startswith("DEVICE ")) == ["DEVICE", *device.split()]
    told = [line for line in lines if line.startswith("(")]
    assert [line[: len(hidden)] for line in told] == ([hidden] if hidden else [])


def test_top_shows_above_old_data_that_the_daemon_is_down() -> None:
    lines, since = lines_of(BUSY, 80, 24, AWAY), clock(NOW_S - 60)
    assert [line.rstrip() for line in lines[:4]] == [
        f"yunion-mps {__version__}  {clock(NOW_S)}  no answer since {since}; showing the last data",
        "Problem: the daemon is not running",
        "  Hint: start it",
        "1 GPU; 4 devices: 3 used, 1 free; 2 leases; 2 processes",
    ]
    assert not any("ready" in line for line in lines[:4])
    assert any(line.startswith("00:06.0-1!") for line in lines)


@pytest.mark.parametrize(
    ("scene", "state"), [(BUSY, "degraded"), (MANY, "ready"), (TROUBLED, "failed"), (DISABLED, "disabled")]
)
def test_the_first_line_shows_the_overall_state(scene: Scene, state: str) -> None:
    assert lines_of(scene, 80, 24)[0].split()[3] == state


@pytest.mark.parametrize(
    ("order", "slots"),
    [
        ("busiest", ["-1!", "!", "-2", "-3", "-0"]),
        ("device", ["-0", "-1!", "-2", "-3", "!"]),
        ("user", ["-1!", "-2", "-3", "!", "-0"]),
        ("longest", ["-1!", "!", "-2", "-3", "-0"]),
    ],
)
def test_devices_are_sorted_in_each_order(order: str, slots: list[str]) -> None:
    assert order in ORDERS
    rows = sort_devices(BUSY.devices, order)
    assert [(row.address + row.mark).removeprefix("00:06.0") for row in rows] == slots


def test_the_memory_of_a_reserved_pool_is_not_shown_as_free() -> None:
    polled = poll(snapshots.reference())
    pool: Any = {**polled.answers.gpus[0], "memory_free_mib": 16384, "reserved_for": "kubernetes"}
    reserved = scene(polled._replace(answers=polled.answers._replace(gpus=[pool])))
    lines = lines_of(reserved, 120, 40)
    assert [line.split()[2:4] for line in lines if "-m*" in line] == [["16.0", "reserved"]]
    assert any("0.0 GiB free in pools" in line for line in lines)


def test_devices_of_a_pool_are_shown_while_they_are_leased() -> None:
    lease = {**LEASE, **lease_of({"00:06.0-m0": 2048, "00:06.0-m1": 1024})}
    client = {**CLIENT, "device": "00:06.0-m0,00:06.0-m1", "memory_by_gpu_mib": [2500]}
    found = scene(poll(snapshots.reference(), lease, clients=clients(client)))
    rows = [(row.address, row.used_mib, row.of_mib) for row in found.devices if row.in_use]
    assert rows == [("00:06.0-m0", 2048, 2048), ("00:06.0-m1", 452, 1024)]
    assert [row.user for row in found.gpus] == ["2 of 6"]


def test_mig_instances_are_not_counted_as_gpus() -> None:
    lines = lines_of(scene(poll(snapshots.mig())), 120, 40)
    assert lines[1].startswith("2 GPUs with 2 MIG instances; 6 devices: 0 used, 6 free")
    rows = {line.split()[0]: line for line in lines if line.startswith("81:00.0")}
    assert "NVIDIA" not in rows["81:00.0"]
    assert rows["81:00.0"].rstrip().endswith("H100, mig")


def test_every_way_of_sharing_is_named_after_the_gpu() -> None:
    found = scene(poll(snapshots.every_way()))
    assert [(row.address, row.user, row.command.removeprefix("H100 80GB HBM3")) for row in found.gpus] == [
        ("01:00.0", "0 of 4", ""),
        ("02:00.0", "0 of 3", ", time-slicing (short)"),
        ("03:00.0", "0 of 4", ", mig"),
        ("03:00.0-g1", "0 of 1", "MIG 3g.40gb"),
        ("03:00.0-g2", "0 of 1", "MIG 2g.20gb"),
        ("03:00.0-g3", "0 of 1", "MIG 1g.10gb"),
        ("03:00.0-g4", "0 of 1", "MIG 1g.10gb"),
        ("04:00.0", "0 of 4", ", mig"),
        ("04:00.0-g1", "0 of 2", "MIG 3g.40gb, mps"),
        ("04:00.0-g2", "0 of 2", "MIG 3g.40gb, mps"),
        ("05:00.0", "0 of 4", ", mig"),
        ("05:00.0-g1", "0 of 2", "MIG 3g.40gb, time-slicing"),
        ("05:00.0-g2", "0 of 2", "MIG 3g.40gb, time-slicing"),
    ]


def test_a_device_shows_its_largest_process_and_how_many_more() -> None:
    more = [{**CLIENT, "pid": 4270 + n, "command": f"job {n}", "memory_by_gpu_mib": [n]} for n in range(3)]
    found = scene(poll(snapshots.reference(), clients=clients(*more)))
    assert [(row.pid, row.command) for row in found.devices if row.in_use] == [(4272, "job 2 (+2)")]


def test_rows_that_do_not_fit_are_counted_even_if_folded() -> None:
    rest = "and 48 more of the same kind (all: yunion-mps status -o json)"
    few = [ShownProblem("problem", "", f"GPU {n}", "reload") for n in range(2)]
    many = BUSY._replace(problems=[*few, ShownProblem("problem", "", rest, "reload", 48)])
    assert lines_of(many, 80, 12)[2:4] == ["Problem: GPU 0", "49 more; show all: yunion-mps status"]
    assert lines_of(many, 80, 24)[2:6] == [
        "Problem: GPU 0",
        "Problem: GPU 1",
        "Problem: and 48 more of the same kind (all: yunion-mps status -o json)",
        "  Hint: reload",
    ]
    more = many._replace(problems=[*many.problems, ShownProblem("warning", "", "a", "b")])
    assert lines_of(more, 80, 24)[5] == "1 more; show all: yunion-mps status"


@pytest.mark.parametrize(
    ("share", "blocks", "signs"),
    [
        (0.0, "░░░░░░░░░░", "[--------]"),
        (0.0001, "▏░░░░░░░░░", "[#-------]"),
        (0.25, "██▌░░░░░░░", "[##------]"),
        (0.5, "█████░░░░░", "[####----]"),
        (1.0, "██████████", "[########]"),
        (7.0, "██████████", "[########]"),
    ],
)
def test_a_bar_shows_the_share_and_whatever_is_not_nothing(share: float, blocks: str, signs: str) -> None:
    assert bar(share, 10, utf8=True) == blocks
    assert bar(share, 10, utf8=False) == signs


def test_a_host_without_mps_has_its_notice(serve: Any) -> None:
    cli = serve(snapshots.disabled())
    hold_leases(cli.host)
    lines = cli.good("top", "--once").splitlines()
    assert lines[1:3] == [
        "0 GPUs; 0 devices: 0 used, 0 free; 0 leases; 1 process",
        "Notice: enable_cuda_mps is false",
    ]


@pytest.mark.parametrize(
    ("keys", "screen", "term", "why"),
    [
        (True, True, "dumb", "top cannot draw on this terminal: TERM is dumb"),
        (True, True, "", "top cannot draw on this terminal: TERM is not set"),
        (False, True, "xterm", "top needs a terminal"),
        (True, False, "xterm", "top needs a terminal"),
    ],
)
def test_without_a_terminal_to_draw_on_it_says_what_to_do_instead(
    own_cli: Cli, keys: bool, screen: bool, term: str, why: str
) -> None:
    ours, theirs = pty.openpty()
    stdin, stdout = theirs if keys else subprocess.DEVNULL, theirs if screen else subprocess.PIPE
    try:
        done = own_cli.process("top", stdin=stdin, stdout=stdout, env={**own_cli.env, "TERM": term})
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.code, done.err) == (1, f"yunion-mps: {why}\n{INSTEAD}")
