"""A host whose first GPU gets MIG layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from yunion_mps.core.enums import MPS
from yunion_mps.core.mig import DISABLED, MigLayout
from yunion_mps.core.models import Gpu
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import Reason
from yunion_mps.gpus.blockers import Blockers
from yunion_mps.gpus.mig_layout import NO_LOSSES, LayoutLook, Losses, find_layout, losses_of
from yunion_mps.gpus.mig_steps import LayoutResult, bring_into_effect
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import Store
from yunion_mps.inventory.mig import Mig
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import Scanner
from yunion_mps.leases.ledger import Hold
from yunion_mps.planning.mig import describe, layout_profiles

from simhost import Description, SimHost

NOTHING_BUSY = Blockers()


class MigHost(NamedTuple):
    """A host whose first GPU gets layouts."""

    sim: SimHost
    mig: Mig
    nvml: Nvml
    store: Store

    @property
    def originals(self) -> Originals:
        return Originals(self.store)

    @property
    def gpu(self) -> Gpu:
        return Scanner(Paths(str(self.sim.root))).scan(self.nvml).gpus[0]

    @property
    def has(self) -> str:
        """What nvidia-smi would list."""
        return describe(self.gpu.mig_instances)

    @property
    def ours(self) -> list[int]:
        return [one.id for one in self.originals.layout(str(self.gpu.uuid)).created]

    def layout(self, *names: str, **given: Any) -> MigLayout:
        gpu = self.gpu
        return MigLayout(str(gpu.uuid), names[0] != DISABLED, layout_profiles(names, gpu), **given)

    def leased(self, *uuids: str) -> Blockers:
        """Leases that keep these GPUs or instances, of which only that is known."""
        return Blockers(holds=[Hold("job", uuid, uuid, MPS) for uuid in uuids], gpus=[self.gpu])

    def apply(self, *names: str, busy: Blockers | None = NOTHING_BUSY, force: bool = False) -> Reason:
        look = self.look(*names)
        confirmed = self.losses(look, busy) if force else NO_LOSSES
        return self.result(look._replace(confirmed=confirmed), busy).reasons[look.uuid]

    def look(self, *names: str) -> LayoutLook:
        return LayoutLook(self.layout(*names), self.gpu)

    def losses(self, look: LayoutLook, busy: Blockers | None = NOTHING_BUSY) -> Losses:
        """What `reload --now` would list."""
        return losses_of(look, find_layout(look, self.mig, self.originals), busy)

    def result(self, look: LayoutLook, busy: Blockers | None = NOTHING_BUSY) -> LayoutResult:
        return bring_into_effect([look], self.mig, self.originals, busy)

    def process(self, instance: int, pid: int = 4321) -> None:
        self.sim.gpus[0].add_process(pid, 100, on=(instance, 0))


MakeMigHost = Callable[..., MigHost]


@pytest.fixture
def mig_host() -> Iterator[MakeMigHost]:
    with ExitStack() as stack:

        def make(description: Description | None = None) -> MigHost:
            sim = stack.enter_context(SimHost.create(description or [{"kind": "h100"}]))
            stack.enter_context(sim.pynvml())
            nvml = stack.enter_context(Nvml())
            store = Store(Paths(str(sim.root)))
            stack.callback(store.close)
            return MigHost(sim, Mig(nvml), nvml, store)

        yield make
