"""/etc/yunion/host.conf and host_local.conf: our keys; those of Cloudpods' host agent are ignored."""

from __future__ import annotations

import os
from typing import NamedTuple

from yunion_mps.config.assignments import read_assignments
from yunion_mps.config.document import (
    FileProblemError,
    MappingNode,
    Pair,
    line_of,
    nearest_key,
    quote,
    read_document,
    value_of,
)
from yunion_mps.config.mapping import distinct_pairs, look_alike_problem, merge_problem
from yunion_mps.config.values import (
    MAX_DEVICES_PER_GPU,
    MAX_OVERRIDE,
    SHARING_KEYS,
    InvalidValueError,
    Key,
    Kind,
    absolute_path,
    boolean,
    endpoint,
    group,
    is_public,
    max_devices,
    one_of,
    overlap,
    own_directory,
    path_or_empty,
    textfile,
    whole_number,
)
from yunion_mps.enums import KEEP, REPORT, SET_EXCLUSIVE, TERMINATE
from yunion_mps.errors import Problem
from yunion_mps.paths import MAX_SOCKET_PATH, Paths
from yunion_mps.settings import Config, Source

#: The keys that name other files.
LOCAL_FILE, DEVICE_FILE = "local_config_file", "container_device_config_file"

KEYS: dict[str, Key] = {
    "enable_cuda_mps": Key(
        boolean, default=False, help="whether this host offers devices, with or without MPS"
    ),
    LOCAL_FILE: Key(
        path_or_empty,
        "/etc/yunion/host_local.conf",
        "the file whose values replace those of host.conf, if any",
    ),
    DEVICE_FILE: Key(
        absolute_path, "/etc/yunion/host_container_device.yml", "the file that divides the GPUs"
    ),
    "cuda_mps_pipe_directory": Key(
        own_directory("/tmp/nvidia-mps/pipe"), "/tmp/nvidia-mps/pipe", "where clients find the control daemon"
    ),
    "cuda_mps_pipe_group": Key(
        group, None, "the only group, besides root, whose members may use the control daemon"
    ),
    "cuda_mps_log_directory": Key(
        own_directory("/tmp/nvidia-mps/log"), "/tmp/nvidia-mps/log", "where the control daemon's log is kept"
    ),
    "cuda_mps_replicas": Key(
        whole_number(1, MAX_DEVICES_PER_GPU),
        10,
        "the number of devices per GPU if the device file has no entry for this daemon",
    ),
    "cuda_mps_compute_mode": Key(
        one_of(SET_EXCLUSIVE, KEEP), SET_EXCLUSIVE, "the GPUs' compute mode while MPS runs"
    ),
    "cuda_mps_scope": Key(one_of("host", "gpu"), "host", "one control daemon for all GPUs, or one for each"),
    "cuda_mps_thread_percentage": Key(
        one_of("equal", "double", "none"), "equal", "SM percentage of a device: 100/n, 200/n, or unlimited"
    ),
    "cuda_mps_combine": Key(
        whole_number(1, MAX_DEVICES_PER_GPU),
        1,
        "how many devices of a GPU one job may combine into one budget",
    ),
    "cuda_mps_max_clients": Key(
        whole_number(1, MAX_OVERRIDE),
        None,
        "the MPS client limit of each GPU (Volta or later), if this driver's limit is not the documented one",
    ),
    "cuda_mps_stop_timeout_s": Key(
        whole_number(0, 86_400), 10, "how long a stop waits for jobs before killing them, in seconds"
    ),
    "cuda_mps_multiuser": Key(
        boolean, default=False, help="one MPS server for all users' jobs, if NVIDIA's program supports it"
    ),
    "max_leases_per_user": Key(
        whole_number(1, 1_000_000), None, "the maximum number of leases and queued requests per user"
    ),
    "max_devices_per_user": Key(
        whole_number(1, 1_000_000), None, "the maximum number of devices per user, leased or requested"
    ),
    "max_lease_ttl_s": Key(
        whole_number(1, 365 * 86_400),
        30 * 86_400,
        "the longest time to live of a lease that is taken by name, in seconds",
    ),
    "over_budget": Key(
        one_of(REPORT, TERMINATE),
        REPORT,
        "what happens if a job's processes together exceed its memory budget",
    ),
    "over_budget_grace_s": Key(
        whole_number(1, 3600), 10, "how long a job may exceed its budget before terminate acts, in seconds"
    ),
    "metrics_listen": Key(endpoint, None, "the TCP address at which Prometheus can scrape the metrics"),
    "metrics_allow_public": Key(
        boolean, default=False, help="whether metrics_listen may be reached from other hosts"
    ),
    "metrics_textfile": Key(
        textfile, None, "a file with the metrics, for node_exporter's textfile collector"
    ),
    "web_listen": Key(endpoint, None, "the TCP address of the web page"),
    "web_allow_public": Key(
        boolean, default=False, help="whether web_listen may be reached from other hosts"
    ),
}

