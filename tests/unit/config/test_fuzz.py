from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.config import KEYS, load

from unit.config.conftest import Files

#: What YAML 1.1 ends a line with.
LINE_END = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


@pytest.fixture(scope="module")
def shared() -> Iterator[Files]:
    """One pair of files for all examples, each of which writes both."""
    with tempfile.TemporaryDirectory(prefix="cfg.", dir="/tmp") as root:
        yield Files(Path(root))


def lines_in(file: Path) -> int:
    content = file.read_bytes()
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = content.decode("utf-16" if wide else "utf-8", errors="replace")
    return max(len(LINE_END.findall(text)), content.count(b"\n")) + 1


def assert_problems_name_real_lines(files: Files) -> None:
    config, problems = load(files.paths)
    for problem in problems:
        assert problem.file in (str(files.host), str(files.devices))
        assert problem.what
        assert problem.hint or problem.what.endswith("?)") or " but must be " in problem.what
        assert "\n" not in str(problem)
        if problem.line is not None:
            assert 1 <= problem.line <= lines_in(Path(problem.file)), problem
    paths = (config.cuda_mps_pipe_directory, config.cuda_mps_log_directory, config.metrics_textfile or "")
    assert all(path.isprintable() for path in (*paths, *(entry.path for entry in config.devices)))
    for entry in config.devices:
        most = max(config.cuda_mps_max_clients or 0, 60)
        assert (1 <= entry.virtual_number <= most) != (
            0 < len(entry.slices) <= most or entry.memory_unit_mib > 0
        )


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["NVIDIA_MPS", "NVIDIA_GPU", "4", "/dev/dri/renderD128", "equal", "gpu", "keep"]),
    st.sampled_from(["8GiB", "128MiB", "1GiB", "below_normal", 50, 0, 2]),
)
keys = st.one_of(
    # The device file stays where it is, so that every problem's file is one of the two.
    st.sampled_from([key for key in KEYS if not key.endswith("_config_file")]),
    st.sampled_from(["devices", "path", "type", "virtual_number", "paht", "cuda_mps_", "enable_cuda_mpss"]),
    st.sampled_from(
        [
            "slices",
            "memory_unit",
            "memory_reserve",
            "thread_percentage",
            "thread_overcommit",
            "gpu_memory_unit",
        ]
    ),
    st.sampled_from(["memory", "thread_percentage", "priority"]),
    scalars,
)
trees: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=5)),
    max_leaves=20,
)
entries = st.lists(
    st.one_of(
        trees,
        st.fixed_dictionaries({"type": st.just("NVIDIA_MPS"), "path": scalars, "virtual_number": scalars}),
        st.fixed_dictionaries({"type": st.just("NVIDIA_MPS"), "path": scalars, "slices": trees}),
        st.fixed_dictionaries({"type": st.just("NVIDIA_MPS"), "path": scalars, "memory_unit": scalars}),
    ),
    max_size=4,
)
WORDS = (
    "devices path type virtual_number slices memory memory_unit 8GiB"
    " NVIDIA_MPS [ ] { } , ' \" ! ? << # - _ 0x 0b 010 1:1 true null ~ 4"
    " .5 .nan 2001-01-01 \\ud800 é 😀 &a *a !!int !!bool !!float !!null !!str !%ed%a0%80"
)
BREAKS = [": ", ":", "- ", "\n", "\n  ", " ", "|\n", ">\n", "%YAML 1.1\n", "---\n", "...\n", "\t", "\r",
          "\x85", "\u2028", "\ufeff"]  # fmt: skip
pieces = st.lists(st.sampled_from([*KEYS, *WORDS.split(), *BREAKS]), max_size=30).map("".join)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_yield_only_problems(shared: Files, host: bytes, devices: bytes) -> None:
    assert_problems_name_real_lines(shared.write(host, devices))


@given(pieces, pieces)
def test_pieces_of_yaml_yield_only_problems(shared: Files, host: str, devices: str) -> None:
    text = host.replace("container_device_config_file", "container")
    assert_problems_name_real_lines(shared.write(text, devices))


@given(st.dictionaries(keys, trees, max_size=6), entries)
def test_values_of_our_keys_yield_only_problems(
    shared: Files, host: dict[Any, Any], devices: list[Any]
) -> None:
    shared.write(yaml.safe_dump(host), yaml.safe_dump({"devices": devices}, allow_unicode=True))
    assert_problems_name_real_lines(shared)


@given(st.sampled_from(sorted(KEYS)), pieces)
def test_any_text_after_one_of_our_keys_yields_only_problems(shared: Files, key: str, value: str) -> None:
    name = "cuda_mps_scope" if key == "container_device_config_file" else key
    assert_problems_name_real_lines(shared.write(f"{name}: {value.replace('container_', '')}\n"))
