from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from yunion_mps.config.document import read_document

from descriptors import open_descriptors
from unit.as_user import as_user, needs_root
from unit.config.conftest import DEVICES, HOST, Files
from unit.short_memory import with_memory_short

MIB = 1 << 20
FLAT = "write one key: value per line, as in the example"
SYNTAX = "correct the syntax near this line"
UTF_8 = "save it as UTF-8 text"
CREATE = "copy the example: cp /usr/share/yunion-mps/host.conf {}"
CREATE_DEVICES = "copy the example: cp /usr/share/yunion-mps/host_container_device.yml {}"
READABLE = "make it readable: chmod 0644, and its directory 0755"

#: Processor time, which a loaded machine does not change: enough for the slowest machine, too little for what
#: grows with the square of the length.
QUICK_S = 10


def test_every_value_is_of_the_same_kind_as_for_pyyaml(files: Files) -> None:
    words = "yes No TRUE tRUE off y ~ null Null nan none _ _x a-b é 'no'"
    numbers = "0 00 07 10 1_0 1e3 1:30 .5 -3 0x1f ١٢ '10'"
    content = "".join(f"- {text}\n" for text in [*words.split(), *numbers.split()])
    ours, theirs = read_document(str(files.write(content).host), "host.conf"), yaml.compose(content)
    assert ours
    assert theirs
    assert [one.tag for one in ours.value] == [one.tag for one in theirs.value]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n", f":1: contains a list, not a mapping: {FLAT}"),
        (b"\nenable_cuda_mps\n", f':2: contains "enable_cuda_mps", not a mapping: {FLAT}'),
        (b"enable_cuda_mps = true\nb\n", f':1: contains "enable_cuda_mps = true b", not a mapping: {FLAT}'),
        (b"4.5\n", f":1: contains 4.5, not a mapping: {FLAT}"),
        (b"a: b: c\n", f":1: not valid YAML (mapping values are not allowed in this context): {SYNTAX}"),
        (
            b"a: 1\nb: @c\n",
            (
                ":2: not valid YAML (while scanning for the next token"
                f" found character that cannot start any token): {SYNTAX}"
            ),
        ),
        (
            b'a: 1\nb: "c\nd: 1\ne: 2\n',
            f":2: not valid YAML (while scanning a quoted scalar found unexpected end of stream): {SYNTAX}",
        ),
        (b"a: 1\nb: *c\n", f":2: not valid YAML (found undefined alias): {SYNTAX}"),
        (b"a: 1\n# gr\xfcn\n", f":2: not valid YAML (invalid leading UTF-8 octet): {UTF_8}"),
        (b"a: 1\n\nb: \x07\n", f":3: not valid YAML (control characters are not allowed): {UTF_8}"),
        (b"\x7fELF\x02\x01\x01\x00", f":1: not valid YAML (control characters are not allowed): {UTF_8}"),
        (b"\x1f\x8b\x08\x00\xff\xff", f":1: not valid YAML (control characters are not allowed): {UTF_8}"),
        (b"a: !%ed%a0%80 b\n", ": not valid YAML (a tag is not UTF-8): write the values without tags"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_refused_with_its_line(
    files: Files, content: bytes, message: str
) -> None:
    assert files.write(content).messages() == [HOST + message]


def test_a_missing_host_conf_is_named(files: Files) -> None:
    files.write(host=None)
    assert files.messages() == [f"{HOST}: cannot be read (No such file or directory): {CREATE.format(HOST)}"]


@pytest.mark.parametrize(
    ("path", "why", "hint"),
    [
        ("/etc/devices.yml", "No such file or directory", CREATE_DEVICES),
        (f"{HOST}/x.yml", "Not a directory", CREATE_DEVICES),
        ("/" + "x" * 300, "File name too long", READABLE),
    ],
    ids=["missing", "below a file", "too long"],
)
def test_a_device_file_that_host_conf_names_must_be_there(
    files: Files, path: str, why: str, hint: str
) -> None:
    files.write(f"container_device_config_file: {path}\n")
    assert files.messages() == [f"{path}: cannot be read ({why}): {hint.format(path)}"]


def test_the_device_file_may_be_missing_if_host_conf_does_not_name_it(files: Files) -> None:
    assert files.write(devices=None).load().devices == ()


def test_a_dangling_link_in_place_of_the_device_file_is_named(files: Files) -> None:
    files.write().devices.symlink_to("nowhere")
    assert files.messages() == [
        f"{DEVICES}: cannot be read (No such file or directory): {CREATE_DEVICES.format(DEVICES)}"
    ]


@pytest.mark.processes
@needs_root
def test_an_unreadable_file_is_named_with_the_modes_it_should_have(files: Files) -> None:
    files.write("enable_cuda_mps: true\n", "devices: []\n")
    files.host.chmod(0o600)
    files.devices.chmod(0o600)
    assert as_user(files.messages) == [
        f"{HOST}: cannot be read (Permission denied): {READABLE}",
        f"{DEVICES}: cannot be read (Permission denied): {READABLE}",
    ]


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)],
    ids=["a FIFO", "a directory", "an endless device"],
)
def test_a_special_file_is_refused_without_blocking(files: Files, make: Callable[[Path], None]) -> None:
    make(files.host)
    make(files.devices)
    before = open_descriptors()
    assert files.messages() == [
        f"{HOST}: is not a regular file: put a YAML file there",
        f"{DEVICES}: is not a regular file: put a YAML file there",
    ]
    assert open_descriptors() == before


