"""The list of checks, and what describes it."""

from __future__ import annotations

from yunion_mps.doctor.report import OF_THE_HOST, checks

from simhost.environment import CHECKOUT

PAGE = CHECKOUT / "docs/doctor.md"


def test_every_check_has_a_name_of_its_own_and_its_row_in_the_documentation() -> None:
    every = checks({}, 1, ("true",), selftest_too=True)
    names = {check.name for check in every}
    assert len(OF_THE_HOST) == len({check.name for check in OF_THE_HOST})
    rows = [
        line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines() if line[:2] == "| "
    ]
    listed = rows[rows.index("check") + 1 :]
    assert set(listed) == names
    assert listed[: len(OF_THE_HOST)] == [check.name for check in OF_THE_HOST]
