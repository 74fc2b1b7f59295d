"""What is written in several places is the same in all of them, and documents name what is there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.config import KEYS
from yunion_mps.core.enums import EVENT_KINDS, SEVERITIES
from yunion_mps.http.operations import OPERATIONS
from yunion_mps.mps.domain import Domain
from yunion_mps.supervisor import changes
from yunion_mps.supervisor.changes import PLANNED_KEYS

from documents import code_blocks, paragraphs, without_code
from unit.builders import config, gpu, inventory, planned

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGE = CHECKOUT / "yunion_mps"
PAGES = [*CHECKOUT.glob("*.md"), *sorted(CHECKOUT.glob("docs/**/*.md"))]
#: Without decisions, which stay as they were written.
PAGES_TO_READ = PAGES
#: What a page says that tells what it has been tested on.
TESTED = re.compile(r"\bTested (?:on|with)\b|\b[Nn]ot tested\b")
#: Of blocks of code, as GitHub knows them.
LANGUAGES = {"console", "ini", "json", "mermaid", "promql", "python", "sh", "text", "toml", "yaml"}
ARCHITECTURE = (CHECKOUT / "docs/architecture.md").read_text()

#: Another value of each key whose change shows in the plan.
OTHERS = {
    "enable_cuda_mps": False,
    "cuda_mps_pipe_directory": "/tmp/nvidia-mps/other",
    "cuda_mps_pipe_group": "video",
    "cuda_mps_log_directory": "/tmp/nvidia-mps/other",
    "cuda_mps_replicas": 5,
    "cuda_mps_compute_mode": "keep",
    "cuda_mps_scope": "gpu",
    "cuda_mps_thread_percentage": "none",
    "cuda_mps_combine": 2,
    "cuda_mps_multiuser": True,
    "over_budget": "terminate",
}


def test_a_reload_shows_every_key_as_a_setting_or_in_the_plan() -> None:
    assert set(OTHERS) == PLANNED_KEYS
    for key in sorted(set(KEYS) - PLANNED_KEYS):
        shown = changes.setting_changes(config(), config(**{key: "another"}))
        assert [(one.kind, one.subject, one.after) for one in shown] == [("setting", key, "another")]


@pytest.mark.parametrize("key", OTHERS)
def test_a_reload_shows_a_changed_value_of_a_planned_key(key: str) -> None:
    found = inventory(gpu(1), gpu(2))
    before, after = planned(config(), found), planned(config(**{key: OTHERS[key]}), found)
    domains = [Domain(plan, "", lambda _: None, lambda: None) for plan in before.domains]
    assert changes.changes_to(before, before, before, found.gpus, domains, {}) == []
    assert changes.changes_to(after, before, after, found.gpus, domains, {}) != []


def test_each_operation_has_its_row_in_the_documentation() -> None:
    page = (CHECKOUT / "docs/api.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+) (\S+)` \| .+ \| (\w+) \|$", page, re.MULTILINE)
    assert rows == [(one.name, one.method, one.path, one.access) for one in OPERATIONS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_each_row_of_a_table_is_on_one_line(page: Path) -> None:
    broken = [
        f"{number}: {line[:60]}"
        for number, line in enumerate(without_code(page.read_text()), 1)
        if line.strip().startswith("| ") and not line.rstrip().endswith("|")
    ]
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    """A bar that is not escaped ends a cell, even in code; a table begins after an empty line."""
    before, cells = "", 0
    for number, line in enumerate(without_code(page.read_text()), 1):
        if line.startswith("|"):
            bars = len(re.findall(r"(?<!\\)\|", line))
            if not before.startswith("|"):
                assert before == "", number
                cells = bars
            assert bars == cells, number
        before = line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_code_is_fenced_and_its_language_is_named(page: Path) -> None:
    text = page.read_text()
    assert {block.language for block in code_blocks(text)} <= LANGUAGES
    indented = re.findall(r"\n\n {4,}(?![-*] |\d+\. )\S.*", "\n".join(without_code(text)))
    assert indented == []


@pytest.mark.parametrize("page", PAGES_TO_READ, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_paragraph_has_at_most_six_lines(page: Path) -> None:
    """So has an item of a list. A line has at most 150 characters."""
    found = list(paragraphs(page.read_text()))
    assert [paragraph.line for paragraph in found if len(paragraph.lines) > 6] == []
    wide = [paragraph.line for paragraph in found if max(map(len, paragraph.lines)) > 150]
    assert wide == []


@pytest.mark.parametrize("page", sorted(CHECKOUT.glob("docs/*.md")), ids=lambda page: page.name)
def test_what_was_tested_is_at_the_end_of_a_page(page: Path) -> None:
    lines = without_code(page.read_text())
    heading = lines.index("## Tested on") if "## Tested on" in lines else len(lines)
    assert [line for line in lines[:heading] if TESTED.search(line) and "](" not in line] == []
    assert [line for line in lines[heading + 1 :] if line.startswith("#")] == []


def test_events_have_only_listed_kinds_and_severities() -> None:
    said: dict[int, set[str]] = {0: set(), 1: set()}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Event":
                arguments = dict(enumerate(node.args[:2]))
                for keyword in node.keywords:
                    if keyword.arg in ("severity", "kind"):
                        arguments[("severity", "kind").index(keyword.arg)] = keyword.value
                for place, argument in arguments.items():
                    if isinstance(argument, ast.Constant):
                        said[place].add(str(argument.value))
    assert said[0] <= set(SEVERITIES)
    assert said[1] == set(EVENT_KINDS)


def _is_there(name: str) -> bool:
    """Whether it is a module or a package of ours, or a module of one that is named before it."""
    return (PACKAGE / f"{name}.py").is_file() or (PACKAGE / name).is_dir()


def test_the_architecture_names_all_packages_and_only_those() -> None:
    table = ARCHITECTURE.partition("## Packages")[2].partition("## Start")[0]
    named = {
        name
        for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`([\w/]+?)/?`", row)
    }
    there = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    rooms = {name for name in named if "/" in name}
    assert named - rooms == there - {"__init__"}
    assert all((PACKAGE / room / "__init__.py").is_file() for room in rooms)
    for row in table.splitlines():
        packages = re.findall(r"`([\w/]+?)/`", row.partition(" | ")[0])
        for name in re.findall(r"`([\w/]+?)/?`", row.partition(" | ")[2]) if packages else ():
            assert any(_is_there(f"{package}/{name}") for package in packages) or _is_there(name), name


@pytest.mark.processes
def test_the_list_of_modules_is_current(tmp_path: Path) -> None:
    """Otherwise, run scripts/modules."""
    copy = tmp_path / "modules.md"
    command = [sys.executable, "-m", "module_list", str(copy)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(CHECKOUT / "scripts/lib")}, check=True)
    assert (CHECKOUT / "docs/modules.md").read_text() == copy.read_text()
    for path in PACKAGE.rglob("*.py"):
        assert f"| `{path.stem}` |" in copy.read_text() or path.stem == "__init__", path


def _sources(module: str) -> list[str]:
    """The module's source, or those of all modules of the package."""
    path = PACKAGE / module
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [file.read_text() for file in files]