def test_a_file_of_1_mib_is_read_and_one_byte_more_is_refused(files: Files) -> None:
    text = b"enable_cuda_mps: true\n#"
    assert files.write(text.ljust(MIB, b"x")).load().enable_cuda_mps is True
    files.write(text.ljust(MIB + 1, b"x"))
    assert files.messages() == [
        f"{HOST}: is larger than 1 MiB: check that the path names a yunion-mps configuration file"
    ]


@pytest.mark.processes
def test_a_small_file_is_read_during_a_memory_shortage(files: Files) -> None:
    files.write(b"enable_cuda_mps: true\n")

    def read(_: list[bytearray]) -> None:
        with pytest.raises(MemoryError):
            bytearray(MIB)
        assert read_document(str(files.host), "host.conf") is not None

    with_memory_short(read)


TOO_MANY = (
    "contains more than 200,000 values once its aliases are expanded: write a short file, without aliases"
)


def bomb(levels: int, aliases: int) -> str:
    """Lists of lists: a few lines that stand for `aliases` to the power of `levels` values."""
    lines = [f"a0: &a0 [{', '.join('x' * aliases)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * aliases)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (bomb(9, 9), 6),  # the classic: 72 aliases, a billion laughs
        (bomb(30, 9), 6),
        (bomb(300, 2), 16),
        ("a: &a [" + "x," * 999 + "]\n" + "b: *a\n" * 99_999, 200),
        ("a: &a [" + "x," * 999 + "]\nb: {<<: [" + "*a," * 99_999 + "]}\n", 2),
    ],
)
def test_an_alias_bomb_is_refused_at_the_line_where_it_grows_too_large(
    files: Files, content: str, line: int
) -> None:
    files.write(content)
    begin = time.process_time()
    assert files.messages() == [f"{HOST}:{line}: {TOO_MANY}"]
    assert time.process_time() - begin < QUICK_S


def test_at_most_200000_values_are_read(files: Files) -> None:
    # the list and its alias are 99,996 each, the mapping 1, its keys and the other values 7
    text = "a: &a [" + "x," * 99_995 + "]\nb: *a\nenable_cuda_mps: true\nc: "
    files.write(text + "[d]\n").load()
    files.write(text + "[d, e]\n")
    assert files.messages() == [f"{HOST}:4: {TOO_MANY}"]


@pytest.mark.parametrize(
    "content", ["a: 1\nb: &a [*a]\n", "a: 1\nb: &a {c: [d, *a]}\n", "a: 1\n? &a [*a]\n: b\n"]
)
def test_an_alias_to_its_own_container_is_refused(files: Files, content: str) -> None:
    files.write(content)
    assert files.messages() == [
        f"{HOST}:2: contains the alias *a, which refers to itself: write the values out"
    ]


def test_at_most_64_levels_are_read(files: Files) -> None:
    files.write("a: " + "[" * 63 + "]" * 63 + "\nenable_cuda_mps: true\n").load()
    files.write("enable_cuda_mps: true\na: " + "[" * 64 + "]" * 64)
    assert files.messages() == [
        f"{HOST}:2: is nested more than 64 levels deep: flatten it, as in the example"
    ]


@pytest.mark.parametrize("opener", ["[", "{", "- ", "? ", "[{a: "])
def test_1_mib_of_nesting_is_refused_quickly(files: Files, opener: str) -> None:
    files.write("\n" + opener * ((MIB - 1) // len(opener)))
    begin = time.process_time()
    assert files.messages() == [
        f"{HOST}:2: is nested more than 64 levels deep: flatten it, as in the example"
    ]
    assert time.process_time() - begin < QUICK_S


@pytest.mark.parametrize("number", ["9" * (MIB - 50), "1" + ":59" * 340_000, "1" + ":59" * 340_000 + ".5"])
def test_a_number_of_1_mib_is_refused_quickly(files: Files, number: str) -> None:
    files.write(f"cuda_mps_replicas: {number}\n")
    begin = time.process_time()
    assert files.messages() == [
        (
            f"{HOST}:1: cuda_mps_replicas is {number[:39]}…, not a whole number:"
            " write a whole number from 1 to 60"
        )
    ]
    assert time.process_time() - begin < QUICK_S
