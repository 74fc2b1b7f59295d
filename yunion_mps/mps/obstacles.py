"""What other users have done to a directory's path, in words, and the command that mends it.

The operator pastes the command as root, perhaps long after it was printed, so it must do no harm whatever is
there by then. What another user keeps is moved aside, by a rename of that one name, and never deleted or
unmounted: a command that follows a symlink would do that where the link leads. Modes are changed, and entries
moved, only below a directory named nvidia-mps, where nothing but MPS has its files. Everywhere else, only
another directory helps.
"""

from __future__ import annotations

import os
import re

from yunion_mps.core.errors import UnsafePathError
from yunion_mps.core.text import printable, shell_word

#: The files of NVIDIA's programs and ours in pipe and log directories; purge.sh has the same names.
#: Source: nvidia-cuda-mps-control(1), section "FILES"; those of pipe directories: measured with 535 and 550.
FILES = (
    *("control", "control_lock", "control_privileged", "log", "nvidia-cuda-mps-control.pid"),
    *("control.log", "control.log.1", "server.log", "server.log.1"),
)

#: What mends a path that no command may change.
CHOOSE_ANOTHER = "choose another directory in host.conf"

#: The name of NVIDIA's own directory, in which nothing but MPS has its files.
_NVIDIAS = "nvidia-mps"
_MOUNTED_BY = re.compile(rb"(?:^|,)user_id=(\d+)")


def unsafe_path(path: str, message: str, command: str = "", *, look: str = "ls -la") -> UnsafePathError:
    """Return the error for `path`, with the commands that look at it and mend it.

    message: what is wrong with it
    command: mends it; if it is empty, the hint is to choose another directory
    look: the command that looks at it, without the path
    """
    check = f"check it ({look} {shell_word(path)})"
    hint = f"{check}, and {CHOOSE_ANOTHER}"
    if command:
        hint = f"{check}; then {command}, or choose another directory"
    return UnsafePathError(f"{printable(path)} {message}", hint)


def replace_command(path: str, *, last: bool, is_shared: bool) -> str:
    """Return the command that puts a directory of root in the place of another user's; may be empty.

    It creates root's directory at once, so that the other user cannot be first again, and fails if they are.

    last: whether `path` is the pipe or log directory itself, and not one above it
    is_shared: whether it lies in a directory like /tmp: all users write to it, and cannot remove each
        other's files
    """
    if not (_is_nvidias(path) or (last and is_shared)):
        return ""
    return f"{_move_aside(path)} && mkdir -m 755 {shell_word(path)}"


def move_command(path: str) -> str:
    """Return the command that moves an entry of a pipe or log directory aside; may be empty."""
    return _move_aside(path) if _is_nvidias(os.path.dirname(path)) else ""


def close_command(path: str) -> str:
    """Return the command that keeps other users from writing to a directory; may be empty."""
    return f"chmod go-w {shell_word(path)}" if _is_nvidias(path) else ""


def enter_hint(path: str) -> str:
    """Return what lets all users enter a directory; one that may be private is not opened by a command."""
    if _is_nvidias(path):
        return f"chmod a+x {shell_word(path)}"
    return f"{CHOOSE_ANOTHER}, which all users may enter"


def limit_hint(path: str, group: str, mode: int) -> str:
    """Return what lets only this group enter a directory; one that others may need is not closed."""
    if _is_nvidias(path):
        place = shell_word(path)
        return f"limit it: chgrp {group} {place} && chmod {mode:o} {place}"
    return f"{CHOOSE_ANOTHER}, which yunion-mps creates"


def mounting_user(mount_id: str) -> int | None:
    """Return the user (uid) who has mounted the file system with this id; 0 if no user has, but root.

    None if it is not mounted any more. Any user can mount a file system (FUSE) on a directory of theirs
    (fusermount(1)). A call to it may be refused even to root, or may block for ever, so this is known without
    touching it (mount.fuse(8), `user_id`). Raises OSError if the mounts cannot be read.
    """
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file.read().splitlines():
            if line.partition(b" ")[0] == mount_id.encode():
                match = _MOUNTED_BY.search(line.rpartition(b" ")[2])
                return int(match[1]) if match else 0
    return None


def _move_aside(path: str) -> str:
    template = shell_word(os.path.join(os.path.dirname(path), "old.XXXXXX"))
    return f'mv {shell_word(path)} "$(mktemp -d {template})"'


def _is_nvidias(path: str) -> bool:
    return _NVIDIAS in path.split("/")
