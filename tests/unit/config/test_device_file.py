"""The device file: entries, merge keys, and what is wrong with them."""

from __future__ import annotations

import textwrap
import time

import pytest
from yunion_mps.config import load

from unit.config.conftest import DEVICES, Files, annotated

INDENT = "indent it below an entry of devices"
NUMBER = "write a whole number from 1 to 60"
KEYS = (
    "path, type, virtual_number, slices, memory_unit, memory, memory_reserve, thread_percentage, "
    "thread_overcommit, reserved_for, over_budget, cuda_mps_compute_mode, mig, mig_restore"
)
PATH = "write path: followed by a render node, a PCI address or a GPU's UUID"


def test_entries_are_read_in_the_order_of_the_file_and_know_their_lines(files: Files) -> None:
    files.write(
        devices="devices:\n"
        "- path: /dev/dri/renderD129\n"
        "  type: NVIDIA_MPS\n"
        "  virtual_number: 60\n"
        "- {path: GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400, type: NVIDIA_MPS, virtual_number: 1}\n"
    )
    entries = files.load().devices
    assert [(entry.path, entry.virtual_number) for entry in entries] == [
        ("/dev/dri/renderD129", 60),
        ("GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400", 1),
    ]
    assert [(entry.path_at.line, entry.divided_at.line) for entry in entries] == [(2, 4), (5, 5)]
    assert entries[0].path_at.file == str(files.devices)


@pytest.mark.parametrize("path", ["00:06.0", "0000:00:06.0", "'00:06.0'", "00:1e.0", "00000000:00:06.0"])
def test_a_pci_address_needs_no_quotes_though_yaml_reads_some_as_numbers(files: Files, path: str) -> None:
    files.write(devices=f"devices:\n- {{path: {path}, type: NVIDIA_MPS, virtual_number: 4}}\n")
    assert files.load().devices[0].path == path.strip("'")


def test_entries_of_other_types_are_ignored_whatever_they_contain(files: Files) -> None:
    files.write(
        devices=textwrap.dedent("""\
        devices:
        - {type: NVIDIA_GPU, path: /dev/nvidia0, virtual_number: many, colour: red}
        - {type: NVIDIA_HAMI, virtual_number: -4, virtual_number: 5}
        - type: NVIDIA_GPU_SHARED_BY_OTHERS
        - {type: ASCEND_NPU, path: 5}
        - {type: CPH_AMD_GPU, path: /dev/dri/renderD128, virtual_number: 4}
        - {type: something_new, path: [a]}
        - {type: NVIDIA, path: [a]}
        version: 2
        """)
    )
    assert files.load().devices == ()


@pytest.mark.parametrize("written", ["mig: all-1g.10gb", "mig_restore: true", "time_slice: short"])
@pytest.mark.parametrize("entry_type", ["NVIDIA_GPU", "NVIDIA_MIG"])
def test_our_key_in_an_entry_of_another_type_is_reported(files: Files, entry_type: str, written: str) -> None:
    files.write(devices=f"devices:\n- path: 00:06.0\n  type: {entry_type}\n  {written}\n")
    what = f'{written.partition(":")[0]} is not allowed in an entry of the type "{entry_type}"'
    others = "" if "time_slice" in written else "type: NVIDIA_MPS or "
    hint = f"write {others}type: NVIDIA_GPU_SHARE, or remove it"
    assert files.messages() == [f"{DEVICES}:4: {what}: {hint}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- path: a\n", ":1: contains a list, not a mapping: begin the file with devices:"),
        ("\n\nword\n", ':3: contains "word", not a mapping: begin the file with devices:'),
        ("path: a\n", ":1: missing key devices: begin the file with devices:, and each entry with a dash"),
        ("v: 1\ndevice: []\n", ":2: unknown key device (did you mean devices?)"),
        ("devices: []\nvirtual_number: 3\n", f":2: unknown key virtual_number beside devices: {INDENT}"),
        ("memory_unit: 1GiB\ndevices: []\n", f":1: unknown key memory_unit beside devices: {INDENT}"),
        (
            "devices: []\nvirtual_numbr: 3\n",
            f":2: unknown key virtual_numbr beside devices (did you mean virtual_number?): {INDENT}",
        ),
        ("dveices: []\n", ":1: unknown key dveices (did you mean devices?)"),
        (
            "devices: []\ndevices: [{type: X}]\n",
            ":2: duplicate key devices: put all entries under one devices: key",
        ),
        ("devices: ''\n", ':1: devices is "", not a list: write each entry after a dash: - path: …'),
        (
            "devices:\n  path: a\n",
            ":2: devices is a mapping, not a list: write each entry after a dash: - path: …",
        ),
        ("devices: 4\n", ":1: devices is 4, not a list: write each entry after a dash: - path: …"),
    ],
)
def test_a_file_of_another_shape_is_refused_with_the_right_one(files: Files, text: str, message: str) -> None:
    assert files.write(devices=text).messages() == [DEVICES + message]


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", "---\n...\n", "\ufeff", "null\n", "{}\n", "version: 1\n", "devices:\n",
     "devices: ~\n", "devices: []\n", "devices: []\ndevices: []\n"],
)  # fmt: skip
def test_a_file_without_entries_has_none_as_for_cloudpods(files: Files, text: str) -> None:
    assert files.write(devices=text).load().devices == ()


