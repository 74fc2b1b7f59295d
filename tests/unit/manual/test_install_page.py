"""docs/install.md: its links lead somewhere, and what it says the programs print is in the programs."""

from __future__ import annotations

import re

from yunion_mps.config import KEYS
from yunion_mps.host.processes import PROGRAM_DIRECTORIES

from unit.generated import CHECKOUT

PAGE = (CHECKOUT / "docs/install.md").read_text()
SOURCES = "".join(path.read_text() for path in sorted(CHECKOUT.glob("yunion_mps/**/*.py")))


def anchors() -> set[str]:
    titles = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_within_the_page_leads_somewhere() -> None:
    links = set(re.findall(r"\]\(#([^)]+)\)", PAGE))
    assert len(links) >= 3
    assert links - anchors() == set()


def test_every_source_that_is_named_is_listed() -> None:
    named = {int(number) for number in re.findall(r"\[source (\d+)\]", PAGE)}
    listed = {
        int(number) for number in re.findall(r"^(\d+)\. ", PAGE.partition("## Sources")[2], re.MULTILINE)
    }
    assert named == listed


def test_each_message_of_the_table_is_one_of_the_programs() -> None:
    table = PAGE.partition("| it says | do |")[2].partition("\n## ")[0]
    cells = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| ")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) >= 8
    for message in messages:
        parts = [part.strip() for part in re.split("…|: ", message) if len(part.strip()) > 5]
        for part in parts:
            found = part.replace("nvidia-cuda-mps-control ", "").replace("/var/lib/yunion-mps/state.db ", "")
            assert found in SOURCES or "/host.conf" in found, message


def test_the_page_names_the_control_program_s_places_and_defaults() -> None:
    for directory in PROGRAM_DIRECTORIES:
        assert f"`{directory}`" in PAGE, directory
    assert f"`cuda_mps_replicas` ({KEYS['cuda_mps_replicas'].default})" in PAGE
    assert f"`cuda_mps_stop_timeout_s` ({KEYS['cuda_mps_stop_timeout_s'].default})" in PAGE
