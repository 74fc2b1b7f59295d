"""Records which directories the daemon uses, so that a purge of the package can remove them.

It is read by packaging/scriptlets/purge.sh.
Each line is one of these: `made DIRECTORY`, `used DIRECTORY` if it existed before, `theirs FILE` for a file
in an existing directory whose name is like one of ours, and `above DIRECTORY` for a parent that we created
for another.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

log = logging.getLogger(__name__)

_MAX_LINES = 1000
_UNRECORDED = "%s cannot be %s: %s; a purge of the package leaves unrecorded files behind"


class DirectoryRecord:
    """The file of the record, whose lines are never removed."""

    def __init__(self, file: str) -> None:
        """`file` is the path; it is empty if nothing is recorded."""
        self._file = file

    def lines(self) -> list[str] | None:
        """Return the lines; None if nothing is recorded, or the file cannot be read."""
        if not self._file:
            return None
        try:
            with open(self._file, "rb") as file:
                return [os.fsdecode(line) for line in file.read().split(b"\n")[:-1]]
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning(_UNRECORDED, self._file, "read", error.strerror)
            return None

    def has_made(self, directory: str) -> bool:
        """Whether we created the directory, as far as that is known."""
        return f"made {directory}" in (self.lines() or ())

    def add(self, before: Sequence[str] | None, lines: Sequence[str]) -> None:
        """Add new lines to those from before; a failure is only logged."""
        if before is None:
            return
        new = [line for line in lines if line not in before]
        if not new or len(before) + len(new) > _MAX_LINES:
            return
        try:
            os.makedirs(os.path.dirname(self._file), mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(self._file, flags, 0o600), "ab") as file:
                file.write(b"".join(os.fsencode(line) + b"\n" for line in new))
        except OSError as error:
            log.warning(_UNRECORDED, self._file, "written", error.strerror)

    def remove_after(self, before: Sequence[str] | None) -> None:
        """Remove the lines that were added to those from before; raises OSError."""
        if before is not None:
            os.truncate(self._file, sum(len(os.fsencode(line)) + 1 for line in before))


#: Of programs that create no directories, or remove what they have created.
NO_RECORD = DirectoryRecord("")
