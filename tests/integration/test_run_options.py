"""What each option of `yunion-mps run` gives its command, variable by variable, and how `env` prints it."""

from __future__ import annotations

import json
import os
import signal

import pytest

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon, eventually
from integration.lease_host import leased_addresses, run_job, start_job
from simhost import SimHost

_DEVICES = """\
devices:
- {path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 4}
- {path: /dev/dri/renderD129, type: NVIDIA_MPS, virtual_number: 4}
- path: /dev/dri/renderD130
  type: NVIDIA_MPS
  slices:
  - {memory: 8GiB, thread_percentage: 50}
  - {memory: 4GiB, thread_percentage: 25, priority: below_normal}
- {path: /dev/dri/renderD131, type: NVIDIA_MPS, virtual_number: 0, memory_unit: 128MiB}
"""


@pytest.fixture
def host(make_host: MakeHost) -> SimHost:
    """Four Tesla V100: two divided by four, one into two unequal slices, and one open for any memory."""
    host = make_host([{"kind": "v100", "count": 4}])
    (host.root / "etc/yunion/host_container_device.yml").write_text(f"gpu_memory_unit: 128MiB\n{_DEVICES}")
    return host


@pytest.fixture
def divided(make_daemon: MakeDaemon, host: SimHost) -> Daemon:
    """A daemon on that host which gives two devices as one budget."""
    daemon = make_daemon(host)
    daemon.configure(cuda_mps_combine=2)
    return daemon.start().wait_ready()


#: GPUs by their place on the host, then threads in percent, memory limits, devices, and priority.
_GIVEN = {
    "": ("2", "50", "0=8192M", "00:08.0-0", None),
    "--device 00:06.0-2": ("0", "25", "0=4096M", "00:06.0-2", None),
    "--device 00:08.0-0": ("2", "50", "0=8192M", "00:08.0-0", None),
    "--device 00:08.0-1": ("2", "25", "0=4096M", "00:08.0-1", "1"),
    "--gpu 00:07.0": ("1", "25", "0=4096M", "00:07.0-0", None),
    "--spread": ("1", "25", "0=4096M", "00:07.0-0", None),
    "--count 2": ("0", "50", "0=8192M", "00:06.0-0,00:06.0-1", None),
    "--count 2 --gpu 00:07.0": ("1", "50", "0=8192M", "00:07.0-0,00:07.0-1", None),
    "--count 2 --across": ("20", "25", "0=8192M,1=4096M", "00:08.0-0,00:06.0-0", None),
    "--count 3 --across --spread": (
        "120",
        "25",
        "0=4096M,1=8192M,2=4096M",
        "00:07.0-0,00:08.0-0,00:06.0-0",
        None,
    ),
    "--gpu-mem 3GiB": ("3", "18.7", "0=3072M", "00:09.0-m0", None),
    "--gpu-mem 3GiB --count 2": ("3", "37.4", "0=6144M", "00:09.0-m0,00:09.0-m1", None),
    "--gpu-mem 3GiB --gpu 00:08.0": ("2", "25", "0=4096M", "00:08.0-1", "1"),
    "--gpu-mem-units 3": ("3", "2.3", "0=384M", "00:09.0-m0", None),
}


def test_every_option_gives_its_own_environment_and_nothing_else(divided: Daemon) -> None:
    host = divided.host
    assert divided.control("get_default_device_pinned_mem_limit 0") == ["8G"], "what two may have together"
    before = dict(host.env)
    for options, expected in _GIVEN.items():
        taken = start_job(host, "--device", "00:06.0-3") if "--spread" in options else None
        done = run_job(host, *options.split(), "--", "env", "-0")
        if taken:
            taken.communicate()
        found = dict(entry.partition("=")[::2] for entry in done.stdout.split("\0") if entry)
        new = {name: value for name, value in found.items() if before.get(name) != value}
        assert len(new.pop("YUNION_MPS_LEASE")) == 36
        gpus, threads, memory, devices, priority = expected
        assert new == {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": threads,
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": memory,
            "CUDA_MPS_PIPE_DIRECTORY": str(divided.pipe_directory),
            "CUDA_VISIBLE_DEVICES": ",".join(host.gpus[int(place)].uuid for place in gpus),
            "YUNION_MPS_DEVICE": devices,
            **({"CUDA_MPS_CLIENT_PRIORITY": priority} if priority else {}),
        }, options
        eventually(lambda: leased_addresses(divided) == [], "that all is free")


