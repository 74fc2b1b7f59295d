"""/etc/yunion/kubelet-plugin.yml: how the kubelet plugin offers devices; every key is optional."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from yunion_mps.config.device_file import MEMORY_UNITS
from yunion_mps.config.document import (
    FileProblemError,
    MappingNode,
    Node,
    SequenceNode,
    line_of,
    nearest_key,
    pairs_of,
    quote,
    read_document,
    value_of,
)
from yunion_mps.config.values import (
    InvalidValueError,
    Key,
    absolute_path,
    boolean,
    endpoint,
    is_public,
    one_line,
    one_of,
)
from yunion_mps.core.enums import BINPACK, MPS, NOT_SHARED, PLACEMENTS, TIME_SLICING
from yunion_mps.core.errors import ConfigError, Problem
from yunion_mps.core.paths import Paths

#: The key of the resource that counts devices, by how they are shared.
_KEY_OF = {MPS: "resource", TIME_SLICING: "timeSlicedResource", NOT_SHARED: "gpuResource"}
#: What is added to the name of a MIG profile's resource if its instances are shared. NVIDIA's device plugin
#: has the same names, except for MPS, which it does not offer on instances.
_SUFFIXES = {MPS: ".mps", TIME_SLICING: ".shared", NOT_SHARED: ""}
#: The longest name after the domain in Kubernetes' qualified names, and the longest value of a label
#: (Kubernetes: Labels and Selectors, section "Syntax and character set").
_MAX_NAME = 63
#: The longest domain and the longest name of a node, which are DNS subdomains (Kubernetes: Object Names and
#: IDs, section "DNS Subdomain Names").
_MAX_DOMAIN = 253
#: Set in a pod, where `metricsAddress` is in the cluster's network and not in the host's.
CLUSTER_VARIABLE = "KUBERNETES_SERVICE_HOST"
#: How containers get their devices: as a CDI device, or as variables, mounts and device nodes.
CDI = "cdi"
ENVIRONMENT = "environment"
#: Whether MIG instances are not offered, counted like other devices, or by profile: NVIDIA's MIG_STRATEGY.
NONE = "none"
SINGLE = "single"
MIXED = "mixed"
MIG_STRATEGIES = (NONE, SINGLE, MIXED)
_DOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"


class PluginOptions(NamedTuple):
    """The values of the file, with the defaults filled in."""

    resource: str
    #: None: NVIDIA's names, in the domain of `resource`.
    time_sliced_resource: str | None
    gpu_resource: str | None
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
    device_list_strategy: str = CDI
    mig_strategy: str = SINGLE
    #: `NAME=VALUE`, or `NAME` with any value.
    only_with_node_label: str | None = None
    configs: tuple[NamedConfiguration, ...] = ()

    @property
    def resources(self) -> dict[str, str]:
        """Return the extended resource that each key names."""
        return {
            "resource": self.resource,
            "timeSlicedResource": self.time_sliced_resource or f"{self._domain}/gpu.shared",
            "gpuResource": self.gpu_resource or f"{self._domain}/gpu",
            "memoryResource": self.memory_resource,
        }

    def resource_of(self, sharing: str, mig_profile: str | None) -> str | None:
        """Return the extended resource that counts devices that are shared in this way; None if none does.

        `mig_profile` is that of their MIG instance, None if they are on a whole GPU.
        """
        if mig_profile is None or self.mig_strategy == SINGLE:
            return self.resources[_KEY_OF[sharing]]
        if self.mig_strategy == NONE:
            return None
        return f"{self._domain}/{mig_name(mig_profile)}{_SUFFIXES[sharing]}"

    def naming_problem(self) -> tuple[str, str] | None:
        """Return why a resource would count devices of different kinds, and the hint; None if none would."""
        key_of: dict[str, str] = {}
        for key, name in self.resources.items():
            if key_of.setdefault(name, key) != key:
                return f"{key_of[name]} and {key} are both {name}", f"set {key} to another name"
            if self.mig_strategy == MIXED and name.startswith(f"{self._domain}/{mig_name('')}"):
                text = f"{key} is {name}, which migStrategy {MIXED} may use for MIG instances"
                return text, f"set {key} to another name"
        return None

    @property
    def _domain(self) -> str:
        return self.resource.partition("/")[0]


def mig_name(profile: str) -> str:
    """Return the name of a MIG profile's resource without its domain: `mig-1g.10gb.me` of 1g.10gb+me.

    Source: NVIDIA's k8s-device-plugin, README.md, section "Configuration option details", MIG_STRATEGY.
    """
    return f"mig-{profile.replace('+', '.')}"


class NamedConfiguration(NamedTuple):
    """One of several configurations."""

    name: str
    #: Patterns of the names of the GPUs that choose it.
    models: tuple[str, ...]
    options: PluginOptions


def _resource(key: str, node: Node) -> str:
    value = value_of(node)
    if not isinstance(value, str) or not _is_extended_resource(value):
        hint = "write a domain and a name, for example yunion.io/mps"
        raise InvalidValueError(key, node, "not the name of an extended resource", hint)
    return value


def _is_extended_resource(value: str) -> bool:
    match = re.fullmatch(f"(?P<domain>{_DOMAIN})/(?P<name>{_NAME})", value)
    if match is None or len(match["domain"]) > _MAX_DOMAIN or len(match["name"]) > _MAX_NAME:
        return False
    if match["domain"].startswith("requests."):  # the quota's name for another resource
        return False
    return "kubernetes.io" not in match["domain"]


def _metrics_address(key: str, node: Node) -> str:
    address = endpoint(key, node)
    if is_public(address) and CLUSTER_VARIABLE not in os.environ:
        hint = "write 127.0.0.1 or [::1], and let a proxy with authentication serve other hosts"
        raise InvalidValueError(key, node, "which other hosts can reach", hint)
    return address


def _feature_file(key: str, node: Node) -> str:
    path = absolute_path(key, node)
    if os.path.basename(path).startswith("."):
        hint = "write a name that does not begin with a dot"
        raise InvalidValueError(key, node, "a hidden file, which NFD does not read", hint)
    return path


def _memory_unit(key: str, node: Node) -> int:
    return MEMORY_UNITS[one_of(*MEMORY_UNITS)(key, node)]


def _node_name(key: str, node: Node) -> str:
    value = one_line(key, node)
    if not re.fullmatch(_DOMAIN, value) or len(value) > _MAX_DOMAIN:
        raise InvalidValueError(key, node, "not the name of a node", "write it as kubectl get nodes shows it")
    return value


def _label(key: str, node: Node) -> str:
    value = one_line(key, node)
    match = re.fullmatch(f"((?P<domain>{_DOMAIN})/)?(?P<name>{_NAME})(=(?P<value>{_NAME})?)?", value)
    if not match:
        raise InvalidValueError(key, node, "not a label", "write ack.node.gpu.schedule=mps, for example")
    longest = {"domain": _MAX_DOMAIN, "name": _MAX_NAME, "value": _MAX_NAME}
    for part, length in longest.items():
        if len(match[part] or "") > length:
            hint = f"write a {part} of at most {length} characters"
            raise InvalidValueError(key, node, "not a label that a node can have", hint)
    return value


def _models(key: str, node: Node) -> tuple[str, ...]:
    models = [value_of(model) for model in node.value] if isinstance(node, SequenceNode) else []
    if not models or not all(isinstance(model, str) and model for model in models):
        hint = 'write a list of names, where * is any text: ["Tesla T4", "NVIDIA A100*"]'
        raise InvalidValueError(key, node, "not a list of one or more model names", hint)
    return tuple(models)


def _mapping(key: str, node: Node) -> MappingNode:
    if not isinstance(node, MappingNode) or not node.value:
        hint = "write the name of each configuration, and its keys indented below"
        raise InvalidValueError(key, node, "not a mapping of one or more configurations", hint)
    return node


#: The keys, in the order of the manual, with their defaults and their purpose.
KEYS = {
    "resource": Key(
        _resource, "yunion.io/mps", "The extended resource that counts devices that are shared through MPS."
    ),
    "timeSlicedResource": Key(_resource, None, "The extended resource that counts time-sliced devices."),
    "gpuResource": Key(_resource, None, "The extended resource that counts whole MIG instances."),
    "failRequestsGreaterThanOne": Key(
        boolean, default=False, help="Whether to refuse containers that request several devices."
    ),
    "preferred": Key(
        one_of(*PLACEMENTS),
        BINPACK,
        "Whether GPUs with the fewest or the most free devices of the resource are used first.",
    ),
    "memoryResource": Key(
        _resource, "yunion.io/mps-memory", "The extended resource that counts units of the memory of pools."
    ),
    "memoryUnit": Key(
        _memory_unit, None, "A unit of memoryResource; if not set, the largest memory_unit of the GPUs."
    ),
    "dra": Key(boolean, default=False, help="Whether to offer the devices to resource claims (DRA) instead."),
    "kubeconfig": Key(absolute_path, None, "The file with the address and credentials of the API server."),
    "nodeName": Key(_node_name, None, "The node's name, if it is not the host's."),
    "metricsAddress": Key(
        _metrics_address, None, "An address of this host or pod at which the plugin's metrics are served."
    ),
    "featureFile": Key(
        _feature_file, None, "The file for Node Feature Discovery in which the node's labels are written."
    ),
    "deviceListStrategy": Key(one_of(CDI, ENVIRONMENT), CDI, "How containers get their devices."),
    "migStrategy": Key(
        one_of(*MIG_STRATEGIES), SINGLE, "Which extended resources count MIG instances, if any."
    ),
    "onlyWithNodeLabel": Key(_label, None, "A label without which the node offers nothing."),
    "configs": Key(_mapping, None, "Several configurations by name, of which one is chosen for the node."),
}
#: The keys of a configuration in `configs`: all except those that choose one.
_MODELS = "models"
_CHOOSING = ("kubeconfig", "nodeName", "onlyWithNodeLabel", "configs")
_NAMED_KEYS = {
    **{name: key for name, key in KEYS.items() if name not in _CHOOSING},
    _MODELS: Key(_models, (), "The names of the GPUs for which it is chosen."),
}


def read_options(paths: Paths) -> PluginOptions:
    """Read the file; if there is none, everything has its default.

    Raises ConfigError with all problems.
    """
    path = paths.kubelet_plugin
    if not os.path.lexists(path):
        return _options_of(_defaults())
    reader = _OptionsReader(path)
    try:
        root = read_document(path, os.path.basename(path))
        options = reader.options(root)
    except FileProblemError as error:
        reader.problems.append(error.problem)
    if reader.problems:
        problems = sorted(reader.problems, key=lambda problem: problem.line or 0)
        raise ConfigError(problems, check="yunion-mps-kubelet-plugin --check")
    return options


def _defaults() -> dict[str, Any]:
    defaults = {name: key.default for name, key in KEYS.items()}
    return {**defaults, "configs": ()}


def _options_of(values: Mapping[str, Any]) -> PluginOptions:
    """Return the options, of the values of all keys."""
    return PluginOptions(
        resource=values["resource"],
        time_sliced_resource=values["timeSlicedResource"],
        gpu_resource=values["gpuResource"],
        fail_requests_greater_than_one=values["failRequestsGreaterThanOne"],
        preferred=values["preferred"],
        memory_resource=values["memoryResource"],
        memory_unit_mib=values["memoryUnit"],
        dra=values["dra"],
        kubeconfig=values["kubeconfig"],
        node_name=values["nodeName"],
        metrics_address=values["metricsAddress"],
        feature_file=values["featureFile"],
        device_list_strategy=values["deviceListStrategy"],
        mig_strategy=values["migStrategy"],
        only_with_node_label=values["onlyWithNodeLabel"],
        configs=values["configs"],
    )


class _OptionsReader:
    """Reads the mappings of the file, and gathers their problems."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.problems: list[Problem] = []

    def options(self, root: Node | None) -> PluginOptions:
        if root is not None and not isinstance(root, MappingNode):
            text = f"contains {quote(root)}, not a mapping"
            self._report(root, text, "write a key and its value on each line")
            root = None
        values = self._values(root, KEYS) if root else {}
        named = values.pop("configs", None)
        base = {**_defaults(), **values}
        if root:
            self._refuse_equal_names(root, base)
        configs = [] if named is None else self._configs(named, base)
        return _options_of({**base, "configs": tuple(configs)})

    def _configs(self, root: MappingNode, base: dict[str, Any]) -> Iterator[NamedConfiguration]:
        names: dict[str, Node] = {}
        for name, key, node, _ in pairs_of(root):
            if not re.fullmatch(_NAME, name) or len(name) > _MAX_NAME:
                hint = "write letters, digits, -, _ and ., as in the value of a label"
                self._report(key, f"{quote(key)} is not the name of a configuration", hint)
            elif names.setdefault(name, key) is not key:
                hint = f"keep one of the two (the other is line {line_of(names[name])})"
                self._report(key, f"duplicate configuration {name}", hint)
            elif not isinstance(node, MappingNode):
                text = f"configuration {name} is {quote(node)}, not a mapping"
                self._report(node, text, "indent its keys")
            else:
                values = self._values(node, _NAMED_KEYS)
                models = values.pop(_MODELS, ())
                merged = {**base, **values}
                self._refuse_equal_names(node, merged)
                yield NamedConfiguration(name, models, _options_of(merged))

    def _values(self, root: MappingNode, keys: Mapping[str, Key]) -> dict[str, Any]:
        """Return the values that are written, of valid keys."""
        values: dict[str, Any] = {}
        known_keys: dict[str, Node] = {}
        for name, key, node, _ in pairs_of(root):
            if name not in keys:
                text = f"unknown key {name or quote(key)}"
                near = nearest_key(name, keys)
                if near:
                    self._report(key, f"{text} (did you mean {near}?)", "")
                else:
                    self._report(key, text, f"remove it; the valid keys are {', '.join(keys)}")
            elif known_keys.setdefault(name, key) is not key:
                hint = f"keep one of the two (the other is line {line_of(known_keys[name])})"
                self._report(key, f"duplicate key {name}", hint)
            else:
                try:
                    values[name] = keys[name].kind(name, node)
                except InvalidValueError as error:
                    self._report(node, error.what, error.hint)
        return values

    def _refuse_equal_names(self, root: Node, values: dict[str, Any]) -> None:
        problem = _options_of(values).naming_problem()
        if problem:
            text, hint = problem
            self._report(root, text, hint)

    def _report(self, node: Node, text: str, hint: str) -> None:
        self.problems.append(Problem(self._path, line_of(node), text, hint))
