"""Whether a control program knows the flag for serving all users at once, as it shows itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from yunion_mps.errors import HostError
from yunion_mps.models import DomainPlan
from yunion_mps.mps.startup import MULTIUSER, knows_multiuser
from yunion_mps.mps.states import READY

from .conftest import RunDomain, WriteProgram


@pytest.fixture
def write_knowing(program: str, write_program: WriteProgram) -> Callable[[], str]:
    """A program that takes the flag, as releases from 570 on do."""
    script = (
        f'for word; do shift; [ "$word" = {MULTIUSER} ] || set -- "$@" "$word"; done; exec {program} "$@"'
    )
    return lambda: write_program(script)


def test_a_release_that_does_not_know_it_turns_into_a_front_end(program: str, place: Path) -> None:
    assert not knows_multiuser(program, str(place))
    assert list(place.iterdir()) == []


def test_a_release_that_serves_with_it_knows_it(write_knowing: Callable[[], str], place: Path) -> None:
    knowing = write_knowing()
    assert knows_multiuser(knowing, str(place))
    assert [path.name for path in place.iterdir()] == ["bin"], "what was tried is gone"


def test_it_is_tried_once_and_again_only_with_another_program(
    write_program: WriteProgram, write_knowing: Callable[[], str], place: Path
) -> None:
    count = place / "count"
    program = write_program(f"echo x >>{count}; exit 1")
    assert not knows_multiuser(program, str(place))
    assert not knows_multiuser(program, str(place))
    assert count.read_text() == "x\n"
    write_knowing()
    assert knows_multiuser(program, str(place))


def test_one_that_neither_serves_nor_ends_is_tried_again_later(
    write_program: WriteProgram,
    write_knowing: Callable[[], str],
    place: Path,
) -> None:
    count = place / "count"
    program = write_program(f"echo x >>{count}; exec sleep 1000")
    assert not knows_multiuser(program, str(place), deadline_s=0.05)
    assert not knows_multiuser(program, str(place), deadline_s=0.05)
    assert count.read_text() == "x\nx\n"


def test_a_program_that_cannot_be_tried_is_an_error(program: str, place: Path) -> None:
    with pytest.raises(HostError, match="cannot be tried: No such file or directory"):
        knows_multiuser(str(place / "none"), str(place))
    unknown = place / "copy"
    unknown.write_bytes(Path(program).read_bytes())
    unknown.chmod(0o755)
    with pytest.raises(HostError, match="cannot be tried: No such file or directory"):
        knows_multiuser(str(unknown), str(place / "none"))


def test_a_domain_for_all_users_is_started_with_it(
    run_domain: RunDomain, plan: DomainPlan, write_knowing: Callable[[], str], place: Path
) -> None:
    run = run_domain(plan._replace(multiuser=True), write_knowing()).start().until(READY)
    words = Path(f"/proc/{run.pid}/cmdline").read_text().split("\0")
    assert MULTIUSER not in words, "the script has taken it out"
    assert os.path.exists(plan.pipe_directory)
