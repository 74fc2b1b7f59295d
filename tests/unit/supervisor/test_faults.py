"""Why GPUs are ill, kept until the boot's end."""

from __future__ import annotations

from pathlib import Path

import pytest
from yunion_mps.supervisor.illness import Illness


def test_what_was_noted_is_known_to_the_next_daemon(tmp_path: Path) -> None:
    file = tmp_path / "ill.json"
    Illness(str(file)).note("0000:00:06.0", "XID 79")
    assert Illness(str(file)).reason("0000:00:06.0") == "XID 79"


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000], ids=len)
def test_a_file_that_is_none_of_that_tells_of_no_illness(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ill.json"
    file.write_text(text)
    assert Illness(str(file)).reason("0000:00:06.0") == ""
