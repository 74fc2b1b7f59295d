"""A PyTorch DataLoader in which each worker preprocesses on its own device.

A worker's lease ends with the worker. CUDA reads the budget when a process first uses it, so the worker takes
its lease before that. Workers are spawned, because a forked child of a process that uses CUDA cannot
use CUDA.
"""

from __future__ import annotations

import os

from torch.utils.data import DataLoader, Dataset
from yunion_mps import Client


def take_device(worker: int) -> None:
    """Take a device for this worker, and wait for one if necessary."""
    lease = Client().lease(wait_s=60)
    os.environ.update(lease.environment)
    print(f"worker {worker}: {lease.devices[0]} with {lease.memory_mib} MiB", flush=True)


class Images(Dataset[str]):
    """A data set that preprocesses on the GPU of its worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> str:
        return f"image {number}, prepared on {os.environ['YUNION_MPS_DEVICE']}"


if __name__ == "__main__":
    loader = DataLoader(
        Images(),
        batch_size=None,
        num_workers=2,
        worker_init_fn=take_device,
        multiprocessing_context="spawn",
    )
    for image in loader:
        print(image)