def _definitions(module: str) -> set[str]:
    """Its functions and classes; a method as its own name and as `Class.method`."""
    found = set()
    for source in _sources(module):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
                below = node.body if isinstance(node, ast.ClassDef) else []
                found |= {f"{node.name}.{getattr(one, 'name', '')}" for one in below}
    return found


def _messages(diagram: str) -> Iterator[tuple[str, str, str]]:
    """The modules that send and receive each message, and its text."""
    modules = dict(re.findall(r"participant (\w+) as ([a-z_/]*\w)", diagram))
    for sender, receiver, text in re.findall(r"(\w+)--?>>(\w+): (.*)", diagram):
        yield modules[sender], modules[receiver], text


DIAGRAMS = re.findall(r"```mermaid\n(.*?)```", ARCHITECTURE, re.DOTALL)


@pytest.mark.parametrize("diagram", DIAGRAMS)
def test_a_diagram_s_functions_are_of_its_modules(diagram: str) -> None:
    """Each is defined in the module that receives the message, and used in the one that sends it.

    `make_plan() of planning/plan` is in another module, which either of the two uses.
    """
    assert ";" not in diagram  # which ends a statement of mermaid
    seen = 0
    for sender, receiver, text in _messages(diagram):
        for name, module in re.findall(r"([\w.]+)\(\)(?: of ([a-z_/]+))?", text):
            seen += 1
            defined_at = module or receiver
            assert name in _definitions(defined_at), f"{text}: {name}() is not in {defined_at}"
            users = [*_sources(sender), *_sources(receiver)] if module else _sources(sender)
            used = re.compile(rf"(?<!def )(?<!class )\b{name.rpartition('.')[2]}\b")
            assert any(map(used.search, users)), f"{text}: nothing in {sender} uses {name}()"
    assert seen


def test_the_tables_of_decisions_and_writers_name_what_is_there() -> None:
    """`mps/limits.py` `check_limits`, `Probe.poll`: names follow the module that defines them."""
    tables = ARCHITECTURE.partition("## Where decisions are made")[2]
    for module in re.findall(r"`([\w/]+\.py)`", tables):
        assert (PACKAGE / module).is_file(), module
    named = re.findall(r"`([\w/]+)\.py` `([A-Za-z_.]+)`", tables)
    for module, name in named:
        assert name in _definitions(module), f"{module} has no {name}"
    assert len(named) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_between_documents_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_to_a_section_lead_to_one(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([\w/.-]*)#([^)]+)\)", page.read_text()):
        titles = re.findall(r"^#+ (.+)$", (page.parent / link if link else page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert anchor in anchors, anchor


def test_the_guide_to_contributing_names_files_that_exist() -> None:
    text = (CHECKOUT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w/.]+\.(?:py|md|yml|json|conf)|[\w]+/[\w/]+)`", text)
    assert len(named) > 15
    for name in named:
        assert (PACKAGE / name).exists() or (CHECKOUT / name).exists(), name