@pytest.mark.parametrize(
    "keys",
    [
        ("virtual-number", "path", "type"),
        ("virtualNumber", "Path", "Type"),
        ("VirtualNumber", "PATH", "TYPE"),
    ],
)
def test_a_key_may_be_written_as_cloudpods_finds_its_fields(files: Files, keys: tuple[str, ...]) -> None:
    number, path, kind = keys
    files.write(devices=f"Devices:\n- {{{path}: 00:06.0, {kind}: NVIDIA_MPS, {number}: '4'}}\n")
    assert [entry[:2] for entry in files.load().devices] == [("00:06.0", 4)]


WRONG = """\
# a comment
devices:
- {type: NVIDIA_GPU}
- word
! an entry of devices is "word", not a mapping: write - path: …, type: … and virtual_number: …
-
! an entry of devices is empty (null), not a mapping: write - path: …, type: … and virtual_number: …
- {path: 00:06.0, virtual_number: 4}
! an entry has no type: write type: NVIDIA_MPS, or the type of other software
- {path: 00:06.0, virtual_number: 4, tpye: NVIDIA_MPS}
! unknown key tpye (did you mean type?)
- {path: 00:06.0, virtual_number: 4, typ: NVIDIA_MSP}
! unknown key typ (did you mean type?)
! unknown type NVIDIA_MSP (did you mean NVIDIA_MPS?)
- {typ: NVIDIA_GPU, virtual_numbr: 4}
! unknown key typ (did you mean type?)
- {typ: 5, virtual_numbr: 4}
! unknown key typ (did you mean type?)
! type is 5, not a string: write type: NVIDIA_MPS
- pth: a
! unknown key pth in an NVIDIA_MPS entry (did you mean path?)
  typ: NVIDIA_MPS
! unknown key typ (did you mean type?)
  virtual_numbr: 4
! unknown key virtual_numbr in an NVIDIA_MPS entry (did you mean virtual_number?)
- pth: a
! unknown key pth in an NVIDIA_MPS entry (did you mean path?)
  type: NVIDIA_MSP
! unknown type NVIDIA_MSP (did you mean NVIDIA_MPS?)
  virtual-num: 4
! unknown key virtual-num in an NVIDIA_MPS entry (did you mean virtual_number?)
- {typ: NVIDIA_MPS, path: 00:06.0}
! unknown key typ (did you mean type?)
! an NVIDIA_MPS entry has no virtual_number: add virtual_number, for example virtual_number: 4
- {path: 00:06.0, type: 4}
! type is 4, not a string: write type: NVIDIA_MPS
- {path: 00:06.0, type: }
! type is empty (null), not a string: write type: NVIDIA_MPS
- {path: 00:06.0, virtual_number: 4, type: nvidia_mps}
! unknown type nvidia_mps (did you mean NVIDIA_MPS?)
- {type: NVIDIA_MPS}
! an NVIDIA_MPS entry has no path: add path, for example path: /dev/dri/renderD128
! an NVIDIA_MPS entry has no virtual_number: add virtual_number, for example virtual_number: 4
- {type: NVIDIA_MPS, path: 5, virtual_number: '4.5'}
! path is 5, not a string: $PATH
! virtual_number is "4.5", not a whole number: $NUMBER
- {type: NVIDIA_MPS, path: , virtual_number: 4.5}
! path is empty (null), not a string: $PATH
! virtual_number is 4.5, not a whole number: $NUMBER
- {type: NVIDIA_MPS, path: ' ', virtual_number: true}
! path is " ", not a string: $PATH
! virtual_number is true, not a whole number: $NUMBER
- {type: NVIDIA_MPS, path: 00:06.0, virtual_number: }
! virtual_number is empty (null), not a whole number: $NUMBER
- {type: NVIDIA_MPS, path: 00:06.0, virtual_number: 0}
! virtual_number is 0, out of range: $NUMBER
- {type: NVIDIA_MPS, path: 00:06.0, virtual_number: 61}
! virtual_number is 61, out of range: $NUMBER
- {type: NVIDIA_MPS, path: 00:06.0, virtual_number: 4, colour: red, [a]: b}
! unknown key colour in an NVIDIA_MPS entry: remove it; $VALID
! a key that is not a string in an NVIDIA_MPS entry: remove it; $VALID
- {path: 00:06.0, type: NVIDIA_MPS, virtual_number: 4,
   path: 00:07.0}
! duplicate key path: keep one of the two lines (the other is line 29)
- {path: 00:06.0, type: NVIDIA_MPS, type: NVIDIA_MPS, virtual_number: 4, virtual_number: '4'}
"""


