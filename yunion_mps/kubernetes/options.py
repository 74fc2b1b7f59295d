"""/etc/yunion/kubelet-plugin.yml: how the kubelet plugin offers devices; every key is optional."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from yunion_mps.config.devices import MEMORY_UNITS
from yunion_mps.config.document import (
    FileProblemError,
    MappingNode,
    Node,
    line_of,
    nearest_key,
    pairs_of,
    read_document,
    value_of,
    written,
)
from yunion_mps.config.values import (
    InvalidValueError,
    Key,
    absolute_path,
    boolean,
    endpoint,
    is_public,
    one_of,
    text,
)
from yunion_mps.enums import PLACEMENTS
from yunion_mps.errors import ConfigError, Problem
from yunion_mps.paths import Paths

#: Added to the resource's name by `renameByDefault`, as NVIDIA's device plugin does.
_SHARED = ".shared"
#: The longest name after the domain in Kubernetes' qualified names.
_MAX_NAME = 63
_MAX_NODE_NAME = 253
_DOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"


class PluginOptions(NamedTuple):
    """The values of the file, with the defaults filled in."""

    resource: str
    rename_by_default: bool
    fail_requests_greater_than_one: bool
    preferred: str
    memory_resource: str
    #: A unit of `memory_resource`; None: the largest unit of the node's pools.
    memory_unit_mib: int | None
    dra: bool = False
    kubeconfig: str | None = None
    node_name: str | None = None
    metrics_address: str | None = None
    feature_file: str | None = None

    @property
    def resource_name(self) -> str:
        """The extended resource that pods request."""
        return self.resource + (_SHARED if self.rename_by_default else "")


def _resource(key: str, node: Node) -> str:
    value = value_of(node)
    match = isinstance(value, str) and re.fullmatch(f"(?P<domain>{_DOMAIN})/(?P<name>{_NAME})", value)
    if not match or "kubernetes.io" in match["domain"] or len(match["name"] + _SHARED) > _MAX_NAME:
        hint = "write a domain of yours and a name, for example yunion.io/mps"
        raise InvalidValueError(key, node, "not the name of an extended resource", hint)
    return match[0]


def _local_address(key: str, node: Node) -> str:
    address = endpoint(key, node)
    if is_public(address):
        hint = "write 127.0.0.1 or [::1], and let a proxy with authentication serve other hosts"
        raise InvalidValueError(key, node, "which other hosts can reach", hint)
    return address


def _memory_unit(key: str, node: Node) -> int:
    return MEMORY_UNITS[one_of(*MEMORY_UNITS)(key, node)]


def _node_name(key: str, node: Node) -> str:
    value = text(key, node)
    if not re.fullmatch(_DOMAIN, value) or len(value) > _MAX_NODE_NAME:
        raise InvalidValueError(key, node, "not the name of a node", "write it as kubectl get nodes shows it")
    return value


#: The keys in the order of `PluginOptions`, with their defaults and their purpose.
KEYS = {
    "resource": Key(_resource, "yunion.io/mps", "The extended resource that pods request."),
    "renameByDefault": Key(boolean, default=False, help=f"Whether to add {_SHARED} to the resource's name."),
    "failRequestsGreaterThanOne": Key(
        boolean, default=False, help="Whether to refuse containers that request several devices."
    ),
    "preferred": Key(
        one_of(*PLACEMENTS),
        PLACEMENTS[0],
        "Whether GPUs with the fewest or the most free devices are preferred.",
    ),
    "memoryResource": Key(
        _resource, "yunion.io/mps-memory", "The extended resource that counts units of the memory of pools."
    ),
    "memoryUnit": Key(
        _memory_unit,
        None,
        "A unit of memoryResource; if not set, the largest memory_unit of the GPUs.",
    ),
    "dra": Key(boolean, default=False, help="Whether to offer the devices by DRA instead, to claims."),
    "kubeconfig": Key(absolute_path, None, "The file with the address and credentials of the API server."),
    "nodeName": Key(_node_name, None, "The node's name, if it is not the host's."),
    "metricsAddress": Key(
        _local_address, None, "An address of this host at which the plugin's metrics are served."
    ),
    "featureFile": Key(
        absolute_path, None, "The file for Node Feature Discovery in which the node's labels are written."
    ),
}


def read_options(paths: Paths) -> PluginOptions:
    """Read the file; if there is none, everything has its default. Raises ConfigError with all problems."""
    path = paths.kubelet_plugin
    values = {name: key.default for name, key in KEYS.items()}
    if not os.path.lexists(path):
        return PluginOptions(*values.values())
    problems: list[Problem] = []
    try:
        root = read_document(path, os.path.basename(path))
        if root is not None and not isinstance(root, MappingNode):
            what = f"contains {written(root)}, not a mapping"
            problems.append(Problem(path, line_of(root), what, "write a key and its value on each line"))
            root = None
        seen: dict[str, int] = {}
        for name, key, node in pairs_of(root) if root else ():
            line = line_of(key)
            if name not in KEYS:
                near = nearest_key(name, KEYS)
                hint = "" if near else f"remove it; the valid keys are {', '.join(KEYS)}"
                what = f"unknown key {name}" + (f" (did you mean {near}?)" if near else "")
                problems.append(Problem(path, line, what, hint))
            elif seen.setdefault(name, line) != line:
                hint = f"keep one of the two lines (the other is line {seen[name]})"
                problems.append(Problem(path, line, f"duplicate key {name}", hint))
            else:
                try:
                    values[name] = KEYS[name].kind(name, node)
                except InvalidValueError as error:
                    problems.append(Problem(path, line_of(node), error.what, error.hint))
    except FileProblemError as error:
        problems.append(error.problem)
    if problems:
        raise ConfigError(problems, check="yunion-mps-kubelet-plugin --check")
    return PluginOptions(*values.values())
