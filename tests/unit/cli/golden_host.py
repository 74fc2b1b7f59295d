"""One realistic host for the golden outputs, at 13:45 on a day in November.

Two H100 with jobs, a Tesla P40 on which nothing is enforced, a GPU that is lost, and requests that wait.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from yunion_mps.core.exposition import PLAIN_TYPE
from yunion_mps.core.models import Event, Holder, Lease, PcieLink
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import GPU_LOST, NO_REASON, OVER_BUDGET, SERVER_FAILED, Reason
from yunion_mps.core.units import rfc3339
from yunion_mps.inventory.nvml import GpuLoad, Load
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.match import select
from yunion_mps.leases.refusals import refuse_infeasible
from yunion_mps.leases.request import LeaseRequest, candidates_of
from yunion_mps.metrics.exporter import text_of
from yunion_mps.observe.holdings import holder_label
from yunion_mps.observe.observer import DomainUsage, GpuUsage, HostUsage
from yunion_mps.observe.usage import DeviceUsage, LatestPoll
from yunion_mps.service.facts import ClockReadings, LeaseFacts

from simhost import SimHost
from unit import builders
from unit.cli.conftest import Cli, Done
from unit.http import fake_services, snapshots
from unit.http.server_host import ServerHost
from unit.metrics.metric_facts import facts
from waiting import readable

if TYPE_CHECKING:
    from typing_extensions import Self

Json = Any

NOW_S = 1795182300.0
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
#: The program at that moment, on a host of that name. It forks for each command that it receives.
PROGRAM = f"""
import importlib, json, os, socket, sys, time
time.time = lambda: {NOW_S}
os.uname = lambda: os.uname_result(("Linux", "gpu-01", "6.1", "", "x86_64"))
from yunion_mps.cli import main, root
for module, _ in root.COMMANDS.values():
    importlib.import_module(f"yunion_mps.cli.{{module}}")
with socket.socket(fileno=0) as commands:
    while True:
        request, streams, _, _ = socket.recv_fds(commands, 1 << 20, 3)
        if not request:
            break
        command = os.fork()
        if command == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.closerange(3, max(streams) + 1)
            sys.stdin = open(0)
            sys.stdout = open(1, "w")
            sys.stderr = open(2, "w")
            asked = json.loads(request)
            sys.argv = ["yunion-mps", *asked["arguments"]]
            os.environ.clear()
            os.environ.update(asked["environment"])
            main()
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(command, 0)
        commands.send(str(os.waitstatus_to_exitcode(status)).encode())
