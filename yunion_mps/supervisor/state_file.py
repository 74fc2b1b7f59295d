"""The daemon's state file, opened when it is first needed: a host without one gets none for a mere look."""

from __future__ import annotations

from yunion_mps.core.paths import Paths
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import Store


class StateFile:
    """Opens and closes the state file; the supervisor creates it, and its parts use it."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        #: The open file; None if nothing has needed it yet.
        self.opened: Store | None = None

    def open(self) -> Store:
        """Return the file, opened on first use and created if it is missing; raises HostError."""
        if self.opened is None:
            self.opened = Store(self._paths)
        return self.opened

    def open_if_exists(self) -> Store | None:
        """Return the file, opened on first use; None if there is none. Raises HostError."""
        return self.open() if Store.exists(self._paths) else None

    def originals(self) -> Originals:
        """Return what GPUs had before our first change; raises HostError."""
        return Originals(self.open())

    def opened_originals(self) -> Originals | None:
        """Return what GPUs had before our first change; None if the file is not open, so nothing has."""
        return Originals(self.opened) if self.opened else None

    def close(self) -> None:
        """Close the file, so that another program can continue."""
        if self.opened:
            self.opened.close()
            self.opened = None
