"""Whether a control program knows the flag for serving all users at once, as it shows itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from yunion_mps.core.enums import READY
from yunion_mps.core.errors import HostError
from yunion_mps.mps.control_daemon import MULTIUSER
from yunion_mps.supervisor.preflight import knows_multiuser

from .domain_bench import Bench


def write_knowing(bench: Bench) -> str:
    """A program that takes the flag, as releases from 570 on do."""
    drop = f'for word; do shift; [ "$word" = {MULTIUSER} ] || set -- "$@" "$word"; done'
    return bench.script(f'{drop}; exec {bench.program} "$@"')


def test_a_release_without_multiuser_becomes_a_front_end(bench: Bench) -> None:
    assert not knows_multiuser(bench.program, str(bench.place))
    assert list(bench.place.iterdir()) == []


def test_a_release_that_serves_with_multiuser_supports_it(bench: Bench) -> None:
    assert knows_multiuser(write_knowing(bench), str(bench.place))
    assert [path.name for path in bench.place.iterdir()] == ["bin"], "what was tried is gone"


def test_multiuser_is_tried_once_and_again_only_with_another_program(bench: Bench) -> None:
    count = bench.place / "count"
    program = bench.script(f"echo x >>{count}; exit 1")
    assert not knows_multiuser(program, str(bench.place))
    assert not knows_multiuser(program, str(bench.place))
    assert count.read_text() == "x\n"
    write_knowing(bench)
    assert knows_multiuser(program, str(bench.place))


def test_a_program_that_neither_serves_nor_ends_is_retried_later(bench: Bench) -> None:
    count = bench.place / "count"
    program = bench.script(f"echo x >>{count}; exec sleep 1000")
    assert not knows_multiuser(program, str(bench.place), deadline_s=0.05)
    assert not knows_multiuser(program, str(bench.place), deadline_s=0.05)
    assert count.read_text() == "x\nx\n"


def test_a_program_that_cannot_be_tried_is_an_error(bench: Bench) -> None:
    with pytest.raises(HostError, match="cannot be run: No such file or directory"):
        knows_multiuser(str(bench.place / "none"), str(bench.place))
    unknown = bench.place / "copy"
    unknown.write_bytes(Path(bench.program).read_bytes())
    unknown.chmod(0o755)
    with pytest.raises(HostError, match="cannot be run: No such file or directory"):
        knows_multiuser(str(unknown), str(bench.place / "none"))


def test_a_domain_for_all_users_is_started_with_multiuser(bench: Bench) -> None:
    run = bench.domain(bench.plan._replace(multiuser=True), write_knowing(bench)).start().until(READY)
    words = Path(f"/proc/{run.pid}/cmdline").read_text().split("\0")
    assert MULTIUSER not in words, "the script has taken it out"
    assert os.path.exists(bench.plan.pipe_directory)
