"""The garbage collector of the program yunion-mps."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import click
import pytest
from yunion_mps.cli.root import COMMANDS, cli


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
