"""scripts/generate and its example files: every key is explained, as the parser takes it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from yunion_mps.config import DEVICE_FILE_KEYS, KEYS, load
from yunion_mps.core.errors import Problem

from unit.generated import CHECKOUT, generate, run
from unit.http.server_host import short_root
from unit.manual.conftest import Manual, squeezed


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_another_date_changes_nothing_but_the_date(generated: Path, tmp_path: Path) -> None:
    other = contents(generate(tmp_path, "86400"))
    old = contents(generated)
    for name, text in other.items():
        assert text.replace(b" 1970-01-02 ", b" 2026-09-21 ") == old[name], name
    assert sum(b" 1970-01-02 " in text for text in other.values()) == 5


def test_the_files_describe_the_sources_beside_the_script(tmp_path: Path) -> None:
    """Packages are built from a copy of the sources, with the checkout's Python."""
    copy = tmp_path / "copy"
    shutil.copytree(CHECKOUT / "yunion_mps", copy / "yunion_mps")
    shutil.copytree(CHECKOUT / "scripts/manual", copy / "scripts/manual")
    command = copy / "yunion_mps/cli/devices.py"
    command.write_text(command.read_text().replace("List this host's", "Count this host's"))
    made = [sys.executable, "-I", str(copy / "scripts/manual/__main__.py"), str(tmp_path / "made")]
    subprocess.run(made, env={"SOURCE_DATE_EPOCH": "0"}, check=True, timeout=60)
    assert "Count this host" in (tmp_path / "made/man/yunion-mps.1").read_text()


def test_a_missing_argument_prints_the_usage() -> None:
    for arguments in ([], ["--help"], ["one", "two"], [""]):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "usage: scripts/generate DIRECTORY\n"


HOST_PAGE = "yunion-mps-host.conf.5"
DEVICE_PAGE = "yunion-mps-host_container_device.yml.5"


def written(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Example(NamedTuple):
    """What the example says of a key."""

    about: str
    type: str
    default: str
    used: bool
    value: str


def told(directory: Path) -> dict[str, Example]:
    pattern = r"((?:^# .*\n)+)^# Type: (.+)\. Default: (.+)\.\n(#?)(\w+): (.*)\n"
    text = (directory / "etc/yunion/host.conf").read_text()
    return {
        name: Example(" ".join(about.replace("# ", "").split()), kind, default, not hidden, value)
        for about, kind, default, hidden, name, value in re.findall(pattern, text, re.MULTILINE)
    }


def test_the_checkouts_example_files_are_the_generated_ones(generated: Path) -> None:
    for name in ("host.conf", "host_container_device.yml"):
        new = generated / "etc/yunion" / name
        mend = f"scripts/generate DIRECTORY, then copy DIRECTORY/etc/yunion/{name}"
        assert new.read_text() == (CHECKOUT / "etc/yunion" / name).read_text(), mend


def test_a_purge_knows_the_keys_and_types_of_these_sources(generated: Path) -> None:
    written = (CHECKOUT / "packaging/scriptlets/keys.sh").read_text()
    mend = "scripts/generate DIRECTORY, then copy DIRECTORY/scriptlets/keys.sh to packaging/scriptlets"
    assert (generated / "scriptlets/keys.sh").read_text() == written, mend


def test_the_example_has_every_key_with_its_true_default(generated: Path) -> None:
    found = told(generated)
    assert list(found) == list(KEYS)
    for name, key in KEYS.items():
        assert found[name].default == written(key.default), name
        assert found[name].about.lower().startswith(key.help.lower()), name
        assert len(found[name].about) > len(key.help) + 20, name
        if not found[name].used and key.default is not None:
            assert found[name].value == found[name].default, name


def test_the_man_page_has_every_key_in_the_words_of_the_example(generated: Path, manual: Manual) -> None:
    page = squeezed(manual.text(HOST_PAGE))
    for name, key in told(generated).items():
        assert squeezed(f"{name}: {key.type}; default: {key.default} {key.about}") in page, name


def test_the_device_files_example_and_man_page_have_every_key(generated: Path, manual: Manual) -> None:
    example = (generated / "etc/yunion/host_container_device.yml").read_text()
    page = manual.text(DEVICE_PAGE)
    keys = {*DEVICE_FILE_KEYS} - {"devices", "priority"}  # a slice's keys are explained with it
    for name in keys:
        entry = re.search(rf"^# {name}: ((?:.+\n(?:# )?)+)", example, re.MULTILINE)
        assert entry, name
        about = re.split(r"^#\w|^#\n|^devices:", entry[1], flags=re.MULTILINE)[0].replace("# ", "")
        assert squeezed(f"{name}:{about}").replace(".", "") in squeezed(page).replace(".", ""), name
    assert len(re.findall(r"^       \w+: ", page, re.MULTILINE)) == len(keys)


def test_comments_in_the_device_file_s_example_are_right_when_used(generated: Path) -> None:
    text = (generated / "etc/yunion/host_container_device.yml").read_text()
    text = re.sub(r"^#(?=  |\w)", "", text, flags=re.MULTILINE)
    with short_root() as paths:
        etc = Path(paths.root) / "etc/yunion"
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "host.conf").write_text("enable_cuda_mps: true\n")
        (etc / "host_container_device.yml").write_text(text)
        config, problems = load(paths)
    assert problems == []
    equal, unequal, pool, shared = config.devices
    assert (equal.virtual_number, len(unequal.slices), pool.memory_unit_mib) == (4, 2, 128)
    assert (shared.sharing, shared.time_slice) == ("time-slicing", "short")
    assert config.gpu_memory_unit_at.line is not None
    keys = yaml.safe_load((CHECKOUT / "scripts/manual/keys.yml").read_text())
    default = keys["host_container_device.yml, beside devices"]["gpu_memory_unit"]["default"]
    assert config.gpu_memory_unit_mib == 1024 * int(default.removesuffix("GiB"))


