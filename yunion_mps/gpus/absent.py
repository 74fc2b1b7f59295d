"""GPUs that are not there: how messages name them, and what restores their settings once they are back."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.errors import YunionError
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import GPU_GONE, GPU_LOST, GPU_OTHER_DRIVER
from yunion_mps.core.text import list_of

log = logging.getLogger(__name__)

#: What has to be done before the settings of a GPU that is not there can be restored, by reason code.
_ONCE_BACK = {
    GPU_GONE: "if it comes back, run",
    GPU_OTHER_DRIVER: "once it is bound to the NVIDIA driver again, run",
    GPU_LOST: "reset it (nvidia-smi --gpu-reset -i {uuid}) or reboot the host, then run",
}


def gpu_label(uuid: str, gpus: Iterable[Gpu]) -> str:
    """Return `GPU 00:06.0` if it or one of its instances is in `gpus`, otherwise its UUID (`GPU-…`)."""
    for gpu in gpus:
        if uuid in (gpu.uuid, gpu.parent):
            return f"GPU {physical_gpu(gpu.address)}"
    return uuid


def once_back(code: str, uuid: str) -> str:
    """Return what restores the settings of a GPU that is not there for the reason of this code."""
    return f"{_ONCE_BACK[code].format(uuid=uuid)}: yunion-mps-daemon --restore"


def report_absent(not_restored: Mapping[str, Mapping[str, YunionError]], gpus: Collection[Gpu]) -> None:
    """Log which settings were not restored because the GPU is not there, and why; one line for each GPU.

    not_restored: the errors by the label of the kind of setting, and by the UUID of the GPU
    """
    labels: dict[str, list[str]] = {}
    causes: dict[str, YunionError] = {}
    for label, errors in not_restored.items():
        for uuid, error in errors.items():
            if error.code in _ONCE_BACK:
                labels.setdefault(uuid, []).append(label)
                causes[uuid] = error
    for uuid, error in causes.items():
        cause = error.message
        if not any(gpu.uuid == uuid for gpu in gpus):
            cause += _candidates(gpus)
        problem = f"its {list_of(labels[uuid])} cannot be restored now: {cause}"
        log.warning("%s: %s; %s", gpu_label(uuid, gpus), problem, once_back(error.code, uuid))


def _candidates(gpus: Iterable[Gpu]) -> str:
    """Return which GPUs of unknown UUID an unknown UUID may belong to: `; it may be GPU 01:00.0: …`."""
    named = [f"GPU {gpu.address}: {gpu.reason}" for gpu in gpus if gpu.uuid is None and gpu.reason]
    return "".join(f"; it may be {candidate}" for candidate in named)
