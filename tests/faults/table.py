"""The table of faults in docs/reliability.md: written on demand, and compared with what was seen."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from faults.rows import FAULTS, TOPICS, Row
from simhost.environment import CHECKOUT

PAGE = CHECKOUT / "docs/reliability.md"
WRITE_VARIABLE = "YUNION_MPS_WRITE_RELIABILITY"
_BEGIN, _END = "<!-- from here on written by tests/faults -->", "<!-- up to here -->"
_HEAD = "| fault | lost | recovery | what the operator saw first |\n|---|---|---|---|\n"


def render(rows: Iterable[Row]) -> str:
    """All rows in the order of the scenarios, a table for each topic."""
    by_fault = {row.fault: row for row in rows}
    kernel = ".".join(platform.release().split(".")[:2])
    text = f"One run on {os.cpu_count()} cores, Linux {kernel}.\n"
    topic = ""
    for fault in sorted(FAULTS, key=lambda fault: TOPICS.index(fault.topic)):
        row = by_fault.get(fault.name)
        if row is None:
            continue
        if row.topic != topic:
            topic = row.topic
            text += f"\n### {topic}\n\n{_HEAD}"
        text += "| " + " | ".join(cell.replace("|", "\\|") for cell in row[1:]) + " |\n"
    return text


def write(rows: Iterable[Row], page: Path = PAGE) -> None:
    """Put the rows in the place of the page's."""
    before, _, rest = page.read_text().partition(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n{render(rows)}{_END}{rest.partition(_END)[2]}")


def fixed(text: str) -> list[Sequence[str]]:
    """What each line of the tables says but for times: the fault, what was lost, what was seen."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| fault ")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [(fault, lost, saw) for fault, lost, _, saw in cells]


def on_page(page: Path = PAGE) -> str:
    return page.read_text().partition(_BEGIN)[2].partition(_END)[0]
