"""For engines without CDI: a process that has the lease until the container has it, and no longer."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import NoReturn

from yunion_mps.cli.ask import tell
from yunion_mps.errors import ShortageError, YunionError
from yunion_mps.host.processes import Process, output_of
from yunion_mps.models import CDI_KIND

#: How soon the engine is asked again, and how seldom in the end: it may pull an image first.
_LOOK_S = 0.1
_LONGEST_LOOK_S = 2.0
_PATIENCE_S = 30


class Watcher:
    """A child that waits for what to watch, and ends when there is nothing, or nothing any more."""

    def __init__(self, engine: str) -> None:
        """`engine` is the path of the engine's program."""
        self._engine = engine
        self._read, self._write = os.pipe()
        try:
            self.pid = os.fork()
        except OSError as error:
            raise ShortageError(f"no process can be started: {error.strerror}") from None
        if not self.pid:
            self._watch(os.getppid())

    def __enter__(self) -> Watcher:  # noqa: PYI034 - typing.Self is not in 3.9
        """Nothing more is done."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without a word to begin, the child ends."""
        os.close(self._read)
        os.close(self._write)

    def begin(self, lease_id: str) -> None:
        """Watch the container that has the lease's label; this very process is to become the engine."""
        os.write(self._write, lease_id.encode())

    def _watch(self, engine_pid: int) -> NoReturn:
        """The child's life; it leaves without the parent's clean-up."""
        status = 1
        try:
            os.setsid()
            os.close(self._write)
            with open(os.devnull, "r+b") as nothing:
                for descriptor in (0, 1, 2):
                    os.dup2(nothing.fileno(), descriptor)
            engine = Process.adopt(engine_pid)
            lease_id = os.read(self._read, 1 << 16).decode()
            if lease_id and engine:
                self._until_bound(lease_id, engine)
            status = 0
        finally:
            os._exit(status)

    def _until_bound(self, lease_id: str, engine: Process) -> None:
        """Bind the lease to the container once it runs; where that is refused, keep it until that ends."""
        look_s = _LOOK_S
        while True:
            has_ended = engine.status() is not None
            container = self._ask("ps", "--quiet", "--no-trunc", "--filter", f"label={label(lease_id)}")
            pid = self._pid_of(container) if container else 0
            if pid:
                try:
                    tell(f"/v1/leases/{lease_id}/bind?pid={pid}")
                except YunionError:  # such as a container of root's, started by another user
                    output_of([self._engine, "wait", container])
                return
            if has_ended:
                return
            time.sleep(look_s)
            look_s = min(look_s * 1.2, _LONGEST_LOOK_S)

    def _pid_of(self, container: str) -> int:
        """The PID of the container's first process, 0 before and after it runs."""
        told = self._ask("inspect", "--format", "{{.State.Pid}}", container)
        return int(told) if told.isdigit() else 0

    def _ask(self, *words: str) -> str:
        return output_of([self._engine, *words], _PATIENCE_S)


def label(lease_id: str) -> str:
    """What tells the lease's container: whatever else the user says of it, this stands beside that."""
    return f"{CDI_KIND}.lease={lease_id}"
