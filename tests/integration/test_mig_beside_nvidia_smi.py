"""MIG and time slices as NVIDIA's nvidia-smi shows them, and as we do, after each step."""

from __future__ import annotations

import csv
import json
import re
from typing import NamedTuple

import pytest

from integration.daemon_host import Daemon, eventually
from integration.mig_devices import free, instances

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "h100", "count": 2})]


class Shown(NamedTuple):
    """What a program shows of the host: UUIDs, MIG modes and time slices of all GPUs, and GPU instances.

    Of each instance of the first GPU (by id), its profile and memory; `computes` has the ids of those that
    are one MIG device.
    """

    uuids: set[str]
    modes: list[bool]
    slices: list[str]
    instances: dict[int, tuple[str, int]]
    computes: set[int]


def shown_by_nvidia_smi(daemon: Daemon) -> Shown:
    def smi(*words: object) -> str:
        return daemon.host.run(["nvidia-smi", *words]).stdout

    gpus = [line.split() for line in smi("mig", "-i", 0, "-lgi").splitlines() if " MIG " in line]
    computes = [line.split() for line in smi("mig", "-i", 0, "-lci").splitlines() if " MIG " in line]
    places = dict(re.findall(r"Profile ID +(\d+) Placements? ?: {([0-9,]*)}", smi("mig", "-i", 0, "-lgipp")))
    for row in gpus:
        assert row[-2].partition(":")[0] in places[row[4]].split(","), "it is where it can be"
    ids = [int(found) for found in re.findall(r"GPU Instance ID +: (\d+)", smi("-i", 0, "-q"))]
    sizes = re.findall(r"MIG Device.*?FB Memory Usage\s+Total +: (\d+) MiB", smi("-i", 0, "-q"), re.DOTALL)
    memory = dict(zip(ids, map(int, sizes)))
    modes = smi("--query-gpu=mig.mode.current", "--format=csv,noheader").split()
    return Shown(
        set(re.findall(r"UUID: ([^)]*)", smi("-L"))),
        [mode == "Enabled" for mode in modes],
        [name.lower() for name in re.findall(r"Timeslice +(\w+)", smi("compute-policy", "--list"))],
        {int(row[-3]): (row[3], memory.get(int(row[-3]), 0)) for row in gpus},
        {int(row[2]) for row in computes},
    )


def shown_by_us(daemon: Daemon) -> Shown:
    rows = json.loads(daemon.host.run(["yunion-mps", "gpus", "-o", "json"], check=True).stdout)["gpus"]
    whole = [row for row in rows if row["parent"] is None]
    parts = {int(row["addr"].rpartition("-g")[2]): row for row in rows if row["parent"]}
    told = daemon.host.run(["yunion-mps", "list", "-o", "csv"], check=True).stdout
    addresses = {row["addr"] for row in csv.DictReader(told.splitlines()) if row["addr"][:7] == "00:06.0"}
    assert addresses == ({row["addr"] for row in parts.values()} or {"00:06.0-0", "00:06.0-1"})
    return Shown(
        {row["uuid"] for row in rows},
        [row["mig_enabled"] for row in whole],
        [row["time_slice"] or "default" for row in whole],
        {number: (row["mig_profile"], row["memory_mib"]) for number, row in parts.items()},
        set(parts),
    )


#: How the first GPU is divided, one after the other, its number of instances, and the other's time slice.
STEPS = [
    ("virtual_number: 2", 0, "default"),
    ("mig: all-balanced", 4, "short"),
    ("mig: [4g.40gb, 3g.40gb]", 2, "long"),
    ("mig: all-disabled\n  virtual_number: 2", 0, "medium"),
]
SLICED = "type: NVIDIA_GPU_SHARE\n  virtual_number: 2\n  time_slice: "


def test_nvidia_smi_shows_what_we_show_after_each_change_of_a_layout(daemon: Daemon) -> None:
    daemon.host.divide(2)
    daemon.start().wait_ready()
    for entry, number, time_slice in STEPS:
        daemon.host.divide(entry, SLICED + time_slice)
        assert daemon.ask("POST", "/v1/reload")[0] == 200
        expected = number, number or 2
        eventually(lambda: (len(instances(daemon)), free(daemon)) == expected, entry)  # noqa: B023
        eventually(lambda: daemon.host.gpus[1].time_slice == time_slice, time_slice)  # noqa: B023
        shown = shown_by_us(daemon)
        assert shown == shown_by_nvidia_smi(daemon)
        assert (len(shown.instances), shown.slices) == (number, ["default", time_slice])


def test_instances_made_with_nvidia_smi_have_a_uuid_once_they_are_whole(daemon: Daemon) -> None:
    daemon.host.divide("mig: 3g.40gb")
    daemon.start().wait_ready()

    def smi(*words: object) -> None:
        daemon.host.run(["nvidia-smi", "mig", "-i", 0, *words], check=True)

    def shows(whole: int, in_all: int) -> None:
        def same() -> bool:
            daemon.polls()
            theirs = shown_by_nvidia_smi(daemon)
            rows = daemon.get("/v1/gpus")[1]["gpus"]
            listed = {int(row["addr"].rpartition("-g")[2]): row for row in rows if row["parent"]}
            ours = {number for number, row in listed.items() if row["uuid"]}
            counts = (len(ours), len(listed), len(theirs.instances))
            return ours == theirs.computes and counts == (whole, in_all, in_all)

        eventually(same, f"{whole} of {in_all} instances")

    shows(1, 1)
    smi("-cgi", "1g.10gb")
    shows(1, 2)
    other = next(one for one in range(7, 14) if one in shown_by_nvidia_smi(daemon).instances)
    smi("-cci", "-gi", other)
    shows(2, 2)
    smi("-dci", "-gi", other)
    shows(1, 2)
    smi("-dgi", "-gi", other)
    shows(1, 1)


def test_a_layout_that_is_refused_names_the_profiles_of_nvidia_smi(daemon: Daemon) -> None:
    daemon.host.gpus[0].mig = True  # nvidia-smi needs it
    table = daemon.host.run(["nvidia-smi", "mig", "-i", 0, "-lgip"]).stdout
    daemon.host.divide("mig: 3g.30gb")
    refused = daemon.host.run(["yunion-mps", "config", "check"])
    assert refused.returncode == 6
    named = re.findall(r"\dg\.\d+gb(?:\+me)?", refused.stderr)
    assert {*named} - {"3g.30gb"} == set(re.findall(r"MIG (\S+)", table)), refused.stderr
