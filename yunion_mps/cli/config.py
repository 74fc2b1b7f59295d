"""`yunion-mps config check` and `config show`: both work without the daemon, and touch nothing."""

from __future__ import annotations

from typing import Any

import click

from yunion_mps.cli.output import output_option, show, show_pairs
from yunion_mps.cli.suggest import SuggestingGroup
from yunion_mps.cli.table import draw, notes
from yunion_mps.errors import ConfigError
from yunion_mps.paths import Paths

_HEADER = ("Key", "Value", "From")


@click.group("config", cls=SuggestingGroup, short_help="Show or check the configuration.")
def command() -> None:
    """Look at the configuration: what is in force, and whether it is right.

    \b
    Examples:
      yunion-mps config show
      yunion-mps config check
    """


@command.command("show", short_help="Show every key, its value and its place.")
@output_option
def show_config(output: str) -> None:
    """Show every key's value, and where it stands or that it is the default.

    \b
    Examples:
      yunion-mps config show
      yunion-mps config show --output yaml
    """
    from yunion_mps.config import load
    from yunion_mps.report import config_json

    config, problems = load(Paths.from_environment())
    if problems:
        raise ConfigError(problems)
    answer = config_json(config)
    rows = _config_rows(answer)
    show(answer, output, _HEADER, rows, lambda: draw(_HEADER, rows))


def _config_rows(configuration: dict[str, Any]) -> list[tuple[str, object, str]]:
    rows = [(name, entry["value"], entry["from"]) for name, entry in configuration["keys"].items()]
    unit = configuration["gpu_memory_unit"]
    rows.append(("gpu_memory_unit", f"{unit['value']} MiB", unit["from"]))
    entries = [(f"{d['path']}: {_entry_text(d)}", d["from"]) for d in configuration["devices"]]
    return rows + [("devices", value, place) for value, place in entries]


def _entry_text(entry: dict[str, Any]) -> str:
    if "slices" in entry:
        return ", ".join(f"{one['memory']} MiB" for one in entry["slices"])
    if "memory_unit" in entry:
        return f"units of {entry['memory_unit']} MiB"
    return str(entry["virtual_number"])


@command.command("check", short_help="Check both files, and show their plan.")
@output_option
def check_config(output: str) -> None:
    """Check both files against this host's GPUs, and show the plan that they make.

    Exits with 6 and every problem of both files, each with its file and line, where there is one.

    \b
    Examples:
      yunion-mps config check
      yunion-mps config check --output json
    """
    from yunion_mps.report import plan_json
    from yunion_mps.supervisor.preflight import run_preflight

    examination = run_preflight(Paths.from_environment())
    try:
        examination.check()
        answer = plan_json(examination)
    finally:
        examination.close()
    show_pairs(answer, output, lambda: _plan_text(answer))


def _plan_text(answer: dict[str, Any]) -> str:
    text = "The configuration is right:\n" + draw(_HEADER, _config_rows(answer["configuration"]))
    if answer["notice"]:
        text += f"{answer['notice']}.\n"
    if not answer["gpus"]:
        return text
    text += "Nothing was changed; the daemon would do this:\n"
    rows = [
        (
            gpu["addr"],
            gpu["name"],
            gpu["devices"],
            gpu["memory_limit"],
            gpu["thread_percentage"],
            gpu["compute_mode"],
            gpu["domain"],
        )
        for gpu in answer["gpus"]
    ]
    header = ("GPU", "Name", "Devices", "Memory_MiB", "Threads_%", "Compute_mode", "Domain")
    text += draw(header, rows, ("Name", "Domain", "Compute_mode", "Threads_%", "Memory_MiB"))
    text += notes((gpu["addr"], _note(gpu)) for gpu in answer["gpus"])
    for domain in answer["domains"]:
        count = len(domain["gpus"])
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        text += f"Control daemon {domain['name']}: {gpus}, {domain['pipe_directory']}\n"
    return text


def _note(gpu: dict[str, Any]) -> str:
    if gpu["reason"]:
        return str(gpu["reason"])
    uneven = gpu["division"] if gpu["memory_limit"] is None else ""
    unenforced = "" if gpu["budget_enforced"] else "budgets are not enforced: older than Volta"
    return "; ".join(filter(None, (uneven, unenforced)))
