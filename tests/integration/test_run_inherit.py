"""`yunion-mps run --inherit`: the command gets the limits of the lease, even if its environment has none."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from integration.daemon_host import Daemon
from integration.lease_host import take
from simhost.host import SHARED

pytestmark = pytest.mark.gpus({"kind": "v100", "count": 2})

NAMES = ("YUNION_MPS_DEVICE", "YUNION_MPS_LEASE")


@pytest.fixture
def mixed(daemon: Daemon) -> Daemon:
    """A daemon of a GPU that is shared through MPS and one that is time-sliced."""
    daemon.configure(cuda_mps_scope="gpu", cuda_mps_combine=2)
    daemon.host.divide(4, SHARED)
    return daemon.start().wait_ready()


def lease_of(daemon: Daemon, *addresses: str) -> dict[str, Any]:
    request = f"allow_unlimited=true&devices={','.join(addresses)}"
    return take(daemon, f"holder.name=job&holder.ttl_s=600&{request}")


def inherit(daemon: Daemon, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command that prints its environment as JSON; the caller's has only these variables of devices."""
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    words = ["yunion-mps", "run", "--inherit", "--", "python3", "-c", script]
    return daemon.host.run(words, env={**daemon.host.env, **variables})


def devices_in(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The variables of devices that the command has printed."""
    assert done.returncode == 0, done.stderr
    prefixes = ("CUDA_", "YUNION_MPS_DEVICE", "YUNION_MPS_LEASE", "YUNION_MPS_MEMORY", "XLA_")
    return {name: value for name, value in json.loads(done.stdout).items() if name.startswith(prefixes)}


@pytest.mark.parametrize("address", ["00:06.0-1", "00:07.0-1"], ids=["mps", "time-sliced"])
def test_the_limits_hold_if_only_the_lease_is_known(mixed: Daemon, address: str) -> None:
    environment = lease_of(mixed, address)["environment"]
    done = inherit(mixed, {name: environment[name] for name in NAMES})
    assert devices_in(done) == environment


@pytest.mark.parametrize("address", ["00:06.0-1", "00:07.0-1"], ids=["mps", "time-sliced"])
def test_variables_of_other_devices_are_replaced_or_dropped(mixed: Daemon, address: str) -> None:
    environment = lease_of(mixed, address)["environment"]
    stale = {
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "CUDA_MPS_PIPE_DIRECTORY": "/gone",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=90000M",
        "YUNION_MPS_MEMORY_MIB": "90000",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
    }
    done = inherit(mixed, {**stale, **{name: environment[name] for name in NAMES}})
    assert devices_in(done) == environment


def test_a_step_with_one_of_the_devices_has_its_limits(mixed: Daemon) -> None:
    addresses = ["00:06.0-0", "00:06.0-1"]
    lease = lease_of(mixed, *addresses)
    done = inherit(mixed, {"YUNION_MPS_DEVICE": addresses[1], "YUNION_MPS_LEASE": lease["id"]})
    expected = mixed.get(f"/v1/devices/{addresses[1]}")[1]["client_environment"]
    assert devices_in(done) == {**expected, "YUNION_MPS_LEASE": lease["id"]}


def test_without_the_lease_an_incomplete_environment_is_refused(mixed: Daemon) -> None:
    environment = lease_of(mixed, "00:06.0-0")["environment"]
    without_lease = {name: value for name, value in environment.items() if name != "YUNION_MPS_LEASE"}
    assert devices_in(inherit(mixed, without_lease)) == without_lease
    done = inherit(mixed, {"YUNION_MPS_DEVICE": "00:06.0-0"})
    assert (done.returncode, done.stdout) == (1, "")
    lacking = "CUDA_VISIBLE_DEVICES, CUDA_MPS_PIPE_DIRECTORY, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    assert f"--inherit: this environment lacks {lacking}" in done.stderr
    assert "keep the job's environment" in done.stderr


def test_without_the_daemon_only_a_complete_environment_is_used(mixed: Daemon) -> None:
    environment = lease_of(mixed, "00:06.0-0")["environment"]
    mixed.kill()
    assert devices_in(inherit(mixed, environment)) == environment
    done = inherit(mixed, {name: environment[name] for name in NAMES})
    assert (done.returncode, done.stdout) == (1, "")
    assert "so the command would have no limits; the lease cannot be read: " in done.stderr


def test_without_mps_a_command_may_choose_among_the_gpus_of_its_lease(daemon: Daemon) -> None:
    daemon.host.divide(SHARED, SHARED)
    daemon.start().wait_ready()
    environment = lease_of(daemon, "00:06.0-0", "00:07.0-0")["environment"]
    second = {"CUDA_VISIBLE_DEVICES": daemon.host.gpus[1].uuid}
    assert devices_in(inherit(daemon, {**environment, **second})) == {**environment, **second}
    unknown = inherit(daemon, {**environment, "CUDA_VISIBLE_DEVICES": "MIG-destroyed"})
    assert (unknown.returncode, unknown.stdout) == (1, "")
    hint = "set CUDA_VISIBLE_DEVICES to one of them, or unset it to use all"
    assert "names MIG-destroyed, but the GPUs of this lease are GPU-" in unknown.stderr
    assert hint in unknown.stderr
