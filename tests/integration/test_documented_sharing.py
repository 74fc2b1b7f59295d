"""The examples in docs/sharing.md and docs/mig.md: what the commands print is what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from documents import code_blocks
from integration.daemon_host import Daemon, eventually
from simhost import SimHost

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
#: The GPUs that the first example of each page is about.
GPUS: dict[str, dict[str, Any]] = {
    "sharing.md": {"kind": "h100", "count": 3},
    "mig.md": {"kind": "h100", "uuid": "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"},
}


def _load_is_known(daemon: Daemon) -> bool:
    return daemon.get("/v1/gpus")[1]["gpus"][0]["memory_used_mib"] is not None


@pytest.mark.parametrize("page", GPUS)
def test_the_first_example_of_the_page_prints_what_the_page_says(page: str) -> None:
    file, session = (block.text for block in code_blocks((DOCS / page).read_text())[:2])
    commands = re.split(r"^# (?=yunion-mps)", session, flags=re.MULTILINE)[1:]
    with SimHost.create([GPUS[page]]) as host, Daemon(host) as daemon:
        (host.root / "etc/yunion/host_container_device.yml").write_text(file)
        daemon.configure()
        daemon.start().wait_ready()
        eventually(lambda: _load_is_known(daemon), "the load of the GPUs")
        assert len(commands) >= 2
        for command in commands:
            words, _, told = command.partition("\n")
            if words != "yunion-mps reload":
                assert host.run(words.split(), check=True).stdout.strip() == told.strip()
