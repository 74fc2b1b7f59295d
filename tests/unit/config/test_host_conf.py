"""host.conf: every key with its default, its values, and what is wrong with them."""

from __future__ import annotations

import pytest
from yunion_mps.config import KEYS, load
from yunion_mps.core.settings import Source

from unit.config.conftest import HOST, Files

NULL = "empty (null)"
MODES, SCOPES, PERCENTAGES = "exclusive_process or keep", "host or gpu", "equal, double or none"
A_TEXT = "write cuda_mps_log_directory: followed by a string"
PIPE, LOG, DEVICE_FILE = "cuda_mps_pipe_directory", "cuda_mps_log_directory", "container_device_config_file"


def whole(most: int) -> str:
    return f"write a whole number from 1 to {most}"


#: For each key: what is wrong, what would be right, and such values with how they are shown.
WRONG: list[tuple[str, str, str, dict[str, str]]] = [
    (
        "enable_cuda_mps", "not true or false", "write enable_cuda_mps: true or enable_cuda_mps: false",
        {'"yes"': '"yes"', "2": "2", "": NULL, "~": NULL, "ture": '"ture"', '"y"': '"y"', "tRUE": '"tRUE"',
         "[true]": "a list", "{a: true}": "a mapping", '!!bool "maybe"': "maybe"},
    ),
    (
        "cuda_mps_pipe_group", "a group that does not exist",
        "create it (groupadd --system NAME), or choose one that exists: getent group",
        {"no such group": '"no such group"'},
    ),
    (
        "cuda_mps_replicas", "not a whole number", whole(60),
        {"4.5": "4.5", '"4.0"': '"4.0"', ".inf": ".inf", "true": "true", "yes": "yes", "null": NULL,
         "[4]": "a list", "2001-01-01": "2001-01-01", "!mine 4": "4", "four": '"four"', '"1_0"': '"1_0"',
         '!!int "-"': "-", '!!int "four"': "four", "0:30": '"0:30"', "1:10": "1:10"},
    ),
    (
        "cuda_mps_replicas", "out of range", whole(60),
        {"0": "0", "-1": "-1", "61": "61", '"61"': '"61"', "9" * 50: f"{'9' * 39}…"},
    ),
    ("cuda_mps_max_clients", "out of range", whole(4096), {"0": "0", "4097": "4097"}),
    ("cuda_mps_max_clients", "not a whole number", whole(4096), {"null": NULL}),
    ("max_leases_per_user", "out of range", whole(1_000_000), {"0": "0"}),
    ("max_leases_per_user", "not a whole number", whole(1_000_000), {"none": '"none"'}),
    ("max_devices_per_user", "out of range", whole(1_000_000), {"0": "0"}),
    ("max_lease_ttl_s", "out of range", whole(31_536_000), {"99999999": "99999999"}),
    ("over_budget", "but must be report or terminate", "", {"kill": '"kill"'}),
    ("over_budget_grace_s", "out of range", whole(3600), {"0": "0"}),
    (
        "cuda_mps_compute_mode", f"but must be {MODES}", "",
        {"default": '"default"', "3": "3", "": NULL},
    ),
    (
        "cuda_mps_compute_mode", f"but must be {MODES}", "did you mean exclusive_process?",
        {"EXCLUSIVE_PROCESS": '"EXCLUSIVE_PROCESS"'},
    ),
    ("cuda_mps_scope", f"but must be {SCOPES}", "did you mean host?", {"hots": '"hots"'}),
    (
        "cuda_mps_scope", f"but must be {SCOPES}", "",
        {"true": "true", "[host]": "a list"},
    ),
    (
        "cuda_mps_thread_percentage", f"but must be {PERCENTAGES}", "did you mean equal?",
        {"equals": '"equals"'},
    ),
    ("cuda_mps_thread_percentage", f"but must be {PERCENTAGES}", "", {"25": "25"}),
    (PIPE, "not an absolute path", "write an absolute path", {"tmp/x": '"tmp/x"'}),
    (
        PIPE,
        "which is a file system of the kernel",
        "use a directory of a file system, for example /tmp/nvidia-mps/pipe",
        {"/proc/x": '"/proc/x"', "/sys/fs/mps": '"/sys/fs/mps"'},
    ),
    (DEVICE_FILE, "not an absolute path", "write an absolute path", {"~/d.yml": '"~/d.yml"'}),
    (PIPE, "the root directory", "use a separate directory", {"/": '"/"'}),
    (LOG, "the root directory", "use a separate directory", {"/tmp/..": '"/tmp/.."'}),
    (LOG, "not a string", A_TEXT, {"": NULL, '""': '""', "5": "5"}),
    (
        "metrics_textfile", "which node_exporter does not read",
        "use a separate file that ends in .prom",
        {path: f'"{path}"' for path in ("/etc/yunion/host.conf", "/dev/null", "/srv/.prom")},
    ),
    *(
        (key, "which contains control characters", "remove them", {value: shown})
        for key, value, shown in (
            (PIPE, '"/a\\0b"', '"/a\\x00b"'),
            (LOG, '"/a\\nb"', '"/a\\nb"'),
            ("web_listen", '"[::1]:9434\\n"', '"[::1]:9434\\n"'),
            ("metrics_textfile", '"/\\e/b.prom"', '"/\\x1b/b.prom"'),
            (DEVICE_FILE, '"/a\\u202Eb"', '"/a\\u202eb"'),
        )
    ),
]  # fmt: skip


