"""What is recorded of leases: which devices, what became of them, and who has or had them, in words."""

from __future__ import annotations

from yunion_mps.containers.lookup import Containers
from yunion_mps.host.proc import command_of, user_name
from yunion_mps.models import Event, Holder, Lease
from yunion_mps.supervisor.event_log import EventLog


class LeaseEvents:
    """Records them; a holder has to be there for its name to be known."""

    def __init__(self, event_log: EventLog, containers: Containers) -> None:
        self._event_log = event_log
        self._containers = containers

    def given(self, lease: Lease) -> None:
        """Its devices were given to its holder."""
        self._tell(lease, "given to", "it was asked for")

    def bound(self, lease: Lease) -> None:
        """It is a container's now."""
        self._tell(lease, "bound to", "its container starts")

    def ended(self, lease: Lease, cause: str) -> None:
        """Its devices are free again."""
        self._tell(lease, "given back by", cause)

    def _tell(self, lease: Lease, what: str, cause: str) -> None:
        what = f"{what} {self._named(lease.holder)}"
        self._event_log.record(Event("info", "lease", devices_of(lease), what, cause))

    def _named(self, holder: Holder) -> str:
        user = user_name(holder.uid)
        if holder.binding == "name":
            return f"{holder.name} of {user}"
        inside = self._containers.of(holder.pid or 0) if holder.binding == "container" else None
        command = holder.command or command_of(holder.pid or 0) or "a process"
        what = f"container {inside.name}" if inside else command
        return f"{what} (PID {holder.pid}, {user})"


def devices_of(lease: Lease) -> str:
    """The addresses of its devices, in words."""
    return ", ".join(device.addr for device in lease.devices)
