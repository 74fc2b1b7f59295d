"""A copy of the newest events in the run directory, for when the state file cannot be written or is torn."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable

from yunion_mps.journal.table import Recorded
from yunion_mps.models import Event

#: A file of it is followed by the next when it has so many bytes; two are kept, of some 2,000 events each.
_LARGEST = 512 * 1024
#: A larger id is none of ours, and no id that SQLite can keep could follow it.
_MOST_EVENTS_EVER = 1 << 62


class Copy:
    """One event a line, as JSON; what cannot be written or read of it is passed over."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._older = f"{file}.old"

    def add(self, events: Iterable[Recorded]) -> None:
        """Append the events."""
        lines = "".join(
            json.dumps([one.id, one.time_s, *one.event], separators=(",", ":")) + "\n" for one in events
        )
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.file), mode=0o755, exist_ok=True)
            file = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, lines.encode())
                large = os.fstat(file).st_size > _LARGEST
            finally:
                os.close(file)
            if large:
                os.replace(self.file, self._older)

    def read(self) -> list[Recorded]:
        """What there is, in the order of the ids; a line that was cut off is none."""
        found: dict[int, Recorded] = {}
        for name in (self._older, self.file):
            with contextlib.suppress(OSError), open(name, encoding="utf-8", errors="replace") as file:
                for line in file:
                    with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
                        number, time_s, *fields = json.loads(line)
                        if 0 < int(number) < _MOST_EVENTS_EVER:
                            event = Event(*map(str, fields))
                            found[int(number)] = Recorded(int(number), float(time_s), event)
        return [found[number] for number in sorted(found)]