def test_dry_run_and_print_env_say_the_same_and_take_nothing(divided: Daemon) -> None:
    host = divided.host
    said = run_job(host, "--count", "2", "--dry-run").stdout
    assert said == "would use 00:06.0-0, 00:06.0-1: 8192 MiB of memory, 50 % of the SM threads\n"
    across = run_job(host, "--count", "2", "--across", "--dry-run").stdout
    of_each = "8192 MiB of 00:08.0 and 4096 MiB of 00:06.0"
    assert across == f"would use 00:08.0-0, 00:06.0-0: {of_each}, 25 % of the SM threads\n"
    printed = json.loads(run_job(host, "--count", "2", "--print-env", "-o", "json").stdout)
    assert printed["YUNION_MPS_DEVICE"] == "00:06.0-0,00:06.0-1"
    assert "YUNION_MPS_LEASE" not in printed
    assert divided.get("/v1/events?kind=lease")[1]["events"] == []


def test_env_prints_a_device_s_environment_for_its_holder(divided: Daemon) -> None:
    host = divided.host
    expected = json.loads(host.run(["yunion-mps", "env", "00:06.0-1", "-o", "json"]).stdout)
    assert expected["YUNION_MPS_DEVICE"] == "00:06.0-1"
    assert divided.get("/v1/devices/00:06.0-1")[1]["client_environment"] == expected
    for style, line in {
        "dotenv": '{}="{}"\n',
        "docker": "{}={}\n",
        "systemd": 'Environment="{}={}"\n',
    }.items():
        printed = host.run(["yunion-mps", "env", "00:06.0-1", "--output", style]).stdout
        assert printed == "".join(line.format(name, value) for name, value in expected.items())
    shell = 'eval "$(yunion-mps env 00:06.0-1)"; env -0'
    found = host.run(["sh", "-c", shell]).stdout.split("\0")
    assert {f"{name}={value}" for name, value in expected.items()} <= {*found}
    assert leased_addresses(divided) == []


def test_an_eval_without_an_environment_fails_and_no_job_behind_it_runs(divided: Daemon) -> None:
    """To eval, no text at all is a success."""
    host = divided.host
    for words in ("env 00:06.0-99", "env ''", "run --print-env --device 00:06.0-99"):
        job = host.run(["sh", "-c", f'eval "$(yunion-mps {words})" && echo ran'])
        assert (job.returncode, job.stdout) == (1, "")
        assert job.stderr.startswith("yunion-mps: "), job.stderr
    assert host.run(["yunion-mps", "env", "00:06.0-99", "-o", "json"]).stdout == ""
    typed = host.run(["script", "--quiet", "--command", "yunion-mps env 00:06.0-99", "/dev/null"])
    assert "false" not in typed.stdout, "it was not typed for a shell"


def test_a_request_waits_until_its_domain_serves_and_is_started_then(divided: Daemon) -> None:
    """A file in the place of its log directory keeps the next control daemon from being started."""
    host = divided.host
    logs = host.root / "tmp/nvidia-mps/log"
    logs.rename(logs.with_name("aside"))
    logs.write_text("")
    os.kill(divided.control_pid(), signal.SIGKILL)
    eventually(lambda: divided.status()["state"] == "failed", "that it does not")
    done = run_job(host, "--device", "00:06.0-0", "echo", "ran")
    assert (done.returncode, done.stdout) == (5, "")
    assert (
        "device 00:06.0-0 cannot be allocated now: 1 unavailable (GPU 00:06.0: its domain is " in done.stderr
    )
    done = host.run(["sh", "-ec", 'eval "$(yunion-mps env 00:06.0-0)"; echo ran'])
    assert (done.returncode, done.stdout) == (1, "")
    with host.popen(["yunion-mps", "run", "--device", "00:06.0-0", "--wait", "echo", "ran"]) as waits:
        eventually(lambda: divided.get("/v1/leases")[1]["waiting"], "that it waits")
        logs.unlink()
        assert divided.ask("POST", "/v1/reload")[0] == 200
        assert (waits.communicate()[0], waits.returncode) == ("ran\n", 0)
