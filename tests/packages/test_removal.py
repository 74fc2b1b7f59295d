"""The package leaves in bad times."""

from __future__ import annotations

import pytest

from packages.family import Family
from packages.machine import UNIT
from packages.operator import Operator
from packages.versions import Packages


@pytest.mark.parametrize("family", ["bookworm-deb"], indirect=True)
def test_removed_after_its_daemon_was_killed_it_puts_back_what_that_left(
    family: Family, operator: Operator, current: Packages
) -> None:
    machine = family.machine
    operator.configure()
    family.install(current)
    operator.start()
    machine.write(f"/etc/systemd/system/{UNIT}.d/once.conf", "[Service]\nRestart=no\n")
    machine.run("systemctl", "daemon-reload")
    operator.kill(operator.daemon())
    machine.wait_until("systemd sees it", lambda: machine.show("ActiveState") == "failed")
    assert operator.modes() == ["Exclusive_Process"]
    family.remove()
    operator.see_it_rests()
