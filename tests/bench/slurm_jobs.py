"""Jobs of a real Slurm: `srun` with a device, without one, and on a node without our hooks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from bench.running import running
from bench.values import BenchError, Line, Rounds, Settings
from engines.slurm import HOOKS, VERSIONS, Slurm
from integration.daemon_host import eventually

_FLOOR = "srun without hooks"


def lines(settings: Settings) -> Iterator[Line]:
    if os.geteuid() != 0:
        raise BenchError("slurmd is only started by root")
    for version in VERSIONS:
        with running(1) as daemon, Slurm(daemon.host, version) as slurm:
            slurm.install().start()
            rounds = Rounds("ms")
            steps = [
                ("bare", lambda: _srun_ms(slurm, with_hooks=False)),
                ("plain", lambda: _srun_ms(slurm)),
                ("device", lambda: _srun_ms(slurm, "--gres=gpu:mps:1")),
            ]
            rounds.run(settings.rounds(20, 3), steps)
        for name, what in (("plain", "without a device"), ("device", "with a device")):
            yield Line(f"srun {what}, Slurm {version}", rounds.of(name), rounds.of("bare"), _FLOOR)


def _srun_ms(slurm: Slurm, *words: str, with_hooks: bool = True) -> float:
    """From the start of srun until its end; then waits until the node is idle."""
    for hook in HOOKS.values():
        if with_hooks:
            slurm.write_hook(hook)
        else:
            slurm.write_script(hook, "exit 0\n")
    begin_s = time.perf_counter()
    done = slurm.srun(*words, "printenv", *(["YUNION_MPS_DEVICE"] if words else ["PATH"]))
    taken_ms = (time.perf_counter() - begin_s) * 1000
    if done.returncode:
        raise BenchError(f"srun failed: {done.stderr}")
    eventually(lambda: slurm.state() == "idle", "an idle node")
    return taken_ms
