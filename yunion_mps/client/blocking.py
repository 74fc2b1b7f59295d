"""The client whose methods block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from yunion_mps.client.lease import Lease, hold
from yunion_mps.client.queries import Questions
from yunion_mps.client.request import lease_request
from yunion_mps.client.taking import Say
from yunion_mps.client.transport import Blocking, finish, iterate
from yunion_mps.client.values import Device, DeviceDetails, Event, Gpu, LeaseRecord, QueuedRequest, Status
from yunion_mps.http.client import DaemonClient
from yunion_mps.paths import Paths


def silent(text: str) -> None:
    """Tell nothing."""


class Client:
    """Asks the daemon of this host. It may be used by several threads, and holds nothing open.

    Every method raises YunionError if the daemon cannot answer.
    """

    def __init__(self, say: Say = silent) -> None:
        """`say` is given a line for people now and then: what is waited for, and that it has come."""
        self._daemon = DaemonClient(Paths.from_environment())
        self._transport = Blocking(self._daemon)
        self._say = say
        self._ask = Questions(self._transport, say)

    def devices(self, *, unused: bool = False) -> list[Device]:
        """All devices in PCI order, or those that can be used now and are free."""
        return finish(self._ask.devices(unused=unused))

    def watch_devices(self) -> Iterator[list[Device]]:
        """Yield all devices now and whenever one of them has changed, also past a restart of the daemon.

        Raises UnreachableError if the daemon stays away.
        """
        return iterate(self._ask.watch_devices())

    def device(self, name: str) -> DeviceDetails:
        """One device by id, address or a unique beginning of either; raises NotFoundError."""
        return finish(self._ask.device(name))

    def gpus(self) -> list[Gpu]:
        """All GPUs of the host in PCI order, those that cannot be used with their reason."""
        return finish(self._ask.gpus())

    def status(self) -> Status:
        """The state of the daemon, the control daemons and the devices."""
        return finish(self._ask.status())

    def leases(self) -> list[LeaseRecord]:
        """All leases of the host."""
        return finish(self._ask.leases())

    def queue(self) -> list[QueuedRequest]:
        """The requests that wait for devices, the first to be served first."""
        return finish(self._ask.queue())

    def events(
        self,
        *,
        since: datetime | timedelta | None = None,
        kind: str | None = None,
        follow: bool = False,
    ) -> Iterator[Event]:
        """Yield what has happened since then, or for so long, the oldest first, at most the newest 1000.

        `kind` is one of domain, limit, gpu, compute_mode, configuration, client, lease and daemon. With
        `follow` it goes on for good with what comes, also past a restart of the daemon; raises
        UnreachableError if the daemon stays away.
        """
        return iterate(self._ask.events(since, kind, goes_on=follow))

    def lease(
        self,
        *,
        memory: str | None = None,
        count: int = 1,
        across: bool = False,
        devices: Sequence[str] = (),
        gpu: str | None = None,
        placement: str = "binpack",
        enforced: bool = True,
        wait_s: float = 0,
        name: str | None = None,
        ttl_s: int | None = None,
    ) -> Lease:
        """Take devices, and give them back at the end of a `with` block, or of this process at the latest.

        `memory` is what a device must have, as in "6GiB", on a GPU that is open for it. `count` devices are
        of one GPU or, with `across`, of one each. `devices` (ids or addresses) and `gpu` (UUID or address)
        restrict the choice. The `placement` "spread" takes from the GPU with the most free devices, "binpack"
        from that with the fewest. Only GPUs that enforce budgets are taken (from Volta on); with
        `enforced=False` others as well. `wait_s` is how long to wait, `math.inf` for good: first come, first
        served.

        With a `name` the lease is bound to that and not to this process: it is renewed for as long as this
        process lives, and ends `ttl_s` (60) seconds after that.

        Raises NothingFreeError if there are none within that time, InfeasibleError if there never will be,
        and HostError if this user could not use the devices.
        """
        request = lease_request(
            memory=memory, count=count, across=across, devices=devices, gpu=gpu, placement=placement,
            enforced=enforced, wait_s=wait_s, name=name, ttl_s=ttl_s,
        )  # fmt: skip
        return finish(hold(Lease, self._transport, self._daemon, request, self._say))
