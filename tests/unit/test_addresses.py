"""PCI addresses in domains of any length: no two look alike anywhere, and each is found by what is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.answers.fields import DeviceAddress, GpuAddress
from yunion_mps.containers.spec import devices_spec
from yunion_mps.core.addresses import full_address, normalise_address, physical_gpu, shown_address, sort_key
from yunion_mps.core.models import Gpu, Snapshot
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import GPU_FAULT, hint_of
from yunion_mps.inventory.gpu_events import processes_of_xids
from yunion_mps.inventory.scan import in_order
from yunion_mps.kubernetes.device_plugin.resources import DeviceResource
from yunion_mps.kubernetes.dra.host_watch import pcie_root
from yunion_mps.kubernetes.dra.slice_devices import HostFacts, offered_devices
from yunion_mps.kubernetes.options import PluginOptions, read_options
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.planning.environment import client_environment
from yunion_mps.service.queries import Filters, Queries
from yunion_mps.slurm.gres_conf import gres_lines, record_of

from unit import builders
from unit.containers.cdi_specs import HOST, plan_of
from unit.http.fake_services import status_of
from unit.http.snapshots import in_instances, snapshot
from unit.metrics import metric_facts

DOMAINS = st.one_of(
    st.sampled_from([0x0, 0x1, 0x3, 0xF, 0xFFFF, 0x10000, 0x10003, 0x20003, 0xFFFFFFFF]),
    st.integers(0, 0xFFFFFFFF),
)
#: Addresses as sysfs spells them; few of the lower digits, so that often only the domains differ.
ADDRESSES = st.builds(
    "{:04x}:{:02x}:{:02x}.{}".format, DOMAINS, st.sampled_from([0, 0xE1]), st.just(0), st.just(0)
)
PAIRS = st.lists(ADDRESSES, min_size=2, max_size=2, unique=True)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:00:06.0", "0000:00:06.0"),
        ("00000000:00:06.0", "0000:00:06.0"),
        ("00:06.0", "0000:00:06.0"),
        ("0:6.0", "0000:00:06.0"),
        ("00000001:3B:1F.7", "0001:3b:1f.7"),
        ("00010000:E1:00.0", "10000:e1:00.0"),
        (" 00:06.0\n", "0000:00:06.0"),
        ("", None),
        ("00:06", None),
        ("06.0", None),
        ("00:20.0", None),
        ("100:00.0", None),
        ("00:06.8", None),
        ("100000000:00:06.0", None),
        ("0000:zz:06.0", None),
        ("1:2:3:4.0", None),
        ("GPU-76aef7ff", None),
    ],
)
def test_an_address_is_spelt_as_sysfs_does(text: str, address: str | None) -> None:
    assert normalise_address(text) == address


def domain_of(address: str) -> int:
    return int(address.partition(":")[0], 16)


@given(st.lists(ADDRESSES, min_size=2, max_size=5, unique=True))
def test_gpus_are_in_the_order_of_their_domains(addresses: list[str]) -> None:
    ordered = [gpu.pci_address for gpu in in_order(Gpu(address) for address in addresses)]
    assert ordered == sorted(addresses, key=lambda one: (domain_of(one), one.partition(":")[2]))
    assert ordered == sorted(addresses, key=sort_key)


#: Spellings of an address that people and programs use, from that of sysfs.
SPELLINGS: list[Callable[[str], str]] = [
    str,
    str.upper,
    shown_address,
    lambda address: f"{domain_of(address):08X}:{address.partition(':')[2]}",  # NVML and nvidia-smi
    lambda address: f"{domain_of(address):x}:{address.partition(':')[2]}",
]


@given(ADDRESSES, st.sampled_from(["", "-3", "-g1", "-g1-3", "-m3"]), st.sampled_from(SPELLINGS))
def test_every_spelling_is_shown_in_the_same_way(
    address: str, part: str, spelling: Callable[[str], str]
) -> None:
    shown = shown_address(address + part)
    assert shown == shown_address(spelling(address) + part) == shown_address(shown)
    assert full_address(physical_gpu(shown)) == address
    assert re.fullmatch(pattern_of(DeviceAddress if part in ("-3", "-g1-3", "-m3") else GpuAddress), shown)


def pattern_of(annotated: Any) -> str:
    """Return the pattern in the JSON schema of a field's type."""
    _, field = get_args(annotated)
    pattern: str = field.__get_pydantic_json_schema__(None, lambda _: {})["pattern"]
    return pattern.strip("^$")


