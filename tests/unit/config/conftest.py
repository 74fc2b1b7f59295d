"""The configuration files of a host that has nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Optional, Union

import pytest
from yunion_mps.config import load
from yunion_mps.core.errors import Problem
from yunion_mps.core.paths import Paths
from yunion_mps.core.settings import Config

Content = Optional[Union[str, bytes]]

HOST = "/etc/yunion/host.conf"
LOCAL = "/etc/yunion/host_local.conf"
DEVICES = "/etc/yunion/host_container_device.yml"


class Files:
    """Writes the files below a root and reads them back; messages name files as on a host without a root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = Paths(str(root))
        self.host = root / HOST[1:]
        self.local = root / LOCAL[1:]
        self.devices = root / DEVICES[1:]
        self.host.parent.mkdir(parents=True)

    def write(
        self, host: Content = "enable_cuda_mps: true\n", devices: Content = None, local: Content = None
    ) -> Files:
        for file, content in ((self.host, host), (self.devices, devices), (self.local, local)):
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content.encode() if isinstance(content, str) else content)
        return self

    def load(self) -> Config:
        config, problems = load(self.paths)
        assert problems == []
        return config

    def problems(self) -> list[Problem]:
        return load(self.paths)[1]

    def messages(self) -> list[str]:
        return [str(problem).replace(str(self.root), "") for problem in self.problems()]


def annotated(text: str, **hints: str) -> tuple[str, list[str]]:
    """A file's content, and what is said of a line, below it after `! `; `$NAME` is one of the hints."""
    content: list[str] = []
    messages: list[str] = []
    for line in Template(text).substitute(hints).replace("\n!   ", " ").splitlines():
        if line.startswith("! "):
            messages.append(f"{len(content)}: {line[2:]}")
        else:
            content.append(f"{line}\n")
    return "".join(content), messages


@pytest.fixture
def files() -> Iterator[Files]:
    with tempfile.TemporaryDirectory(prefix="cfg.", dir="/tmp") as root:
        Path(root).chmod(0o755)
        yield Files(Path(root))
