"""The program yunion-mps-kubelet-plugin: its command line, and its life from the start to a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import click

from yunion_mps.core.errors import YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.core.program import print_error, program_command, run_command
from yunion_mps.core.tasks import first_of
from yunion_mps.host.log import set_up_log
from yunion_mps.host.malloc import tune_malloc
from yunion_mps.host.systemd import Notifier
from yunion_mps.kubernetes.api.credentials import Kubeconfig
from yunion_mps.kubernetes.features import is_foreign_feature_file
from yunion_mps.kubernetes.node import (
    PROGRAM,
    NodeService,
    config_error,
    dra_credentials,
    find_api_server,
    kubernetes_node_name,
)
from yunion_mps.kubernetes.node_lock import run_alone
from yunion_mps.kubernetes.options import PluginOptions, read_options

_HELP = """\
Offer the MPS devices of this host to Kubernetes, as a device plugin or a DRA driver.

The plugin runs in the foreground, and is normally started by systemd:
systemctl enable --now yunion-mps-kubelet-plugin

It reads /etc/yunion/kubelet-plugin.yml, and needs a running yunion-mps-daemon and kubelet; it waits for both.
"""
_STATUSES = """\b
Exit status:
  0 stopped cleanly; 1 failure; 2 wrong usage; 6 invalid configuration
"""
#: What a plugin reports while it waits for another one to end.
_OTHER_PLUGIN = f"""\
another {PROGRAM} serves this node; find it with `systemctl status {PROGRAM}` or \
`kubectl get pods -A -l app.kubernetes.io/name={PROGRAM} --field-selector spec.nodeName={{node}}`, \
and stop one of the two"""


async def run_plugin(options: PluginOptions, paths: Paths, name: str = "", labels_file: str = "") -> None:
    """Serve the node until SIGTERM or SIGINT, once no other plugin serves it.

    `name` and `labels_file` are the program's `--config` and `--node-labels`.

    Raises HostError if the kubelet's directory is removed or replaced.
    """
    notifier = Notifier()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    notifier.ready("waiting for the kubelet")
    node = NodeService(options, paths, notifier, name=name, labels_file=labels_file)
    other = _OTHER_PLUGIN.format(node=kubernetes_node_name(options))
    await first_of(run_alone(paths.device_plugins, other, notifier.status, node.run), stop.wait())


def _check(options: PluginOptions, paths: Paths, name: str, labels_file: str) -> None:
    """Raise ConfigError if the configuration cannot work on this host.

    What a label or the GPUs of the node choose is only checked once it is chosen.
    """
    if options.only_with_node_label and not labels_file and find_api_server(options, paths) is None:
        text = "onlyWithNodeLabel is set, but the node's labels cannot be read"
        raise config_error(paths, text, "set kubeconfig, or start the plugin with --node-labels FILE")
    if options.configs and not name:
        return
    chosen = options
    for config in options.configs:
        if config.name == name:
            chosen = config.options
    if chosen.dra:
        dra_credentials(chosen, paths)
    file = chosen.feature_file
    if file and is_foreign_feature_file(paths.under(file)):
        text = f"featureFile is {file}, which exists and is not a feature file of this plugin"
        raise config_error(paths, text, "remove that file, or set another path")


def _check_kubeconfig(options: PluginOptions, paths: Paths) -> None:
    """Raise ConfigError if the file cannot be used. Without --check, the plugin waits for it instead."""
    if options.kubeconfig:
        try:
            Kubeconfig(options.kubeconfig).access()
        except YunionError as error:
            raise config_error(paths, f"kubeconfig: {error.message}", "correct it") from None


def plugin_command() -> click.Command:
    """Return the program with its options; its callback raises YunionError."""

    def start(*, check: bool, config: str, node_labels: str) -> None:
        paths = Paths.from_environment()
        options = read_options(paths)
        names = [config.name for config in options.configs]
        if config and config not in names:
            known = f"the configurations are {', '.join(names)}" if names else "configs is not set"
            raise click.BadParameter(f"there is no configuration {config}: {known}", param_hint="'--config'")
        _check(options, paths, config, node_labels)
        if check:
            _check_kubeconfig(options, paths)
        else:
            tune_malloc()
            set_up_log("info")
            logging.getLogger("grpclib").setLevel(logging.WARNING)  # it reports each call that a peer ends
            asyncio.run(run_plugin(options, paths, config, node_labels))

    options = (
        click.option("--check", is_flag=True, help="Check the configuration, and exit."),
        click.option(
            "--config", default="", metavar="NAME", help="The configuration to use, of those in configs."
        ),
        click.option(
            "--node-labels", default="", metavar="FILE",
            help="A file with the node's labels, NAME=VALUE on each line, instead of the API server.",
        ),
    )  # fmt: skip
    return program_command(PROGRAM, start, _HELP, _STATUSES, options)


def main() -> None:
    try:
        run_command(plugin_command(), PROGRAM)
    except YunionError as error:
        sys.exit(print_error(PROGRAM, error))
