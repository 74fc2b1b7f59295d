"""A lease in the hands of a program: what it has, until it gives it back."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from yunion_mps.client.patience import MOST_S, Patience, Say
from yunion_mps.client.taking import Tells
from yunion_mps.errors import BusyError, NotFoundError, ShortageError, UnreachableError, YunionError
from yunion_mps.host import threads

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecord

#: A lease of a name is renewed so many times within its time to live.
_RENEWALS = 3
#: How long until another try, where a renewal has failed, in s.
_AGAIN_S = 1.0


class Daemon(Tells, Protocol):
    """Gives leases, and takes them back."""

    def delete(self, target: str, timeout_s: float | None = None) -> Any:
        """The JSON answer; raises YunionError of the kind that the failure is."""


class Lease:
    """Devices that are this program's until `release`, or the end of its `with` block.

    Its attributes are what it was given with; `memory` is of each device, in MiB. One that is bound to this
    process is given back by the end of the process at the latest. One with a name is renewed by a thread of
    its own for as long as the process lives, and ends `ttl_s` after that.
    """

    def __init__(self, daemon: Daemon, record: LeaseRecord, ttl_s: int | None, say: Say) -> None:
        """`ttl_s` is the time to live of a lease with a name, None for others."""
        self.id = record["id"]
        self.name = record["name"]
        self.devices = tuple(record["devices"])
        self.gpus = tuple(record["gpus"])
        self.memory = tuple(record["memory"])
        self.thread_percentage = record["thread_percentage"]
        self.budget_enforced = record["budget_enforced"]
        #: The variables of a process that is to use the devices, without any others.
        self.environment: Mapping[str, str] = dict(record["environment"])
        #: Why a lease with a name ended before it was given back, empty where it did not.
        self.lost = ""
        self._daemon = daemon
        self._say = say
        self._pid = os.getpid()
        self._is_over = False
        #: Ends the renewals: set also where the daemon could not be told, so that it ends by its time.
        self._released = threading.Event()
        if ttl_s is not None:
            try:
                threads.start(lambda: self._keep(ttl_s), threads.ignore_outcome)
            except ShortageError:
                self.release()
                raise

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a process that is to use them: `base`, or this process' own, and theirs."""
        return {**(os.environ if base is None else base), **self.environment}

    def release(self) -> None:
        """Give the devices back; does nothing where that was done, and in a fork of who took them.

        Raises YunionError where the daemon cannot be told, which may be tried again: else it ends with this
        process, or by its time.
        """
        if self._is_over or os.getpid() != self._pid:
            return
        self._released.set()
        patience = Patience(MOST_S, self._say)
        while True:
            try:
                self._daemon.delete(f"/v1/leases/{self.id}")
            except NotFoundError:  # it has ended by itself, or the answer to a first try was lost
                break
            except (UnreachableError, BusyError) as error:
                patience.lost(error)
            else:
                break
        self._is_over = True

    def __enter__(self) -> Lease:  # noqa: PYI034 - typing.Self is not in 3.9
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease {self.id} of {', '.join(self.devices)}>"

    def _keep(self, ttl_s: int) -> None:
        """Renew it until it is given back; the daemon is asked again where it is away or has a trouble."""
        wait_s = ttl_s / _RENEWALS
        while not self._released.wait(wait_s):
            wait_s = ttl_s / _RENEWALS
            try:
                self._daemon.post(f"/v1/leases/{self.id}/renew", float(ttl_s))
            except NotFoundError as error:
                if not self._released.is_set():
                    self.lost = error.message
                    self._say(f"the lease of {', '.join(self.devices)} is lost: {error.message}")
                return
            except YunionError:
                wait_s = min(_AGAIN_S, wait_s)
