"""An environment in each format is read back as it was, or refused: else a job would miss its budget."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.cli.environment import show_environment
from yunion_mps.cli.options import STYLES
from yunion_mps.core.errors import HostError

from unit.cli.conftest import Cli
from unit.http.fake_services import LEASE

NAME = "CUDA_MPS_PIPE_DIRECTORY"
#: How a shell takes each format from standard input; systemd itself cannot be asked.
READERS = {
    "shell": 'eval "$(cat)"',
    "dotenv": 'set -a; eval "$(cat)"',
    "docker": 'IFS= read -r line; export "$line"',
}


def printed_environment(environment: dict[str, str], style: str = "shell") -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show_environment(environment, style)
    return out.getvalue()


def printed(value: str, style: str) -> str:
    return printed_environment({NAME: value}, style)


@pytest.mark.parametrize("style", READERS)
@given(value=st.text(st.sampled_from("/aé日 $`'\"\\%#=;&|*?~!{}()\n\r\t\x1b\u202e"), max_size=20))
def test_an_accepted_value_is_read_back_unchanged(style: str, value: str) -> None:
    try:
        text = printed(value, style)
    except HostError:
        assert not value.isprintable() or (style == "dotenv" and set(value) & {"$", "`"})
        return
    assert text.count("\n") == 1 or style == "shell"
    script = f'{READERS[style]}; printf %s. "${NAME}"'
    found = subprocess.run(["sh", "-c", script], input=text, capture_output=True, text=True, timeout=60)
    assert found.stdout == f"{value}."


@pytest.mark.parametrize("sliced_first", [True, False])
def test_eval_leaves_nothing_of_another_devices_environment(sliced_first: bool) -> None:
    shared = {
        "CUDA_VISIBLE_DEVICES": "GPU-6",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        "YUNION_MPS_DEVICE": "a",
    }
    sliced = {
        "CUDA_VISIBLE_DEVICES": "GPU-7",
        "YUNION_MPS_DEVICE": "b",
        "YUNION_MPS_MEMORY_MIB": "4096",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
    }
    first, second = (sliced, shared) if sliced_first else (shared, sliced)
    script = "".join(printed_environment(one) for one in (first, second)) + "env"
    found = subprocess.run(["sh", "-euc", script], env={}, capture_output=True, text=True, timeout=60)
    ours = {line for line in found.stdout.splitlines() if line.startswith(("CUDA_", "YUNION_", "XLA_"))}
    assert ours == {f"{name}={value}" for name, value in second.items()}, found.stderr


def test_a_unit_gets_a_dollar_and_a_percent_sign_as_they_are() -> None:
    """systemd.exec(5): in Environment= a dollar sign means nothing, and %% is a percent sign."""
    assert printed('/a$HOME/%h/"b\\', "systemd") == f'Environment="{NAME}=/a$HOME/%%h/\\"b\\\\"\n'


@pytest.mark.parametrize("style", STYLES)
def test_a_value_that_a_format_cannot_hold_fails_its_reader(own_cli: Cli, style: str) -> None:
    environment = {**LEASE["environment"], NAME: "/a\nLD_PRELOAD=/b"}
    own_cli.host.leases.granted = {**LEASE, "environment": environment}
    done = own_cli("run", "--print-env", "-o", style)
    if style == "json":
        assert json.loads(done.out) == environment
        return
    assert done.code == 1
    assert done.out == {"shell": "false\n", "docker": "=no-device-available\n"}.get(style, "")
    why = f"{NAME}: the format {style} cannot represent /a\\nLD_PRELOAD=/b"
    hint = "use --output json, or set another directory in host.conf"
    assert done.err == f"yunion-mps: {why} [host_error]\nyunion-mps: {hint}\n"


@pytest.mark.parametrize("command", ["run --print-env", "lease take job-17 --ttl 1h"])
@pytest.mark.parametrize("memory", ["--gpu-mem 3GiB", "--gpu-mem-units 3"])
def test_memory_is_requested_for_each_of_several_devices(own_cli: Cli, command: str, memory: str) -> None:
    own_cli.good(*command.split(), "--count", "2", "--across", *memory.split(), "--thread-percentage", "12")
    ((request, _, _),) = own_cli.host.leases.requested
    assert (request.number, request.across, request.memory_mib) == (2, True, 3072)
    assert request.thread_percentage == 12


@pytest.mark.parametrize(
    ("sharing", "named"), [("none", "a whole MIG instance"), ("time-slicing", "time-slicing")]
)
def test_dry_run_says_how_a_device_without_mps_is_shared(own_cli: Cli, sharing: str, named: str) -> None:
    own_cli.host.leases.granted = {**LEASE, "environment": {}, "sharing": sharing}
    assert own_cli.good("run", "--dry-run").endswith(f" MiB of memory, {named}\n")
