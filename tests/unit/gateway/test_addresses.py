"""The addresses that the daemon publishes, as the gateway reads them."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.gateway import publish_addresses, read_addresses, remove_addresses

from unit import builders
from unit.http.server_host import short_root


@pytest.fixture
def paths() -> Iterator[Paths]:
    with short_root() as found:
        yield found


def test_the_addresses_file_is_readable_by_all(paths: Paths) -> None:
    config = builders.config()._replace(metrics_listen="127.0.0.1:9434", web_listen="[::1]:9435")
    publish_addresses(paths, config)
    assert read_addresses(paths) == {"metrics_listen": "127.0.0.1:9434", "web_listen": "[::1]:9435"}
    assert stat.S_IMODE(Path(paths.gateway).stat().st_mode) == 0o644
    assert [each.name for each in Path(paths.gateway).parent.iterdir()] == [Path(paths.gateway).name]


def test_without_addresses_there_is_no_file(paths: Paths) -> None:
    publish_addresses(paths, builders.config()._replace(metrics_listen="127.0.0.1:9434"))
    publish_addresses(paths, builders.config())
    assert not Path(paths.gateway).exists()
    assert read_addresses(paths) == {}
    remove_addresses(paths)  # again


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"other": "127.0.0.1:1"}', '{"metrics_listen": ""}', "null"]
)
def test_a_file_that_makes_no_sense_opens_nothing(paths: Paths, text: str) -> None:
    Path(paths.gateway).write_text(text)
    assert read_addresses(paths) == {}
