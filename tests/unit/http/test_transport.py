"""The client retries while the daemon is unreachable, until its deadline."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.cli.output import print_notice
from yunion_mps.core.errors import UnreachableError
from yunion_mps.http.operations import GET_STATUS
from yunion_mps.http.transport import Retrier, run_blocking, with_devices

UNREACHABLE = UnreachableError("it is away", "start it")


class UnreachableTransport:
    """A transport whose first calls fail."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    async def call(self, *_: Any, **__: Any) -> Any:
        self.calls -= 1
        if self.calls >= 0:
            raise UNREACHABLE
        return {"an": "answer"}

    async def call_if_changed(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    async def sleep(self, delay_s: float) -> None:
        pass


def test_an_outage_and_its_end_are_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    retrier = Retrier(UnreachableTransport(2), 60.0, print_notice)
    for _ in range(2):
        run_blocking(retrier.call(GET_STATUS))
    said = "yunion-mps: it is away; retrying for up to 60 s\nyunion-mps: the daemon is responding again\n"
    assert capsys.readouterr() == ("", said)


def test_retries_end_at_the_deadline_which_an_answer_resets() -> None:
    retrier = Retrier(UnreachableTransport(0), 1e-9, print_notice)
    run_blocking(retrier.wait(UNREACHABLE))
    with pytest.raises(UnreachableError, match="it is away"):
        run_blocking(retrier.wait(UNREACHABLE))
    retrier.reset()
    run_blocking(retrier.wait(UNREACHABLE))


def test_without_a_timeout_the_first_failure_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnreachableError, match="it is away"):
        run_blocking(Retrier(UnreachableTransport(1), 0, print_notice).call(GET_STATUS))
    assert capsys.readouterr() == ("", "")


def test_an_environment_has_no_variables_of_other_devices() -> None:
    sliced = {"PATH": "/bin", "YUNION_MPS_MEMORY_MIB": "27186", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".333"}
    shared = {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps", "YUNION_MPS_DEVICE": "00:06.0-1"}
    assert with_devices(sliced, shared) == {"PATH": "/bin", **shared}
    own = {"PATH": "/bin", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}
    assert with_devices(own, shared) == {**own, **shared}, "the user's own"
    both = {**shared, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4G", "PATH": "/bin"}
    assert with_devices(both, {"YUNION_MPS_DEVICE": "00:07.0-0"}) == {
        "PATH": "/bin",
        "YUNION_MPS_DEVICE": "00:07.0-0",
    }
