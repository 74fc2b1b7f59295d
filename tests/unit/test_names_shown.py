"""Every output refuses what steers a terminal or forges a line, whatever it is given."""

from __future__ import annotations

import json
import logging
import socket
import tempfile

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from prometheus_client.parser import text_string_to_metric_families
from yunion_mps.cli.output import Column, notes, print_notice, show, table, wrapped
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import HOST_ERROR
from yunion_mps.doctor.checks import Check, Host, problem
from yunion_mps.doctor.report import run_checks
from yunion_mps.host.log import JournalFormatter, LineFormatter
from yunion_mps.host.systemd import Notifier
from yunion_mps.metrics.exporter import text_of

from unit.hostile_names import HOSTILE, steers
from unit.metrics.metric_facts import facts

# The library never closes its socket, which in the daemon lives as long as the process.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
#: A fixture that many examples may share.
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(HOSTILE)
def test_systemd_gets_a_status_and_nothing_else(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        address = f"{folder}/notify"
        patch.setenv("NOTIFY_SOCKET", address)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
            inbox.bind(address)
            inbox.settimeout(60)
            notify(text)
            told = [inbox.recv(65536).decode().split("\n") for _ in range(4)]
    names = [[line.partition("=")[0] for line in lines] for lines in told]
    assert names == [
        ["STATUS"],
        ["STATUS", "READY"],
        ["RELOADING", "MONOTONIC_USEC", "STATUS"],
        ["STOPPING", "EXTEND_TIMEOUT_USEC", "STATUS"],
    ]
    assert all(line.isprintable() for lines in told for line in lines)


def notify(text: str) -> None:
    notifier = Notifier()
    notifier.status(text)
    notifier.ready(text)
    notifier.reloading(text)
    notifier.stopping(text, 1)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("a", logging.INFO, "a.py", 1, "domain %s: %s", ("host", text), None)


@given(HOSTILE)
def test_a_log_line_cannot_be_forged(text: str) -> None:
    """What continues a message is indented, so that it begins as no line of ours does."""
    first, *more = JournalFormatter("%(message)s").format(record(text)).split("\n")
    assert first.startswith("<6>domain host: ")
    assert [line for line in more if not line.startswith("<6>  ")] == []
    assert [line for line in (first, *more) if not line.isprintable()] == []
    first, *more = LineFormatter("%(asctime)s %(levelname)s %(message)s").format(record(text)).split("\n")
    assert [line for line in more if not line.startswith("  ")] == []
    assert [line for line in (first, *more) if not line.isprintable()] == []


@shared
@given(HOSTILE)
def test_json_and_yaml_keep_what_they_escape(capsys: pytest.CaptureFixture[str], text: str) -> None:
    value = {"name": text, "cause": [text]}
    for output, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        show(value, output, ("Name",), [(text,)], str)
        out = capsys.readouterr().out
        assert steers(out) == set()
        assert read(out) == value


@shared
@given(HOSTILE)
def test_tables_csv_and_lines_are_printable(capsys: pytest.CaptureFixture[str], text: str) -> None:
    rows = [(text, {"name": text}, [text])]
    show({}, "csv", ("A", "B", "C"), rows, str)
    print_notice(text)
    out, err = capsys.readouterr()
    columns = [Column(name, place) for place, name in enumerate("ABC")]
    shown = (out, err, table(columns, rows), wrapped(text), notes([(text, text)]))
    assert set().union(*map(steers, shown)) == set()
    assert [each.count("\n") for each in shown] == [2, 1, 2, 1, 1]


@given(HOSTILE)
def test_the_metrics_are_printable_and_can_be_read(text: str) -> None:
    gpu = {**facts().gpus[0], "name": text}
    found = facts(gpus=[gpu])
    for openmetrics in (False, True):
        assert steers(text_of(found, openmetrics=openmetrics).decode()) == set()
    families = text_string_to_metric_families(text_of(found, openmetrics=False).decode())
    assert [family for family in families if family.name.startswith("yunion_mps_gpu")]


@given(HOSTILE)
def test_a_finding_of_the_doctor_is_printable(text: str) -> None:
    """It quotes environments, logs and files of every sort."""
    report = run_checks(
        [Check("one", HOST_ERROR, lambda _: [problem(text, text)])], Host(Paths("/nowhere"), 30)
    )
    (line,) = report.lines
    assert (line.finding.what + line.finding.hint).isprintable()
