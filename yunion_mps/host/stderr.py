"""Writes a line to the standard error of a user's process, without risk to the process or the daemon."""

from __future__ import annotations

import contextlib
import os
import re
import stat

#: How the kernel names an unnamed pipe and a pseudo-terminal. Anything else is not even opened: a call on a
#: file of a network file system may hang, and opening a device may change it.
_SUITABLE = re.compile(r"pipe:\[\d+\]|/dev/pts/\d+")
#: The major numbers of pseudo-terminals (Linux, admin-guide/devices.txt).
_PTS_MAJORS = range(136, 144)
#: Less than PIPE_BUF, so that all of it is written or nothing.
_MAX_BYTES = 1000


def write_to_stderr(pid: int, uid: int, line: str) -> bool:
    """Write the line if the process's standard error is an unnamed pipe or a pseudo-terminal of this user.

    Never writes to a file or socket, nor to what belongs to another user: the process could have chosen it to
    have a line written where its own user may not write. Never waits: the line is lost if there is no reader
    or no room. Returns whether it was written.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        path = f"/proc/{pid}/fd/2"
        if not _SUITABLE.fullmatch(os.readlink(path)):
            return False
        # O_PATH does not open it, but keeps hold of it: the process may have replaced it meanwhile.
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, held)
        path = f"/proc/self/fd/{held}"
        if not _SUITABLE.fullmatch(os.readlink(path)) or not _is_owned(os.fstat(held), uid):
            return False
        opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        stack.callback(os.close, opened)
        return os.write(opened, line.encode()[:_MAX_BYTES]) > 0
    return False


def _is_owned(file: os.stat_result, uid: int) -> bool:
    """Return whether it is a pipe or pseudo-terminal of this user."""
    is_terminal = stat.S_ISCHR(file.st_mode) and os.major(file.st_rdev) in _PTS_MAJORS
    return file.st_uid == uid and (is_terminal or stat.S_ISFIFO(file.st_mode))
