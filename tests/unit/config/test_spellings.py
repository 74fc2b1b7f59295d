"""Files that Cloudpods' programs read: what is accepted, and what looks right but is read otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unit.config.conftest import DEVICES, HOST, Files

ENTRY = "devices:\n- path: 00:06.0\n  type: NVIDIA_MPS\n  virtual_number: 4\n"
SPACES = "write it with spaces only"
INDENT = "indent it with spaces"


@pytest.mark.parametrize(
    "text", ["", "\n  \n", "# only a comment\n", "\ufeff", "---\n...\n", "null\n", "~\n"]
)
def test_an_empty_host_conf_has_every_default(files: Files, text: str) -> None:
    assert files.write(text).load().enable_cuda_mps is False


@pytest.mark.parametrize(
    "text",
    [
        "---\nenable_cuda_mps: true\n...\n",
        "%YAML 1.1\n---\nenable_cuda_mps: true\n",
        "enable_cuda_mps: true\n---\n",
        "enable_cuda_mps: true\n---\nregion: Yunion\n",
        "enable_cuda_mps: true\n---\n- a list\n",
        "{enable_cuda_mps: true}",
        '{"enable_cuda_mps": true, "region": "Yunion"}',
        "enable-cuda-mps: true\n",
        '" enable_cuda_mps ": true\n',
        "on: &yes true\nenable_cuda_mps: *yes\n",
        "enable_cuda_mps:\ttrue\t# a tab\n",
    ],
)
def test_a_document_is_read_as_cloudpods_reads_it(files: Files, text: str) -> None:
    assert files.write(text).load().enable_cuda_mps is True


@pytest.mark.processes
def test_tabs_before_values_are_read_by_the_parser_in_python(files: Files) -> None:
    files.write("enable_cuda_mps:\ttrue \t \nregion: Yunion\n")
    code = """
import sys
sys.modules["yaml._yaml"] = None  # as in the packages, which have no compiled parser
from yunion_mps.config import load
from yunion_mps.core.paths import Paths
config, problems = load(Paths(sys.argv[1]))
import yaml
print(yaml.__with_libyaml__, config.enable_cuda_mps, *problems)
"""
    command = [sys.executable, "-c", code, str(files.root)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert printed == "False True\n"


def test_one_of_our_keys_in_another_document_is_named(files: Files) -> None:
    files.write("region: Yunion\n---\na: b\nenable_cuda_mps: true\n", f"---\n---\n{ENTRY}")
    what = "is in another document of the file, which is not read: remove the line --- above it"
    assert files.messages() == [f"{HOST}:4: enable_cuda_mps {what}", f"{DEVICES}:3: devices {what}"]


ASSIGNMENTS = """\
# lines of the older format
[DEFAULT]
enable_cuda_mps = true  # yes
cuda-mps-replicas=4
cuda_mps_scope = "gpu"
cuda_mps_log_directory = '/var/log/mps'
auth_url = https://10.0.0.1:30500/v3
networks = ['eth1/br0/10.168.222.136']
"""


def test_lines_with_equals_signs_are_read_as_by_cloudpods(files: Files) -> None:
    config = files.write(ASSIGNMENTS, local="cuda_mps_replicas = 5\n").load()
    assert (config.enable_cuda_mps, config.cuda_mps_replicas, config.cuda_mps_scope) == (True, 5, "gpu")
    assert config.cuda_mps_log_directory == "/var/log/mps"
    assert config.sources["cuda_mps_scope"].line == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enable_cuda_mps = yes\n", '1: enable_cuda_mps is "yes", not true or false'),
        ("[x]\nenable_cuda_mp = true\n", "2: unknown key enable_cuda_mp (did you mean enable_cuda_mps?)"),
        ("cuda_mps_replicas = 4\ncuda_mps_replicas = 5\n", "2: duplicate key cuda_mps_replicas"),
    ],
)
def test_what_cloudpods_ignores_in_such_lines_is_named(files: Files, text: str, message: str) -> None:
    assert [one.partition(": write")[0].partition(": keep")[0] for one in files.write(text).messages()] == [
        f"{HOST}:{message}"
    ]


@pytest.mark.parametrize(
    ("space", "name"),
    [
        ("\u00a0", "a no-break space (U+00A0)"),
        ("\u3000", "an ideographic space (U+3000)"),
        ("\u200b", "a zero width space (U+200B)"),
    ],
)
def test_a_space_that_is_none_to_yaml_is_named_with_its_line(files: Files, space: str, name: str) -> None:
    key, number = "enable_cuda_mps", "write a whole number from 1 to 60"
    for host, message in (
        (f"a: b\n{space}{key}: true\n", f"2: key {key} is written with {name}: {SPACES}"),
        (f"{key}{space}: true\n", f"1: key {key} is written with {name}: {SPACES}"),
        (f"a: b\nc:{space}d\n", f"2: the line contains {name}: replace it with a space"),
        (f"a:\n  b: c\n {space}d: e\n", f"3: the line is indented with {name}: {INDENT}"),
    ):
        assert files.write(host).messages() == [f"{HOST}:{message}"]
    files.write(f"cuda_mps_replicas: 4{space}\n")
    (problem,) = files.problems()
    assert (problem.line, problem.hint) == (1, f"remove {name} from it")
    assert number not in problem.hint


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (ENTRY.replace("  type", "\tt ype"), "3: the line is indented with a tab: "),
        (ENTRY.replace("  type", "\ttype"), "3: the line is indented with a tab: "),
        (ENTRY.replace("  type", " \t type"), "3: the line is indented with a tab: "),
        (ENTRY.replace("- path", "\t- path"), "2: the line is indented with a tab: "),
        (
            ENTRY.replace("  type", "\u00a0\u00a0type"),
            "3: the line is indented with a no-break space (U+00A0): ",
        ),
        (
            ENTRY.replace("  type", "  \u3000\u3000type"),
            "3: key type is written with an ideographic space (U+3000): ",
        ),
        (ENTRY.replace("  type", " \u00a0type"), "3: the line is indented with a no-break space (U+00A0): "),
        (ENTRY.replace("  type", "  \u00a0type"), "3: key type is written with a no-break space (U+00A0): "),
        (
            ENTRY.replace("  virtual", "  \u00a0virtual"),
            "4: key virtual_number is written with a no-break space (U+00A0): ",
        ),
        (ENTRY.replace("- path", "-\u00a0path"), "2: "),
    ],
)
def test_other_indentation_than_spaces_is_named_with_its_line(
    files: Files, devices: str, message: str
) -> None:
    messages = files.write(devices=devices).messages()
    assert messages[0].startswith(f"{DEVICES}:{message}"), messages
    assert messages[0].endswith((INDENT, SPACES, "replace it with a space"))


def test_a_key_that_such_a_space_moves_out_of_its_entry_is_named(files: Files) -> None:
    files.write(devices="devices:\n- path: 00:06.0\n\u3000\u3000type: NVIDIA_MPS\n")
    assert files.messages() == [
        f"{DEVICES}:2: an entry has no type: write type: NVIDIA_MPS, or the type of other software",
        f"{DEVICES}:3: key type is written with an ideographic space (U+3000): {SPACES}",
    ]


def test_a_fullwidth_colon_is_named_with_its_line(files: Files) -> None:
    message = "the line contains a fullwidth colon (U+FF1A): replace it with a colon and a space"
    assert files.write("region: Yunion\nenable_cuda_mps\uff1a true\n").messages() == [f"{HOST}:2: {message}"]
    assert files.write("# ours\nenable_cuda_mps\uff1atrue\n").messages() == [f"{HOST}:2: {message}"]
