"""/etc/yunion/host.conf and host_local.conf: our keys; those of Cloudpods' host agent are ignored."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from yunion_mps.config.assignments import read_assignments
from yunion_mps.config.document import (
    FileProblemError,
    MappingNode,
    Node,
    Pair,
    line_of,
    nearest_key,
    quote,
    read_document,
    value_of,
)
from yunion_mps.config.mapping import distinct_pairs, look_alike_mistake, merge_mistake
from yunion_mps.config.values import (
    MAX_DEVICES_PER_GPU,
    MAX_OVERRIDE,
    SHARING_KEYS,
    InvalidValueError,
    Key,
    ValueKind,
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
    split_endpoint,
    textfile,
    whole_number,
)
from yunion_mps.core.enums import KEEP, REPORT, SET_EXCLUSIVE, TERMINATE
from yunion_mps.core.errors import Problem
from yunion_mps.core.paths import MAX_SOCKET_PATH, Paths
from yunion_mps.core.settings import Config, Mistake, Source

#: The keys that name other files.
LOCAL_FILE = "local_config_file"
DEVICE_FILE = "container_device_config_file"

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
        if problem:
            problems.append(problem)
    problems += _check_pipe_directory(paths, config)
    for name, problem in (*_check_public(config), *_check_ports(config)):
        config = config._replace(**{name: KEYS[name].default})
        problems.append(problem._replace(is_minor=True))
    order = {file: number for number, file in enumerate(files)}
    problems.sort(key=lambda problem: (order.get(problem.file, 0), problem.line or 0))
    return config._replace(files=tuple(files)), problems


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
    pairs = distinct_pairs(root, _key_name)
    problems = [_problem(file, pair.key, merge_mistake(pair)) for pair in pairs.invalid]
    for duplicate in pairs.duplicates:
        if duplicate.pair.name in KEYS:
            problems.append(_problem(file, duplicate.pair.key, duplicate.mistake))
    settings = []
    for pair in pairs.by_name.values():
        if pair.name in KEYS:
            settings.append(_Setting(file, pair))
            continue
        mistake = _foreign_key_mistake(pair.name)
        if mistake:
            problems.append(_problem(file, pair.key, mistake))
    return settings, problems


def _problem(file: str, node: Node, mistake: Mistake) -> Problem:
    return Problem(file, line_of(node), mistake.what, mistake.hint)


def _key_name(written: str) -> str:
    """Return the name of a key; as for Cloudpods, it may have dashes instead of underscores."""
    name = written.strip(" ").replace("-", "_")
    return name if name in KEYS else written


def _local_file(settings: list[_Setting]) -> str:
    """Return the value of `local_config_file`; its default if it is missing or invalid, "" if it is empty."""
    key = KEYS[LOCAL_FILE]
    for setting in settings:
        if setting.pair.name == LOCAL_FILE:
            try:
                return str(key.kind(LOCAL_FILE, setting.pair.value))
            except InvalidValueError:  # reported with the other values
                break
    return str(key.default)


def _check_local_file(settings: list[_Setting], file: str) -> list[Problem]:
    """Refuse `local_config_file` in the file that it has named, unless it names that file."""
    sources = [setting.source for setting in settings if setting.pair.name == LOCAL_FILE]
    if not sources or _local_file(settings) == file:
        return []
    text = f"{LOCAL_FILE} has no effect in this file"
    return [
        Problem(
            file=sources[0].file, line=sources[0].line, what=text, hint="set it in host.conf, or remove it"
        )
    ]


def _with_setting(config: Config, setting: _Setting) -> tuple[Config, Problem | None]:
    """Return the configuration with the setting, or the problem of its value."""
    name = setting.pair.name
    node = setting.pair.value
    if name == DEVICE_FILE and value_of(node) == "":  # as if it were not set
        return _with_value(config, name, KEYS[name].default, _DEFAULT), None
    try:
        value = _kind(name, config)(name, node)
    except InvalidValueError as error:
        problem = _problem(setting.file, node, Mistake(error.what, error.hint))
        config = config._replace(sources={**config.sources, name: setting.source})
        return config, problem._replace(is_minor=name.startswith(_MINOR))
    return _with_value(config, name, value, setting.source), None


def _with_value(config: Config, name: str, value: Any, source: Source) -> Config:
    sources = {**config.sources, name: source}
    return config._replace(**{name: value}, sources=sources)


def _kind(name: str, config: Config) -> ValueKind:
    if name == "cuda_mps_replicas":
        return whole_number(1, max_devices(config.cuda_mps_max_clients))
    return KEYS[name].kind


def _foreign_key_mistake(name: str) -> Mistake | None:
    """Return why a key that is not ours is wrong: it is nearly one of ours, or belongs in the device file."""
    mistake = look_alike_mistake(name, KEYS)
    if mistake:
        return mistake
    near = nearest_key(name, KEYS)
    if near:
        return Mistake(f"unknown key {name} (did you mean {near}?)")
    if name in (*SHARING_KEYS, "virtual_number"):
        hint = "move it to the entry of a GPU in host_container_device.yml"
        return Mistake(f"{name} is not a key of host.conf", hint)
    if name.startswith(("cuda_mps_", "enable_cuda_mps")):
        keys = ", ".join(sorted(KEYS))
        return Mistake(f"unknown key {name}", f"remove it; yunion-mps reads these keys: {keys}")
    return None


def _check_public(config: Config) -> list[tuple[str, Problem]]:
    """Return the keys whose address other hosts can reach, although that is not allowed."""
    refused = []
    if config.metrics_listen and not config.metrics_allow_public and is_public(config.metrics_listen):
        problem = _public_problem(config, "metrics_listen", "metrics_allow_public")
        refused.append(("metrics_listen", problem))
    if config.web_listen and not config.web_allow_public and is_public(config.web_listen):
        problem = _public_problem(config, "web_listen", "web_allow_public")
        refused.append(("web_listen", problem))
    return refused


def _public_problem(config: Config, listen: str, allow: str) -> Problem:
    """Return the problem of an address (the key `listen`) that needs the key `allow`."""
    address = str(getattr(config, listen))
    source = config.sources[listen]
    text = f"{listen} is {address}, which is reachable from other hosts"
    hint = f"write 127.0.0.1:{split_endpoint(address)[1]}, or {allow}: true if this is intended"
    return Problem(source.file, source.line, text, hint)


def _check_ports(config: Config) -> list[tuple[str, Problem]]:
    """Return the key whose address another listener uses already, so that it would never be served."""
    web = config.web_listen
    metrics = config.metrics_listen
    if not (web and metrics and overlap(web, metrics)):
        return []
    source = config.sources["web_listen"]
    text = f"web_listen is {web}, which metrics_listen already uses"
    return [("web_listen", Problem(source.file, source.line, text, "use a different port for each"))]


def _check_pipe_directory(paths: Paths, config: Config) -> list[Problem]:
    """Check that the paths of the control daemon's sockets fit a socket's address."""
    source = config.sources["cuda_mps_pipe_directory"]
    extra = _SOCKET if config.cuda_mps_scope == "host" else _GPU_DIRECTORY + _SOCKET
    room = MAX_SOCKET_PATH - len(extra) - len(paths.under("/")) + 1
    length = len(config.cuda_mps_pipe_directory.encode())
    if length <= room:
        return []
    text = f"cuda_mps_pipe_directory is {length} bytes long, too long for a socket address"
    return [Problem(source.file, source.line, text, f"choose a path of at most {room} bytes")]
