"""The pages of docs/ for a task each: how they begin, and what of the programs they quote."""

from __future__ import annotations

import re

import click
import pytest
from yunion_mps.cli.root import cli
from yunion_mps.config import KEYS
from yunion_mps.core.reasons import CODES
from yunion_mps.host.processes import PROGRAM_DIRECTORIES

from documents import code_blocks, without_code
from unit.generated import CHECKOUT

DOCS = CHECKOUT / "docs"
#: They begin with a definition, or are generated.
OTHER_PAGES = ("architecture", "mps-behaviour", "reason-codes")
TASKS = [path.stem for path in sorted(DOCS.glob("*.md")) if path.stem not in OTHER_PAGES]
INSTALL = (DOCS / "install.md").read_text()
TROUBLESHOOT = (DOCS / "troubleshoot.md").read_text()
SOURCES = "".join(path.read_text() for path in sorted(CHECKOUT.glob("yunion_mps/**/*.py")))
#: A command line within backquotes, and one in a line of code.
_QUOTED_COMMAND = re.compile(r"`yunion-mps ([a-z-][^`|;)#\n]*)(?=[`|;)#\n])")
_COMMAND_OF_CODE = re.compile(r"^(?:[#$] )?yunion-mps ([a-z-][^`|;)#\n]*)(?=[`|;)#\n])", re.MULTILINE)
#: What users paste into a search.
CUDA_ERRORS = (
    "CUDA_ERROR_MPS_CONNECTION_FAILED",
    "CUDA_ERROR_MPS_SERVER_NOT_READY",
    "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
    "CUDA_ERROR_MPS_RPC_FAILURE",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    '"all CUDA-capable devices are busy or unavailable"',
    "Out of memory (2) below the budget",
)


#: How messages begin that are container engines' own.
ENGINES = (
    "error executing hook",
    "unresolvable CDI devices",
    "could not select device driver",
    "error mounting",
)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_page_begins_with_what_its_reader_can_do(task: str) -> None:
    title, blank, promise = (DOCS / f"{task}.md").read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert not blank
    assert promise.startswith(("After reading this page, you can ", "After reading this page, you know "))


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    readme = (CHECKOUT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    linked = set(re.findall(r"\]\(docs/([\w-]+)\.md\)", readme))
    assert linked == {path.stem for path in DOCS.glob("*.md")}


def test_cuda_s_errors_have_a_section_each() -> None:
    titles = re.findall(r"^### (.+)$", TROUBLESHOOT, re.MULTILINE)
    for error in CUDA_ERRORS:
        assert [title for title in titles if title.startswith(error)], error


def test_the_codes_in_the_table_of_reason_codes_exist() -> None:
    table = TROUBLESHOOT.partition("| code | what to know | do |")[2].partition("\n## ")[0]
    codes = re.findall(r"`([a-z_]+)`", " ".join(re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)))
    assert len(codes) > 10
    assert set(codes) - set(CODES) == set()


def test_each_message_of_the_daemon_s_start_is_one_of_the_programs() -> None:
    table = TROUBLESHOOT.partition("| it says | do |")[2].partition("\n## ")[0]
    cells = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| ")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) >= 8
    for message in messages:
        for part in (part.strip() for part in re.split("…|: ", message)):
            found = part.replace("nvidia-cuda-mps-control ", "").replace("/var/lib/yunion-mps/state.db ", "")
            assert len(part) <= 5 or found in SOURCES or "/host.conf" in found, message


def test_each_message_of_the_containers_page_is_one_of_the_programs() -> None:
    table = (DOCS / "containers.md").read_text().partition("| message of the engine or in the log | cause")[2]
    cells = [row.split(" | ")[0] for row in table.splitlines()[2:] if row.startswith("| `")]
    messages = [message.split(": ")[0] for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    ours = [message for message in messages if not message.startswith(ENGINES)]
    assert len(ours) >= 8
    assert [message for message in ours if message not in SOURCES] == []


def test_the_install_page_has_the_program_directories_and_defaults() -> None:
    for directory in PROGRAM_DIRECTORIES:
        assert f"`{directory}`" in INSTALL, directory
    assert f"`cuda_mps_stop_timeout_s` ({KEYS['cuda_mps_stop_timeout_s'].default})" in INSTALL


def _commands(page: str) -> list[str]:
    """The arguments of each call of yunion-mps in the page."""
    commands = _QUOTED_COMMAND.findall("\n".join(without_code(page)))
    for block in code_blocks(page):
        commands += _COMMAND_OF_CODE.findall(block.text + "\n")
    return commands


def test_the_documents_name_commands_and_options_that_exist() -> None:
    root = click.Context(cli, **cli.context_settings)  # click keeps the help option that is made first
    pages = [CHECKOUT / "README.md", *DOCS.glob("*.md")]
    said = [(page.name, command) for page in pages for command in _commands(page.read_text())]
    assert len(said) > 100
    for page, words in said:
        group: click.Command = cli
        for word in words.split():
            if isinstance(group, click.Group) and re.fullmatch("[a-z-]+", word):
                found = group.get_command(root, word)
                assert found, f"{page}: yunion-mps {words}"
                group = found
            elif group.context_settings.get("ignore_unknown_options") or word == "--":  # those of a program
                break
            elif option := re.match(r"--[a-z][a-z-]*", word):
                names = {name for one in group.get_params(root) for name in one.opts}
                assert option[0] in names, f"{page}: yunion-mps {words}"
            elif group.name in ("run", "doctor"):
                break
