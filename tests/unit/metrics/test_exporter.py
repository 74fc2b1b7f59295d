"""The file for node_exporter, whose directory may belong to another user, and the daemon is root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from yunion_mps.metrics.exporter import write

from integration.lease_host import STRANGER

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")


def test_another_users_symlinks_are_not_followed(tmp_path: Path) -> None:
    victim, theirs = tmp_path / "victim", tmp_path / "theirs"
    victim.write_text("mine\n")
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    file, unfinished = theirs / "a.prom", theirs / "a.prom.new"
    for link in (file, unfinished):
        link.symlink_to(victim)
    write(str(file), b"metrics")
    assert victim.read_text() == "mine\n"
    assert (file.is_symlink(), unfinished.is_symlink()) == (False, False)
    assert file.read_bytes() == b"metrics"


def test_the_administrators_own_links_lead_to_the_file(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    os.chown(real, STRANGER, STRANGER)
    (tmp_path / "link").symlink_to("real")
    write(str(tmp_path / "link/a.prom"), b"metrics")
    assert os.listdir(real) == ["a.prom"]
