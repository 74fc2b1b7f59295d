"""One daemon a host: a lock that ends with its process, in a file that names the PID."""

from __future__ import annotations

import fcntl
import os

from yunion_mps.errors import HostError
from yunion_mps.paths import Paths


def take_lock(paths: Paths) -> int:
    """Return a descriptor that holds the lock while it is open; raises HostError naming the other daemon."""
    try:
        os.makedirs(paths.run_directory, mode=0o755, exist_ok=True)
        descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise HostError(f"{paths.lock} cannot be opened: {error.strerror}", "run as root") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise HostError(
            f"another yunion-mps-daemon is running already (PID {pid})",
            "look at it: yunion-mps status; stop it: systemctl stop yunion-mps-daemon",
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
