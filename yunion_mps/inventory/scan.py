"""One inventory out of both sources: NVML for the GPUs, sysfs for their place in the host."""

from __future__ import annotations

from yunion_mps.inventory import pci
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.models import Gpu, Inventory
from yunion_mps.paths import Paths


def scan(nvml: Nvml, paths: Paths) -> Inventory:
    """Return every NVIDIA GPU of the host in PCI order, the broken ones with their reason.

    A GPU that NVML cannot give a handle for has no address there; sysfs still lists it, so that it is
    reported by its place. Raises DriverError when the driver as a whole does not answer.
    """
    driver = nvml.driver()
    found, silent = nvml.gpus()
    nodes = pci.render_nodes(paths)
    by_address = {gpu.pci_address: gpu for gpu in found}
    reasons = [error.message for _, error in silent]
    for address in pci.nvidia_gpus(paths):
        if address not in by_address:
            reason = nvml.reason_at(address) or (
                reasons[0] if reasons else "the driver does not offer this GPU"
            )
            by_address[address] = Gpu(address, reason=reason)
    gpus = [_placed(gpu, nodes, paths) for gpu in by_address.values()]
    return Inventory(driver, tuple(sorted(gpus, key=lambda gpu: pci.sort_key(gpu.pci_address))))


def _placed(gpu: Gpu, nodes: dict[str, str], paths: Paths) -> Gpu:
    """The GPU with what sysfs and udev know of its address."""
    return gpu._replace(
        vendor_device_id=gpu.vendor_device_id or pci.vendor_device_id(paths, gpu.pci_address),
        numa_node=pci.numa_node(paths, gpu.pci_address),
        link=pci.max_link(paths, gpu.pci_address),
        render_node=nodes.get(gpu.pci_address),
    )