#: What the control daemon adds to the pipe directory: its longest socket name; with scope gpu, a UUID first.
_SOCKET = "/control_privileged"
_GPU_DIRECTORY = "/GPU-00000000-0000-0000-0000-000000000000"

#: Prefixes of keys that no job needs.
_MINOR = ("metrics_", "web_")

_DEFAULT = Source("default", None)


class _Setting(NamedTuple):
    """One of our keys in a file."""

    file: str
    pair: Pair

    @property
    def source(self) -> Source:
        return Source(self.file, line_of(self.pair.key))


def read_host(paths: Paths) -> tuple[Config, list[Problem]]:
    """Return the keys' values and places, and the problems; invalid values are replaced by defaults.

    As Cloudpods' host agent does, read host.conf and then the file that `local_config_file` names, if it
    exists; its values replace those of host.conf.
    """
    defaults = {name: key.default for name, key in KEYS.items()}
    config = Config(**defaults, sources=dict.fromkeys(KEYS, _DEFAULT))
    files = [paths.host_conf]
    settings, problems = _settings_of(paths.host_conf)
    local_file = _local_file(settings)
    if local_file and os.path.lexists(paths.under(local_file)):
        files.append(paths.under(local_file))
        local_settings, local_problems = _settings_of(files[-1])
        settings += [setting for setting in local_settings if setting.pair.name != LOCAL_FILE]
        problems += [*local_problems, *_check_local_file(local_settings, local_file)]
    # `cuda_mps_max_clients` comes first, because it bounds another key.
    for setting in sorted(settings, key=lambda setting: setting.pair.name != "cuda_mps_max_clients"):
        config, problem = _with_setting(config, setting)
        problems += [problem] if problem else []
    problems += _check_pipe_directory(paths, config)
    invalid = [*_check_public(config), *_check_ports(config)]
    config = config._replace(**{name: KEYS[name].default for name, _ in invalid}, files=tuple(files))
    problems += [problem._replace(is_minor=True) for _, problem in invalid]
    places = {file: number for number, file in enumerate(files)}
    return config, sorted(problems, key=lambda problem: (places.get(problem.file, 0), problem.line or 0))


def _settings_of(file: str) -> tuple[list[_Setting], list[Problem]]:
    """Return our keys in the file, and the problems of its keys; none if it is empty."""
    try:
        root = read_document(file, "host.conf", KEYS, read_assignments)
    except FileProblemError as error:
        return [], [error.problem]
    if root is None:
        return [], []
    if not isinstance(root, MappingNode):
        hint = "write one key: value per line, as in the example"
        return [], [Problem(file, line_of(root), f"contains {quote(root)}, not a mapping", hint)]
    pairs, duplicates, invalid = distinct_pairs(root, _key_name)
    problems = [Problem(file, line_of(pair.key), *merge_problem(pair)) for pair in invalid]
    problems += [
        Problem(file, line_of(duplicate.pair.key), duplicate.what, duplicate.hint)
        for duplicate in duplicates
        if duplicate.pair.name in KEYS
    ]
    settings = []
    for pair in pairs.values():
        if pair.name in KEYS:
            settings.append(_Setting(file, pair))
        else:
            problems += _check_foreign_key(file, line_of(pair.key), pair.name)
    return settings, problems


def _key_name(written: str) -> str:
    """Return the name of a key; as for Cloudpods, it may have dashes instead of underscores."""
    name = written.strip(" ").replace("-", "_")
    return name if name in KEYS else written


def _local_file(settings: list[_Setting]) -> str:
    """Return the value of `local_config_file`; its default if it is missing or invalid, "" if it is empty."""
    key = KEYS[LOCAL_FILE]
    for _, pair in settings:
        if pair.name == LOCAL_FILE:
            try:
                return str(key.kind(LOCAL_FILE, pair.value))
            except InvalidValueError:  # reported with the other values
                break
    return str(key.default)


