"""The device nodes that a container needs for a GPU or a MIG instance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from yunion_mps.containers.nodes import gpu_nodes, missing_nodes
from yunion_mps.core.models import Gpu
from yunion_mps.core.paths import Paths

from simhost import SimHost


@pytest.fixture
def host() -> Iterator[SimHost]:
    with SimHost.create([{"kind": "t4"}, {"kind": "h100", "mig": True}]) as made:
        yield made


def nodes(host: SimHost, gpu: Gpu) -> list[str]:
    """The nodes, all of which are devices."""
    for file in (host.root / "dev").rglob("nvidia*"):
        if file.is_file():
            file.unlink()
            file.symlink_to("/dev/null")
    return [node.path for node in gpu_nodes(Paths(str(host.root)), [gpu])[str(gpu.uuid)]]


def minor(host: SimHost, name: str) -> str:
    """As in NVIDIA's table of all minors."""
    table = (host.root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    return next(line.split()[1] for line in table if line.startswith(f"{name} "))


@pytest.mark.processes
def test_an_instance_has_its_gpus_node_and_its_own_capabilities(host: SimHost) -> None:
    first, second = host.create_mig_devices(1, "3g.40gb", "3g.40gb")
    gpu = Gpu(f"0000:00:07.0-g{second.gpu_instance}", second.uuid, minor=1)
    assert nodes(host, gpu) == [
        "/dev/nvidia1",
        f"/dev/nvidia-caps/nvidia-cap{minor(host, f'gpu1/gi{second.gpu_instance}/access')}",
        f"/dev/nvidia-caps/nvidia-cap{minor(host, f'gpu1/gi{second.gpu_instance}/ci0/access')}",
    ]
    host.gpus[1].end_instances(first.gpu_instance)
    gone = Gpu(f"0000:00:07.0-g{first.gpu_instance}", first.uuid, minor=1)
    assert nodes(host, gone) == ["/dev/nvidia1"]


def test_a_file_that_is_not_a_device_is_left_out(host: SimHost) -> None:
    """An engine would refuse to start a container with it."""
    gpu = Gpu("0000:00:06.0", host.gpus[0].uuid, minor=0)
    node, paths = host.root / "dev/nvidia0", Paths(str(host.root))
    node.unlink(missing_ok=True)
    assert gpu_nodes(paths, [gpu])[gpu.uuid or ""] == ()
    node.write_text("")
    assert gpu_nodes(paths, [gpu])[gpu.uuid or ""] == ()


def test_a_whole_gpu_has_its_own_node_only(host: SimHost) -> None:
    assert nodes(host, Gpu("0000:00:06.0", host.gpus[0].uuid, minor=0)) == ["/dev/nvidia0"]


@pytest.mark.processes
def test_an_instance_without_the_nodes_of_its_capabilities_is_found(host: SimHost) -> None:
    (made,) = host.create_mig_devices(1, "3g.40gb")
    whole = Gpu("0000:00:06.0", host.gpus[0].uuid, minor=0)
    gpu = Gpu(f"0000:00:07.0-g{made.gpu_instance}", made.uuid, minor=1)
    paths = Paths(str(host.root))
    *_, node = nodes(host, gpu)
    assert missing_nodes(paths, [whole, gpu]) == {}
    (host.root / node[1:]).unlink()
    access = f"{paths.capabilities}/gpu1/mig/gi{made.gpu_instance}/ci0/access"
    (missing,) = missing_nodes(paths, [whole, gpu]).values()
    assert missing.message == f"MIG instance {gpu.address}: no such device node: {node}"
    assert missing.hint == f"create it: nvidia-modprobe -f {access}; containers get it within 10 seconds"
    host.gpus[1].end_instances(made.gpu_instance)
    (missing,) = missing_nodes(paths, [gpu]).values()
    what = f"MIG instance {gpu.address}: its capabilities are missing from {paths.capabilities}"
    assert missing.message == what
