"""The kubelet's directories: what happens in one, and whether it is still the one that was opened."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal

from yunion_mps.core.errors import HostError

#: The mode with which the kubelet creates the directory (its pkg/kubelet/cm/devicemanager/plugin/v1beta1,
#: server.go).
_MODE = 0o750
#: How often a change is assumed even if none is reported, in s.
_POLL_S = 1.0


class KubeletDirectory:
    """A directory of the kubelet, held open to notice that it has been removed or replaced.

    The unit and pods have it mounted, and would still see the old one, so they have to be started again.
    """

    def __init__(self, path: str) -> None:
        """Open the directory, which is created if it does not exist.

        Raises OSError, and HostError if it was replaced by one to which we cannot write.
        """
        self._path = path
        try:
            os.makedirs(path, _MODE, exist_ok=True)
        except OSError as error:
            if error.errno == errno.EROFS:
                raise self.replaced from None
            raise
        if not os.access(path, os.W_OK):
            raise self.replaced
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    @property
    def is_current(self) -> bool:
        """Return whether other processes find the same directory."""
        opened = os.fstat(self.descriptor)
        with contextlib.suppress(OSError):
            # a pod still sees a removed directory that was mounted into it, but it has no links
            return bool(opened.st_nlink) and os.path.samestat(opened, os.stat(self._path))
        return False

    @property
    def replaced(self) -> HostError:
        """Return the error for a directory that was removed or replaced."""
        hint = "start the plugin again, unless systemd or the kubelet does"
        return HostError(f"{self._path} was removed or replaced", hint)

    def close(self) -> None:
        os.close(self.descriptor)


class DirectoryWatch:
    """Watches the kubelet's directory: reports changes as they happen, and regularly without one.

    About a second after it starts, the kubelet refuses those of its pods whose resource is not registered
    yet, for example when the node restarts. So we have the kernel signal each change (F_NOTIFY of fcntl(2)).
    We do not use inotify(7), because a user has few of its instances, and a busy node may have none left.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        #: Set when an entry may have been created, renamed or removed; then replaced by a new event.
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Report changes forever."""
        loop = asyncio.get_running_loop()
        # Without a handler, SIGURG is ignored, but SIGIO, the default, would end the process.
        loop.add_signal_handler(signal.SIGURG, self._report)
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # kernels without dnotify
                fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
                events = fcntl.DN_CREATE | fcntl.DN_DELETE | fcntl.DN_RENAME
                fcntl.fcntl(descriptor, fcntl.F_NOTIFY, events | fcntl.DN_MULTISHOT)
            while True:
                self._report()
                await asyncio.sleep(_POLL_S)
        finally:
            os.close(descriptor)
            loop.remove_signal_handler(signal.SIGURG)

    def _report(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
