"""The code runs on Python 3.9, whichever newer one runs these tests; tests/packages boots one that has it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDEST = (3, 9)
MODULES = sorted((ROOT / "yunion_mps").rglob("*.py"))
#: The modules are checked in so many parts, because a check of all takes 4 s of processor time.
PARTS = 3

#: What 3.9 cannot do, and what it can although it looks alike.
CANNOT = {
    "a generic NamedTuple": "from typing import Generic, NamedTuple, TypeVar\nT = TypeVar('T')\n"
    "class P(NamedTuple, Generic[T]):\n    a: T\n",
    "bisect with a key": "from bisect import bisect\nbisect([1], 2, key=abs)\n",
    "zip that is strict": "zip([1], [2], strict=True)\n",
    "a union at run time": "isinstance(1, int | str)\n",
    "a dataclass with slots": "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass P: ...\n",
    "match": "match 1:\n    case 1:\n        pass\n",
    "a newer function": "import itertools\nitertools.pairwise([1])\n",
    "a newer module": "import tomllib\n",
}
CAN = {
    "a union in an annotation": "from __future__ import annotations\ndef f(a: int | str) -> list[int]: ...\n",
    "a plain NamedTuple": "from typing import NamedTuple\nclass P(NamedTuple):\n    a: int\n",
    "what 3.9 has brought": "'a'.removeprefix('a')\n",
}


def newer_than_oldest(*paths: Path) -> str:
    """What needs a newer Python than the oldest, as vermin says it; empty for nothing."""
    vermin = Path(sys.executable).with_name("vermin")
    target = f"--target={OLDEST[0]}.{OLDEST[1]}-"
    command = [
        str(vermin),
        target,
        "--violations",
        "--no-tips",
        "--quiet",
        "--feature=union-types",
        *map(str, paths),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def not_seen_by_vermin(path: Path) -> list[str]:
    """Where a class has NamedTuple and another base, or types are joined by `|` beside annotations."""
    nodes = list(ast.walk(ast.parse(path.read_text(), str(path), feature_version=OLDEST)))
    roots = [getattr(node, field, None) for node in nodes for field in ("annotation", "returns")]
    annotations = {id(part) for root in roots if root for part in ast.walk(root)}
    return [
        f"{path}:{node.lineno}"
        for node in nodes
        if (isinstance(node, ast.ClassDef) and len(node.bases) > 1 and _names_named_tuple(node))
        or (isinstance(node, ast.BinOp) and id(node) not in annotations and _joins_types(node))
    ]


def _names_named_tuple(node: ast.ClassDef) -> bool:
    return any("NamedTuple" in ast.unparse(base) for base in node.bases)


def _joins_types(node: ast.BinOp) -> bool:
    sides = {ast.unparse(side) for side in (node.left, node.right)}
    return isinstance(node.op, ast.BitOr) and bool(sides & {"None", "int", "str", "bytes", "float", "bool"})


@pytest.mark.parametrize("part", range(PARTS))
def test_no_module_needs_a_newer_python(part: int) -> None:
    modules = MODULES[part::PARTS]
    assert len(modules) > 30
    assert newer_than_oldest(*modules) == ""
    for path in modules:
        assert not_seen_by_vermin(path) == []


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in CANNOT.items()])
def test_unsupported_syntax_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(text)
    module = tmp_path / "module.py"
    assert newer_than_oldest(module) or not_seen_by_vermin(module)


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in CAN.items()])
def test_supported_syntax_is_accepted(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(text)
    assert newer_than_oldest(tmp_path / "module.py") == ""
    assert not_seen_by_vermin(tmp_path / "module.py") == []
