"""A stop that has begun goes on although memory is short."""

from __future__ import annotations

import types
from typing import Any

import pytest
from yunion_mps.daemon.run import _Daemon
from yunion_mps.host.systemd import Notifier
from yunion_mps.paths import Paths


class Short:
    """Stands for a supervisor that cannot be used, because that needs memory."""

    def __getattr__(self, name: str) -> Any:
        raise MemoryError


def _serve(stop: str) -> None:
    signals: Any = types.SimpleNamespace(stop=stop)
    supervisor: Any = Short()
    listener: Any = None
    daemon = _Daemon(Paths.from_environment(), signals, Notifier(), supervisor, 0, None)
    daemon.serve(listener)


def test_a_stop_goes_on_without_the_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    _serve("SIGTERM")
    assert "stopping without the event loop" in caplog.text


def test_a_daemon_that_is_not_stopping_ends_as_by_any_fault() -> None:
    with pytest.raises(MemoryError):
        _serve("")