def test_errors_of_an_entry_have_a_hint(files: Files) -> None:
    content, messages = annotated(
        WRONG, VALID=f"the valid keys of an NVIDIA_MPS entry are {KEYS}", NUMBER=NUMBER, PATH=PATH
    )
    assert files.write(devices=content).messages() == [f"{DEVICES}:{message}" for message in messages]


def test_the_override_of_host_conf_bounds_the_virtual_number(files: Files) -> None:
    entry = "devices:\n- {{path: 00:06.0, type: NVIDIA_MPS, virtual_number: {}}}\n"
    files.write("cuda_mps_max_clients: 128\n", entry.format(128))
    assert files.load().devices[0].virtual_number == 128
    files.write("cuda_mps_max_clients: 128\n", entry.format(129))
    hint = "write a whole number from 1 to 128"
    assert files.messages() == [f"{DEVICES}:2: virtual_number is 129, out of range: {hint}"]


def test_an_override_below_60_is_left_to_the_plan(files: Files) -> None:
    files.write(
        "cuda_mps_max_clients: 8\ncuda_mps_replicas: 16\n",
        "devices:\n- {path: 00:06.0, type: NVIDIA_MPS, virtual_number: 16}\n",
    )
    config = files.load()
    assert (config.devices[0].virtual_number, config.cuda_mps_replicas) == (16, 16)


def test_ten_thousand_unknown_keys_are_read_in_linear_time(files: Files) -> None:
    keys = "".join(f"  k{number}: 1\n" for number in range(10_000))
    files.write(devices=f"devices:\n- path: 00:06.0\n  virtual_number: 4\n{keys}  typ: NVIDIA_MPS\n")
    begin = time.process_time()
    assert len(files.messages()) == 10_001
    assert time.process_time() - begin < 20


def test_values_given_by_alias_are_read(files: Files) -> None:
    files.write(
        devices="devices:\n"
        "- {path: 00:06.0, type: &type NVIDIA_MPS, virtual_number: &number 4}\n"
        "- {path: 00:07.0, type: *type, virtual_number: *number}\n"
    )
    assert [entry[:2] for entry in files.load().devices] == [("00:06.0", 4), ("00:07.0", 4)]


def test_an_entry_that_merges_another_software_s_type_is_left_alone(files: Files) -> None:
    files.write(
        devices="base: &b {type: NVIDIA_GPU, foo: 2}\n"
        "devices:\n- {<<: *b, path: /dev/nvidia0}\n- {<<: [*b]}\n"
    )
    config, problems = load(files.paths)
    assert config.devices == ()
    assert problems == []


