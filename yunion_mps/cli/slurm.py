"""`yunion-mps slurm`: the hooks that slurm.conf names, and the lines for Slurm's configuration."""

from __future__ import annotations

import os

import click

from yunion_mps.cli.calls import call_daemon, listed_devices
from yunion_mps.cli.output import print_notice
from yunion_mps.cli.root import SuggestingGroup
from yunion_mps.core.errors import HostError
from yunion_mps.core.paths import Paths
from yunion_mps.http.operations import GET_GPUS, GET_STATUS
from yunion_mps.slurm.gres_conf import (
    gpus_for_slurm,
    gres_lines,
    install,
    node_lines,
    pending_change,
    record_of,
)
from yunion_mps.slurm.hooks import Hooks
from yunion_mps.slurm.node_state import slurm_node_name


@click.group("slurm", cls=SuggestingGroup, short_help="Let Slurm assign devices to its jobs.")
def slurm_group() -> None:
    """Let Slurm assign devices to its jobs: the lines for its configuration, and its hooks.

    Slurm starts its hooks without arguments. So slurm.conf names the files slurm-prolog, slurm-task-prolog,
    slurm-epilog and slurm-health-check in /usr/libexec/yunion-mps, which run these commands.

    \b
    Examples:
      yunion-mps slurm gres-conf
    """


@slurm_group.command("gres-conf", short_help="Print the lines for gres.conf and slurm.conf.")
@click.option("--node", metavar="NAME", help="The node's name in slurm.conf. Default: the host's short name.")
@click.option(
    "--install", "installs", is_flag=True, help="Also create and record the device nodes (root only)."
)
@click.option(
    "--shards", is_flag=True, help="Offer the devices of shared GPUs as gres/shard, and whole GPUs as gpu."
)
def gres_conf(node: str | None, installs: bool, shards: bool) -> None:
    """Print the lines for gres.conf and slurm.conf that offer this host's devices as gpu, or as shards.

    They offer the devices that are reserved for Slurm (reserved_for: slurm) or, if there are none, all that
    are not reserved. Their types are gpu:mps, gpu:time-sliced and, for whole MIG instances, the profile,
    such as gpu:1g.10gb. The comments say which device has which index in Slurm.

    With --install, the command also creates the device nodes that the lines name, now and at each boot (with
    tmpfiles.d), and records which device has which index. If the devices change, the node is drained until
    the command is repeated.

    \b
    Examples:
      yunion-mps slurm gres-conf
      yunion-mps slurm gres-conf --install >> /etc/slurm/gres.conf
      yunion-mps slurm gres-conf --shards --install
    """
    paths = Paths.from_environment()
    name = node or slurm_node_name()
    gpus = {gpu["addr"]: gpu["uuid"] for gpu in gpus_for_slurm(call_daemon(GET_GPUS)["gpus"])}
    if change := pending_change(gpus, call_daemon(GET_STATUS)["problems"]):
        message = f"gres.conf cannot be written yet: {change}"
        raise HostError(message, "repeat this once the change is in effect: yunion-mps status", change.code)
    devices = [device for device in listed_devices() if device["gpu_uuid"] in gpus.values()]
    if not devices:
        message = "this host has no devices for Slurm"
        raise HostError(
            message, "divide a GPU with virtual_number or slices: man yunion-mps-host_container_device.yml"
        )
    record = record_of(devices, shards=shards)
    if installs:
        install(record, paths)
        print_notice(f"recorded {len(devices)} devices; if they changed, restart slurmctld and slurmd")
    for index, entry in enumerate(record.entries):
        click.echo(f"# {index}: " + ", ".join(f"{device.addr} ({device.budget})" for device in entry))
    for line in gres_lines(record, name, paths):
        click.echo(line)
    click.echo("# for slurm.conf; keep the order of the types:")
    for line in node_lines(record, name):
        click.echo(f"# {line}")


def _hooks() -> Hooks:
    return Hooks(Paths.from_environment(), os.environ, print_notice)


def _end(status: int) -> None:
    raise click.exceptions.Exit(status)


@slurm_group.command("prolog", short_help="Prolog of slurm.conf: lease a job's devices.")
def prolog() -> None:
    """Lease exactly the devices that Slurm has assigned to the job, until its Epilog.

    If the node is at fault, it is drained with the reason, and the exit status is 1. If the job is at fault,
    its tasks fail, and its user sees the reason.

    \b
    Examples:
      Prolog=/usr/libexec/yunion-mps/slurm-prolog
    """
    _end(_hooks().prolog())


@slurm_group.command("task-prolog", short_help="TaskProlog of slurm.conf: set a task's environment.")
def task_prolog() -> None:
    """Print the environment of the job's devices for slurmstepd, or why the job cannot have them.

    \b
    Examples:
      TaskProlog=/usr/libexec/yunion-mps/slurm-task-prolog
    """
    status, lines = _hooks().task_prolog()
    for line in lines:
        click.echo(line)
    _end(status)


@slurm_group.command("epilog", short_help="Epilog of slurm.conf: release a job's devices.")
def epilog() -> None:
    """Release the job's devices. It is safe to repeat this.

    \b
    Examples:
      Epilog=/usr/libexec/yunion-mps/slurm-epilog
    """
    _end(_hooks().epilog())


@slurm_group.command("health-check", short_help="HealthCheckProgram of slurm.conf: drain or resume the node.")
def health_check() -> None:
    """Drain the node while Slurm's devices cannot be used, and resume it once they can.

    Only a drain whose reason begins with "yunion-mps: " is ended. Leases of jobs that Slurm no longer knows
    are released. A job that Slurm is about to kill, after scancel or at its time limit, is disconnected from
    MPS, if KillWait is at least HealthCheckInterval + 20 seconds.

    \b
    Examples:
      HealthCheckProgram=/usr/libexec/yunion-mps/slurm-health-check
    """
    _end(_hooks().health_check())
