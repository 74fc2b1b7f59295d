"""What people call a GPU, and a lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from yunion_mps.errors import NotFoundError
from yunion_mps.models import Gpu, Lease

#: So much of a lease's id must be given.
_LEAST = 4


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


def lease_named(name: str, leases: Mapping[str, Lease], uid: int) -> Lease:
    """The lease of this id, of a holder with this name, or a unique beginning of an id.

    `leases` are by id. Those of the user `uid`, who asks, go before others': whatever others call theirs, it
    is in nobody's way. Raises NotFoundError.
    """
    if name in leases:
        return leases[name]
    named = [one for one in leases.values() if one.holder.name == name]
    begun = [one for one in leases.values() if len(name) >= _LEAST and one.id.startswith(name)]
    either = list({one.id: one for one in (*named, *begun)}.values())
    found = _of_user(uid, named) or _of_user(uid, begun) or either
    if not found:
        raise NotFoundError(f"there is no lease {cut(name)}", "see: yunion-mps who")
    if len(found) > 1:
        raise NotFoundError(f"{cut(name)} names {len(found)} leases", "give more of the id")
    return found[0]


def _of_user(uid: int, leases: Sequence[Lease]) -> list[Lease]:
    return [one for one in leases if one.holder.uid == uid]


def cut(name: str) -> str:
    """A name that somebody has given, as it can be shown."""
    return name if name.isprintable() and len(name) <= 100 else repr(name[:100])
