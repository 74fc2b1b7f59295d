from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yunion_mps.cli.config import config_json, config_text, gpu_records, plan_json, plan_text
from yunion_mps.core.enums import TIME_SLICING
from yunion_mps.core.models import Gpu, Inventory
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import GPU_LOST, MULTIUSER_UNSUPPORTED, RECORD_HIDDEN, Reason
from yunion_mps.core.settings import Config, SliceEntry
from yunion_mps.planning.plan import make_plan
from yunion_mps.supervisor.domain_directories import DomainDirectories
from yunion_mps.supervisor.preflight import Preflight

from unit.builders import DEVICES, MACHINE_ID, config, entry, gpu, inventory
from unit.http.snapshots import WAYS, every_way

CHECKOUT = Path(__file__).resolve().parents[3]


def preflight_of(settings: Config, found: Inventory) -> Preflight:
    plan, problems = make_plan(settings, found, MACHINE_ID)
    directories = DomainDirectories(settings, Paths(), creates=False)
    return Preflight(settings, tuple(problems), found, plan, MACHINE_ID, None, None, directories)


def test_an_entry_shows_what_the_file_has_of_how_it_divides_its_gpu() -> None:
    slices = entry("01:00.0", 0)._replace(
        slices=(SliceEntry(8192, 50.0), SliceEntry(4096, None, "below_normal")), thread_overcommit=2.0
    )
    pool = entry("02:00.0", 0, 5)._replace(memory_unit_mib=128, memory_reserve_mib=64)
    settings = config(slices, pool)
    assert config_json(settings)["gpu_memory_unit"] == {"value": 1024, "from": "default"}
    assert config_json(settings)["devices"] == [
        {
            "path": "01:00.0",
            "type": "NVIDIA_MPS",
            "slices": [
                {"memory_mib": 8192, "thread_percentage": 50.0, "priority": "normal"},
                {"memory_mib": 4096, "thread_percentage": None, "priority": "below_normal"},
            ],
            "thread_overcommit": 2.0,
            "from": f"{DEVICES}:2",
        },
        {
            "path": "02:00.0",
            "type": "NVIDIA_MPS",
            "memory_unit": 128,
            "memory_reserve": 64,
            "from": f"{DEVICES}:5",
        },
    ]
    found = inventory(gpu(1), gpu(2, memory_mib=16384))
    shown: list[Any] = gpu_records(preflight_of(settings, found))
    told = ("devices", "division", "memory_limit_mib", "thread_percentage", "domain", "reason")
    assert [[one[field] for field in told] for one in shown] == [
        [2, "1 x 8192 MiB, 50 % + 1 x 4096 MiB, 10 %, below normal", None, None, "host", ""],
        [0, "127 units of 128 MiB, 64 MiB reserved for each client", None, None, "host", ""],
    ]


def test_every_key_that_an_entry_has_is_shown() -> None:
    written: dict[str, Any] = {
        "thread_overcommit": 2.0,
        "reserved_for": "kubernetes",
        "over_budget": "terminate",
        "cuda_mps_compute_mode": "keep",
        "mig_restore": True,
    }
    divided = entry("01:00.0", 4)._replace(memory_mib=4096, mig=("1g.10gb",), sharing=TIME_SLICING, **written)
    pool = entry("02:00.0", 0)._replace(memory_unit_mib=128, memory_reserve_mib=64, thread_percentage=10)
    sliced = entry("03:00.0", 0)._replace(slices=(SliceEntry(8192, 50.0),))
    settings = config(divided._replace(time_slice="short"), pool, sliced)
    shown: set[str] = set()
    for record in config_json(settings)["devices"]:
        shown |= record.keys()
    keys = yaml.safe_load((CHECKOUT / "scripts/manual/keys.yml").read_text())["host_container_device.yml"]
    assert shown - {"from"} == keys.keys()
    assert config_json(settings)["devices"][0].items() >= written.items()
    text = config_text(settings)
    for name, value in written.items():
        assert f"; {name}: {'true' if value is True else value}" in text, name
    assert "; memory: 4096 MiB" in text
    assert "; memory_reserve: 64 MiB" in text


def test_a_setting_that_is_ignored_is_shown_as_it_is_written() -> None:
    """Beside it, a line says that it is ignored, and why."""
    warning = Reason("cuda_mps_multiuser is true, but it does not support it", MULTIUSER_UNSUPPORTED)
    preflight = preflight_of(config(), inventory(gpu(1)))._replace(warnings=(warning,))
    assert plan_json(preflight)["configuration"]["keys"]["cuda_mps_multiuser"]["value"] is True
    text = plan_text(preflight)
    assert re.search(r"^cuda_mps_multiuser +true ", text, re.MULTILINE)
    assert f"{warning}.\n" in text


