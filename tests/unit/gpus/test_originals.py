"""Originals: what each GPU had before the first change, in the state file and its copies."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.core.mig import MigInstance
from yunion_mps.core.paths import Paths
from yunion_mps.gpus.mig_record import MigIntent, MigRecord
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import Store

MODES, SLICES = {"GPU-1": "Default"}, {"GPU-2": "long"}
RECORD = MigRecord(
    before=(MigInstance(1, "1g.10gb", 0, 1, "MIG-1"),),
    compute_mode="Default",
    intent=MigIntent("2g.20gb", 2, (1,)),
)


@pytest.fixture
def originals(paths: Paths) -> Iterator[Originals]:
    with closing(Store(paths)) as store:
        yield Originals(store)


def recorded(originals: Originals) -> list[dict[str, str]]:
    return [originals.of(kind) for kind in ("compute_mode", "time_slice", "power_limit")]


def test_each_kind_has_its_own_values(originals: Originals) -> None:
    originals.remember("compute_mode", MODES)
    originals.remember("time_slice", SLICES)
    originals.remember("power_limit", {"GPU-1": "300 W"})
    originals.remember("power_limit", {"GPU-1": "250 W", "GPU-3": "200 W"})
    assert recorded(originals) == [MODES, SLICES, {"GPU-1": "300 W", "GPU-3": "200 W"}]
    assert originals.gpus() == {"GPU-1", "GPU-2", "GPU-3"}
    originals.forget("power_limit", "GPU-1")
    originals.forget("compute_mode", "GPU-1")
    assert recorded(originals) == [{}, SLICES, {"GPU-3": "200 W"}]


@pytest.mark.parametrize("copy", ["records", "modes"])
def test_a_kind_of_a_later_version_is_taken_from_the_copies(paths: Paths, copy: str) -> None:
    with closing(Store(paths)) as store:
        Originals(store).remember("power_limit", {"GPU-1": "300 W"})
    for end in ("", "-wal", "-shm"):
        Path(paths.store + end).unlink(missing_ok=True)
    Path(paths.former_modes if copy == "records" else paths.settings_copy).unlink()
    with closing(Store(paths)) as store:
        assert Originals(store).of("power_limit") == {"GPU-1": "300 W"}


def test_an_earlier_version_that_runs_in_between_loses_nothing(paths: Paths) -> None:
    """Its copy has no table of the kinds that it does not know."""
    with closing(Store(paths)) as store:
        Originals(store).remember("power_limit", {"GPU-1": "300 W"})
    file = Path(paths.settings_copy)
    copy = json.loads(file.read_text())
    del copy["tables"]["former_setting"]
    copy["tables"]["former_compute_mode"] = MODES
    copy["number"] += 1
    file.write_text(json.dumps(copy))
    with closing(Store(paths)) as store:
        assert recorded(Originals(store)) == [MODES, {}, {"GPU-1": "300 W"}]


def test_the_file_of_an_earlier_version_is_read(paths: Paths) -> None:
    """It has no table for other kinds of settings."""
    with closing(Store(paths)) as store:
        Originals(store).remember("compute_mode", MODES)
        Originals(store).write_layout("GPU-1", RECORD)
    with closing(sqlite3.connect(paths.store)) as file, file:
        file.execute("DROP TABLE former_setting")
    with closing(Store(paths)) as store:
        assert recorded(Originals(store)) == [MODES, {}, {}]
        assert Originals(store).layout("GPU-1") == RECORD


def test_a_layout_that_an_earlier_version_recorded_is_read(originals: Originals) -> None:
    """It stored the fields of instances by their position."""
    row = [1, "1g.10gb", 0, 1, "MIG-1", 1]
    value = {"enabled_before": True, "before": [row], "created": [row], "compute_mode": "Default"}
    assert MigRecord.from_text(json.dumps(value)) == MigRecord(
        enabled_before=True,
        before=RECORD.before,
        created=RECORD.before or (),
        compute_mode="Default",
    )


def test_a_layout_is_recorded_with_its_intent(originals: Originals) -> None:
    assert originals.layout("GPU-1") == MigRecord()
    originals.write_layout("GPU-1", RECORD)
    assert originals.layout("GPU-1") == RECORD
    assert originals.changed_layouts() == {"GPU-1"}
    originals.write_layout("GPU-1", MigRecord(created=RECORD.before or ()))
    assert originals.changed_layouts() == set()
    originals.forget_layout("GPU-1")
    assert originals.gpus() == set()
