"""Render the page from the JSON file alone, so that it can be rendered again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Longer texts are shortened in the middle; the JSON file has the full text.
_MAX_LINES = 70
_WIDEST = 200

Json = dict[str, Any]


def draw(result: Json) -> str:
    """The whole page."""
    done = {step["name"]: step for step in result["steps"]}
    steps = [_step(entry, done.get(entry["name"])) for entry in result["catalogue"]]
    return "\n".join([_head(result), *steps, _overview(result["catalogue"], done)])


def _head(result: Json) -> str:
    gpu, settings = result["gpu"], result["settings"]
    facts = [
        ("GPU", f"{gpu.get('name')}, compute capability {gpu.get('capability', '?')}"),
        ("SMs, memory", f"{gpu.get('multiprocessors', '?')} SMs, {gpu.get('memory_mib', '?')} MiB by CUDA"),
        ("Driver", f"{settings.get('driver', '?')}, CUDA {gpu.get('cuda', '?')}"),
        ("Compute mode, MIG", f"{settings.get('compute_mode', '?')}, {settings.get('mig', '?')}"),
        ("Machine", f"{result['machine']['cores']} cores, {result['machine']['kernel']}"),
        (
            "MPS programs",
            f"{result['programs']['control'] or 'none'}, {result['programs']['server'] or 'none'}",
        ),
        ("Started, took", f"{result['started']}, {result['seconds']} s"),
    ]
    counted = sum(len(entry["questions"]) for entry in result["catalogue"])
    answered = sum(len(step["answers"]) for step in result["steps"])
    lines = [
        f"# MPS on {gpu.get('name')}, {result['date']}",
        "",
        "Written by `scripts/gpu-check`; the JSON file of the same name has every number.",
        f"{answered} of {counted} questions have an answer.",
        "",
        _table(("what", "value"), facts),
    ]
    if result["notes"]:
        lines += ["", *(f"- {note}" for note in result["notes"])]
    return "\n".join([*lines, ""])


def _step(entry: Json, step: Json | None) -> str:
    lines = [f"## {entry['title']}", ""]
    if step is None or step["status"] != "done":
        lines += [f"**{_problem(step)}.**", ""]
    answers = step["answers"] if step else {}
    for name, question in entry["questions"]:
        lines.append(f"- **{question}** {answers.get(name) or 'Not measured.'}")
    lines.append("")
    if step:
        for table in step["tables"]:
            lines += [f"{table['title']}:", "", _table(table["header"], table["rows"]), ""]
        for said in step["verbatim"]:
            lines += [f"{said['title']}:", "", "```", _cut(said["text"]), "```", ""]
    return "\n".join(lines)


def _problem(step: Json | None) -> str:
    """Why a step has no answers, or fewer than it should."""
    if step is None:
        return "Not measured"
    status = str(step["status"]).capitalize()
    return f"{status}: {step['reason']}" if step["reason"] else status


def _overview(catalogue: Sequence[Json], done: dict[str, Json]) -> str:
    rows = []
    for entry in catalogue:
        step = done.get(entry["name"])
        if step:
            left = "; ".join(step["left_behind"])
            rows.append([entry["name"], step["status"], f"{step['seconds']:.1f} s", step["reason"], left])
        else:
            rows.append([entry["name"], "not measured", "", "", ""])
    header = ("step", "status", "took", "reason", "leftover processes, ended afterwards")
    return f"## The steps\n\n{_table(header, rows)}\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [_row(header), _row(["---"] * len(header)), *(_row(row) for row in rows)]
    return "\n".join(lines)


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _cut(text: str) -> str:
    lines = [line[:_WIDEST].replace("```", "'''") for line in text.rstrip().splitlines()]
    if len(lines) > _MAX_LINES:
        half = _MAX_LINES // 2
        lines = [*lines[:half], f"... ({len(lines) - 2 * half} lines omitted)", *lines[-half:]]
    return "\n".join(lines)
