"""The specification: what a container gets with a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.containers import budget_variables
from yunion_mps.containers.nodes import DeviceNode, MissingNodes
from yunion_mps.containers.spec import Edits, HostFiles, Nvidia, devices_spec, lease_spec
from yunion_mps.core.models import Gpu, Holder, Lease, Pool
from yunion_mps.planning.division import pool_device
from yunion_mps.planning.environment import client_environment

from unit.containers.cdi_specs import (
    HOST,
    edits_of,
    environment_of,
    held,
    hold_to_the_format,
    plan_of,
    spec_of,
)
from unit.http.snapshots import H100, P40, disabled, gone, large, reference, snapshot, troubled

LEASE_ID = "7c1f0e7a-8a52-4f0e-8b5e-3f9d2a6c1b44"


def test_every_device_is_named_by_address_and_id_and_in_all() -> None:
    devices, domains = plan_of(reference())
    spec = held(devices_spec(devices, domains, HOST))
    assert (spec["kind"], spec["cdiVersion"]) == ("yunion.io/mps", "0.5.0")
    names = [device["name"] for device in spec["devices"]]
    assert names == [name for one in devices for name in (one.addr, one.id)] + ["all"]
    assert names[:2] == ["00:06.0-0", devices[0].id]
    assert edits_of(spec, devices[2].id) == edits_of(spec, "00:06.0-2")


def test_a_device_brings_budget_pipe_directory_nodes_and_hook() -> None:
    devices, domains = plan_of(reference())
    spec = held(devices_spec(devices, domains, HOST._replace(hook_environment={"A": "b"})))
    edits = edits_of(spec, "00:06.0-1")
    expected = client_environment([devices[1]], domains[0])
    assert environment_of(edits) == {**expected, "YUNION_MPS_LEASE": ""}, "and no lease of an engine's caller"
    options = ["rw", "nosuid", "nodev", "noexec", "rbind"]
    assert edits["mounts"] == [
        {"hostPath": place, "containerPath": place, "options": options}
        for place in ("/tmp/nvidia-mps/pipe", "/dev/shm")
    ]
    assert edits["deviceNodes"] == [{"path": "/dev/nvidia0"}]
    assert edits["hooks"] == [
        {
            "hookName": "createRuntime",
            "path": "/usr/bin/yunion-mps",
            "args": ["yunion-mps", "cdi-hook", "00:06.0-1"],
            "env": ["A=b"],
            "timeout": 30,
        }
    ]
    common = spec["containerEdits"]
    assert "mounts" not in common
    assert [node["path"] for node in common["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia-uvm"]


def test_a_time_sliced_device_brings_its_gpu_and_nothing_of_mps() -> None:
    (first, *others), domains = plan_of(reference())
    direct = first._replace(domain="", sharing="time-slicing", budget_enforced=False)
    spec = held(devices_spec([direct, *others], domains, HOST))
    edits = edits_of(spec, first.addr)
    assert environment_of(edits) == {**client_environment([direct], None), "YUNION_MPS_LEASE": ""}
    assert "mounts" not in edits
    assert edits["deviceNodes"] == [{"path": "/dev/nvidia0"}]
    assert len(spec["devices"]) == 2 * len(others) + 2, "no process can have them all"


def test_all_has_every_gpu_within_what_one_client_may_get_of_it() -> None:
    devices, _ = plan_of(snapshot(P40, H100))
    edits = edits_of(spec_of(snapshot(P40, H100)), "all")
    environment = environment_of(edits)
    assert environment["CUDA_VISIBLE_DEVICES"] == f"{P40.uuid},{H100.uuid}"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=5760M,1=20389M"
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment["YUNION_MPS_DEVICE"].split(",") == [device.addr for device in devices]
    assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidia0", "/dev/nvidia1"]


def test_with_a_control_daemon_for_each_gpu_nothing_is_all() -> None:
    devices, domains = plan_of(snapshot(P40, H100, scope="gpu"))
    spec = held(devices_spec(devices, domains, HOST))
    assert "all" not in [device["name"] for device in spec["devices"]]
    places = {environment_of(edits_of(spec, one.addr))["CUDA_MPS_PIPE_DIRECTORY"] for one in devices}
    assert places == {f"/tmp/nvidia-mps/pipe/{gpu.uuid}" for gpu in (P40, H100)}


def test_all_exists_even_if_a_gpu_is_not_served_now() -> None:
    devices, (domain,) = plan_of(snapshot(P40, H100))
    without = domain._replace(gpus=domain.gpus[:1])
    environment = environment_of(edits_of(held(devices_spec(devices, [without], HOST)), "all"))
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].startswith("0=5760M,1=")


def test_the_one_control_daemon_that_is_left_of_several_is_not_all() -> None:
    devices, domains = plan_of(snapshot(P40, H100, scope="gpu"))
    spec = held(devices_spec(devices, domains[:1], HOST))
    assert "all" not in [device["name"] for device in spec["devices"]]


def test_devices_that_are_not_served_stay_for_the_hook_to_say_why() -> None:
    for state in (troubled(), gone()):
        names = {device["name"] for device in spec_of(state)["devices"]}
        assert {device.addr for device in state.plan.devices} < names


def test_a_device_of_a_lost_gpu_brings_only_its_variables_and_the_hook() -> None:
    """No control daemon is started for it, so its pipe directory and its nodes may be missing."""
    devices, (served, parked) = plan_of(snapshot(P40, H100, scope="gpu"))
    spec = held(devices_spec(devices, [served], HOST, [parked]))
    lost = [device for device in devices if device.domain == parked.name]
    for name in (lost[1].addr, lost[1].id):
        edits = edits_of(spec, name)
        assert edits.keys() == {"env", "hooks"}
        assert environment_of(edits)["YUNION_MPS_DEVICE"] == lost[1].addr
        assert edits["hooks"][0]["args"] == ["yunion-mps", "cdi-hook", lost[1].addr, "--unserved"]
    alone = held(devices_spec(lost, [], HOST, [parked]))
    assert [one["name"] for one in alone["devices"]] == [name for one in lost for name in (one.addr, one.id)]
    both = held(devices_spec(devices, [served, parked], HOST, [parked]))
    assert "mounts" in edits_of(both, lost[1].addr), "as soon as it is served"


def test_a_host_without_devices_has_no_specification() -> None:
    assert devices_spec(*plan_of(disabled()), HOST) is None


def test_below_another_root_a_node_is_found_where_the_host_has_it() -> None:
    host = HostFiles(gpu_nodes={str(P40.uuid): (DeviceNode("/dev/nvidia0", "/root/dev/nvidia0"),)})
    edits = edits_of(spec_of(reference(), host), "00:06.0-0")
    assert edits["deviceNodes"] == [{"path": "/dev/nvidia0", "hostPath": "/root/dev/nvidia0"}]


def test_the_hook_is_told_which_nodes_are_missing_unless_nvidia_has_them() -> None:
    missing = MissingNodes("MIG instance 00:06.0-g1: no such device node", "create it")
    host = HOST._replace(missing={str(P40.uuid): missing})
    (hook,) = edits_of(spec_of(reference(), host), "00:06.0-1")["hooks"]
    assert hook["args"] == ["yunion-mps", "cdi-hook", "00:06.0-1", "--missing-nodes", *missing]
    host = host._replace(nvidia=Nvidia(by_gpu={str(P40.uuid): Edits()}))
    (hook,) = edits_of(spec_of(reference(), host), "00:06.0-1")["hooks"]
    assert hook["args"] == ["yunion-mps", "cdi-hook", "00:06.0-1"]


def test_nvidias_cdi_edits_are_included() -> None:
    theirs = Edits(
        ("NVIDIA_VISIBLE_DEVICES=void",),
        ({"hostPath": "/usr/lib/libcuda.so.1", "containerPath": "/usr/lib/libcuda.so.1"},),
        ({"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["hook"]},),
        ({"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-modeset"}),
    )
    gpu = Edits(device_nodes=({"path": "/dev/nvidia0"}, {"path": "/dev/dri/card0"}))
    host = HOST._replace(nvidia=Nvidia((0, 7, 0), theirs, {str(P40.uuid): gpu}))
    spec = spec_of(snapshot(P40, H100), host)
    assert spec["cdiVersion"] == "0.7.0", "theirs may need what came with it"
    common = spec["containerEdits"]
    assert [mount["containerPath"] for mount in common["mounts"]] == ["/usr/lib/libcuda.so.1"]
    assert common["hooks"] == list(theirs.hooks)
    assert [node["path"] for node in common["deviceNodes"]] == [
        "/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia-uvm",
    ]  # fmt: skip
    assert common["env"] == list(theirs.env)
    on_p40 = edits_of(spec, "00:06.0-0")["deviceNodes"]
    assert [node["path"] for node in on_p40] == ["/dev/nvidia0", "/dev/dri/card0"]
    assert edits_of(spec, "0001:e1:00.0-0")["deviceNodes"] == [{"path": "/dev/nvidia1"}]
    assert [node["path"] for node in edits_of(spec, "all")["deviceNodes"]] == [
        "/dev/nvidia0", "/dev/dri/card0", "/dev/nvidia1",
    ]  # fmt: skip


def test_a_lease_is_a_device_by_its_id_with_its_own_environment() -> None:
    devices, _ = plan_of(reference())
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": "/p",
        "CUDA_VISIBLE_DEVICES": str(P40.uuid),
        "YUNION_MPS_LEASE": LEASE_ID,
    }
    lease = Lease(LEASE_ID, devices[:2], Holder("process", 0, 1, 1), 0.0, environment, cdi=True)
    spec = held(lease_spec(lease, {device.id for device in devices}, HOST))
    assert [device["name"] for device in spec["devices"]] == [LEASE_ID]
    edits = edits_of(spec, LEASE_ID)
    budget = {"YUNION_MPS_MEMORY_MIB": "11520", "YUNION_MPS_SM_PERCENT": "50"}
    assert environment_of(edits) == {**environment, **budget}
    assert edits["hooks"][0]["args"][-1] == LEASE_ID
    assert [mount["containerPath"] for mount in edits["mounts"]] == ["/p", "/dev/shm"]


def test_a_lease_of_a_whole_instance_has_no_budget_variables() -> None:
    """Its hardware enforces the budget, and the device itself has none either."""
    devices, _ = plan_of(reference())
    whole = devices[0]._replace(sharing="none", domain="")
    environment = {"CUDA_VISIBLE_DEVICES": "MIG-1", "YUNION_MPS_LEASE": LEASE_ID}
    lease = Lease(LEASE_ID, (whole,), Holder("process", 0, 1, 1), 0.0, environment, cdi=True)
    assert environment_of(edits_of(held(lease_spec(lease, {whole.id}, HOST)), LEASE_ID)) == environment


def test_a_device_of_a_pool_has_a_name_while_its_lease_lives() -> None:
    plan = reference().domains[0].plan
    pool = Pool(str(P40.uuid), "host", 1024, 22528, 23040, 0, 16)
    device = pool_device(reference().plan.host_id, pool, 2, 0, [P40])
    environment = client_environment([device], plan)
    lease = Lease(LEASE_ID, (device,), Holder("name", 0, name="job"), 0.0, environment, cdi=True)
    spec = held(lease_spec(lease, set(), HOST))
    assert [one["name"] for one in spec["devices"]] == [LEASE_ID, "00:06.0-m0", device.id]
    assert edits_of(spec, "00:06.0-m0")["hooks"][0]["args"][-1] == LEASE_ID


@given(
    st.lists(
        st.builds(
            lambda domain, bus, slot, function: f"{domain:04x}:{bus:02x}:{slot:02x}.{function}",
            st.integers(0, 0xFFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7),
        ),
        min_size=1, max_size=4, unique=True,
    ),
    st.sampled_from([1, 2, 11]),  # slots of one digit and of two
    st.sampled_from(["host", "gpu"]),
)  # fmt: skip
def test_whatever_the_gpus_are_every_name_fits_the_format(
    addresses: list[str], number: int, scope: str
) -> None:
    gpus: list[Gpu] = [
        H100._replace(pci_address=address, uuid=f"GPU-{place:08x}-2222-3333-4444-555555555555", minor=place)
        for place, address in enumerate(sorted(addresses))
    ]
    spec_of(snapshot(*gpus, replicas=number, scope=scope))


@pytest.mark.parametrize("word", ["kind", "name", "hookName", "deviceNodes"])
def test_the_schema_that_holds_us_finds_what_is_wrong(word: str) -> None:
    spec = spec_of(large(48))
    edits = spec["devices"][0]["containerEdits"]
    broken = {"kind": spec, "name": spec["devices"][0], "hookName": edits["hooks"][0], "deviceNodes": edits}
    broken[word][word] = 7
    with pytest.raises((AssertionError, TypeError)):
        hold_to_the_format(spec)


def test_a_container_is_told_no_amount_that_is_unknown() -> None:
    assert budget_variables([("GPU-0", None, 100.0)]) == {"YUNION_MPS_SM_PERCENT": "100"}
    both = budget_variables([("GPU-0", None, 100.0), ("GPU-1", 512, 100.0)])
    assert both == {"YUNION_MPS_MEMORY_MIB": "512", "YUNION_MPS_SM_PERCENT": "100"}
