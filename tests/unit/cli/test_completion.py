"""The completion scripts do what they are for, in the shells themselves."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
from yunion_mps.cli.root import SECTIONS

from unit.cli.conftest import PROGRAM, Cli
from waiting import readable


@pytest.fixture(scope="module")
def script(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash."""
    file = tmp_path_factory.mktemp("completion") / "yunion-mps"
    file.write_text(cli.good("completion", "bash"))
    return file


def complete_in_bash(cli: Cli, line: str, script: Path) -> list[str]:
    """What bash offers for the last word of `line`, with the script sourced."""
    program = f"""
        set -u
        source {script}
        complete -p yunion-mps >/dev/null || exit 9
        COMP_LINE='{line}' COMP_POINT={len(line)}
        _yunion_mps_completion yunion-mps
        printf "%s\\n" "${{COMPREPLY[@]:-}}"
    """
    command = ["bash", "--norc", "--noprofile", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=with_program(cli), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def with_program(cli: Cli) -> dict[str, str]:
    return {**cli.env, "PATH": f"{Path(PROGRAM).parent}:{cli.env['PATH']}"}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("yunion-mps st", ["status"]),
        ("yunion-mps is", ["isolated-device-list"]),
        ("yunion-mps ", [name for section in SECTIONS.values() for name in section]),
        ("yunion-mps events --kind c", ["compute_mode", "configuration", "client"]),
        ("yunion-mps reload --", ["--drain", "--now", "--timeout", "--yes", "--output", "--help"]),
        ("yunion-mps config ", ["show", "check"]),
        ("yunion-mps isolated-device-list --of", ["--offset"]),
        ("yunion-mps list --output ", ["table", "wide", "json", "yaml", "csv"]),
        ("yunion-mps show ", ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]),
        ("yunion-mps show 00:06.0-2", ["06.0-2"]),
        ("yunion-mps show x", []),
        ("yunion-mps run --device 00:06.0-3", ["06.0-3"]),
        ("yunion-mps run --gpu ", ["00:06.0"]),
        ("yunion-mps lease release ", ["7c1f0e7a"]),
        ("yunion-mps doctor --pid 42", ["4260"]),
        ("yunion-mps terminate ", ["4260"]),
    ],
)
def test_bash_completes_commands_options_and_devices(
    cli: Cli, script: Path, line: str, offered: list[str]
) -> None:
    assert complete_in_bash(cli, line, script) == offered


@pytest.mark.parametrize("typed", ["0001\t2", "0001:e\t1", "0001:e1:00\t0", "0001:e1:00.0-2\t"])
def test_an_address_is_completed_as_it_is_typed(troubled: Cli, script: Path, typed: str) -> None:
    """Readline itself, on a terminal: it breaks words at the colons that every address has."""
    ours, theirs = pty.openpty()
    env = {**with_program(troubled), "PS1": "$ ", "TERM": "dumb", "INPUTRC": "/dev/null", "HISTFILE": ""}
    command = ["bash", "--norc", "--noprofile", "-i"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    ) as bash:
        os.close(theirs)
        os.write(ours, f"source {script}; echo sour''ced\n".encode())
        read_until(ours, b"sourced\r\n")
        os.write(ours, f"yunion-mps show {typed} -o csv\n".encode())
        printed = read_until(ours, b"CUDA_VISIBLE_DEVICES,")
        os.write(ours, b"exit\n")
        bash.wait(60)
    os.close(ours)
    assert f"addr,0001:e1:00.0-{typed.strip()[-1]}\r\n".encode() in printed


def read_until(terminal: int, text: bytes) -> bytes:
    printed = b""
    while text not in printed:
        assert readable(terminal, 60), printed
        printed += os.read(terminal, 65536)
    return printed


def test_without_the_daemon_bash_completes_no_device_and_stays_silent(alone: Cli, script: Path) -> None:
    assert complete_in_bash(alone, "yunion-mps show ", script) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_needs_no_daemon_and_asks_for_its_own_shell(alone: Cli, shell: str) -> None:
    script = alone.good("completion", shell)
    assert f"_YUNION_MPS_COMPLETE={shell}_complete" in script


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_can_read_their_scripts(alone: Cli, tmp_path: Path, shell: str) -> None:
    if not shutil.which(shell):
        pytest.fail(f"{shell} is not there: scripts/setup installs it")
    script = tmp_path / f"yunion-mps.{shell}"
    script.write_text(alone.good("completion", shell))
    subprocess.run([shell, "-n", str(script)], check=True, timeout=60)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_are_offered_devices_too(cli: Cli, shell: str) -> None:
    env = {
        **cli.env,
        "_YUNION_MPS_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "yunion-mps show 00:06.0-3",
        "COMP_CWORD": "00:06.0-3" if shell == "fish" else "2",
    }
    done = cli.process(env=env)
    assert (done.code, done.err) == (0, "")
    expected = "plain,00:06.0-3\n" if shell == "fish" else "plain\n00:06.0-3\n_\n"
    assert done.out == expected