#: For each key its default, another value, and how that is written.
VALUES: dict[str, tuple[object, object, str]] = {
    "enable_cuda_mps": (False, True, "true"),
    "local_config_file": ("/etc/yunion/host_local.conf", "/etc/local.conf", "/etc/local.conf"),
    "container_device_config_file": (
        "/etc/yunion/host_container_device.yml", "/etc/devices.yml", "/etc/devices.yml"
    ),
    "cuda_mps_pipe_directory": ("/tmp/nvidia-mps/pipe", "/run/mps/pipe", "/run/mps/pipe"),
    "cuda_mps_pipe_group": (None, "root", "root"),
    "cuda_mps_log_directory": ("/tmp/nvidia-mps/log", "/var/log/mps", "/var/log/mps"),
    "cuda_mps_replicas": (10, 7, "7"),
    "cuda_mps_compute_mode": ("exclusive_process", "keep", "keep"),
    "cuda_mps_scope": ("host", "gpu", "gpu"),
    "cuda_mps_thread_percentage": ("equal", "double", "double"),
    "cuda_mps_combine": (1, 2, "2"),
    "cuda_mps_max_clients": (None, 96, "96"),
    "cuda_mps_stop_timeout_s": (10, 3600, "3600"),
    "cuda_mps_multiuser": (False, True, "true"),
    "max_leases_per_user": (None, 4, "4"),
    "max_devices_per_user": (None, 8, "8"),
    "max_lease_ttl_s": (30 * 86_400, 600, "600"),
    "over_budget": ("report", "terminate", "terminate"),
    "over_budget_grace_s": (10, 60, "60"),
    "metrics_listen": (None, "10.0.0.1:9434", "10.0.0.1:9434"),
    "metrics_allow_public": (False, True, "true"),
    "metrics_textfile": (None, "/srv/yunion-mps.prom", "/srv/yunion-mps.prom"),
    "web_listen": (None, "[::]:9435", "'[::]:9435'"),
    "web_allow_public": (False, True, "true"),
}  # fmt: skip


def test_every_key_has_the_default_of_the_design(files: Files) -> None:
    config = files.write("hypervisor: kvm\n").load()
    assert {name: getattr(config, name) for name in KEYS} == {name: row[0] for name, row in VALUES.items()}
    assert set(config.sources.values()) == {Source("default", None)}
    assert config.devices == ()


def test_every_key_is_read_and_knows_its_line(files: Files) -> None:
    lines = [f"{name}: {written}\n" for name, (_, _, written) in VALUES.items()]
    files.write("".join(["# Cloudpods' and ours\n", "hypervisor: kvm\n", *lines]))
    files.root.joinpath("etc/devices.yml").write_text("devices: []\n")
    found = files.load()
    assert {name: getattr(found, name) for name in KEYS} == {name: row[1] for name, row in VALUES.items()}
    assert found.sources == {name: Source(str(files.host), 3 + place) for place, name in enumerate(KEYS)}