@pytest.mark.parametrize("text", ["GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400", "00:06", "train", "all", ""])
def test_what_is_no_address_is_not_changed(text: str) -> None:
    assert shown_address(text) == text


@given(ADDRESSES)
def test_advice_names_a_gpu_as_nvidia_smi_does(address: str) -> None:
    for shown in (address, shown_address(address), f"{shown_address(address)}-g1"):
        assert f"nvidia-smi --gpu-reset -i {address})" in hint_of(GPU_FAULT, gpu=shown)


# ---- What outputs say of two GPUs


def host_of(addresses: list[str]) -> Snapshot:
    """A host with GPUs at these addresses; each has a control daemon and two devices."""
    gpus = [builders.gpu(slot, pci_address=address) for slot, address in enumerate(addresses)]
    return snapshot(*in_order(gpus), replicas=2, scope="gpu")


def queries(taken: Snapshot) -> Queries:
    return Queries(lambda: taken, 0.0, 1)


def listed_devices(taken: Snapshot) -> Iterator[str]:
    return (device["addr"] for device in queries(taken).all_devices())


def listed_gpus(taken: Snapshot) -> Iterator[str]:
    return (gpu["addr"] for gpu in queries(taken).gpus()["gpus"])


def full_addresses(taken: Snapshot) -> Iterator[str]:
    return (gpu["pci_address"] for gpu in queries(taken).gpus()["gpus"])


def domains(taken: Snapshot) -> Iterator[str]:
    return (domain.pipe_directory for domain in taken.plan.domains)


def environments(taken: Snapshot) -> Iterator[str]:
    plans = {domain.name: domain for domain in taken.plan.domains}
    for device in taken.plan.devices:
        yield client_environment([device], plans[device.domain])["YUNION_MPS_DEVICE"]


def metrics(taken: Snapshot) -> Iterator[str]:
    labels = [dict(pairs) for _, pairs in metric_facts.values(metric_facts.facts(taken))]
    return iter({one["device"] for one in labels if "device" in one})


def offered(taken: Snapshot) -> list[dict[str, Any]]:
    answers = queries(taken)
    gpus = {str(gpu["uuid"]): gpu for gpu in answers.gpus()["gpus"]}
    status = status_of(answers)
    domains = {uuid: domain for domain in status["domains"] for uuid in domain["gpus"]}
    devices: Any = answers.all_devices()
    facts = HostFacts(devices, [], gpus, domains, {}, "550.163.01", {})
    return [dict(one.device) for one in offered_devices(facts)]


def dra_names(taken: Snapshot) -> Iterator[str]:
    return (one["name"] for one in offered(taken))


def dra_bus_ids(taken: Snapshot) -> Iterator[str]:
    ids = (one["attributes"]["resource.kubernetes.io/pciBusID"]["string"] for one in offered(taken))
    return iter(dict.fromkeys(ids))


def device_plugin_ids(taken: Snapshot) -> Iterator[str]:
    options: PluginOptions = read_options(Paths("/nonexistent"))
    resource = DeviceResource("yunion.io/mps", options)
    devices: Any = queries(taken).all_devices()
    resource.update(devices, [])
    return iter(resource.offers)


def cdi_names(taken: Snapshot) -> Iterator[str]:
    files = HOST._replace(gpu_nodes={str(gpu.uuid): () for gpu in taken.inventory.gpus})
    spec: Any = devices_spec(*plan_of(taken), files)
    return (device["name"] for device in spec["devices"] if ":" in device["name"])


#: What outputs show of the GPUs or devices of a host, and how many texts that is for two GPUs.
OUTPUTS: dict[str, tuple[Callable[[Snapshot], Iterator[str]], int]] = {
    "list": (listed_devices, 4),
    "gpus": (listed_gpus, 2),
    "pci_address": (full_addresses, 2),
    "domains": (domains, 2),
    "env": (environments, 4),
    "metrics": (metrics, 4),
    "dra names": (dra_names, 4),
    "dra pciBusID": (dra_bus_ids, 2),
    "device plugin": (device_plugin_ids, 4),
    "cdi": (cdi_names, 4),
}


@pytest.mark.parametrize("output", OUTPUTS)
@given(addresses=PAIRS)
def test_no_output_shows_two_addresses_alike(output: str, addresses: list[str]) -> None:
    texts_of, number = OUTPUTS[output]
    texts = [*texts_of(host_of(addresses))]
    assert len(texts) == len({*texts}) == number


