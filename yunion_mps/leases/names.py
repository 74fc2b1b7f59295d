"""What people call a GPU, a lease, and its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from yunion_mps.errors import NotFoundError
from yunion_mps.host.proc import user_name
from yunion_mps.models import Gpu, Lease, Owner

#: The shortest prefix of a lease's id: as long as `who` shows it, so that no name matches by chance.
_LEAST = 8


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


def lease_named(name: str, leases: Mapping[str, Lease], caller: Owner) -> Lease:
    """The lease with this id, the caller's own lease of this name, or the only one whose id begins so.

    `leases` are by id. A name never finds another owner's lease, not even for root: the caller's own of that
    name may have ended. Raises NotFoundError.
    """
    if name in leases:
        return leases[name]
    named = [one for one in leases.values() if one.holder.name == name]
    begun = [one for one in leases.values() if len(name) >= _LEAST and one.id.startswith(name)]
    found = _own(caller, named) or _own(caller, begun) or begun
    if not found:
        hint = "give the id of another owner's lease: yunion-mps who" if named else "see: yunion-mps who"
        raise NotFoundError(f"there is no lease {cut(name)}", hint)
    if len(found) > 1:
        raise NotFoundError(f"{cut(name)} names {len(found)} leases", "give more of the id")
    return found[0]


def _own(owner: Owner, leases: Sequence[Lease]) -> list[Lease]:
    return [one for one in leases if one.holder.owner == owner]


def owner_name(owner: Owner) -> str:
    """The unit's name, or else the user's."""
    return owner.unit or user_name(owner.uid)


def cut(name: str) -> str:
    """A name that somebody has given, as it can be shown."""
    return name if name.isprintable() and len(name) <= 100 else repr(name[:100])