def problems_of(name: str, value: str) -> list[Problem]:
    """What the parser says of host.conf where the key has this value."""
    with short_root() as paths:
        etc = Path(paths.root) / "etc/yunion"
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "host.conf").write_text(f"hypervisor: kvm\n{name}: {value}\n")
        (etc.parent / "devices.yml").write_text("devices: []\n")
        return load(paths)[1]


def right_and_wrong(kind: str) -> tuple[list[str], list[str]]:
    """Values that are right by what the example says, and some that are wrong."""
    if kind == "true or false":
        return ["true", "false"], ["2", '"yes"', "maybe"]
    if kind == "an absolute path":
        return ["/etc/devices.yml"], ["devices.yml", "1", "/"]
    if kind == 'an absolute path, or ""':
        return ["/etc/devices.yml", '""'], ["devices.yml", "1", "/", "~"]
    if kind == "an absolute path that ends in .prom":
        return ["/srv/own.prom"], ["own.prom", "1", "/", "/etc/yunion/host.conf", "/srv/own"]
    if kind == "the name of a group":
        return ["root"], ["no such group", "1", ""]
    if kind == "an IP address and a port":
        return ["127.0.0.1:9434", "'[::1]:9434'"], ["127.0.0.1", "9434", "node7:9434"]
    numbers = re.fullmatch(r"a whole number from (\d+) to (\d+)", kind)
    if numbers:
        lowest, highest = int(numbers[1]), int(numbers[2])
        return [numbers[1], numbers[2]], [str(lowest - 1), str(highest + 1), "2.5", '"2.5"']
    words = re.split(", | or ", kind)
    assert len(words) > 1
    assert all(re.fullmatch(r"[a-z_]+", word) for word in words)
    return words, ["another", "1"]


@pytest.mark.parametrize("name", KEYS)
def test_the_parser_accepts_exactly_the_documented_values(name: str, generated: Path) -> None:
    kind = told(generated)[name].type
    right, wrong = right_and_wrong(kind)
    for value in right:
        if name.endswith("_directory"):
            value = "/srv/mps/own"
        assert problems_of(name, value) == [], value
    for value in wrong:
        assert problems_of(name, value)[0].what.startswith(f"{name} is "), value


def test_the_example_lists_all_values_of_an_enumerated_key(generated: Path) -> None:
    checked = 0
    for name, key in told(generated).items():
        said = [problem.what for problem in problems_of(name, "another")]
        listed = re.fullmatch(r".*, but must be (.*)", said[0]) if said else None
        if listed:
            assert re.split(", | or ", key.type) == re.split(", | or ", listed[1]), name
            checked += 1
    assert checked == 4
