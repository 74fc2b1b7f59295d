"""Memory that was needed for a moment goes back to the system, and a stop goes on although it is short."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.daemon.process import Signals
from yunion_mps.daemon.run import DaemonLife
from yunion_mps.host.systemd import Notifier

#: Large pieces, with small ones between them that stay; MiB resident that the large ones have left.
LEFT_MIB = """
def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)

bytes(16 << 20)  # after the end of such a piece glibc has smaller ones from its heap
before = resident_mib()
pieces, pins = [], []
for _ in range(300):
    pieces.append(b"x" * (200 << 10))
    pins.append(b"x" * (20 << 10))
del pieces
print(resident_mib() - before)
"""


@pytest.mark.parametrize(
    ("prepare", "is_given_back"),
    [("", False), ("from yunion_mps.host.malloc import tune_malloc; tune_malloc()", True)],
)
def test_large_memory_is_given_back_although_small_pieces_lie_behind_it(
    prepare: str, is_given_back: bool
) -> None:
    """And glibc would keep it by itself."""
    code = f"import resource\n{prepare}\n{LEFT_MIB}"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert (float(done.stdout) < 10) is is_given_back  # of 59 MiB, and 6 that stay


class ReceivedSignals(Signals):
    """Signals that have asked for this stop, without the handlers that would stay in this process."""

    def __init__(self, stop: str) -> None:
        self.stop = stop


class Short:
    """A supervisor that cannot be used, because that needs memory, which a real one would have here."""

    def __getattr__(self, name: str) -> Any:
        raise MemoryError


def _serve(stop: str) -> None:
    supervisor: Any = Short()
    listener: Any = None
    daemon = DaemonLife(
        Paths.from_environment(),
        signals=ReceivedSignals(stop),
        notifier=Notifier(),
        supervisor=supervisor,
        lock=0,
        state=None,
    )
    daemon.serve(listener)


def test_a_stop_works_without_the_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    _serve("SIGTERM")
    assert "stopping without the event loop" in caplog.text


def test_a_daemon_that_is_not_stopping_ends_as_by_any_fault() -> None:
    with pytest.raises(MemoryError):
        _serve("")
