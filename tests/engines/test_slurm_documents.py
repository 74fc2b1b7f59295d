"""docs/slurm*.md: Slurm takes each request and setting of the pages, and commands print what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from documents import code_blocks
from engines.slurm import HOOKS, Slurm
from engines.test_slurm_mig import DIVISIONS
from integration.daemon_host import Daemon
from integration.lease_host import ADDRESSES, leased_addresses
from simhost import SimHost
from simhost.environment import CHECKOUT

#: Both pages, the one for the start first.
PAGE = "".join((CHECKOUT / f"docs/{name}.md").read_text() for name in ("slurm", "slurm-operations"))
V100, H100 = {"kind": "v100"}, {"kind": "h100"}
#: The hosts of the examples of gres.conf, in the page's order: the GPUs, their entries, and an option.
EXAMPLES: dict[str, tuple[list[dict[str, str]], list[object], list[str]]] = {
    "shares": ([V100], [4], []),
    "types": ([V100, H100, H100], [4, DIVISIONS[1], DIVISIONS[2]], []),
    "shards": ([V100], [4], ["--shards"]),
}


def blocks_with(text: str) -> list[list[str]]:
    """The page's blocks of code with this text, as their lines without comments at their end."""
    blocks = [block.text for block in code_blocks(PAGE) if text in block.text]
    return [[line.partition("  #")[0].strip() for line in block.splitlines()] for block in blocks]


def lines_without_open_values(lines: list[str]) -> list[str]:
    """The lines for Slurm's files, without the values that `gres-conf` leaves to the administrator."""
    named = [line for line in lines if line.startswith(("NodeName=", "GresTypes="))]
    return [line.replace(" CPUs=… RealMemory=…", "") for line in named]


@pytest.mark.parametrize("example", EXAMPLES)
def test_gres_conf_prints_the_lines_of_the_page(example: str) -> None:
    gpus, entries, options = EXAMPLES[example]
    expected = lines_without_open_values(blocks_with("Name=gpu Type=")[[*EXAMPLES].index(example)])
    with SimHost.create(gpus) as host, Daemon(host) as daemon:
        host.divide(*entries)
        daemon.configure()
        daemon.start().wait_ready()
        done = host.run(["yunion-mps", "slurm", "gres-conf", "--node", "gpu-01", *options], check=True)
        printed = lines_without_open_values(
            [line.replace(str(host.root), "").removeprefix("# ") for line in done.stdout.splitlines()]
        )
    assert len(expected) >= 2
    assert [line for line in printed if line in expected] == expected
    assert [line for line in printed if line not in expected] in ([], ["GresTypes=gpu"])


@pytest.mark.gpus(V100)
def test_slurm_takes_the_settings_of_the_page(slurm: Slurm) -> None:
    ((*lines,),) = blocks_with("TaskProlog=")
    settings = dict(line.split("=", 1) for line in lines)
    for name, hook in HOOKS.items():
        program = Path(settings.pop(name))
        assert (program.name, (CHECKOUT / "libexec" / program.name).exists()) == (f"slurm-{hook}", True)
    slurm.set(**settings)
    shown = slurm.ask("scontrol", "show", "config")
    for name, value in settings.items():
        assert re.search(rf"^{name} +=.*{value}", shown, re.MULTILINE | re.IGNORECASE), shown


@pytest.mark.gpus(V100)
def test_a_job_prints_what_the_page_says(slurm: Slurm) -> None:
    (lines,) = blocks_with("$ srun")
    command, *told = lines
    done = slurm.run(*command.removeprefix("$ ").split())
    assert done.stdout.split() == told, f"{done}{slurm.logs()}"


@pytest.mark.gpus(V100)
def test_a_job_is_stopped_safely_as_the_page_says(slurm: Slurm, daemon: Daemon) -> None:
    ((command,),) = blocks_with("--safe-stop")
    daemon.socket_path.chmod(0o666)  # the user is in the group yunion-mps
    (slurm.folder / "train.py").write_text("import os; print(os.environ['YUNION_MPS_DEVICE'])")
    done = slurm.run(*command.split(), cwd=slurm.folder)
    assert done.stdout == f"{ADDRESSES[0]}\n", f"{done}{slurm.logs()}"


@pytest.mark.gpus(V100, H100, H100)
def test_slurm_takes_the_requests_of_the_page(daemon: Daemon, version: str) -> None:
    """Requests for shards are left out. Slurm takes --gpus-per-task only with a number of tasks."""
    requests = set(re.findall(r"--(?:gres|gpus-per-task)=[a-z0-9:.-]+[a-z0-9](?=[` ])", PAGE))
    requests = {one for one in requests if "shard" not in one}
    assert len(requests) >= 8
    daemon.host.divide(4, DIVISIONS[1], DIVISIONS[2])
    daemon.configure(cuda_mps_combine=2)
    daemon.start().wait_ready()
    with Slurm(daemon.host, version) as slurm:
        slurm.install().start()
        failed = {one for one in requests if slurm.srun("-n1", one, "true").returncode}
        assert failed == ({"--gres=gpu:1g.10gb"} if version == "22.05" else set()), slurm.logs()


@pytest.mark.gpus(V100)
def test_leases_are_taken_and_ended_by_hand_as_the_page_says(daemon: Daemon) -> None:
    ((take,),) = blocks_with("yunion-mps lease take slurm:")
    ((reconcile,),) = blocks_with("yunion-mps lease reconcile")
    take = take.replace("--user alice", "--user nobody")  # a user that every machine has
    daemon.start().wait_ready()
    ids = set()
    for _ in range(2):
        done = daemon.host.run([*take.split(), "-o", "json"], check=True)
        ids.add(json.loads(done.stdout)["id"])
    assert (len(ids), leased_addresses(daemon)) == (1, ADDRESSES[:1])
    for live, left in (("16,17", ADDRESSES[:1]), ("16,18", [])):
        daemon.host.run(reconcile.replace("JOB,JOB", live).split(), check=True)
        assert leased_addresses(daemon) == left