@pytest.mark.parametrize(
    ("key", "what", "hint", "written", "shown"),
    [(*row[:3], written, shown) for row in WRONG for written, shown in row[3].items()],
)
def test_a_wrong_value_is_named_with_its_line_and_a_hint(
    files: Files, key: str, what: str, hint: str, written: str, shown: str
) -> None:
    files.write(f"# a comment\nhypervisor: kvm\n{key}: {written}\n", "devices: []\n")
    assert files.messages() == [f"{HOST}:3: {key} is {shown}, {what}" + (f": {hint}" if hint else "")]


@pytest.mark.parametrize(
    ("misspelt", "real"),
    [
        ("enable_cuda_mp", "enable_cuda_mps"),
        ("enable-cuda-mp", "enable_cuda_mps"),
        ("Enable_CUDA_MPS", "enable_cuda_mps"),
        ("cuda_mps_replica", "cuda_mps_replicas"),
        ("cuda_mps_socpe", "cuda_mps_scope"),
        ("enable_cuda", "enable_cuda_mps"),
        ("container_device_config_fiel", "container_device_config_file"),
        ("max_lease_per_user", "max_leases_per_user"),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest_real_one(files: Files, misspelt: str, real: str) -> None:
    files.write(f"hypervisor: kvm\n{misspelt}: x\n")
    assert files.messages() == [f"{HOST}:2: unknown key {misspelt} (did you mean {real}?)"]


@pytest.mark.parametrize("key", ["mig", "mig_restore", "time_slice", "virtual_number"])
def test_a_key_of_the_device_file_is_named_with_that_file(files: Files, key: str) -> None:
    files.write(f"hypervisor: kvm\n{key}: 2\n")
    hint = "move it to the entry of a GPU in host_container_device.yml"
    assert files.messages() == [f"{HOST}:2: {key} is not a key of host.conf: {hint}"]


def test_an_unknown_key_that_begins_like_ours_is_named_with_all_of_ours(files: Files) -> None:
    files.write("cuda_mps_colour: red\n")
    assert files.messages() == [
        (
            f"{HOST}:1: unknown key cuda_mps_colour: remove it; yunion-mps reads these keys: "
            "container_device_config_file, cuda_mps_combine, cuda_mps_compute_mode, "
            "cuda_mps_log_directory, cuda_mps_max_clients, cuda_mps_multiuser, cuda_mps_pipe_directory, "
            "cuda_mps_pipe_group, cuda_mps_replicas, cuda_mps_scope, cuda_mps_stop_timeout_s, "
            "cuda_mps_thread_percentage, enable_cuda_mps, local_config_file, max_devices_per_user, "
            "max_lease_ttl_s, max_leases_per_user, metrics_allow_public, metrics_listen, metrics_textfile, "
            "over_budget, over_budget_grace_s, web_allow_public, web_listen"
        )
    ]


@pytest.mark.parametrize(
    "merge",
    [
        "<<: {cuda_mps_scope: gpu, cuda_mps_replicas: 3}",
        "<<: [{a: b}, {cuda_mps_scope: gpu}]",
        "<<: *ours",
        "<<: [*ours]",
        "<<: {<<: *ours}",
    ],
)
def test_a_merge_brings_in_keys_that_the_file_s_own_keys_override(files: Files, merge: str) -> None:
    base = "theirs: &ours {cuda_mps_scope: gpu, cuda_mps_replicas: 3}\n"
    config = files.write(f"{base}{merge}\ncuda_mps_replicas: 4\n").load()
    assert (config.cuda_mps_scope, config.cuda_mps_replicas) == ("gpu", 4)
    assert [config.sources[key].line for key in ("cuda_mps_replicas", "enable_cuda_mps")] == [3, None]


def test_the_first_of_merged_mappings_counts(files: Files) -> None:
    files.write("<<: [{cuda_mps_scope: gpu}, {cuda_mps_scope: host, enable_cuda_mps: true}]\n")
    config = files.load()
    assert (config.cuda_mps_scope, config.enable_cuda_mps) == ("gpu", True)


def test_a_merge_below_a_key_with_another_value_is_named(files: Files) -> None:
    """Cloudpods takes the value of the merge, and YAML's specification that of the key."""
    files.write("a: &a {cuda_mps_scope: gpu}\ncuda_mps_scope: host\n<<: *a\n")
    hint = "keep one of the two lines (the other is line 2)"
    assert files.messages() == [f"{HOST}:1: duplicate key cuda_mps_scope: {hint}"]


def test_a_merge_of_something_else_than_mappings_is_named(files: Files) -> None:
    files.write("enable_cuda_mps: true\n<<: [{a: 1}, 5]\n")
    hint = "write <<: and the alias of a mapping, or remove it"
    assert files.messages() == [f"{HOST}:2: << is a list, not a mapping: {hint}"]


def test_the_first_of_duplicate_keys_counts_and_both_are_named(files: Files) -> None:
    files.write("cuda_mps_scope: gpu\nhypervisor: kvm\ncuda_mps_scope: host\ncuda-mps-scope: host\n")
    hint = "keep one of the two lines (the other is line 1)"
    assert files.messages() == [
        f"{HOST}:3: duplicate key cuda_mps_scope: {hint}",
        f"{HOST}:4: duplicate key cuda_mps_scope: {hint}",
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("cuda_mps_replicas: 4", "cuda_mps_replicas: 4"),
        ("cuda_mps_replicas: 4", "cuda_mps_replicas: '4'"),
        ("cuda_mps_replicas: 4", "cuda-mps-replicas: 0x4"),
    ],
)
def test_a_key_twice_with_the_same_value_is_accepted(files: Files, first: str, second: str) -> None:
    config = files.write(f"{first}\n{second}\n").load()
    assert (config.cuda_mps_replicas, config.sources["cuda_mps_replicas"].line) == (4, 1)


def test_the_override_bounds_the_number_of_devices_wherever_it_stands(files: Files) -> None:
    assert files.write("cuda_mps_replicas: 96\ncuda_mps_max_clients: 96\n").load().cuda_mps_replicas == 96
    files.write("cuda_mps_replicas: 97\ncuda_mps_max_clients: 96\n")
    hint = "write a whole number from 1 to 96"
    assert files.messages() == [f"{HOST}:1: cuda_mps_replicas is 97, out of range: {hint}"]


FOREIGN = """\
hypervisor: kvm
hypervisor: twice
networks: [eth1/br0/10.168.222.136, eth2/br1/bcast0]
region: Yunion
auth_url: https://10.0.0.1:30500/v3
common_config_file: /etc/yunion/common.conf
local_image_path: [/opt/cloud/workspace/disks]
ovn_underlay_mtu: 1500
enable_cpu_binding: 'true'
enable_isolated_devices: 5
disable_gpu: ~
container_runtime_endpoint: unix:///run/containerd.sock
device_config: {a: [1, 2, {b: 3}]}
cuda_visible: 4
enable_gpu: nothing of ours
container_device: nothing of ours
"<<": {enable_cuda_mps: 5}
<<: [{a: 1}, {<<: {b: 2}}]
5: five
? [a, list]
: as a key
"""


def test_foreign_keys_are_ignored_whatever_they_contain(files: Files) -> None:
    assert files.write(FOREIGN + "enable_cuda_mps: true\n").load().enable_cuda_mps is True


@pytest.mark.parametrize(
    "written",
    ["true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON", "y", "Y", "&anchor true", "!!bool yes",
     "'true'", '"True"', "T", "t", "1", "'1'"],
)  # fmt: skip
def test_true_is_written_as_cloudpods_reads_it(files: Files, written: str) -> None:
    assert files.write(f"enable_cuda_mps: {written}\n").load().enable_cuda_mps is True


@pytest.mark.parametrize(
    "written",
    ["false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF", "n", "N", "'false'", "F", "f", "0"],
)
def test_false_is_written_as_cloudpods_reads_it(files: Files, written: str) -> None:
    assert files.write(f"recycle: 1\ncuda_mps_multiuser: {written}\n").load().cuda_mps_multiuser is False


@pytest.mark.parametrize(
    "written",
    [
        "16",
        "0x10",
        "020",
        "0b10000",
        "1_6",
        "+16",
        '!!int "16"',
        "'16'",
        '"16"',
        '"+16"',
        "16.0",
        "!!float 16",
    ],
)
def test_a_whole_number_is_written_as_cloudpods_reads_it(files: Files, written: str) -> None:
    assert files.write(f"cuda_mps_replicas: {written}\n").load().cuda_mps_replicas == 16


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_byte_order_mark_and_any_line_ends_are_read(files: Files, bom: bytes, line_end: str) -> None:
    text = line_end.join(["# ours", "enable_cuda_mps: true", "cuda_mps_scope: gpu", ""])
    config = files.write(bom + text.encode()).load()
    assert (config.enable_cuda_mps, config.cuda_mps_scope) == (True, "gpu")
    assert config.sources["cuda_mps_scope"].line == 3


def test_a_message_is_one_line_whatever_the_file_contains(files: Files) -> None:
    files.write('cuda_mps_scope: "a\\nb\\e[31mc\\u202e"\n"cuda_mps_\\nx": 1\n')
    messages = files.messages()
    assert messages[0] == (f'{HOST}:1: cuda_mps_scope is "a\\nb\\x1b[31mc\\u202e", but must be host or gpu')
    assert messages[1].startswith(f"{HOST}:2: unknown key cuda_mps_\\nx: ")


OWN = "use a separate directory, for example /tmp/nvidia-mps"


@pytest.mark.parametrize(
    "path",
    ["/tmp", "/run", "/var", "/etc", "/root", "/srv", "/var/log", "/var/tmp", "/var/run", "/var/lib",
     "/dev/shm", "/usr/local", "/usr/lib", "/run/lock", "/tmp/", "//tmp", "/tmp/x/..", "/var/./log/"],
)  # fmt: skip
def test_a_shared_directory_is_refused_for_pipes_and_logs(files: Files, path: str) -> None:
    files.write(f"cuda_mps_pipe_directory: {path}\ncuda_mps_log_directory: {path}\n")
    assert files.messages() == [
        f'{HOST}:1: cuda_mps_pipe_directory is "{path}", which is shared with other software: {OWN}/pipe',
        f'{HOST}:2: cuda_mps_log_directory is "{path}", which is shared with other software: {OWN}/log',
    ]


@pytest.mark.parametrize(
    "path", ["/tmp/mps", "/run/mps", "/var/log/mps", "/dev/shm/mps", "/opt/mps", "/var/mps"]
)
def test_a_separate_directory_in_a_shared_one_is_accepted(files: Files, path: str) -> None:
    config = files.write(f"cuda_mps_pipe_directory: {path}\ncuda_mps_log_directory: {path}\n").load()
    assert (config.cuda_mps_pipe_directory, config.cuda_mps_log_directory) == (path, path)


def test_directories_are_normalised(files: Files) -> None:
    config = files.write("cuda_mps_pipe_directory: //run//mps/./x/../pipe/\n").load()
    assert config.cuda_mps_pipe_directory == "/run/mps/pipe"


@pytest.mark.parametrize(("scope", "added"), [("host", 19), ("gpu", 19 + 41)])
def test_a_pipe_directory_too_long_for_a_socket_address_is_refused(
    files: Files, scope: str, added: int
) -> None:
    room = 107 - added - len(str(files.root))
    assert len("/control_privileged") == 19
    files.write(f"cuda_mps_scope: {scope}\ncuda_mps_pipe_directory: /run/{'p' * (room - 5)}\n").load()
    files.write(f"cuda_mps_scope: {scope}\ncuda_mps_pipe_directory: /run/{'p' * (room - 4)}\n")
    assert files.messages() == [
        (
            f"{HOST}:2: cuda_mps_pipe_directory is {room + 1} bytes long, too long for a socket address:"
            f" choose a path of at most {room} bytes"
        )
    ]


def test_values_without_a_problem_are_kept_beside_those_with_one(files: Files) -> None:
    config, problems = load(files.write("cuda_mps_scope: gpu\ncuda_mps_replicas: 0\n").paths)
    assert (config.cuda_mps_scope, config.cuda_mps_replicas, len(problems)) == ("gpu", 10, 1)