"""
H100 = [
    builders.gpu(
        number,
        pci_address=address,
        uuid=f"GPU-{number + 1}f0c2a8e-5b1d-4e6f-9a37-0d4c8b21e59{number}",
        compute_mode="Exclusive_Process",
        numa_node=number,
        link=PcieLink("5.0", "32GT/s", 16, "63.02 GB/s"),
    )
    for number, address in enumerate(("0000:17:00.0", "0000:65:00.0"))
]
P40 = snapshots.P40._replace(pci_address="0000:b3:00.0", nvml_index=2, minor=2, numa_node=1)
LOST = snapshots.SILENT._replace(pci_address="0000:e3:00.0", reason=Reason("the GPU is lost", GPU_LOST))
_TRAIN = "python train.py --config configs/llama-7b.yaml --batch-size 64 --epochs 3"
_SERVE = "python -m vllm.entrypoints.openai.api_server --model mistralai/Mistral-7B-v0.3 --port 8000"


def _ago(seconds: float) -> str:
    return rfc3339(NOW_S - seconds)


#: What the last poll found: the peak memory of each device of a lease, its SM utilization, and a client's.
_USE: Json = {
    1: [(20389, 43), (17001, 43)],
    2: [(None, None)],
    3: [(18400, 48)],
    4: [(6000, 97)],
    5: [(None, None)],
}
_SM = {48213: 31, 48390: 12, 51877: 48, 61044: 97, 3301: 2}


_USED = {
    "17:00.0-0": DeviceUsage(20389, 2, 43),
    "17:00.0-1": DeviceUsage(15451, 2, 43),
    "65:00.0-1": DeviceUsage(18322, 1, 48),
    "b3:00.0-1": DeviceUsage(6000, 1, 97),
}


def _lease(number: int, user: str, ago_s: float, devices: dict[str, int], **more: Json) -> Json:
    gpus = list(dict.fromkeys(address.rpartition("-")[0] for address in devices))
    enforced = gpus != [P40.address]
    found = {
        **fake_services.LEASE,
        "id": f"{number}c1f0e7a-8a52-4f0e-8b5e-3f9d2a6c1b44",
        "user": user,
        "uid": 1000 + number,
        **fake_services.lease_of(devices, _USE[number]),
        "thread_percentage": 25 * len(devices),
        "since": _ago(ago_s),
        "budget_enforced": enforced,
        "unenforced_gpus": [] if enforced else gpus,
        "binding": "process",
        "name": None,
        "expires": None,
        "container": None,
        "container_id": None,
        "cdi": None,
        "environment": {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(25 * len(devices)),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={sum(devices.values())}M",
            "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps/pipe",
            "CUDA_VISIBLE_DEVICES": next(g.uuid for g in (*H100, P40) if g.address == gpus[0]),
            "YUNION_MPS_DEVICE": ",".join(devices),
            "YUNION_MPS_LEASE": f"{number}c1f0e7a-8a52-4f0e-8b5e-3f9d2a6c1b44",
        },
    }
    return {**found, **more}


LEASES = [
    _lease(1, "alice", 2 * _DAY + 3 * _HOUR, {"17:00.0-0": 20389, "17:00.0-1": 20389}, pid=48213,
           command=_TRAIN),
    _lease(2, "bob", 10 * _MINUTE, {"65:00.0-0": 20389}, pid=None, command=None, binding="name",
           name="job-17", expires=_ago(-50 * _MINUTE), cdi="yunion.io/mps=2c1f0e7a"),
    _lease(3, "carol", 5 * _HOUR + 12 * _MINUTE, {"65:00.0-1": 20389}, pid=51877, command=_SERVE,
           binding="container", container="vllm-prod", container_id="ab" * 32),
    _lease(4, "dave", 42, {"b3:00.0-1": 5760}, pid=61044, command="./simulate --steps 100"),
    _lease(5, "erin", 2 * _HOUR, {"65:00.0-2": 20389}, pid=None, command=None, binding="name",
           name="nightly/2026-11-23/llama-7b-finetune/evaluation@worker-0", expires=_ago(-20 * _HOUR)),
]  # fmt: skip


def _client(number: int, gpu: str, memory_mib: int, ago_s: float, **more: Json) -> Json:
    lease = LEASES[number - 1] if number else {}
    known = {name: lease.get(name) for name in ("pid", "uid", "user", "command", "container", "container_id")}
    return {
        **fake_services.CLIENT,
        **known,
        "started": _ago(ago_s),
        "mps": True,
        "server": 40110,
        "domain": "host",
        "device": ",".join(lease.get("devices", [])) or None,
        "gpus": [gpu],
        "memory_by_gpu_mib": [memory_mib],
        "memory_used_mib": memory_mib,
        "sm_utilization_by_gpu": [_SM.get(int(more.get("pid") or known["pid"] or 0))],
        **more,
    }


CLIENTS = [
    _client(1, "17:00.0", 31744, 2 * _DAY + 3 * _HOUR),
    _client(1, "17:00.0", 4096, 2 * _DAY + 3 * _HOUR, pid=48390, command=f"{_TRAIN} --worker 1"),
    _client(3, "65:00.0", 18322, 5 * _HOUR + 11 * _MINUTE),
    _client(4, "b3:00.0", 6000, 40),
    _client(0, "65:00.0", 512, 3 * _MINUTE, pid=61102, uid=1005, user="erin", command="python notebook.py"),
    _client(0, "b3:00.0", 300, 11 * _DAY, pid=3301, uid=1009, user="mallory", command="./old-job", mps=False,
            server=None),
]  # fmt: skip
WAITING = [
    {**fake_services.QUEUED_REQUEST, "pid": 61200, "uid": 1006, "user": "frank",
     "requested": "4 devices on one GPU", "command": "yunion-mps run --count 4 --wait",
     "since": _ago(12 * _MINUTE), "reason": "4 devices on one GPU cannot be allocated now: 2 of 4 leased"},
    {**fake_services.QUEUED_REQUEST, "pid": None, "uid": 1002, "user": "bob", "name": "job-18",
     "command": None, "requested": "1 device of GPU 17:00.0", "since": _ago(50),
     "reason": "1 device of GPU 17:00.0 cannot be allocated now: 2 of 4 leased; 2 reserved for earlier "
               "requests"},
]  # fmt: skip
WAITING_CLIENT = {
    **fake_services.WAITING_CLIENT, "pid": 61310, "uid": 1007, "user": "grace", "command": "python eval.py",
    "started": _ago(30), "since": _ago(25), "server": 40110, "server_user": "root", "domain": "host",
}  # fmt: skip
_EVENTS = [
    (2 * _DAY + 3 * _HOUR, Event("info", "lease", "17:00.0-0,17:00.0-1", "granted to alice (PID 48213)")),
    (_HOUR, Event("error", "gpu", "e3:00.0", "lost", "Xid 79: GPU has fallen off the bus",
                  "its devices are unavailable; the other GPUs are not affected", GPU_LOST)),
    (20 * _MINUTE, Event("error", "client", "host", "MPS server (PID 39888) is in state FAULT",
                         "a client of it failed", "its jobs have failed", SERVER_FAILED)),
    (30, Event("warning", "client", "b3:00.0-1", "uses 6000 of 5760 MiB", "", "", OVER_BUDGET)),
]  # fmt: skip


#: The same host as NVML and its files show it.
_DESCRIPTION: Json = {
    "driver": {"version": "535.261.03", "cuda": "12.2"},
    "gpus": [
        *(
            {
                "kind": kind,
                "pci": gpu.pci_address,
                "uuid": gpu.uuid,
                "numa_node": gpu.numa_node,
                "compute_mode": "exclusive_process",
            }
            for kind, gpu in (("h100", H100[0]), ("h100", H100[1]), ("tesla-p40", P40))
        ),
        {"kind": "h100", "pci": LOST.pci_address, "lost": True},
    ],
}
#: Runs the program on that host: at a place, and with a /dev/shm, that are alike everywhere.
_ON_HOST = 'mount --bind "$0" /mnt && mount -t tmpfs -o size=1g tmpfs /mnt/dev/shm && exec "$@"'


class ForkedCommand:
    """A command that runs in a fork of the program: what the tests use of `subprocess.Popen`."""

    def __init__(self, program: socket.socket, arguments: Sequence[str], **options: Any) -> None:
        self._program = program
        self.returncode = -1
        self.stdout = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self.stderr = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        with open(os.devnull) as nothing:
            streams = [options.get("stdin", subprocess.DEVNULL), options.get("stdout"), options.get("stderr")]
            files = [nothing.fileno(), self.stdout.fileno(), self.stderr.fileno()]
            for place, stream in enumerate(streams):
                if stream is not None and stream >= 0:  # a terminal
                    files[place] = stream
            request = {"arguments": arguments, "environment": options["env"]}
            socket.send_fds(program, [json.dumps(request).encode()], files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()

    def wait(self, timeout: float) -> int:
        assert readable(self._program.fileno(), timeout)
        self.returncode = int(self._program.recv(16))
        self.stderr.seek(0)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.wait(timeout)
        self.stdout.seek(0)
        return self.stdout.read(), self.stderr.read()


class ProgramAtThatMoment(Cli):
    """Runs each command in a process of its own, which is a fork of one that has loaded the program."""

    __call__ = Cli.process

    def __init__(self, root: str, host: ServerHost, commands: socket.socket) -> None:
        super().__init__(root, host)
        self._commands = commands

    def start(self, *arguments: str, **options: Any) -> Any:
        return ForkedCommand(self._commands, arguments, **{"env": self.env, **options})

    def done_on_terminal(self, columns: int, *arguments: str) -> Done:
        return self.process_on_terminal(columns, *arguments)


@contextmanager
def golden_host() -> Iterator[Cli]:
    found = snapshots.snapshot(*H100, P40, LOST, replicas=4, multiuser=True)
    with _simulated() as sim, ServerHost(found, paths=Paths(str(sim.root))) as host:
        devices = {device.addr: device for device in found.plan.devices}
        ledger = Ledger()
        for one in LEASES:
            leased = tuple(devices[name] for name in one["devices"])
            ledger.add(Lease(one["id"], leased, Holder("process", one["uid"]), NOW_S))
        candidates = candidates_of(found, {str(gpu.uuid): NO_REASON for gpu in (*H100, P40)})

        def check(request: LeaseRequest) -> None:
            refuse_infeasible(select(request, candidates))
            Allocator(ledger).choose(request, candidates)

        names = {lease.holder: holder_label(one) for lease, one in zip(ledger.leases.values(), LEASES)}
        began_s = NOW_S - 9 * _DAY - 4 * _HOUR
        host.become(pid=40001, started_s=began_s, ledger=ledger, name_holder=names.__getitem__)
        host.leases.check = check
        load = {
            H100[0].uuid: GpuLoad(44, 35900, 58, 402.2, 700.0),
            H100[1].uuid: GpuLoad(48, 18902, 54, 371, 700),
        }
        load[P40.uuid] = GpuLoad(99, 6301, 71, 187.6, 250.0)
        host.service.usage.latest = LatestPoll(Load({str(uuid): one for uuid, one in load.items()}), _USED)
        host.leases.listed = {"leases": LEASES, "waiting": WAITING, "total": len(LEASES)}
        host.leases.granted = LEASES[1]
        host.metrics = lambda _: _metrics(host)
        server = {**fake_services.SERVER, "pid": 40110, "user": "root", "uid": 0, "started": _ago(_DAY)}
        host.clients.listed = fake_services.clients(*CLIENTS, servers=(server,), waiting=(WAITING_CLIENT,))
        host.reloader.reloaded = json.loads(json.dumps(fake_services.PLANNED).replace("00:06.0", "17:00.0"))
        ended = [client for client in CLIENTS if client["mps"]]
        host.reloader.planned = {
            **host.reloader.reloaded,
            "clients": ended,
            "confirmation": "7d41f02c9be83a65",
        }
        host.event_time_s = NOW_S
        for ago_s, event in _EVENTS:
            host.record(event, NOW_S - ago_s)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            cli = ProgramAtThatMoment("/mnt", host, ours)
            cli.env.update(
                TZ="UTC", LD_LIBRARY_PATH="/mnt/lib", PATH="/mnt/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            )
            program = (sys.executable, "-c", PROGRAM)
            command = ("unshare", "--mount", "sh", "-c", _ON_HOST, str(sim.root), *program)
            with subprocess.Popen(command, env=cli.env, stdin=theirs.fileno()) as process:
                theirs.close()
                try:
                    yield cli
                finally:
                    ours.close()
            assert process.returncode == 0


@contextmanager
def leasing(cli: Cli, lease: Json) -> Iterator[None]:
    """Its requests get this lease, whose control daemon can be reached from inside."""
    before = cli.host.leases.granted
    environment = {**lease["environment"], "CUDA_MPS_PIPE_DIRECTORY": "/mnt/pipe"}
    cli.host.leases.granted = {**lease, "environment": environment}
    yield
    cli.host.leases.granted = before


async def _metrics(host: ServerHost) -> tuple[str, bytes]:
    """The metrics of that host, but for the process that serves them."""
    service = host.service
    gpus = {
        str(H100[0].uuid): GpuUsage(2, 0),
        str(H100[1].uuid): GpuUsage(2, 0),
        str(P40.uuid): GpuUsage(1, 1),
    }
    found = facts(
        host.snapshot,
        clocks=ClockReadings(NOW_S, 9 * _DAY),
        status=fake_services.status_of(service, *LEASES, clients=host.clients.listed),
        gpus=service.gpus()["gpus"],
        devices=service.all_devices(),
        unusable=service.unusable_gpus(),
        queue=LeaseFacts({"process": 2, "name": 1, "container": 1}, len(WAITING), 12 * _MINUTE),
        events={("lease", "info"): 1, ("gpu", "error"): 1, ("client", "error"): 1, ("client", "warning"): 1},
        use=HostUsage(NOW_S - 2, gpus, _USED, {"host": DomainUsage(1, 5, NOW_S - 9 * _DAY)}),
        latest=service.usage.latest,
        peaks_mib={"17:00.0-0": 20389, "17:00.0-1": 17001, "65:00.0-1": 18400, "b3:00.0-1": 6000},
        probe_s={"host": 0.0004},
    )
    text = text_of(found, openmetrics=False).decode()
    return PLAIN_TYPE, re.sub(r"^(yunion_mps_process_\w+) .*", r"\1 1.0", text, flags=re.MULTILINE).encode()


@contextmanager
def _simulated() -> Iterator[SimHost]:
    """The host's files, with NVIDIA's programs and libraries of the driver's version."""
    with SimHost.create(_DESCRIPTION) as sim:
        (sim.root / "etc/machine-id").write_text(snapshots.MACHINE_ID)
        (sim.root / "run/yunion-mps").mkdir(parents=True, exist_ok=True)
        (sim.root / "dev/shm").mkdir(parents=True, exist_ok=True)
        (sim.root / "pipe").mkdir()
        (sim.root / "pipe/control").touch()
        library = sim.root / "lib/libcuda.so.535.261.03"
        library.touch()
        (sim.root / "lib/libcuda.so.1").symlink_to(library.name)
        (sim.root / "bin").mkdir(exist_ok=True)
        for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
            (sim.root / "bin" / name).write_bytes(b"\x7fELF\0535.261.03\0")
            (sim.root / "bin" / name).chmod(0o755)
        yield sim
