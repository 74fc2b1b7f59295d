"""`isolated-device-list`, `show` and `gpus`: what they print, to the letter."""

from __future__ import annotations

import pytest
from yunion_mps.cli.devices import footer

from unit import builders
from unit.cli.conftest import Cli, Serve
from unit.http import snapshots

HEADER = [
    "ID", "Dev_type", "Model", "Addr", "Vendor_device_id", "Host_id", "numa_node", "Device_path", "PCIE_Info",
    "Index", "Device_minor",
]  # fmt: skip
IDS = (
    "b12d61be-94a4-552c-ad13-b3efefc94aa3",
    "3cb2ad91-8d2c-5b86-89cd-e78abbc0a30a",
    "801c89c4-90b6-52f7-9571-7ee9d414cdbc",
    "28ab592f-a465-577c-b525-6ff140f7d5f1",
)
HOST = "52b1e14e-614a-598b-b82e-ff71dc75e5c6"
P40 = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"
H100 = "GPU-11111111-2222-3333-4444-555555555555"
LINK = '{"lane_width":16,"throughput":"15.76 GB/s","transfer_rate_per_lane":"8GT/s","version":"3.0"}'
ROWS = [
    [IDS[slot], "NVIDIA_MPS", "Tesla P40", f"00:06.0-{slot}", "10de:1b38", HOST, "-1", P40, LINK, "-1", "-1"]
    for slot in range(4)
]
LIST = "isolated-device-list"
ON_P40 = ["00:06.0-0", "00:06.0-1", "00:06.0-2"]
ON_H100 = ["0001:e1:00.0-0", "0001:e1:00.0-1", "0001:e1:00.0-2"]
WIDTHS = (36, 10, 9, 9, 16, 36, 9, 40, 92, 5, 12)
BORDER = "+" + "+".join("-" * (width + 2) for width in WIDTHS) + "+\n"


def drawn(rows: list[list[str]], last_line: str) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS)) + " |\n"

    return BORDER + line(HEADER) + BORDER + "".join(line(row) for row in rows) + BORDER + last_line + "\n"


