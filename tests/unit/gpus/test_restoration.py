"""The restoration at a stop, while a thread still makes a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

from yunion_mps.core.paths import Paths
from yunion_mps.gpus.originals import Originals
from yunion_mps.gpus.reconciler import Reconciler
from yunion_mps.gpus.restoration import restore_originals
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger

from unit.gpus.test_reconciler import Fan

JOIN_S = 60.0


class AskedFan(Fan):
    """It says when the driver is asked again."""

    def __init__(self, asked_again: Callable[[], None]) -> None:
        super().__init__()
        self._asked_again = asked_again

    def try_again(self) -> None:
        self._asked_again()


def test_a_stop_asks_again_only_after_the_step_at_work_which_may_hang(paths: Paths) -> None:
    """Otherwise the pause that begins with the hang would keep everything from being restored."""
    were_kept_out: list[bool] = []

    def try_to_make_a_step() -> None:
        is_free = reconciler.gate.lock.acquire(blocking=False)
        were_kept_out.append(not is_free)
        if is_free:
            reconciler.gate.lock.release()

    def asked_again() -> None:
        other = threading.Thread(target=try_to_make_a_step)
        other.start()
        other.join(JOIN_S)

    reconciler = Reconciler([AskedFan(asked_again)])
    with closing(Store(paths)) as store:
        originals = Originals(store)
        restore_originals(
            reconciler, originals, [], None, layouts=[], ledger=Ledger(), left=[], keeps_requests=True
        )
    assert were_kept_out == [True]
