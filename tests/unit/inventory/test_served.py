"""The file of the GPUs that have served: what is not understood of it is as if there were none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from yunion_mps.inventory.scan import ServedGpus, load_served, save_served
from yunion_mps.models import Gpu
from yunion_mps.paths import Paths

GPU = Gpu("0000:00:06.0", "GPU-1", "Tesla V100", minor=0, memory_mib=16384, compute_capability=(7, 0))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    assert load_served(paths) == ServedGpus()
    assert save_served(paths, [GPU])
    assert load_served(paths) == ServedGpus((GPU,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pci_address", None),
        ("pci_address", []),
        ("uuid", {}),
        ("uuid", None),
        ("name", 7),
        ("memory_mib", "16G"),
        ("minor", 1.5),
        ("numa_node", [1]),
        ("render_node", 128),
        ("compute_capability", "70"),
        ("link", [1]),
    ],
)
def test_what_is_of_another_kind_names_no_gpu(tmp_path: Path, name: str, value: object) -> None:
    paths = Paths(str(tmp_path))
    save_served(paths, [GPU])
    text = json.loads(Path(paths.served_gpus).read_text())
    text["gpus"][0][name] = value
    Path(paths.served_gpus).write_text(json.dumps(text))
    assert load_served(paths) == ServedGpus()


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000], ids=len)
def test_what_is_no_such_file_names_no_gpu(tmp_path: Path, text: str) -> None:
    paths = Paths(str(tmp_path))
    save_served(paths, [GPU])
    Path(paths.served_gpus).write_text(text)
    assert load_served(paths) == ServedGpus()
