"""The lock of the node, so that only one plugin serves it, whether as a service or in a pod.

Two would take each other's sockets away. The lock is on the kubelet's directory of device plugins, which all
plugins of a node share, DRA drivers too. A lock file in it would be removed when the kubelet starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

from yunion_mps.errors import HostError
from yunion_mps.host.log import Failures
from yunion_mps.tasks import cancel

log = logging.getLogger(__name__)

_POLL_S = 1.0
#: The mode with which the kubelet creates the directory.
_MODE = 0o750


class NodeLock:
    """A lock that lasts until the process that took it releases it or ends."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Take the lock, unless another process has it; raises OSError, and HostError if we may not write."""
        try:
            os.makedirs(self._directory, _MODE, exist_ok=True)
        except OSError as error:
            if error.errno == errno.EROFS:
                raise self.replaced from None
            raise
        if not os.access(self._directory, os.W_OK):
            raise self.replaced
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._descriptor = descriptor
        return True

    @property
    def is_effective(self) -> bool:
        """Whether other processes would find the lock: the directory may have been removed or replaced."""
        assert self._descriptor is not None
        locked = os.fstat(self._descriptor)
        with contextlib.suppress(OSError):
            # a pod still sees a removed directory that was mounted into it, but it has no links
            return bool(locked.st_nlink) and os.path.samestat(locked, os.stat(self._directory))
        return False

    @property
    def replaced(self) -> HostError:
        """The error if the directory was replaced: this unit or pod cannot write to the new one."""
        hint = "start the plugin again, unless systemd or the kubelet does"
        return HostError(f"{self._directory} was removed or replaced", hint)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


async def run_alone(
    directory: str, other: str, report: Callable[[str], None], work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Do the work while no other plugin serves the node; raises what it raises.

    While one does, `report` is called with the text `other`. Raises HostError if the directory is removed or
    replaced, by a mount or with all of the kubelet's files.
    """
    lock = NodeLock(directory)
    await _wait_for(lock, other, report)
    serving = asyncio.ensure_future(work())
    try:
        while not serving.done():
            if not lock.is_effective:
                raise lock.replaced
            await asyncio.wait({serving}, timeout=_POLL_S)
    finally:
        await cancel([serving])
        lock.release()
    serving.result()


async def _wait_for(lock: NodeLock, other: str, report: Callable[[str], None]) -> None:
    failures = Failures(log)
    while True:
        try:
            if lock.take():
                return
            failures.report(other)
        except OSError as error:
            failures.report(f"{error.filename}: {error.strerror}")
        report(failures.cause)
        await asyncio.sleep(_POLL_S)
