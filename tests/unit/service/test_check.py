"""`yunion-mps-daemon --check`, `config check` and a start agree on a host whose driver does not work."""

from __future__ import annotations

import pytest
from yunion_mps.core.errors import ConfigError, DriverError
from yunion_mps.core.reasons import DRIVER_HUNG, DRIVER_NOT_LOADED
from yunion_mps.service import offline
from yunion_mps.supervisor.preflight import run_preflight

from unit.supervised import MakeHost, StartSupervised, Supervise, configure

pytestmark = pytest.mark.processes  # the control daemon is real

TWO = [{"kind": "v100"}, {"kind": "a100"}]


def test_a_missing_driver_is_no_reason_not_to_start_unless_it_is_required(
    make_host: MakeHost, supervise: Supervise, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host(TWO)
    host.unload_driver()
    made = supervise(host)
    assert offline.check(made.paths) == 0
    assert "a start waits for it: the NVIDIA driver's kernel module is not loaded" in caplog.text
    run_preflight(made.paths).check(even_without_driver=True)  # as config check does
    assert made.start().snapshot.notice.code == DRIVER_NOT_LOADED
    with pytest.raises(DriverError) as caught:
        offline.check(made.paths, requires_driver=True)
    assert caught.value.code == DRIVER_NOT_LOADED
    configure(host, cuda_mps_scope="node")
    with pytest.raises(ConfigError):
        offline.check(made.paths)


def test_what_a_reexec_may_do_without_is_a_driver_that_this_program_lacks(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO)
    supervisor = made.supervisor
    assert not supervisor.lacks_driver
    supervisor.driver_failed(DriverError("it does not answer", code=DRIVER_HUNG), 0.0)
    assert not supervisor.lacks_driver
    supervisor.driver_failed(DriverError("it is not loaded", code=DRIVER_NOT_LOADED), 0.0)
    assert supervisor.lacks_driver
    made.rescan()
    assert not supervisor.lacks_driver
    made.end()
    host.unload_driver()
    assert made.start_next().supervisor.lacks_driver
    configure(host, enable_cuda_mps="false")
    assert made.next_supervisor().supervisor.lacks_driver
