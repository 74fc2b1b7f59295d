"""The control daemon's log: never fills the disk, keeps what matters, tells what nothing else does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from yunion_mps.core.enums import READY
from yunion_mps.core.models import DomainPlan, Event
from yunion_mps.core.reasons import SERVER_START_FAILED
from yunion_mps.host.proc import user_name
from yunion_mps.mps.health import PROBE_S
from yunion_mps.mps.log_file import (
    LOG_NAME,
    MAX_BYTES,
    OLDER,
    SERVER_LOG,
    LogNews,
    LogReader,
    bound_logs,
    events_of,
    log_hint,
)
from yunion_mps.mps.log_lines import timestamp_parser

from integration.daemon_host import eventually
from unit.short_memory import with_memory_short

from .domain_bench import Bench, DomainRun, Jobs
from .other_processes import as_root

OWN_NAME = user_name(os.geteuid())
CHATTER = (
    "[2026-11-20 12:40:49.964 Control 21889] Accepting connection...\n"
    "[2026-11-20 12:40:49.964 Control 21889] NEW UI\n"
    "[2026-11-20 12:40:49.964 Control 21889] Cmd:get_server_list\n"
    "[2026-11-20 12:40:49.964 Control 21889] UI closed\n"
)


@pytest.fixture
def log(plan: DomainPlan) -> Path:
    os.makedirs(plan.log_directory)
    return Path(plan.log_directory, LOG_NAME)


def test_a_log_that_is_small_is_left_alone(plan: DomainPlan, log: Path) -> None:
    log.write_text(CHATTER)
    bound_logs(plan)
    assert log.read_text() == CHATTER
    assert not log.with_name(OLDER).exists()


@pytest.mark.parametrize("name", [LOG_NAME, SERVER_LOG])
def test_a_log_that_has_grown_is_emptied_and_its_end_is_kept(plan: DomainPlan, log: Path, name: str) -> None:
    large = log.with_name(name)
    large.write_text("old\n" + CHATTER * 10_000 + "what matters\n")
    bound_logs(plan)
    assert large.read_text() == ""
    assert log.with_name(f"{name}.1").read_text() == "what matters\n"


def test_the_old_log_is_as_bounded_as_the_log(plan: DomainPlan, log: Path) -> None:
    for number in range(5):
        log.write_text(f"{number} matters {'x' * 1000}\n" * 2_000)
        bound_logs(plan)
        assert log.with_name(OLDER).stat().st_size <= MAX_BYTES
    assert log.with_name(OLDER).read_text().rpartition("\n4 matters ")[1]


def test_a_control_daemon_can_write_to_its_emptied_log(bench: Bench) -> None:
    run = bench.domain().start().until(READY)
    log = Path(bench.plan.log_directory, LOG_NAME)
    with log.open("a") as file:
        file.write(CHATTER * 10_000)
    run.advance(PROBE_S).until_answered()
    assert log.stat().st_size < MAX_BYTES
    assert b"\0" not in log.read_bytes()
    assert "Starting control daemon" not in log.read_text()
    before = log.stat().st_size
    run.advance(PROBE_S).until_answered()
    eventually(lambda: log.stat().st_size > before)


def test_a_symlink_in_the_logs_place_is_not_followed(plan: DomainPlan, log: Path) -> None:
    target = log.with_name("precious")
    target.write_text("precious\n" * 200_000)
    log.symlink_to(target)
    bound_logs(plan)
    assert target.stat().st_size == len("precious\n") * 200_000


@pytest.fixture
def full_disk(plan: DomainPlan) -> Iterator[Path]:
    """The log directory on a file system of 3 MiB."""
    os.makedirs(plan.log_directory)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m,mode=755", "none", plan.log_directory], check=False
    )
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    yield Path(plan.log_directory)
    subprocess.run(["umount", "-l", plan.log_directory], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"matters\n" * 4096):
            pass
    assert os.statvfs(path).f_bfree == 0


@as_root
def test_a_full_disk_is_freed_by_emptying_the_log(full_disk: Path, plan: DomainPlan) -> None:
    log = full_disk / LOG_NAME
    fill(log)
    bound_logs(plan)
    assert log.stat().st_size == 0


@as_root
def test_a_full_disk_ends_no_service(bench: Bench, full_disk: Path) -> None:
    fill(full_disk / "ballast")
    run = bench.domain().start().until(READY)
    run.advance_steps(10, PROBE_S)
    assert run.state == READY
    run.domain.change(bench.plan._replace(thread_percentage=50.0), run.now_s)
    run.until(READY)


def test_its_last_words_are_those_that_matter(plan: DomainPlan, log: Path) -> None:
    assert log_hint(plan) == f"see its log: {log}"
    log.write_text("no CUDA here\n" + CHATTER * 5)
    assert log_hint(plan) == f"see its log: {log}\n  no CUDA here"


# -- news


def new_event_texts(run: DomainRun) -> list[str]:
    """What the events after one more probe say, once the control daemon has logged every server."""
    eventually(lambda: all(f"NEW SERVER {pid}: Ready" in log_of(run) for pid in run.domain.server_pids()))
    before = len(run.event_texts)
    run.advance(PROBE_S).until_answered()
    return run.event_texts[before:]


def test_a_server_that_starts_is_an_event(run: DomainRun, jobs: Jobs, plan: DomainPlan) -> None:
    job = jobs.attach()
    (server,) = run.domain.server_pids()
    assert new_event_texts(run) == [f"MPS server (PID {server}) of {OWN_NAME} started"]
    assert new_event_texts(run) == []
    jobs.end(job)
    run.domain.retire()
    run.domain.note_use(in_use=False)
    run.until_true(lambda: run.domain.server_pids() == [] or run.advance(1).state == "stopped")


def test_a_job_that_comes_during_a_change_of_limits_is_an_event(run: DomainRun, jobs: Jobs) -> None:
    """The log is read on across a change of limits."""
    jobs.attach()
    run.domain.change(run.domain.in_effect._replace(thread_percentage=50.0), run.now_s)
    run.until(READY)
    assert len(new_event_texts(run)) == 1


def test_a_server_that_cannot_start_is_one_event_and_no_flood(run: DomainRun, jobs: Jobs) -> None:
    jobs.stand_ins.behave("failing")
    assert jobs.start_waiting().says() == "refused"
    eventually(lambda: log_of(run).count("exited with status") == 6)
    (what,) = new_event_texts(run)
    assert what.endswith(f" and later) of {OWN_NAME} failed to start")
    (event,) = [event for event in run.events if event.what == what]
    assert (event.severity, event.code) == ("error", SERVER_START_FAILED)
    assert event.consequence == "jobs that wait for a server are refused"


@pytest.mark.parametrize("behaviour", ["failing", "dying"])
def test_a_server_that_never_got_ready_is_not_said_to_have_started(
    run: DomainRun, jobs: Jobs, behaviour: str
) -> None:
    jobs.stand_ins.behave(behaviour)
    assert jobs.start_waiting().says() == "refused"
    eventually(lambda: log_of(run).count("exited with status") == 6)
    assert [what for what in new_event_texts(run) if "started" in what or "fault" in what] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_server_that_a_signal_ends_has_failed(run: DomainRun, jobs: Jobs, number: int) -> None:
    jobs.attach()
    (server,) = run.domain.server_pids()
    new_event_texts(run)
    os.kill(server, number)
    eventually(lambda: f"Server {server} exited with status 0" in log_of(run))
    assert new_event_texts(run) == [f"MPS server (PID {server}) of {OWN_NAME} ended unexpectedly"]
    event = run.events[-1]
    assert (event.severity, event.cause) == ("error", "it crashed or was killed")
    assert run.state == READY, "the next server is not known to fail"


@as_root
def test_a_waiting_job_is_an_event_that_names_the_servers_user(run: DomainRun, jobs: Jobs) -> None:
    jobs.attach()
    new_event_texts(run)
    waiting = [jobs.start_waiting(uid=1234), jobs.start_waiting(uid=1234)]
    eventually(lambda: log_of(run).count("push client to pending list") == 3)
    (what,) = new_event_texts(run)
    assert what == f"2 jobs of uid 1234 (PIDs {waiting[0].pid}, {waiting[1].pid}) wait"
    event = run.events[-1]
    assert (event.severity, event.cause) == ("warning", "MPS serves one user at a time, and is serving root")
    assert event.consequence == "jobs start once the other user's jobs have ended"


def log_of(run: DomainRun) -> str:
    return Path(run.domain.in_effect.log_directory, LOG_NAME).read_text()


def reader_of(plan: DomainPlan) -> LogReader:
    return LogReader(plan, lambda _: None, list)


AT, REASON = "[2026-11-20 12:40:50.0", "Failed to start : invalid argument"
CONTROL = "[2026-11-20 12:40:49.964 Control 1] "
BEGINS = f"{CONTROL}Starting new server 7 for user 1234\n"
IS_READY = f"{CONTROL}NEW SERVER 7: Ready\n"


def waits(pid: int) -> str:
    return f"{CONTROL}NEW CLIENT {pid} from user 1234: Server is not ready, push client to pending list\n"


JOB_WAITS = waits(9)
ORDERED = f"{CONTROL}Cmd:start_server -uid 1234\n"
EXCEPTION = f"{CONTROL}Server encountered a fatal exception. Shutting down\n"


def events_for(plan: DomainPlan, log: Path, text: str) -> list[Event]:
    """The events for what a control daemon adds to its log."""
    log.touch()
    reader = reader_of(plan)
    with log.open("a") as file:
        file.write(text)
    return events_of(reader.read(), plan, [])


def test_half_a_line_is_read_with_its_other_half(plan: DomainPlan, log: Path) -> None:
    log.write_text("before\n")
    reader = reader_of(plan)
    with log.open("a") as file:
        file.write(IS_READY[:40])
        file.flush()
        assert reader.read() == LogNews([], [])
        file.write(IS_READY[40:])
    assert [outcome.kind for outcome in reader.read().outcomes] == ["started"]
    log.write_text(IS_READY)
    assert len(reader.read().outcomes) == 1, "also in a log that was emptied"


def test_a_fault_names_no_job(plan: DomainPlan, log: Path) -> None:
    *_, event = events_for(plan, log, JOB_WAITS + BEGINS + IS_READY + EXCEPTION)
    assert (event.severity, event.what) == ("error", "MPS server (PID 7) of uid 1234 had a fatal exception")
    assert event.cause == "the log does not say which job caused it"
    (event,) = events_for(plan, log, EXCEPTION)
    assert event.what == "MPS server (PID 7) of uid 1234 had a fatal exception", "its begin was read before"


def test_an_exception_of_a_server_without_clients_is_no_jobs_fault(plan: DomainPlan, log: Path) -> None:
    ended = f"{CONTROL}Server 7 exited with status 1\n"
    (event,) = events_for(plan, log, (JOB_WAITS + BEGINS + EXCEPTION + ended) * 3)
    assert event.what == "MPS servers (PID 7 and later) of uid 1234 failed to start", (
        "how many more, the next read may show"
    )
    assert "job" not in event.cause


@pytest.mark.parametrize(
    ("server_log", "cause"),
    [
        (f"{AT} Legacy Server     7] {REASON}\n", REASON),
        (f"{AT} Server  7] {REASON}\n{AT} Server  8] Failed to start : other\n", REASON),
        (f"{AT} Other  7] Startup\nERROR: init 250 result=11", "ERROR: init 250 result=11"),
    ],
)
def test_the_cause_of_a_failed_start_is_quoted_from_server_log(
    plan: DomainPlan, log: Path, server_log: str, cause: str
) -> None:
    log.with_name(SERVER_LOG).write_text(server_log)
    (event,) = events_for(plan, log, BEGINS + f"{CONTROL}Server 7 exited with status 1\n")
    assert event.cause == f"server.log: {cause}"


@pytest.mark.parametrize(
    "server_log",
    [
        "[2026-11-20 12:40:50.0 Server  6] Failed to start : invalid argument\n",
        "ERROR: init 250 result=11\n[2026-11-20 12:40:50.0 Other  7] Startup\n",
        "[2026-11-20 12:40:50.0 Server  7] Receive command failed, assuming client exit\n",
    ],
)
def test_what_server_log_says_of_others_is_no_cause(plan: DomainPlan, log: Path, server_log: str) -> None:
    log.with_name(SERVER_LOG).write_text(server_log)
    (event,) = events_for(plan, log, BEGINS + f"{CONTROL}Server 7 exited with status 1\n")
    assert event.cause == "the server exited with status 1, and server.log does not say why"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir])
def test_a_server_log_that_is_no_file_is_not_read(
    plan: DomainPlan, log: Path, make: Callable[[Path], None]
) -> None:
    make(log.with_name(SERVER_LOG))
    (event,) = events_for(plan, log, BEGINS + f"{CONTROL}Server 7 exited with status 1\n")
    assert event.cause.endswith("server.log does not say why")


def test_words_without_a_header_from_before_the_server_are_no_cause(plan: DomainPlan, log: Path) -> None:
    server_log = log.with_name(SERVER_LOG)
    server_log.write_text("ERROR: init 250 result=11\n")
    os.utime(server_log, (1e9, 1e9))
    (event,) = events_for(plan, log, BEGINS + f"{CONTROL}Server 7 exited with status 1\n")
    assert "result=11" not in event.cause


@pytest.mark.parametrize(
    ("text", "multiuser", "whose", "cause"),
    [
        (JOB_WAITS + BEGINS + IS_READY, False, " of uid 1234", "a job of uid 1234 connected"),
        (JOB_WAITS + BEGINS + IS_READY, True, "", "a job connected"),
        (ORDERED + BEGINS + IS_READY, False, " of uid 1234", "the command start_server"),
        (IS_READY, False, "", ""),
    ],
)
def test_why_a_server_started_is_said_only_if_the_log_shows_it(
    plan: DomainPlan, log: Path, text: str, multiuser: bool, whose: str, cause: str
) -> None:
    (event,) = events_for(plan._replace(multiuser=multiuser), log, text)
    assert (event.what, event.cause) == (f"MPS server (PID 7){whose} started", cause)


@pytest.mark.parametrize("ready", [IS_READY, ""], ids=["ended unexpectedly", "failed to start"])
def test_failures_of_two_users_are_two_events_that_name_them(plan: DomainPlan, log: Path, ready: str) -> None:
    text = JOB_WAITS + BEGINS + ready + f"{CONTROL}Server 7 exited with status 0\n"
    other = re.sub("(?i)(server) 7", r"\1 8", text).replace("user 1234", "user 1235")
    whats = [event.what for event in events_for(plan, log, text + other) if event.severity == "error"]
    assert len(whats) == 2
    assert "(PID 7) of uid 1234" in whats[0]
    assert "(PID 8) of uid 1235" in whats[1]


def test_with_one_server_for_all_users_no_job_waits_for_another_user(plan: DomainPlan, log: Path) -> None:
    log.touch()
    reader = reader_of(plan)
    log.write_text(waits(os.getpid()))
    news = reader.read()
    assert len(events_of(news, plan, [os.getpid()])) == 1
    assert events_of(news, plan._replace(multiuser=True), [os.getpid()]) == []


def test_a_job_that_has_ended_does_not_wait(plan: DomainPlan, log: Path) -> None:
    log.touch()
    reader = reader_of(plan)
    ended = subprocess.Popen(["true"])
    ended.wait()
    log.write_text(waits(ended.pid))
    assert events_of(reader.read(), plan, [os.getpid()]) == []
    with log.open("a") as file:
        file.write(waits(ended.pid) + waits(0))
    (event,) = events_of(reader.read(), plan, [os.getpid()])
    assert event.what == "1 job of uid 1234 (PID 0) waits", "one in a container, whose PID is not known"


def test_a_job_whose_server_was_begun_later_does_not_wait(plan: DomainPlan, log: Path) -> None:
    log.touch()
    reader = reader_of(plan)
    log.write_text(waits(os.getpid()) + BEGINS)
    assert reader.read().waiting == []
    with log.open("a") as file:
        file.write(BEGINS + waits(os.getpid()) + BEGINS.replace("1234", "1235"))
    (line,) = reader.read().waiting
    assert line.uid == 1234


def test_failed_starts_of_long_ago_are_not_counted(plan: DomainPlan, log: Path) -> None:
    failed = (BEGINS + f"{CONTROL}Server 7 exited with status 1\n") * 3
    log.write_text(failed.replace("2026", "2020"))
    assert reader_of(plan).take_outcomes() == []
    log.write_text(failed.replace("2026-11-20 12:40:49", "2999-11-20 12:40:49"))
    assert [outcome.kind for outcome in reader_of(plan).take_outcomes()] == ["not started"] * 3
    with log.open("a") as file:
        file.write(BEGINS + IS_READY)
    assert reader_of(plan).take_outcomes() == [], "a server has started since"


def test_the_log_is_read_later_if_memory_is_short(plan: DomainPlan, log: Path) -> None:
    log.touch()
    reader = reader_of(plan)
    with log.open("a") as file:
        file.write("x" * (1 << 20) + f"\n{IS_READY}")

    def read(what_fills_memory: list[bytearray]) -> None:
        assert reader.read() == LogNews()
        what_fills_memory.clear()
        assert [outcome.kind for outcome in reader.read().outcomes] == ["started"]

    with_memory_short(read)


def test_of_a_flood_only_the_end_is_read(plan: DomainPlan, log: Path) -> None:
    reader = reader_of(plan)
    log.write_text(CHATTER * 100_000 + IS_READY)
    (event,) = events_of(reader.read(), plan, [])
    assert event.what == "MPS server (PID 7) started"
    assert reader.read() == LogNews([], [])


@pytest.fixture
def berlin(tmp_path: Path) -> str:
    """A file of a time zone, as /etc/localtime is one: all by a rule, no change in the past."""
    begin = (
        b"TZif2"
        + bytes(15)
        + struct.pack(">6l", 0, 0, 0, 0, 1, 4)
        + struct.pack(">lBB", 3600, 0, 0)
        + b"CET\0"
    )
    path = tmp_path / "localtime"
    path.write_bytes(begin * 2 + b"\nCET-1CEST,M3.5.0,M10.5.0/3\n")
    return str(path)


@pytest.mark.parametrize(
    ("now_s", "text", "moment_s"),
    [
        (1795178707, "2026-11-20 13:45:06", 1795178706),
        (1782900001, "2026-07-01 12:00:00", 1782900000),
        (1792890600, "2026-10-25 02:30:00", 1792888200),  # it is 02:10 again: half past comes only now
        (1792892400, "2026-10-25 02:30:00", 1792891800),  # it is 02:40 again
    ],
)
def test_a_timestamp_is_local_and_an_ambiguous_one_the_latest_past_one(
    berlin: str, now_s: float, text: str, moment_s: float
) -> None:
    assert timestamp_parser(now_s, berlin)(text) == moment_s


def test_a_host_without_a_time_zone_has_utc(tmp_path: Path) -> None:
    assert timestamp_parser(2e9, str(tmp_path / "none"))("2026-11-20 12:45:07") == 1795178707