def _check_local_file(settings: list[_Setting], file: str) -> list[Problem]:
    """Refuse `local_config_file` in the file that it has named, unless it names that file."""
    if not any(setting.pair.name == LOCAL_FILE for setting in settings) or _local_file(settings) == file:
        return []
    source = next(setting.source for setting in settings if setting.pair.name == LOCAL_FILE)
    what = f"{LOCAL_FILE} has no effect in this file"
    return [Problem(source.file, source.line, what, "set it in host.conf, or remove it")]


def _with_setting(config: Config, setting: _Setting) -> tuple[Config, Problem | None]:
    """Return the configuration with the setting, or the problem of its value."""
    name, node = setting.pair.name, setting.pair.value
    config = config._replace(sources={**config.sources, name: setting.source})
    if name == DEVICE_FILE and value_of(node) == "":  # as if it were not set
        default = {name: KEYS[name].default}
        return config._replace(**default, sources={**config.sources, name: _DEFAULT}), None
    try:
        value = _kind(name, config)(name, node)
    except InvalidValueError as error:
        minor = name.startswith(_MINOR)
        return config, Problem(setting.file, line_of(node), error.what, error.hint, minor)
    return config._replace(**{name: value}), None


def _kind(name: str, config: Config) -> Kind:
    if name == "cuda_mps_replicas":
        return whole_number(1, max_devices(config.cuda_mps_max_clients))
    return KEYS[name].kind


def _check_foreign_key(file: str, line: int, name: str) -> list[Problem]:
    """Check a foreign key: it is a problem if it is nearly one of ours, or belongs in the device file."""
    odd = look_alike_problem(name, KEYS)
    if odd:
        return [Problem(file, line, *odd)]
    near = nearest_key(name, KEYS)
    if near:
        return [Problem(file, line, f"unknown key {name} (did you mean {near}?)")]
    if name in (*SHARING_KEYS, "virtual_number"):
        hint = "move it to the entry of a GPU in host_container_device.yml"
        return [Problem(file, line, f"{name} is not a key of host.conf", hint)]
    if name.startswith(("cuda_mps_", "enable_cuda_mps")):
        keys = ", ".join(sorted(KEYS))
        return [Problem(file, line, f"unknown key {name}", f"remove it; yunion-mps reads these keys: {keys}")]
    return []


def _check_public(config: Config) -> list[tuple[str, Problem]]:
    """Return the keys whose address other hosts can reach, although that is not allowed."""
    refused = []
    for listen, address, allow, is_allowed in (
        ("metrics_listen", config.metrics_listen, "metrics_allow_public", config.metrics_allow_public),
        ("web_listen", config.web_listen, "web_allow_public", config.web_allow_public),
    ):
        if address and is_public(address) and not is_allowed:
            port, at = address.rpartition(":")[2], config.sources[listen]
            hint = f"write 127.0.0.1:{port}, or {allow}: true if this is intended"
            problem = f"{listen} is {address}, which is reachable from other hosts"
            refused.append((listen, Problem(at.file, at.line, problem, hint)))
    return refused


def _check_ports(config: Config) -> list[tuple[str, Problem]]:
    """Return the key whose address another listener uses already, so that it would never be served."""
    web, metrics, at = config.web_listen, config.metrics_listen, config.sources["web_listen"]
    if not (web and metrics and overlap(web, metrics)):
        return []
    problem = f"web_listen is {web}, which metrics_listen already uses"
    return [("web_listen", Problem(at.file, at.line, problem, "use a different port for each"))]


def _check_pipe_directory(paths: Paths, config: Config) -> list[Problem]:
    """Check that the paths of the control daemon's sockets fit a socket's address."""
    at = config.sources["cuda_mps_pipe_directory"]
    extra = _SOCKET if config.cuda_mps_scope == "host" else _GPU_DIRECTORY + _SOCKET
    room = MAX_SOCKET_PATH - len(extra) - len(paths.under("/")) + 1
    length = len(config.cuda_mps_pipe_directory.encode())
    if length <= room:
        return []
    what = f"cuda_mps_pipe_directory is {length} bytes long, too long for a socket address"
    return [Problem(at.file, at.line, what, f"choose a path of at most {room} bytes")]
