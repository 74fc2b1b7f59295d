"""The command line teaches: help with examples, the nearest real word, exit codes that tell kinds apart."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yunion_mps
import yunion_mps.cli as cli_package
from yunion_mps import __version__, revision
from yunion_mps.cli.root import COMMANDS, SECTIONS, cli
from yunion_mps.core.enums import EVENT_KINDS
from yunion_mps.http.operations import MAX_EVENT_WAIT_S, MAX_LIMIT, MAX_NUMBER
from yunion_mps.http.transport import WAIT_S

from unit.cli.conftest import Cli
from unit.http.server_host import NOBODY

CLOUDPODS = "isolated-device-list"
ALL = [
    [],
    *([name] for name in COMMANDS),
    ["config", "show"],
    ["config", "check"],
    ["lease", "list"],
    ["lease", "show"],
]
ASKING = (
    ["list"],
    ["isolated-device-list"],
    ["show", "00:06.0-1"],
    ["gpus"],
    ["status"],
    ["events"],
    ["events", "--follow"],
    ["plan"],
    ["reload"],
    ["reload", "--now", "--yes"],
    ["who", "--clients"],
    ["top", "--once"],
    ["lease", "list"],
    ["ray", "resources"],
    ["ray", "start", "--head"],
)
NO_TERMINAL = "this ends jobs, and there is no terminal to ask for confirmation: add --yes"
TELLING = (["daemon-reexec"], ["terminate", "4260", "--yes"])
KIND = "invalid value for '--kind':"
KINDS = ", ".join(repr(kind) for kind in EVENT_KINDS)
LIMIT = "invalid value for '--limit':"
NO_COMMAND = "COMMAND is missing: yunion-mps run [OPTIONS] COMMAND [ARG]..."
NO_NAME = (
    "NAME may contain letters, digits and ._:/@-, must begin with a letter or digit, "
    "and may be at most 360 characters long"
)
NODE = "invalid value for '--numa-node':"
OFFSET = "invalid value for '--offset':"
ONE_DEVICE = ("--device", "00:06.0-1")
OUTPUT = "invalid value for '-o' / '--output':"
PODMAN_OPTIONS = "yunion-mps run --podman -- --rm … IMAGE"
SELECTED = "--device already selects the devices: omit --count, --gpu-mem and --gpu-mem-units"
SHELL = "invalid value for 'SHELL':"
SOCKET = "run/yunion-mps/yunion-mps.sock"
SINCE = "invalid value for '--since':"
TIMEOUT = "invalid value for '--timeout':"
WAIT = "invalid value for '--wait':"
TTL = "invalid value for '--ttl':"
NO_DURATION = "is not a duration: use 90, 90s, 10m, 2h or 1d"
APART = "--wait takes a duration only after =: write --wait={0}, or --wait -- {0} to run {0}"
TIMES = (
    "use an age (10m, 2h, 3d), today, yesterday, a date (2026-11-20), "
    "a local time ('2026-11-20 13:45'), or 2026-11-20T13:45:00Z"
)
WRITING = (["list"], ["gpus", "-o", "json"], ["--help"])
JOIN = "run as root, or join the group: usermod -aG yunion-mps nobody, then log in again"
START = (
    "yunion-mps: start it: systemctl start yunion-mps-daemon; "
    "if that fails, see: systemctl status yunion-mps-daemon\n"
)


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_every_command_s_help_has_examples_and_fits_the_terminal(
    without_daemon: Cli, command: list[str]
) -> None:
    out = without_daemon.good(*command, "--help")
    assert out.startswith(" ".join(["Usage: yunion-mps", *command]))
    examples = out.split("Examples:\n")[1] if command else out
    assert " ".join(["  yunion-mps", *command]) in examples
    assert max(len(line) for line in out.splitlines()) <= 80
    assert not [line for line in out.splitlines() if line.endswith("-")], "a name is broken at its hyphen"
    assert "..." not in out.replace("[ARGS]...", "").replace("[ARG]...", "")
    assert "<=" not in out, "bounds belong in the error"
    assert "x>=" not in out, "bounds belong in the error"


def test_the_first_help_tells_the_exit_codes_and_all_commands(without_daemon: Cli) -> None:
    out = without_daemon.good()
    assert out == without_daemon.good("--help") == without_daemon.good("-h")
    for title, section in SECTIONS.items():
        listed = out.split(f"\n{title}:\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in listed] == list(section)
    assert (
        "    0 success; 1 failure; 2 wrong usage; 3 the daemon is unreachable;\n"
        "    4 permission denied; 5 no device is free; 6 invalid configuration\n"
    ) in out


def test_commands_for_units_are_hidden_but_have_help(without_daemon: Cli) -> None:
    hidden = set(COMMANDS) - {name for section in SECTIONS.values() for name in section}
    assert hidden == {"gateway", "daemon-reexec", "stop-job-unit"}
    assert not any(name in without_daemon.good("--help") for name in hidden)


def test_a_group_without_a_command_is_its_help(without_daemon: Cli) -> None:
    assert (
        without_daemon.good("config")
        == without_daemon.good("config", "--help")
        == without_daemon.good("config", "-h")
    )


def test_the_largest_numbers_are_those_that_the_daemon_takes(cli: Cli) -> None:
    cli.good(CLOUDPODS, "--limit", str(MAX_LIMIT), "--offset", str(MAX_NUMBER))
    cli.good(CLOUDPODS, "--numa-node", str(MAX_NUMBER))
    assert cli(CLOUDPODS, "--limit", str(MAX_LIMIT + 1)).code == 2
    assert cli(CLOUDPODS, "--offset", str(MAX_NUMBER + 1)).code == 2


def test_the_commands_wait_is_within_the_daemons_limit() -> None:
    assert WAIT_S <= MAX_EVENT_WAIT_S


def test_the_version_is_one_line_with_the_revision(without_daemon: Cli) -> None:
    assert without_daemon.good("--version") == f"yunion-mps {__version__} ({revision()})\n"


@pytest.mark.parametrize("packed", [False, True])
def test_the_revision_is_that_of_the_checkout_or_worktree(tmp_path: Path, packed: bool) -> None:
    def run(*words: str) -> str:
        return subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    author = ("-c", "user.name=alice", "-c", "user.email=alice@example.com")
    run("git", "init", "-q", "main")
    run("git", "-C", "main", *author, "commit", "-q", "--allow-empty", "-m", "Begin")
    run("git", "-C", "main", "worktree", "add", "-q", "../other")
    if packed:
        run("git", "-C", "main", "pack-refs", "--all")
    for checkout in ("main", "other"):
        package = tmp_path / checkout / "yunion_mps"
        package.mkdir()
        shutil.copy(Path(yunion_mps.__file__), package)
        found = run(
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, '{checkout}'); "
            "from yunion_mps import revision; print(revision())",
        )
        assert found == run("git", "-C", "main", "rev-parse", "--short=12", "HEAD")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["stauts"], "no such command 'stauts' (did you mean status?)"),
        (["zzz"], "no such command 'zzz'"),
        (
            ["lease", "take", "job-17", "--ttl", "999999d"],
            "invalid value for '--ttl': 999999d is too long: use at most 100000d",
        ),
        ([CLOUDPODS, "--limt", "3"], "no such option: --limt (did you mean --limit?)"),
        ([CLOUDPODS, "--limit", "100001"], f"{LIMIT} 100001 is not a whole number from 0 to 100000"),
        (
            [CLOUDPODS, "--offset", "99999999999999"],
            f"{OFFSET} 99999999999999 is not a whole number from 0 to 2147483647",
        ),
        (
            [CLOUDPODS, "--numa-node", "2147483648"],
            f"{NODE} 2147483648 is not a whole number from -1 to 2147483647",
        ),
        (["list", "more"], "got unexpected extra argument (more)"),
        (["show"], "missing argument 'DEVICE'"),
        (["gpus", "-o", "xml"], f"{OUTPUT} 'xml' is not one of 'table', 'wide', 'json', 'yaml', 'csv'"),
        (["events", "--kind", "gpu0"], f"{KIND} 'gpu0' is not one of {KINDS}"),
        (["events", "--limit", "0"], f"{LIMIT} 0 is not a whole number from 1 to 1000"),
        (["events", "--since", "tomorrow"], f"{SINCE} 'tomorrow' is not a time: {TIMES}"),
        (["reload", "--timeout", "5"], "--timeout requires --drain or --now"),
        (["reload", "--drain", "--timeout", "0"], f"{TIMEOUT} 0 is too short: use at least 1s"),
        (["reload", "--drain", "--timeout", "1h30"], f"{TIMEOUT} '1h30' {NO_DURATION}"),
        (["doctor", "--timeout", "11m"], f"{TIMEOUT} 11m is too long: use at most 10m"),
        (
            ["top", "--interval", "0s"],
            "invalid value for '-d' / '--interval': 0s is too short: use at least 1s",
        ),
        (["run", "--wait", "5", "true"], APART.format("5")),
        (["run", "--wait", "90s", "--", "true"], APART.format("90s")),
        (["run", "--gpu", "--", "--wait", "2h"], APART.format("2h")),
        (["run", "--wait", "1.5h", "true"], APART.format("1.5h")),
        (["run", "--wait=-1", "true"], f"{WAIT} '-1' {NO_DURATION}"),
        (["run", "--wait=0", "true"], f"{WAIT} 0 is too short: use at least 1s"),
        (["run", "--wait=31d", "true"], f"{WAIT} 31d is too long: use at most 30d"),
        (["run", "-o", "dotenv", "true"], "--output requires --print-env"),
        (["run", "--gpu", "", "true"], "--device and --gpu must not be empty"),
        (["run", *ONE_DEVICE, "--count", "2", "true"], SELECTED),
        (["run", *ONE_DEVICE, "--gpu-mem", "2GiB", "true"], SELECTED),
        (["run", *ONE_DEVICE, "--gpu-mem-units", "2", "true"], SELECTED),
        (
            ["run", "--gpu-mem", "2GiB", "--gpu-mem-units", "2", "true"],
            "--gpu-mem and --gpu-mem-units are mutually exclusive: use one of them",
        ),
        (
            ["run", "--gpu-mem-units", "9999999999", "true"],
            "invalid value for '--gpu-mem-units': 9999999999 is not a whole number from 1 to 1073741824",
        ),
        (
            ["run", "--thread-percentage", "10", "true"],
            "--thread-percentage requires --gpu-mem or --gpu-mem-units",
        ),
        (
            ["run", "--podman", "--rm", "IMAGE", "true"],
            f"run has no option --rm; write podman's options after --: {PODMAN_OPTIONS}",
        ),
        (
            ["run", "--podman", "--docker", "IMAGE"],
            "--podman and --docker are mutually exclusive: use one of them",
        ),
        (["run"], NO_COMMAND),
        (["run", "--", ""], NO_COMMAND),
        (
            ["run", "--count", "0", "true"],
            "invalid value for '--count': 0 is not a whole number from 1 to 64",
        ),
        (["lease", "take", "a", "--wait", "5", "--ttl", "1h"], APART.format("5")),
        (["lease", "take", "a b", "--ttl", "5"], NO_NAME),
        (["lease", "renew", ""], "LEASE must not be empty"),
        (["lease", "take", "a", "--wait=", "--ttl", "1h"], f"{WAIT} '' {NO_DURATION}"),
        (["lease", "take", "a", "--ttl", "1y"], f"{TTL} '1y' {NO_DURATION}"),
        (
            ["lease", "take", "a", "--user", "no.body"],
            "invalid value for '--user': there is no user 'no.body'",
        ),
        (["reload", "--yes"], "--yes requires --now"),
        (
            ["reload", "--drain", "--now"],
            "--drain and --now are mutually exclusive: use one of them",
        ),
        (["terminate"], "missing argument 'LEASE|DEVICE|PID'"),
        (["completion"], "missing argument 'SHELL'. Choose from: bash, zsh, fish"),
        (["completion", "tcsh"], f"{SHELL} 'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_exits_with_2_and_says_what_would_be_right(
    without_daemon: Cli, arguments: list[str], error: str
) -> None:
    path = "yunion-mps"
    for name in arguments:
        path += f" {name}" if name in (*COMMANDS, "check", "renew", "take", "terminate") else ""
    told = f"yunion-mps: {error}\nyunion-mps: see: {path} --help\n"
    assert without_daemon(*arguments) == (2, "", told)


@pytest.mark.parametrize("command", [*ASKING, *TELLING], ids=" ".join)
def test_without_the_daemon_every_command_that_asks_it_exits_with_3(
    without_daemon: Cli, command: list[str]
) -> None:
    absent = f"{without_daemon.root}/{SOCKET} does not exist"
    wrong = f"yunion-mps: the daemon is not running: {absent} [daemon_unreachable]\n"
    assert without_daemon(*command) == (3, "", wrong + START)


#: Loads all commands before it becomes another user, because not everyone may read the checkout.
AS_ANOTHER_USER = f"""
import importlib, json, os, sys
from yunion_mps.cli import main, root
from yunion_mps.http import client
for module, _ in root.COMMANDS.values():
    importlib.import_module(f"yunion_mps.cli.{{module}}")
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
results = []
for arguments in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    command = os.fork()
    if command == 0:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        sys.argv = ["yunion-mps", *arguments]
        main()
    os.close(writing)
    with open(reading) as printed:
        text = printed.read()
    _, status = os.waitpid(command, 0)
    results.append((os.waitstatus_to_exitcode(status), text))
