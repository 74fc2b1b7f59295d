"""GPUs that share the host's memory, of which the driver reports none, as GB10, Jetson and Thor."""

from __future__ import annotations

from typing import Any

from yunion_mps.core.reasons import MEMORY_UNKNOWN
from yunion_mps.leases.ledger import Ledger
from yunion_mps.service.queries import Queries
from yunion_mps.views.devices import devices_json

from simhost import SimHost
from unit.supervised import MakeHost, Supervise, Supervised, budgets

#: As the first of two GPUs, one that shares the host's memory.
TWO = [{"kind": "b200", "name": "NVIDIA GB10", "pci": "000f:01:00.0"}, {"kind": "b200"}]
SLICED = "type: NVIDIA_GPU_SHARE\n  virtual_number: 2"


def unified(make_host: MakeHost, *numbers: object, **keys: str) -> SimHost:
    host = make_host(TWO, **keys)
    index = next(number for number, gpu in enumerate(host.gpus) if "GB10" in gpu.description.name)
    host.fail("nvmlDeviceGetMemoryInfo", "not_supported", gpu=index)
    if numbers:
        host.divide(*(numbers if index == 0 else reversed(numbers)))
    return host


def gb10(made: Supervised) -> Any:
    queries = Queries(lambda: made.snapshot, 0.0, 1)
    return next(gpu for gpu in queries.gpus()["gpus"] if gpu["name"] == "NVIDIA GB10")


def test_a_gpu_without_memory_is_time_sliced_at_once(make_host: MakeHost, supervise: Supervise) -> None:
    made = supervise(unified(make_host, SLICED, SLICED)).start()
    shown = [row for row in devices_json(made.snapshot, Ledger()) if row["model"] == "NVIDIA GB10"]
    assert [row["state"] for row in shown] == ["free", "free"]
    for row in shown:
        amounts = ("memory_mib", "gpu_memory_mib", "mps_memory_limit", "mps_memory_total")
        assert [row[name] for name in amounts] == [None] * 4  # type: ignore[literal-required]
    assert (gb10(made)["state"], gb10(made)["memory_mib"]) == ("available", None)


def test_mps_on_a_gpu_without_memory_disables_that_gpu_alone(
    make_host: MakeHost, supervise: Supervise
) -> None:
    made = supervise(unified(make_host)).start()
    assert (gb10(made)["state"], gb10(made)["reason_code"]) == ("unavailable", MEMORY_UNKNOWN)
    assert made.available == 4, "the other GPU serves"


def test_a_reload_with_memory_divides_the_gpu_by_mps(make_host: MakeHost, supervise: Supervise) -> None:
    host = unified(make_host, 4, 2)
    made = supervise(host).start()
    assert made.available == 2
    numbers = ("virtual_number: 4\n  memory: 96GiB", 2)
    host.divide(*(numbers if "GB10" in host.gpus[0].description.name else reversed(numbers)))
    made.reload()
    made.rescan()
    assert made.available == 6
    assert sorted(budgets(made))[:4] == [(f"000f:01:00.0-{slot}", 24576) for slot in range(4)]
    assert (gb10(made)["state"], gb10(made)["memory_mib"]) == ("available", 98304)
