"""What other users have done to a directory's path, in words, and the command that mends it.

The operator pastes the command as root, so it must do no harm: what another user keeps there is moved and not
deleted, and only where nothing but MPS has its files. Everywhere else, only another directory helps.
"""

from __future__ import annotations

import os
import re
import stat

from yunion_mps.core.errors import UnsafePathError
from yunion_mps.core.text import printable, shell_word

#: The files of NVIDIA's programs and ours in pipe and log directories; purge.sh has the same names.
#: Source: nvidia-cuda-mps-control(1), section "FILES"; those of pipe directories: measured with 535 and 550.
FILES = (
    *("control", "control_lock", "control_privileged", "log", "nvidia-cuda-mps-control.pid"),
    *("control.log", "control.log.1", "server.log", "server.log.1"),
)

#: The name of NVIDIA's own directory, in which nothing but MPS has its files.
_NVIDIAS = "nvidia-mps"
#: Directories that every user may write to.
_FOR_ALL = ("/tmp", "/var/tmp", "/dev/shm")
_OCTAL = re.compile(rb"\\([0-7]{3})")


def unsafe_path(path: str, what: str, command: str = "", *, look: str = "ls -la") -> UnsafePathError:
    """Return the error for `path`, with the commands that look at it and mend it.

    command: mends it; if it is empty, the hint is to choose another directory
    """
    check = f"check it ({look} {shell_word(path)})"
    hint = f"{check}, and choose another directory in host.conf"
    if command:
        hint = f"{check}; then {command}, or choose another directory"
    return UnsafePathError(f"{printable(path)} {what}", hint)


def replace_command(path: str, *, last: bool, mounted: bool = False) -> str:
    """Return the command that puts a directory of root in the place of another user's; may be empty.

    It creates root's directory at once, so that the other user cannot be first again, and fails if they are.

    last: whether `path` is the pipe or log directory itself, and not one above it
    mounted: whether the other user has mounted something there
    """
    if not (_is_nvidias(path) or (last and _is_shared(os.path.dirname(path)))):
        return ""
    place = shell_word(path)
    template = shell_word(os.path.join(os.path.dirname(path), "old.XXXXXX"))
    unmount = f"umount -l {place} && " if mounted else ""
    return f'{unmount}mv {place} "$(mktemp -d {template})" && mkdir -m 755 {place}'


def remove_command(path: str, *, mounted: bool = False) -> str:
    """Return the command that removes an entry of a pipe or log directory; may be empty."""
    directory = os.path.dirname(path)
    is_of_mps = os.path.basename(path) in FILES or _is_nvidias(directory)
    if not (is_of_mps or _is_shared(os.path.dirname(directory))):
        return ""
    unmount = f"umount -l {shell_word(path)} && " if mounted else ""
    return f"{unmount}rm -r {shell_word(path)}"


def close_command(path: str, *, last: bool) -> str:
    """Return the command that keeps other users from writing to a directory; may be empty."""
    if path in _FOR_ALL:
        return f"chmod +t {path}"  # every user needs it, and only its sticky bit is missing
    return f"chmod go-w {shell_word(path)}" if last or _is_nvidias(path) else ""


def user_mounts() -> dict[str, int]:
    """Return where users other than root have mounted file systems (FUSE), and who (uid).

    Any user can mount one on a directory of theirs (fusermount(1)). A call to it may be refused even to root,
    or may block for ever, so it is known without touching it (mount.fuse(8), `user_id`).
    """
    mounts: dict[str, int] = {}
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return mounts
    for line in lines:
        match = re.search(rb"\buser_id=(\d+)", line.rpartition(b" ")[2])
        if match and int(match[1]):
            place = _OCTAL.sub(lambda octal: bytes([int(octal[1], 8)]), line.split()[4])
            mounts[os.fsdecode(place)] = int(match[1])
    return mounts


def _is_nvidias(path: str) -> bool:
    return _NVIDIAS in path.split("/")


def _is_shared(directory: str) -> bool:
    """Whether all users write to the directory, and cannot remove each other's files, as in /tmp."""
    try:
        mode = os.stat(directory).st_mode
    except OSError:
        return False
    return bool(mode & stat.S_ISVTX and mode & stat.S_IWOTH)