print(json.dumps(results))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def with_json(command: click.Command, *names: str) -> Iterator[list[str]]:
    """The commands that print JSON, by their names."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), name)
            assert inner
            yield from with_json(inner, *names, name)
    for parameter in command.params:
        if parameter.name == "output" and "json" in getattr(parameter.type, "choices", ()):
            yield [*names]


@pytest.mark.parametrize("command", [*with_json(cli)], ids=" ".join)
def test_every_command_that_prints_json_fails_in_json(without_daemon: Cli, command: list[str]) -> None:
    code, out, error = without_daemon(*command, "--no-such-option", "--output", "json")
    record = json.loads(error)
    assert (code, out, list(record)) == (2, "", ["code", "message", "hint", "exit_status"])
    assert record["message"] == "no such option: --no-such-option"
    assert record["exit_status"] == 2


def test_an_error_in_json_has_the_reason_code_and_the_hint(without_daemon: Cli) -> None:
    code, out, error = without_daemon("status", "-o", "json")
    record = json.loads(error)
    assert (code, out, error.count("\n")) == (3, "", 1)
    assert (record["code"], record["exit_status"]) == ("daemon_unreachable", 3)
    assert record["hint"].startswith("start it: ")


@pytest.mark.parametrize(
    "words",
    [
        ["run", "python", "-o", "json"],
        ["run", "--", "python", "-ojson"],
        ["status", "-o"],
        ["statu", "-o", "json"],
        ["status", "--", "-o", "json"],
    ],
)
def test_an_error_is_text_unless_json_is_the_command_s_own_format(
    without_daemon: Cli, words: list[str]
) -> None:
    _, _, error = without_daemon(*words)
    assert error.startswith("yunion-mps: ")


def test_a_user_outside_the_group_is_not_allowed_to_ask_and_exits_with_4(cli: Cli) -> None:
    commands = [*ASKING, *TELLING]
    program = [sys.executable, "-c", AS_ANOTHER_USER, json.dumps(commands)]
    done = subprocess.run(program, stdout=subprocess.PIPE, env=cli.env, timeout=60, check=True)
    why = f"permission denied: cannot connect to {cli.root}/{SOCKET}"
    refused = [4, f"yunion-mps: {why} [not_allowed]\nyunion-mps: {JOIN}\n"]
    for command, result in zip(commands, json.loads(done.stdout)):
        assert result == refused, command


@pytest.mark.parametrize("stream", ["/dev/full", "closed"])
@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_unwritable_output_is_reported_once(cli: Cli, command: list[str], stream: str) -> None:
    if stream == "closed":
        done = cli.process(*command, stdout=None, preexec_fn=lambda: os.close(1))
        why = "standard output is closed"
    else:
        with open(stream, "w") as full:
            done = cli.process(*command, stdout=full)
        why = "No space left on device"
    what, hint = f"the output cannot be written: {why}", "check its destination: df"
    told = f"yunion-mps: {what}\nyunion-mps: {hint}\n"
    if "json" in command:
        told = json.dumps({"code": "failed", "message": what, "hint": hint, "exit_status": 1}) + "\n"
    assert (done.code, done.err) == (1, told)


@pytest.mark.parametrize("arguments", [["show", "x"], ["lst"], [CLOUDPODS, "--limit", "x"]])
@pytest.mark.parametrize("stream", ["/dev/full", "closed"])
def test_the_exit_status_is_right_even_if_errors_cannot_be_written(
    cli: Cli, arguments: list[str], stream: str
) -> None:
    expected = 1 if arguments[0] == "show" else 2
    if stream == "closed":
        done = cli.process(*arguments, stderr=None, preexec_fn=lambda: os.close(2))
    else:
        with open(stream, "w") as full:
            done = cli.process(*arguments, stderr=full)
    assert done.code == expected


@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_reader_that_has_enough_is_no_error(cli: Cli, command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = cli.process(*command, stdout=pipe)
    assert (done.code, done.err) == (0, "")


def test_an_interrupted_command_ends_without_a_word(without_daemon: Cli) -> None:
    """While it waits for a daemon that does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{without_daemon.root}/run/yunion-mps/yunion-mps.sock")
        listener.listen()
        listener.settimeout(60)
        process = without_daemon.start("list")
        connection = listener.accept()[0]
        with connection, process:
            assert connection.recv(1024)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "")


@pytest.fixture
def collector_off() -> Iterator[None]:
    """As `yunion_mps.cli.main` starts; the tests' own garbage is collected again afterwards."""
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_runs_without_the_garbage_collector(name: str) -> None:
    assert cli.get_command(click.Context(cli), name)
    assert gc.isenabled()


@pytest.mark.parametrize("command", ["show", "env"])
def test_an_argument_that_is_not_utf8_names_nothing(cli: Cli, command: str) -> None:
    done = cli(command, "\udcff")
    assert done.code == 1, done.err
    assert "there is no device " in done.err


def test_every_command_of_a_module_is_reachable() -> None:
    registered = {cli.get_command(click.Context(cli), name) for name in COMMANDS}
    groups = [one for one in registered if isinstance(one, click.Group)]
    registered |= {cli, *(command for group in groups for command in group.commands.values())}
    names = [found.name for found in pkgutil.walk_packages(cli_package.__path__, "yunion_mps.cli.")]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    assert {one.name for one in values if isinstance(one, click.Command) and one not in registered} == set()