@given(PAIRS)
def test_an_output_fits_kubernetes_limits_and_names_the_gpu_in_sysfs(addresses: list[str]) -> None:
    taken = host_of(addresses)
    assert sorted(dra_bus_ids(taken)) == sorted(addresses)
    for one in offered(taken):
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", one["name"])
        texts = [value["string"] for value in one["attributes"].values() if "string" in value]
        assert max(map(len, texts)) <= 64


@given(PAIRS)
def test_slurm_has_a_line_for_each_gpu(addresses: list[str]) -> None:
    devices: Any = queries(host_of(addresses)).all_devices()
    lines = gres_lines(record_of(devices, shards=False), "node", Paths())
    assert [line.rpartition("/")[2] for line in lines] == ["mps[0-1]", "mps[2-3]"]


# ---- What is shown is found again


@given(PAIRS, st.sampled_from(SPELLINGS))
def test_an_entry_names_a_gpu_in_every_spelling(addresses: list[str], spelling: Callable[[str], str]) -> None:
    gpus = host_of(addresses).inventory.gpus
    for gpu in gpus:
        assert builders.find_gpu(spelling(gpu.pci_address), gpus) is gpu
        assert builders.find_gpu(f"/dev/dri/by-path/pci-{gpu.pci_address}-render", gpus) is gpu


@given(PAIRS, st.sampled_from(SPELLINGS))
def test_a_request_names_devices_and_gpus_in_every_spelling(
    addresses: list[str], spelling: Callable[[str], str]
) -> None:
    service = queries(host_of(addresses))
    assert {device["addr"].rpartition("-")[2] for device in service.all_devices()} == {"0", "1"}
    for device in service.all_devices():
        gpu, _, slot = device["addr"].partition("-")
        name = f"{spelling(full_address(gpu))}-{slot}"
        assert service.device(name)["addr"] == device["addr"]
        request = service.resolved(LeaseRequest(devices=(name,), gpu=spelling(full_address(gpu))))
        assert (request.devices, request.gpu) == ((device["addr"],), gpu)
        assert service.devices(Filters(addr=name), 0, 0)["isolated_devices"] == [device]
        shown = service.devices(Filters(addr=spelling(full_address(gpu))), 0, 0)["isolated_devices"]
        assert {one["gpu_uuid"] for one in shown} == {device["gpu_uuid"]}


@given(ADDRESSES)
def test_a_mig_instance_is_found_by_its_address(address: str) -> None:
    parts = in_instances(builders.gpu(pci_address=address), "3g.40gb", "3g.40gb")
    entries = [builders.entry(address, 0)._replace(mig=("3g.40gb", "3g.40gb"))]
    service = queries(snapshot(*parts, entries=entries))
    assert len(service.all_devices()) == 2
    for device in service.all_devices():
        assert service.device(full_address(physical_gpu(device["addr"])) + "-g1")["addr"].endswith("-g1")
        assert physical_gpu(device["addr"]) == shown_address(address)


@pytest.fixture(scope="module")
def kernel_log(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    root = tmp_path_factory.mktemp("log")
    (root / "dev").mkdir()
    return Paths(str(root))


@given(addresses=PAIRS)
def test_an_xid_of_the_kernels_log_belongs_to_its_gpu(kernel_log: Paths, addresses: list[str]) -> None:
    lines = [
        f"4,{number},1,-;NVRM: Xid (PCI:{address.rpartition('.')[0]}): 31, pid={number}, name=train\n"
        for number, address in enumerate(addresses, 100)
    ]
    Path(kernel_log.kernel_log).write_text("".join(lines))
    found = processes_of_xids(kernel_log)
    assert found == [(address, 31, number) for number, address in enumerate(addresses, 100)]


@pytest.mark.parametrize(
    ("address", "place", "root"),
    [
        ("0000:3b:00.0", "pci0000:3a/0000:3a:00.0/0000:3b:00.0", "pci0000:3a"),
        ("10003:00:00.0", "pci10003:00/10003:00:00.0", "pci10003:00"),
        ("10000:01:00.0", "pci0000:64/0000:64:05.5/pci10000:00/10000:01:00.0", "pci0000:64"),
    ],
)
def test_the_root_of_a_pci_hierarchy_may_be_in_any_domain(
    tmp_path: Path, address: str, place: str, root: str
) -> None:
    (tmp_path / "sys/devices" / place).mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices" / address).symlink_to(f"../../../devices/{place}")
    assert pcie_root(Paths(str(tmp_path)), f"{address}-g1") == root