def rows_of(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_reference_case_is_listed_to_the_last_character(cli: Cli) -> None:
    assert cli.good("isolated-device-list") == drawn(
        ROWS, "*** Total: 4 Pages: 1 Limit: 20 Offset: 0 Page: 1 ***"
    )


@pytest.mark.parametrize(
    ("limit", "offset", "shown", "last_line"),
    [
        (3, 0, slice(0, 3), "*** Total: 4 Pages: 2 Limit: 3 Offset: 0 Page: 1 ***"),
        (3, 3, slice(3, 4), "*** Total: 4 Pages: 2 Limit: 3 Offset: 3 Page: 2 ***"),
        (2, 2, slice(2, 4), "*** Total: 4 Pages: 2 Limit: 2 Offset: 2 Page: 2 ***"),
        (1, 1, slice(1, 2), "*** Total: 4 Pages: 4 Limit: 1 Offset: 1 Page: 2 ***"),
        (4, 0, slice(0, 4), "*** Total: 4 Pages: 1 Limit: 4 Offset: 0 Page: 1 ***"),
        (0, 0, slice(0, 4), "*** Total: 4 Pages: 1 Limit: 0 Offset: 0 Page: 1 ***"),
        (0, 1, slice(1, 4), "*** Total: 4 Pages: 1 Limit: 0 Offset: 1 Page: 1 ***"),
    ],
)
def test_a_page_shows_its_devices_and_says_which_page_it_is(
    cli: Cli, limit: int, offset: int, shown: slice, last_line: str
) -> None:
    assert cli.good(LIST, "--limit", str(limit), "--offset", str(offset)) == drawn(ROWS[shown], last_line)


@pytest.mark.parametrize(
    ("total", "limit", "offset", "pages", "page"),
    [(0, 20, 0, 0, 1), (20, 20, 0, 1, 1), (21, 20, 20, 2, 2), (3072, 0, 0, 1, 1), (3072, 100, 3000, 31, 31)],
)
def test_the_footer_counts_pages_as_cloudpods_does(
    total: int, limit: int, offset: int, pages: int, page: int
) -> None:
    expected = f"*** Total: {total} Pages: {pages} Limit: {limit} Offset: {offset} Page: {page} ***\n"
    assert footer({"isolated_devices": [], "total": total, "limit": limit, "offset": offset}) == expected


def test_past_the_last_device_there_is_a_header_and_the_total(cli: Cli) -> None:
    out = cli.good(LIST, "--offset", "9")
    assert rows_of(out) == []
    assert out.splitlines()[-1] == "*** Total: 4 Pages: 1 Limit: 20 Offset: 9 Page: 1 ***"


@pytest.mark.parametrize(
    ("arguments", "addresses"),
    [
        (["--dev-type", "NVIDIA_MPS"], ON_P40 + ON_H100),
        (["--dev-type", "GPU-HPC"], []),
        (["--model", "Tesla P40"], ON_P40),
        (["--model", "tesla"], []),
        (["--addr", "0001:e1:00.0"], ON_H100),
        (["--addr", "00:06.0-2"], ["00:06.0-2"]),
        (["--addr", "00:06"], []),
        (["--device-path", H100], ON_H100),
        (["--vendor-device-id", "10de:1b38"], ON_P40),
        (["--numa-node", "1"], ON_H100),
        (["--numa-node", "0"], []),
        (["--numa-node", "-1"], ON_P40),
        (["--unused"], []),
        (["--model", "Tesla P40", "--numa-node", "1"], []),
        (["--model", "Tesla P40", "--offset", "1", "--limit", "1"], ["00:06.0-1"]),
    ],
)
def test_a_filter_shows_the_devices_that_it_names(
    troubled_cli: Cli, arguments: list[str], addresses: list[str]
) -> None:
    assert [row[3] for row in rows_of(troubled_cli.good(LIST, *arguments))] == addresses


def test_unused_devices_are_those_that_can_be_used_now(cli: Cli, troubled_cli: Cli) -> None:
    assert len(rows_of(cli.good(LIST, "--unused"))) == 4
    expected = "*** Total: 0 Pages: 0 Limit: 20 Offset: 0 Page: 1 ***\n"
    assert troubled_cli.good(LIST, "--unused").endswith(expected)


def test_unknown_values_are_empty_cells_and_numa_nodes_numbers(troubled_cli: Cli) -> None:
    rows = rows_of(troubled_cli.good(LIST, "--addr", "0001:e1:00.0-0"))
    assert [row[6:9] for row in rows] == [["1", H100, ""]]


@pytest.mark.parametrize(
    ("options", "number"), [([], 24), (["--limit", "20"], 20), (["--offset", "5"], 19)], ids=str
)
def test_machine_formats_list_all_devices_unless_limited(
    serve: Serve, options: list[str], number: int
) -> None:
    many = serve(snapshots.snapshot(snapshots.H100, replicas=24))
    answer, rows = many.read(LIST, *options)
    assert (len(answer["isolated_devices"]), len(rows)) == (number, number + 1)
    assert many.good(LIST).endswith("*** Total: 24 Pages: 2 Limit: 20 Offset: 0 Page: 1 ***\n")


def test_programs_read_what_the_daemon_answers_or_the_cells_of_the_table(cli: Cli) -> None:
    answer, rows = cli.read(LIST, "--limit", "2", "--offset", "1")
    assert answer == cli.host.ask("GET", "/v1/devices?limit=2&offset=1").json()
    assert (answer["total"], [device["id"] for device in answer["isolated_devices"]]) == (4, list(IDS[1:3]))
    assert rows == [HEADER, *ROWS[1:3]]


@pytest.mark.parametrize(
    ("arguments", "addresses"),
    [
        ([], ON_P40 + ON_H100),
        (["--gpu", "0001:e1:00.0"], ON_H100),
        (["--gpu", "0001"], ON_H100),
        (["--gpu", H100[:8]], ON_H100),
        (["--gpu", "0001:e1:00.0", "--free"], []),
        (["--free"], []),
    ],
)
def test_people_list_the_devices_of_a_gpu_or_those_that_are_free(
    troubled_cli: Cli, arguments: list[str], addresses: list[str]
) -> None:
    answer, (header, *rows) = troubled_cli.read("list", *arguments)
    assert [one["addr"] for one in answer["isolated_devices"]] == [row[0] for row in rows] == addresses
    assert answer["total"] == len(addresses)
    assert header[:3] == ["addr", "model", "memory_mib"]


@pytest.mark.parametrize(
    ("name", "what"), [("0", "0 matches 2 GPUs"), ("00:09.0", "there is no GPU 00:09.0")]
)
def test_an_unknown_gpu_is_refused(troubled_cli: Cli, name: str, what: str) -> None:
    done = troubled_cli("list", "--gpu", name)
    hint = "yunion-mps: list the GPUs: yunion-mps gpus\n"
    assert (done.code, done.out, done.err) == (1, "", f"yunion-mps: {what} [not_found]\n{hint}")


def test_the_reason_for_unavailable_devices_is_shown_once_per_gpu(troubled_cli: Cli) -> None:
    header, *rows, p40, h100 = troubled_cli.good("list").splitlines()
    assert header.split("  ")[0] == "ADDRESS"
    assert {row.split()[-2] for row in rows} == {"unavailable"}
    why = "its domain is failed: nvidia-cuda-mps-control is missing"
    assert [p40, h100] == [f"00:06.0: {why}", f"0001:e1:00.0: {why}"]


def test_an_empty_list_of_devices_is_a_sentence(troubled_cli: Cli, serve: Serve) -> None:
    assert troubled_cli.good("list", "--free") == "No devices match.\n"
    assert serve(snapshots.disabled()).good("list") == "No devices. See why: yunion-mps status\n"
    assert serve(snapshots.disabled()).good("gpus") == "No GPUs.\n"


HINT = "yunion-mps: list the devices: yunion-mps list\n"


@pytest.mark.parametrize("name", [IDS[1], IDS[1][:3]], ids=["id", "beginning"])
def test_a_device_is_shown_by_address_id_or_a_unique_beginning(cli: Cli, name: str) -> None:
    assert cli.good("show", name) == cli.good("show", "00:06.0-1")


def test_within_a_job_its_own_device_is_shown(cli: Cli) -> None:
    env = {**cli.env, "YUNION_MPS_DEVICE": "00:06.0-1"}
    assert cli.process("show", env=env) == (0, cli.good("show", "00:06.0-1"), "")
    assert cli.process("show", "00:06.0-2", env=env) == (0, cli.good("show", "00:06.0-2"), "")


def test_programs_read_a_device_with_what_belongs_together_or_in_lines(cli: Cli) -> None:
    answer, rows = cli.read("show", "00:06.0-1")
    pairs = dict(rows)
    assert (answer["slot"], pairs["slot"], pairs["reserved_for"]) == (1, "1", "")
    for parts in ("pcie_info", "client_environment"):
        assert {name: pairs[f"{parts}.{name}"] for name in answer[parts]} == {
            name: str(value) for name, value in answer[parts].items()
        }


def test_an_ambiguous_prefix_lists_the_matches(cli: Cli) -> None:
    names = "00:06.0 matches 4 devices (00:06.0-0, 00:06.0-1, 00:06.0-2, 00:06.0-3)"
    told = f"yunion-mps: {names} [not_found]\nyunion-mps: use a longer prefix of the id or address\n"
    assert cli("show", "00:06.0") == (1, "", told)


@pytest.mark.parametrize("name", ["00:06.0-9", "nothing", "é ü", "a/b", "../../x", "?", "%41", "-"])
def test_an_unknown_device_is_reported(cli: Cli, name: str) -> None:
    assert cli("show", name) == (1, "", f"yunion-mps: there is no device {name} [not_found]\n{HINT}")


def test_an_empty_device_is_wrong_usage(cli: Cli) -> None:
    words = "yunion-mps: DEVICE must not be empty\nyunion-mps: see: yunion-mps show --help\n"
    assert cli("show", "") == (2, "", words)


def test_gpus_shows_the_way_of_sharing_of_each_gpu_and_instance(serve: Serve) -> None:
    cli = serve(snapshots.every_way())
    header, *rows = cli.read("gpus")[1]
    fields = ("addr", "sharing", "time_slice", "mig_layout", "mig_profile", "devices", "budget_enforced")
    assert [[row[header.index(field)] for field in fields] for row in rows] == [
        ["01:00.0", "mps", "", "", "", "4", "true"],
        ["02:00.0", "time-slicing", "short", "", "", "3", "false"],
        ["03:00.0", "mig", "", "2 x 1g.10gb + 1 x 2g.20gb + 1 x 3g.40gb", "", "4", "true"],
        ["03:00.0-g1", "none", "", "", "3g.40gb", "1", "true"],
        ["03:00.0-g2", "none", "", "", "2g.20gb", "1", "true"],
        ["03:00.0-g3", "none", "", "", "1g.10gb", "1", "true"],
        ["03:00.0-g4", "none", "", "", "1g.10gb", "1", "true"],
        ["04:00.0", "mig", "", "2 x 3g.40gb", "", "4", "true"],
        ["04:00.0-g1", "mps", "", "", "3g.40gb", "2", "true"],
        ["04:00.0-g2", "mps", "", "", "3g.40gb", "2", "true"],
        ["05:00.0", "mig", "", "2 x 3g.40gb", "", "4", "false"],
        ["05:00.0-g1", "time-slicing", "", "", "3g.40gb", "2", "false"],
        ["05:00.0-g2", "time-slicing", "", "", "3g.40gb", "2", "false"],
    ]
    narrow = [line.split() for line in cli.on_terminal(80, "gpus")]
    assert ["02:00.0", "81559", "MiB", "3", "time-slicing", "(short)", "available"] in [
        [row[0], *row[-6:]] for row in narrow
    ]
    assert ["04:00.0-g1", "MIG", "3g.40gb", "40448", "MiB", "2", "mps", "available"] in narrow


def test_broken_gpus_have_their_reasons_whole_below_the_table(troubled_cli: Cli) -> None:
    answer, (header, *rows) = troubled_cli.read("gpus")
    assert (answer["total"], len(answer["gpus"])) == (4, 4)
    cells = {row[0]: dict(zip(header, row)) for row in rows}
    assert cells["10000:00:07.0"]["reason"] == "the GPU is lost"
    assert (cells["81:00.0"]["mig_enabled"], cells["81:00.0"]["state"]) == ("true", "unavailable")
    assert "MIG mode" in cells["81:00.0"]["reason"]
    lines = troubled_cli.good("gpus").splitlines()
    assert lines[-4:] == [f"{name}: {row['reason']}" for name, row in cells.items()]


def test_gpus_whose_domains_end_alike_are_told_apart(serve: Serve) -> None:
    gpus = [builders.gpu(1, pci_address="0003:00:00.0"), builders.gpu(2, pci_address="10003:00:00.0")]
    cli = serve(snapshots.snapshot(*gpus, replicas=1))
    names = ["0003:00:00.0", "10003:00:00.0"]
    assert [line.split()[0] for line in cli.good("gpus").splitlines()[1:]] == names
    assert [line.split()[0] for line in cli.good("list").splitlines()[1:]] == [f"{name}-0" for name in names]
    for name, spelling in zip(names, ("00000003:00:00.0", "00010003:00:00.0")):
        uuid = next(gpu.uuid for gpu in gpus if gpu.pci_address == name)
        assert rows_of(cli.good(LIST, "--addr", f"{spelling}-0"))[0][7] == uuid
        assert cli.read("list", "--gpu", spelling)[0]["isolated_devices"][0]["gpu_uuid"] == uuid
        assert cli.read("show", f"{spelling}-0")[0]["gpu_uuid"] == uuid
        assert f"={uuid}\n" in cli.good("env", f"{spelling}-0")
