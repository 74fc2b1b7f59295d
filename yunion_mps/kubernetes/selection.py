"""Which configuration the node gets: by the command line, its label, its GPUs, or the name `default`.

The label has the name that NVIDIA's device plugin uses. The node's labels come from a file, which something
else keeps current, or from the API server.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from yunion_mps.core.errors import YunionError
from yunion_mps.host.files import read_text
from yunion_mps.host.log import Failures
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.http.operations import GET_GPUS
from yunion_mps.kubernetes.api.credentials import ApiServerError
from yunion_mps.kubernetes.api.server import NODES, ApiServer, missing_node, node_failure
from yunion_mps.kubernetes.metrics import API_SERVER
from yunion_mps.kubernetes.options import PluginOptions

log = logging.getLogger(__name__)

#: Source: NVIDIA's k8s-device-plugin, README.md, section "Updating Per-Node Configuration With a Node Label".
CONFIG_LABEL = "nvidia.com/device-plugin.config"
_DEFAULT = "default"
_POLL_S = 1.0
#: How often the daemon is asked for the GPU models until it knows them, in s.
_RETRY_S = 1.0


class Choice(NamedTuple):
    """Which options the node gets."""

    #: None if it offers nothing.
    options: PluginOptions | None
    #: Why, in words; empty if there is nothing to choose from.
    cause: str


def choose(options: PluginOptions, name: str, labels: Mapping[str, str], models: Collection[str]) -> Choice:
    """Choose by the name, the node's labels and the models of its GPUs, in this order.

    name: that of `--config`; empty if it was not given
    """
    required = options.only_with_node_label
    if required and not _has_label(labels, required):
        return Choice(None, f"nothing is offered: the node does not have the label {required}")
    configs = {config.name: config for config in options.configs}
    if not configs:
        return Choice(options, "")
    requested = name or labels.get(CONFIG_LABEL, "")
    if requested and requested not in configs:
        names = ", ".join(configs)
        text = f"nothing is offered: {CONFIG_LABEL} is {requested}, but the configurations are {names}"
        return Choice(None, text)
    if requested:
        return Choice(configs[requested].options, f"configuration {requested}")
    for config in options.configs:
        model = _matching_model(sorted(models), config.models)
        if model:
            return Choice(config.options, f"configuration {config.name}, because of GPU model {model}")
    if _DEFAULT in configs:
        return Choice(configs[_DEFAULT].options, f"configuration {_DEFAULT}")
    return Choice(options, "no configuration in configs matches the node")


def _has_label(labels: Mapping[str, str], required: str) -> bool:
    """Return whether the node has the label, `NAME=VALUE` or `NAME` with any value."""
    name, has_value, value = required.partition("=")
    if name not in labels:
        return False
    return not has_value or labels[name] == value


def _matching_model(models: Iterable[str], patterns: Iterable[str]) -> str:
    """Return the first of the models that one of the patterns matches; empty if there is none."""
    for model in models:
        for pattern in patterns:
            if fnmatchcase(model, pattern):
                return model
    return ""


def parse_labels(text: str) -> dict[str, str]:
    """Return the labels of a file with `NAME=VALUE` on each line; the value may be in quotes.

    Source: Kubernetes: Downward API, section "Information available via fieldRef", metadata.labels.
    """
    labels: dict[str, str] = {}
    for line in text.splitlines():
        name, is_label, value = line.partition("=")
        if is_label:
            labels[name.strip()] = value.strip().strip('"')
    return labels


class Selector:
    """Keeps the choice current; the node's service reads it.

    `choice` is None until everything that it depends on is known.
    """

    def __init__(
        self,
        options: PluginOptions,
        name: str,
        daemon: AsyncDaemonClient,
        labels_file: str,
        api: tuple[ApiServer, str] | None,
        errors: Counter[str],
    ) -> None:
        """Choose nothing yet.

        name: the configuration that `--config` names; empty for none
        labels_file: the file with the node's labels that `--node-labels` names; empty for none
        api: the API server and the node's name; None if there is no access to it
        errors: counts failed requests by program
        """
        self._options = options
        self._name = name
        self._daemon = daemon
        self._labels_file = labels_file
        self._api = api
        self._errors = errors
        needs_labels = bool(options.only_with_node_label) or bool(options.configs and not name)
        self._follows_labels = needs_labels and bool(labels_file or api)
        if needs_labels and not self._follows_labels:
            log.info(
                "the node's label %s is not read: set kubeconfig, or start with --node-labels", CONFIG_LABEL
            )
        self._follows_models = not name and any(config.models for config in options.configs)
        self._labels: Mapping[str, str] | None = None if self._follows_labels else {}
        self._models: Collection[str] | None = None if self._follows_models else ()
        self.choice: Choice | None = None
        #: What the choice waits for, while there is none.
        self.waiting = ""
        #: Set when the choice changes, and then replaced.
        self.changed = asyncio.Event()
        self._update()

    async def run(self) -> None:
        """Follow what the choice depends on, without end."""
        await asyncio.gather(self._follow_labels(), self._follow_models(), asyncio.Event().wait())

    async def _follow_labels(self) -> None:
        if not self._follows_labels:
            return
        if not self._labels_file and self._api:
            server, node = self._api
            await self._watch_node(server, node)
        while True:
            text = read_text(self._labels_file)
            if text or self._labels is not None:  # a file that is missing at the start may still appear
                self._labels = parse_labels(text)
                self._update()
            await asyncio.sleep(_POLL_S)

    async def _watch_node(self, server: ApiServer, node: str) -> None:
        failures = Failures(log, self._errors)

        def report(error: ApiServerError) -> None:
            text = f"cannot read the labels of the node: {node_failure(error, node)}"
            failures.report(text, API_SERVER)

        async for nodes in server.watch(NODES, fields=f"metadata.name={node}", on_failure=report):
            failures.clear()
            if not nodes:
                failures.report(missing_node(node))
            for labelled in nodes.values():
                self._labels = labelled["metadata"].get("labels", {})
                self._update()

    async def _follow_models(self) -> None:
        while self._follows_models:
            try:
                gpus = (await self._daemon.call(GET_GPUS))["gpus"]
            except YunionError:
                gpus = []
            models = {gpu["name"] for gpu in gpus if gpu["name"]}
            if models:
                self._models = models
                self._update()
            if gpus and all(gpu["name"] for gpu in gpus):
                return
            await asyncio.sleep(_RETRY_S)

    def _update(self) -> None:
        if self._labels is None or self._models is None:
            text = "the labels of the node" if self._labels is None else "the daemon to name the GPUs"
            self.waiting = f"waiting for {text}, to choose the configuration"
            return
        choice = choose(self._options, self._name, self._labels, self._models)
        if choice != self.choice:
            if choice.cause:
                log.info("%s", choice.cause)
            self.choice = choice
            self.changed.set()
            self.changed = asyncio.Event()
