"""`yunion-mps events`: what it prints, and how it goes on."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from yunion_mps.cli.output import cell
from yunion_mps.core.models import Event
from yunion_mps.core.units import rfc3339
from yunion_mps.http.listener import Listener
from yunion_mps.http.messages import EventualResponse, Request, Response, problem_response
from yunion_mps.http.operations import GET_EVENTS
from yunion_mps.http.pool import Application
from yunion_mps.http.server import Server
from yunion_mps.supervisor.event_log import MAX_REPEATS

from integration.daemon_host import eventually
from unit.cli.conftest import Cli
from unit.http.server_host import ServerHost, short_root

#: The hour in which this begins, in s since 1970, and how far from UTC it is noon then: "today" does not end
#: while a test runs.
HOUR_S = int(time.time()) // 3600 * 3600
EAST_H = 12 - time.gmtime(HOUR_S).tm_hour
#: Yesterday at noon.
THEN_S = HOUR_S - 86_400 + 0.25
DIED = Event(
    "warning",
    "domain",
    "host",
    "ready -> backoff",
    "the control daemon (PID 4242) was killed by signal 9",
    "its devices are not served until it has restarted",
)
BACK = Event("info", "domain", "host", "applying -> ready", "", "its devices are served within their budgets")
REFUSED = Event(
    "error", "configuration", "reload", "refused", "a.conf:3: x is 0\nb.yml:2: y is 1", "nothing changed"
)
GPU = Event("info", "gpu", "00:06.0", "a\x1b[2Jb")


def day_of_events(form: str = "%Y-%m-%d") -> str:
    return time.strftime(form, time.gmtime(THEN_S + 3600 * EAST_H))


@pytest.fixture
def host_with_events(own_cli: Cli) -> Cli:
    """A host on which four things happened yesterday from noon on, an hour apart."""
    own_cli.env["TZ"] = f"HERE{-EAST_H:+}"
    for hour, event in enumerate((DIED, BACK, REFUSED, GPU)):
        own_cli.host.record(event, THEN_S + 3600 * hour)
    return own_cli


TEXT = f"""\
{day_of_events()} 12:00:00  WARNING  domain host: ready -> backoff
    cause: the control daemon (PID 4242) was killed by signal 9
    consequence: its devices are not served until it has restarted
{day_of_events()} 13:00:00  info     domain host: applying -> ready
    consequence: its devices are served within their budgets
{day_of_events()} 14:00:00  ERROR    configuration reload: refused
    cause: a.conf:3: x is 0
    b.yml:2: y is 1
    consequence: nothing changed
{day_of_events()} 15:00:00  info     gpu 00:06.0: a\\x1b[2Jb
"""


def test_events_have_their_time_cause_and_consequence(host_with_events: Cli) -> None:
    assert host_with_events.process("events") == (0, TEXT, "")  # which reads the time zone of its start


def test_on_a_narrow_terminal_lines_are_folded_and_no_word_is_broken(host_with_events: Cli) -> None:
    lines = host_with_events.process_lines(50, "events", "--limit", "4", "--kind", "domain")
    assert lines == [
        f"{day_of_events()} 12:00:00  WARNING  domain host: ready",
        "        -> backoff",
        "    cause: the control daemon (PID 4242) was",
        "        killed by signal 9",
        "    consequence: its devices are not served until",
        "        it has restarted",
        f"{day_of_events()} 13:00:00  info     domain host:",
        "        applying -> ready",
        "    consequence: its devices are served within",
        "        their budgets",
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--kind", "domain"], [DIED, BACK]),
        (["--kind", "lease"], []),
        (["--since", f"{day_of_events()} 13:00"], [BACK, REFUSED, GPU]),
        (["--since", f"{day_of_events()} 13:00:01"], [REFUSED, GPU]),
        (["--since", "yesterday"], [DIED, BACK, REFUSED, GPU]),
        (["--since", "today"], []),
        (["--since", "0s"], []),
        (["--since", "30d", "--limit", "2"], [DIED, REFUSED]),
        (["--since", "30d", "--limit", "3"], [DIED, REFUSED, GPU]),
        (["--since", "30d", "--limit", "1", "--kind", "domain"], [BACK]),
        (["--since", str(int(THEN_S) + 7200), "--kind", "gpu"], [GPU]),
        (["--limit", "1"], [REFUSED]),
    ],
)
def test_only_the_events_that_are_asked_for_are_shown(
    host_with_events: Cli, arguments: list[str], shown: list[Event]
) -> None:
    answer = json.loads(host_with_events.good("events", *arguments, "-o", "json"))
    assert [event["what"] for event in answer["events"]] == [event.what for event in shown]


def test_without_events_it_says_so(host_with_events: Cli) -> None:
    assert host_with_events.good("events", "--since", "today") == "No events.\n"


def test_if_there_may_be_more_it_says_so_and_shows_the_newest(host_with_events: Cli) -> None:
    cut = "(showing the newest 1 events; for older ones, use --limit or --since)\n"
    gpus = ("events", "--kind", "gpu")
    assert host_with_events.good(*gpus, "--limit", "1") == cut + TEXT.splitlines(keepends=True)[-1]
    for number in range(100):
        host_with_events.host.record(GPU._replace(subject=str(number)), THEN_S + 3600 * 4)
    assert host_with_events.good(*gpus).startswith("(showing the newest 100 events; ")
    assert len(host_with_events.good(*gpus).splitlines()) == 101
    assert host_with_events.good("events", "--since", "yesterday").startswith(TEXT)


def test_leases_hide_no_xid_and_it_says_how_many_are_left_out(own_cli: Cli) -> None:
    own_cli.host.record(Event("warning", "gpu", "00:06.0", "Xid 48"))
    for number in range(120):
        own_cli.host.record(Event("info", "lease", "00:06.0-1", f"granted to job-{number} of alice"))
    newest, others, xid, *_ = own_cli.good("events").splitlines()
    assert newest == "(showing the newest 100 events; for older ones, use --limit or --since)"
    where = "for those of a kind: yunion-mps events --kind KIND --limit 1000"
    assert others == f"(warnings and errors first: 21 other events of this time not shown; {where})"
    assert "WARNING  gpu 00:06.0: Xid 48" in xid
    assert "Xid 48" in own_cli.good("events", "--since", "1h", "--limit", "10")
    assert own_cli.good("events", "--kind", "lease", "--limit", "1000").count("granted to job-") == 120


class EarlierDaemon:
    """Answers as a daemon that does not know `severe_first`, nor what came with it."""

    def __init__(self, later: Application) -> None:
        self._later = later

    def handle(self, request: Request) -> EventualResponse:
        if not request.target.startswith(GET_EVENTS.path):
            return self._later.handle(request)
        if "severe_first" in request.target:
            unknown = "unknown parameter 'severe_first'"
            return problem_response(400, unknown, "use one of these parameters: after")
        return self._before(self._later.handle(request))

    async def _before(self, later: EventualResponse) -> Response:
        """Return the answer without the members that came later."""
        response = later if isinstance(later, Response) else await later
        answer = json.loads(response.body)
        del answer["omitted"]
        for event in answer["events"]:
            del event["rank"]
        return response._replace(body=json.dumps(answer).encode())


@pytest.fixture
def earlier(host_with_events: Cli) -> Cli:
    """A host with a daemon of an earlier version."""
    pool = host_with_events.host.server.pool
    pool.application = EarlierDaemon(pool.application)
    return host_with_events


@pytest.mark.parametrize("options", [[], ["--kind", "gpu"], ["--limit", "1"], ["-o", "json"]])
def test_events_of_an_earlier_daemon_are_shown(earlier: Cli, options: list[str]) -> None:
    assert "00:06.0" in earlier.good("events", *options)


def test_events_of_an_earlier_daemon_are_followed(earlier: Cli) -> None:
    with earlier.start("events", "--follow", "--kind", "gpu", stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert "gpu 00:06.0: a" in process.stdout.readline()
        process.send_signal(signal.SIGINT)


def test_top_shows_the_events_of_an_earlier_daemon(earlier: Cli) -> None:
    assert "configuration reload: refused" in earlier.good("top", "--once")


def test_events_are_printed_for_programs_too(host_with_events: Cli) -> None:
    answer, (header, *rows) = host_with_events.read("events")
    times = {"time": rfc3339(THEN_S), "last_time": rfc3339(THEN_S)}
    assert answer["events"][0] == {"id": 1, **times, "count": 1, "rank": 4, **DIED.stored()}
    names = ["time", "severity", "kind", "subject", "what", "cause", "consequence", "code"]
    assert header == [*names, "count", "last_time"]
    assert rows[1] == [rfc3339(THEN_S + 3600), *BACK.stored().values(), "1", rfc3339(THEN_S + 3600)]
    assert rows[2][-5] == "a.conf:3: x is 0; b.yml:2: y is 1"
    assert len(rows) == 4


def test_many_events_of_one_cause_are_counted_in_the_last_line(host_with_events: Cli) -> None:
    for number in range(MAX_REPEATS + 5):
        host_with_events.host.record(BACK, THEN_S + 3600 * 4 + number)
    *_, last = host_with_events.good("events").splitlines()[:-1]
    assert "domain host: applying -> ready (6 times until " in last


@contextlib.contextmanager
def following(cli: Cli, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`yunion-mps events --follow`, once it waits for what comes."""
    with cli.start("events", "--follow", *arguments) as process:
        try:
            eventually(lambda: cli.host.events.waiting, "that it waits")
            yield process
        finally:
            process.kill()
    eventually(lambda: not cli.host.events.waiting, "that it waits no more")


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Press Ctrl-C until it ends: Python misses a signal that comes just before it waits for data."""
    while True:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=5)


def lines_of(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]


def test_follow_shows_what_was_and_what_comes_until_ctrl_c(host_with_events: Cli) -> None:
    with following(host_with_events) as process:
        assert "".join(lines_of(process, 10)) == TEXT
        host_with_events.host.record(BACK)
        assert lines_of(process, 2)[1] == f"    consequence: {BACK.consequence}\n"
        host_with_events.host.record(GPU)
        assert lines_of(process, 1)[0].endswith("gpu 00:06.0: a\\x1b[2Jb\n")
        out, err = interrupt(process)
    assert (process.returncode, out, err.strip()) == (130, "", "")


def test_follow_begins_with_the_newest_ten_or_those_since_a_time(host_with_events: Cli) -> None:
    for number in range(10):
        host_with_events.host.record(BACK._replace(subject=str(number)), THEN_S + 3600 * 4)
    for arguments, count in (([], 10), (["--limit", "3"], 3), (["--since", "yesterday"], 14)):
        with following(host_with_events, "-o", "json", *arguments) as process:
            ids = [json.loads(line)["id"] for line in lines_of(process, count)]
        assert ids == list(range(15 - count, 15))


def test_follow_of_one_kind_shows_nothing_else(host_with_events: Cli) -> None:
    with following(host_with_events, "--kind", "gpu", "-o", "json") as process:
        assert json.loads(lines_of(process, 1)[0])["id"] == 4
        host_with_events.host.record(BACK)
        host_with_events.host.record(GPU)
        assert json.loads(lines_of(process, 1)[0])["id"] == 6


@pytest.mark.parametrize("output", ["json", "yaml", "csv"])
def test_a_program_that_follows_gets_each_event_whole(host_with_events: Cli, output: str) -> None:
    """JSON: an object a line; YAML: a list that goes on; CSV: with one header."""
    with following(host_with_events, "-o", output) as process:
        host_with_events.host.record(BACK)
        host_with_events.host.record(BACK)
        text = ""
        while text.count(BACK.what) < 3:
            text += lines_of(process, 1)[0]
        text += interrupt(process)[0]
    if output == "csv":
        rows = list(csv.DictReader(io.StringIO(text)))
        whats = [row["what"] for row in rows]
    elif output == "yaml":
        whats = [event["what"] for event in yaml.safe_load(text)]
    else:
        whats = [json.loads(line)["what"] for line in text.splitlines()]
    last = cell(GPU.what) if output == "csv" else GPU.what
    assert whats == [DIED.what, BACK.what, REFUSED.what, last, BACK.what, BACK.what]


def test_follow_before_the_first_event_shows_what_comes(own_cli: Cli) -> None:
    for output, begin in (("json", "{"), ("yaml", "- id:"), ("csv", "time,")):
        with following(own_cli, "-o", output, "--since", "0s") as process:
            own_cli.host.record(BACK)
            assert lines_of(process, 1)[0].startswith(begin)


def wake_clients(host: ServerHost) -> None:
    """Have the clients that wait for an event ask again."""

    async def work() -> None:
        host.events.close()

    host.call(work())


@pytest.mark.parametrize(
    "then", [lambda host: host.record(BACK), wake_clients], ids=["with an event", "without"]
)
def test_follow_ends_once_its_reader_has_enough(
    host_with_events: Cli, then: Callable[[ServerHost], Any]
) -> None:
    with following(host_with_events) as process:
        assert process.stdout is not None
        process.stdout.close()
        then(host_with_events.host)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_follow_misses_nothing_across_a_restart(host_with_events: Cli) -> None:
    with following(host_with_events, "-o", "json", "--limit", "1") as process:
        assert json.loads(lines_of(process, 1)[0])["id"] == 4
        host = host_with_events.host
        host.stop()
        assert process.stderr is not None
        wrong = process.stderr.readline()
        host.record(BACK, THEN_S)
        host.listener = Listener(host.paths)
        host.server = Server(host.server.pool.application)
        host.call(host.server.open(host.listener.socket))
        assert process.stderr.readline() == "yunion-mps: the daemon is responding again\n"
        assert json.loads(lines_of(process, 1)[0])["id"] == 5
        host.record(GPU)
        assert json.loads(lines_of(process, 1)[0])["id"] == 6
    assert wrong.startswith(
        f"yunion-mps: the daemon's answer on {host_with_events.host.paths.socket} was cut off: "
    )
    assert wrong.endswith("; retrying for up to 60 s\n")


def test_follow_continues_with_a_new_event_log(host_with_events: Cli) -> None:
    with short_root() as elsewhere, following(host_with_events, "-o", "json", "--limit", "1") as process:
        assert json.loads(lines_of(process, 1)[0])["id"] == 4
        host_with_events.host.begin_new_record(elsewhere)
        host_with_events.host.record(BACK)
        assert process.stderr is not None
        assert process.stderr.readline() == "yunion-mps: the event log was restarted\n"
        assert json.loads(lines_of(process, 1)[0])["id"] == 1
