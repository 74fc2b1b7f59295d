"""The files that engines read: whole at every moment, and only ours are touched."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.host import threads
from yunion_mps.service.publisher import DEVICES_FILE, CdiPublisher, SpecDirectory, lease_file

from unit.supervised import StartSupervised

SPECS = st.dictionaries(st.text(max_size=10), st.text(max_size=200), max_size=20)


@given(st.lists(SPECS, min_size=1, max_size=5))
def test_the_last_write_is_complete_and_leaves_no_other_file(
    tmp_path_factory: pytest.TempPathFactory, specs: list[Any]
) -> None:
    directory = tmp_path_factory.mktemp("cdi")
    for spec in specs:
        SpecDirectory(str(directory)).write(DEVICES_FILE, spec)
    assert json.loads((directory / DEVICES_FILE).read_text()) == specs[-1]
    assert os.listdir(directory) == [DEVICES_FILE]


def test_a_reader_never_finds_half_a_file(tmp_path: Path) -> None:
    specs = [{"devices": ["x" * 100_000] * number} for number in (1, 9)]
    SpecDirectory(str(tmp_path)).write(DEVICES_FILE, specs[0])
    seen: list[int] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.append(len(json.loads((tmp_path / DEVICES_FILE).read_text())["devices"]))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):
        SpecDirectory(str(tmp_path)).write(DEVICES_FILE, specs[number % 2])
    is_over.set()
    reader.join()
    assert seen
    assert set(seen) <= {1, 9}


def test_a_missing_directory_is_made_and_every_user_can_read_its_files(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        SpecDirectory(str(tmp_path / "run/cdi")).write(DEVICES_FILE, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run/cdi" / DEVICES_FILE).stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "run/cdi").stat().st_mode) == 0o755
    (tmp_path / "run/cdi").chmod(0o700)
    SpecDirectory(str(tmp_path / "run/cdi")).write(DEVICES_FILE, {})
    assert stat.S_IMODE((tmp_path / "run/cdi").stat().st_mode) == 0o700, "one that is there is another's"


def test_a_failed_write_keeps_the_previous_file(tmp_path: Path) -> None:
    SpecDirectory(str(tmp_path)).write(DEVICES_FILE, {"a": "b"})
    with pytest.raises(TypeError):
        SpecDirectory(str(tmp_path)).write(DEVICES_FILE, {"a": object()})
    assert json.loads((tmp_path / DEVICES_FILE).read_text()) == {"a": "b"}
    with pytest.raises(OSError, match="File exists"):
        SpecDirectory(str(tmp_path / DEVICES_FILE)).write(DEVICES_FILE, {})


def test_a_file_that_another_program_changed_or_removed_is_noticed(tmp_path: Path) -> None:
    files = SpecDirectory(str(tmp_path))
    assert not files.is_unchanged(DEVICES_FILE)
    files.write(DEVICES_FILE, {"a": "b"})
    assert files.is_unchanged(DEVICES_FILE)
    SpecDirectory(str(tmp_path)).write(DEVICES_FILE, {"a": "b"})
    assert not files.is_unchanged(DEVICES_FILE)
    files.write(DEVICES_FILE, {"a": "b"})
    (tmp_path / DEVICES_FILE).write_text("{")
    assert not files.is_unchanged(DEVICES_FILE)
    (tmp_path / DEVICES_FILE).unlink()
    assert not files.is_unchanged(DEVICES_FILE)


def test_only_our_files_are_ours(tmp_path: Path) -> None:
    mine = [DEVICES_FILE, lease_file("7c1f"), f"{DEVICES_FILE}.new", f"{lease_file('a')}.new"]
    for name in [*mine, "nvidia.yaml", "yunion-mps.json.bak", "other-yunion-mps.json"]:
        (tmp_path / name).write_text("")
    files = SpecDirectory(str(tmp_path))
    assert sorted(files.names()) == sorted(mine)
    for name in mine:
        files.remove(name)
        files.remove(name)
    assert sorted(os.listdir(tmp_path)) == ["nvidia.yaml", "other-yunion-mps.json", "yunion-mps.json.bak"]
    assert SpecDirectory(str(tmp_path / "nowhere")).names() == []


@pytest.mark.processes
def test_a_shortage_of_threads_is_reported_in_words(
    start_supervised: StartSupervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = start_supervised([{"kind": "v100"}], 4)

    def told() -> list[str]:
        return [condition.text for condition in made.snapshot.conditions]

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def refresh() -> None:
        publisher = CdiPublisher(made.paths, made.supervisor)
        publisher.refresh()
        while not told():  # noqa: ASYNC110 - its task tells
            await asyncio.sleep(0)

    assert told() == []
    gate = threading.Event()
    for _ in range(20):  # idle threads of earlier tests would be reused
        threads.start_thread(gate.wait, threads.ignore_outcome)
    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refuse)
        try:
            asyncio.run(refresh())
        finally:
            gate.set()
    short = "cannot start a thread: out of memory, processes or threads (can't start new thread)"
    file = f"{made.paths.root}/run/cdi/{DEVICES_FILE}"
    assert told() == [f"containers cannot find the devices: {file}: {short}"]