@pytest.mark.parametrize(
    "entry",
    ["{<<: *b, path: 00:06.0}", "{<<: [*b], path: 00:06.0}", "{<<: *b, path: 00:06.0, type: NVIDIA_MPS}"],
)
def test_an_entry_gets_the_keys_that_it_merges(files: Files, entry: str) -> None:
    files.write(devices=f"base: &b {{type: NVIDIA_MPS, virtual_number: 2}}\ndevices:\n- {entry}\n")
    assert [one[:2] for one in files.load().devices] == [("00:06.0", 2)]


def test_a_problem_of_a_merged_value_names_the_line_where_it_is(files: Files) -> None:
    files.write(
        devices="base: &b {type: NVIDIA_MPS,\n virtual_number: 0}\ndevices:\n- {<<: *b, path: 00:06.0}\n"
    )
    assert files.messages() == [f"{DEVICES}:2: virtual_number is 0, out of range: {NUMBER}"]


def test_an_unreadable_host_conf_hides_no_problem_of_the_device_file(files: Files) -> None:
    files.write("[\n", "devices: {}\n")
    problems = [(problem.file, problem.line) for problem in files.problems()]
    assert problems == [(str(files.host), 1), (str(files.devices), 1)]


def test_the_problems_of_a_device_file_in_another_place_name_that_place(files: Files) -> None:
    files.write("container_device_config_file: /etc/d.yml\n", "devices: broken\n")
    files.root.joinpath("etc/d.yml").write_text("devices: 4\n")
    hint = "write each entry after a dash: - path: …"
    assert files.messages() == [f"/etc/d.yml:1: devices is 4, not a list: {hint}"]


@pytest.mark.parametrize("entry_type", ["NVIDIA_MPS", "NVIDIA_GPU_SHARE"])
def test_an_entry_may_keep_or_set_the_compute_mode_of_its_gpu(files: Files, entry_type: str) -> None:
    entry = f"- path: 00:06.0\n  type: {entry_type}\n  virtual_number: 2\n"
    for mode in ("keep", "exclusive_process"):
        files.write(devices=f"devices:\n{entry}  cuda_mps_compute_mode: {mode}\n")
        (read,) = files.load().devices
        assert read.cuda_mps_compute_mode == mode
    files.write(devices=f"devices:\n{entry}")
    assert files.load().devices[0].cuda_mps_compute_mode == ""


def test_a_compute_mode_of_an_entry_has_the_values_of_host_conf(files: Files) -> None:
    entry = "- path: 00:06.0\n  type: NVIDIA_MPS\n  virtual_number: 2\n"
    files.write(devices=f"devices:\n{entry}  cuda_mps_compute_mode: default\n")
    what = 'cuda_mps_compute_mode is "default", but must be exclusive_process or keep'
    assert files.messages() == [f"{DEVICES}:5: {what}"]


@pytest.mark.parametrize("entry_type", ["NVIDIA_MPS", "NVIDIA_GPU_SHARE"])
def test_an_entry_says_how_much_memory_its_gpu_has(files: Files, entry_type: str) -> None:
    entry = f"- path: 00:06.0\n  type: {entry_type}\n  virtual_number: 2\n"
    files.write(devices=f"devices:\n{entry}  memory: 96GiB\n")
    (read,) = files.load().devices
    assert read.memory_mib == 98304
    assert read.memory_at is not None
    assert read.memory_at.line == 5
    files.write(devices=f"devices:\n{entry}")
    assert files.load().devices[0].memory_mib is None


def test_the_memory_of_mig_instances_is_that_of_their_profile(files: Files) -> None:
    files.write(devices="devices:\n- path: 00:06.0\n  type: NVIDIA_MPS\n  mig: all-1g.10gb\n  memory: 9GiB\n")
    what = "memory is not allowed with mig: remove it; each instance has the memory of its profile"
    assert files.messages() == [f"{DEVICES}:5: {what}"]


def test_an_amount_of_memory_needs_a_unit(files: Files) -> None:
    entry = "- path: 00:06.0\n  type: NVIDIA_MPS\n  virtual_number: 2\n"
    files.write(devices=f"devices:\n{entry}  memory: 96\n")
    what = "memory is 96, not an amount of memory"
    assert files.messages()[0].startswith(f"{DEVICES}:5: {what}")
