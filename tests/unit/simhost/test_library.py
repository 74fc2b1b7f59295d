"""Building the library, and how it refuses a state that is not its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from simhost import BuildError, SimHost, StateError
from simhost.install import built_library
from unit.simhost.conftest import MakeHost


def test_builders_at_once_make_one_library(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        built = set(pool.map(built_library, [tmp_path] * 3))
    assert [path.parent for path in built] == [tmp_path / ".cache/simhost"]
    assert list((tmp_path / ".cache/simhost").iterdir()) == list(built)


def test_missing_compiler_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="apt-get install gcc"):
        built_library(tmp_path)


def test_state_of_another_version_is_refused_by_both_sides(make_host: MakeHost) -> None:
    host = make_host()
    state = host.root / "lib/simhost.state"
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(StateError, match="use a new root"):
        SimHost.attach(host.root)
    assert "no state of this library's layout" in host.run(["nvidia-smi", "-L"]).stderr
