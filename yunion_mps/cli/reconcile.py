"""`yunion-mps lease reconcile`: ends leases of a scheduler whose jobs may have ended unnoticed."""

from __future__ import annotations

import re

import click

from yunion_mps.cli.options import for_option
from yunion_mps.cli.output import output_option, print_notice, show, wrapped
from yunion_mps.core.enums import SLURM
from yunion_mps.core.paths import Paths
from yunion_mps.core.text import count
from yunion_mps.slurm.job import JOB_ID
from yunion_mps.slurm.job_leases import JobLeases

_FIELDS = ("id", "name", "devices")


@click.command("reconcile", short_help="End the leases of a scheduler's ended jobs.")
@for_option("Consider only the leases of this scheduler's jobs, named ENGINE:JOB", [SLURM], required=True)
@click.option("--live", required=True, metavar="JOB[,JOB]...", help="Keep the leases of these jobs.")
@output_option
def reconcile_leases(engine: str, live: str, output: str) -> None:
    """End the leases of all jobs of a scheduler, except those that are live.

    Only leases that are named after a job and do not expire are ended, and only if no process uses their
    devices. If no job is live, write --live "".

    \b
    Examples:
      yunion-mps lease reconcile --for slurm --live 17,18
      set -e; jobs=$(squeue -h -w "$(hostname -s)" -o %A)
      jobs=$(echo $jobs | tr ' ' ,)
      yunion-mps lease reconcile --for slurm --live "$jobs"
    """
    del engine  # there is only one
    jobs = [job.strip() for job in live.split(",")] if live.strip() else []
    for job in jobs:
        if not re.fullmatch(JOB_ID, job):  # a typo must not end the leases of all jobs
            raise click.UsageError(f"--live: {job!r} is not a job id: use numbers such as 17,18.")
    ended = JobLeases(Paths.from_environment(), print_notice).reconcile(lambda: jobs).ended
    show({"leases": ended}, output, _FIELDS, ended, lambda: wrapped(f"{count(len(ended), 'lease')} ended."))
