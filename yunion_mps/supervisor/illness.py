"""GPUs that had a fatal XID: remembered until they were reset, also by the next daemon of this boot."""

from __future__ import annotations

import contextlib
import json
import os

from yunion_mps.host.files import write_atomically


class Illness:
    """Why GPUs are ill although NVML still speaks of them, by PCI address; the file ends with the boot."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._reasons: dict[str, str] = {}
        unreadable = (OSError, ValueError, AttributeError, RecursionError)
        with contextlib.suppress(*unreadable), open(file, encoding="utf-8") as kept:
            self._reasons = {str(address): str(why) for address, why in json.load(kept).items()}

    def reason(self, pci_address: str) -> str:
        """Why it is ill, empty where it is not."""
        return self._reasons.get(pci_address, "")

    def note(self, pci_address: str, why: str) -> None:
        """It is ill."""
        self._reasons[pci_address] = why
        self._keep()

    def cure(self, *pci_addresses: str) -> None:
        """They were reset; all of them where none is named."""
        before = dict(self._reasons)
        for address in pci_addresses or tuple(before):
            self._reasons.pop(address, None)
        if self._reasons != before:
            self._keep()

    def _keep(self) -> None:
        """Write it down; that this cannot be done is no reason to stop."""
        with contextlib.suppress(OSError):
            if self._reasons:
                write_atomically(self._file, json.dumps(self._reasons))
            else:
                os.unlink(self._file)
