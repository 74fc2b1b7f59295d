"""The lock of the node, so that only one plugin serves it, whether as a service or in a pod.

Two would take each other's sockets away. The lock is on the kubelet's directory of device plugins, which all
plugins of a node share, DRA drivers too. A lock file in it would be removed when the kubelet starts.

Source: Kubernetes, pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, removeContents.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from yunion_mps.core.tasks import cancel
from yunion_mps.host.log import Failures
from yunion_mps.kubernetes.kubelet.directory import KubeletDirectory

log = logging.getLogger(__name__)

_POLL_S = 1.0


class NodeLock:
    """A lock that lasts until the process that took it releases it or ends."""

    def __init__(self, directory: str) -> None:
        self._path = directory
        self._directory: KubeletDirectory | None = None

    def take(self) -> bool:
        """Take the lock, and return whether it was free; raises what KubeletDirectory does."""
        directory = KubeletDirectory(self._path)
        try:
            fcntl.flock(directory.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            directory.close()
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._directory = directory
        return True

    def check(self) -> None:
        """Raise HostError if other processes would not find the lock that was taken."""
        if self._directory and not self._directory.is_current:
            raise self._directory.replaced

    def release(self) -> None:
        if self._directory:
            self._directory.close()
            self._directory = None


async def run_alone(
    directory: str,
    other: str,
    report: Callable[[str], None],
    work: Callable[[], Coroutine[Any, Any, None]],
    poll_s: float = _POLL_S,
) -> None:
    """Do the work while no other plugin serves the node.

    While one does, `report` is called with the text `other`. Lock and directory are checked every `poll_s`.

    Raises what the work raises, and HostError if the directory is removed or replaced, by a mount or with all
    of the kubelet's files.
    """
    lock = NodeLock(directory)
    await _wait_for(lock, other, report, poll_s)
    serving = asyncio.ensure_future(work())
    try:
        while not serving.done():
            lock.check()
            await asyncio.wait({serving}, timeout=poll_s)
    finally:
        await cancel([serving])
        lock.release()
    serving.result()


async def _wait_for(lock: NodeLock, other: str, report: Callable[[str], None], poll_s: float) -> None:
    failures = Failures(log)
    while True:
        try:
            if lock.take():
                return
            failures.report(other)
        except OSError as error:
            failures.report(f"{error.filename}: {error.strerror}")
        report(failures.cause)
        await asyncio.sleep(poll_s)