def test_a_gpu_without_devices_says_why() -> None:
    found = inventory(
        gpu(1), gpu(2, mig_enabled=True), gpu(3), Gpu("0000:04:00.0", reason=Reason("GPU is lost", GPU_LOST))
    )
    settings = config(entry("01:00.0", 2), entry("02:00.0", 2, 5), entry("04:00.0", 2, 8))
    reasons = [shown["reason"] for shown in gpu_records(preflight_of(settings, found))]
    assert reasons == [
        "",
        "the GPU is in MIG mode, so MPS cannot serve it as a whole",
        "not configured",
        "GPU is lost",
    ]


def test_every_way_of_sharing_is_shown_before_the_daemon_starts() -> None:
    found, settings = every_way().inventory, config(*WAYS)
    shown: list[Any] = gpu_records(preflight_of(settings, found))
    told = ("sharing", "time_slice", "devices", "budget_enforced", "reason")
    assert [[one[field] for field in told] for one in shown if "-g" not in one["addr"]] == [
        ["mps", None, 4, True, ""],
        ["time-slicing", "short", 3, False, ""],
        ["mig", None, 4, True, ""],
        ["mig", None, 4, True, ""],
        ["mig", None, 4, False, ""],
    ]
    divisions = re.findall(rf"^\S+ {{2,}}(\S.*\S) {{2,}}{DEVICES}:\d+$", config_text(settings), re.MULTILINE)
    assert divisions == [
        "4 equal devices",
        "3 equal devices, time-sliced (short)",
        "MIG: 3g.40gb + 2g.20gb + 1g.10gb + 1g.10gb",
        "MIG: 3g.40gb + 3g.40gb, 2 equal devices each",
        "MIG: 3g.40gb + 3g.40gb, 2 equal devices each, time-sliced",
    ]


def test_a_compute_mode_that_stays_is_shown_alone() -> None:
    kept = config(entry("01:00.0", 2), cuda_mps_compute_mode="keep")
    right = inventory(gpu(1, compute_mode="Exclusive_Process"))
    for settings, found, mode in (
        (kept, inventory(gpu(1)), "Default"),
        (config(entry("01:00.0", 2)), right, "Exclusive_Process"),
        (config(), inventory(gpu(1, mig_enabled=True)), "Default"),
    ):
        assert gpu_records(preflight_of(settings, found))[0]["compute_mode"] == mode


def test_a_host_without_mps_says_so_and_shows_no_gpu() -> None:
    settings = config(enable_cuda_mps=False)
    shown = plan_json(preflight_of(settings, Inventory(inventory().driver._replace(version=""), ())))
    assert shown["notice"] == "MPS is disabled: enable_cuda_mps is false"
    assert (shown["driver"], shown["gpus"], shown["domains"]) == (None, [], [])


def test_a_user_who_cannot_read_the_record_is_told_of_no_division() -> None:
    settings = config(entry("/dev/dri/renderD129", 2), entry("02:00.0", 2, 5))
    found = inventory(gpu(1), gpu(2))._replace(meant_is_hidden=True)
    shown = plan_json(preflight_of(settings, found))
    assert [(one["path"], one["reason_code"]) for one in shown["missing"]] == [
        ("/dev/dri/renderD129", RECORD_HIDDEN),
        ("02:00.0", RECORD_HIDDEN),
    ]
    assert {one["reason"] for one in shown["gpus"]} == {"only root can see whether an entry means it"}
    assert (shown["domains"], [one["devices"] for one in shown["gpus"]]) == ([], [0, 0])
    text = plan_text(preflight_of(settings, found))
    assert text.startswith("The configuration is valid, as far as this user can check it:\n")
    assert f"Path 02:00.0 ({DEVICES}:5): only root can read which GPU this entry means.\n" in text
    assert "The daemon would divide" not in text


def test_entries_with_uuids_need_no_record() -> None:
    found = inventory(gpu(1), gpu(2))._replace(meant_is_hidden=True)
    settings = config(entry(str(gpu(1).uuid), 2), entry("/dev/dri/renderD130", 2, 5))
    shown = plan_json(preflight_of(settings, found))
    assert [(one["addr"], one["devices"]) for one in shown["gpus"]] == [("01:00.0", 2), ("02:00.0", 0)]
    assert [one["path"] for one in shown["missing"]] == ["/dev/dri/renderD130"]
    assert [one["devices"] for one in gpu_records(preflight_of(config(), found))] == [10, 10]
