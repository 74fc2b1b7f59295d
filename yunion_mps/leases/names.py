"""What people call a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from yunion_mps.errors import NotFoundError
from yunion_mps.models import Gpu


def gpu_named(name: str, gpus: Sequence[Gpu]) -> Gpu:
    """The GPU of this address or UUID, or a unique beginning of either; raises NotFoundError."""
    found = [gpu for gpu in gpus if name in (gpu.address, gpu.uuid)]
    found = found or [
        gpu for gpu in gpus if gpu.address.startswith(name) or (gpu.uuid or "").startswith(name)
    ]
    if len(found) != 1:
        what = f"{cut(name)} names {len(found)} GPUs" if found else f"there is no GPU {cut(name)}"
        raise NotFoundError(what, "list them with: yunion-mps gpus")
    return found[0]


def cut(name: str) -> str:
    """A name that somebody has given, as it can be shown."""
    return name if name.isprintable() and len(name) <= 100 else repr(name[:100])
