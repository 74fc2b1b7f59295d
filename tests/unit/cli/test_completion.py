"""The completion scripts do what they are for, in the shells themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from yunion_mps.cli.root import SECTIONS

from unit.cli.conftest import PROGRAM, Cli, Serve
from unit.http import snapshots


@pytest.fixture(scope="module")
def script(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        ("yunion-mps terminate 42", ["4260"]),
        ("yunion-mps terminate 7c", ["7c1f0e7a"]),
    ],
)
def test_bash_completes_commands_options_and_devices(
    cli: Cli, script: Path, line: str, offered: list[str]
) -> None:
    assert complete_in_bash(cli, line, script) == offered


def test_without_the_daemon_bash_completes_no_device_and_stays_silent(
    without_daemon: Cli, script: Path
) -> None:
    assert complete_in_bash(without_daemon, "yunion-mps show ", script) == []


def test_an_instance_of_another_program_is_not_completed(serve: Serve, script: Path) -> None:
    host = snapshots.mig()
    gpus = host.inventory.gpus
    foreign = gpus[-1]._replace(pci_address=f"{gpus[1].pci_address}-g9", uuid=None, identity="")
    cli = serve(host._replace(inventory=host.inventory._replace(gpus=(*gpus, foreign))))
    listed = complete_in_bash(cli, "yunion-mps run --gpu 81", script)
    assert listed == ["81:00.0", "81:00.0-g1", "81:00.0-g2"]
