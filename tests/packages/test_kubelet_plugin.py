"""The package of the kubelet plugin, from installation to removal, on a node without a kubelet."""

from __future__ import annotations

import pytest

from packages.family import Family
from packages.operator import Operator
from packages.versions import Packages

PACKAGE = "yunion-mps-kubelet-plugin"
PLUGIN = f"{PACKAGE}.service"
#: One of each format; the rest of an operator's life is the same as with the daemon's package.
on_both = pytest.mark.parametrize("family", ["bookworm-deb", "trixie-rpm"], indirect=True, scope="class")


@on_both
def test_the_plugin_is_installed_upgraded_and_removed(
    family: Family, operator: Operator, previous: Packages, current: Packages
) -> None:
    machine = family.machine
    operator.configure()
    family.install(previous, plugin=True)
    assert family.version(PACKAGE) == previous.version
    states = [machine.show(name, PLUGIN) for name in ("UnitFileState", "ActiveState")]
    assert states == ["disabled", "inactive"]
    operator.start()
    machine.run("systemctl", "enable", "--now", PLUGIN)
    waits = "device-plugins/kubelet.sock"
    machine.wait_until("it waits for the kubelet", lambda: waits in machine.journal(PLUGIN))
    pid, daemon = machine.show("MainPID", PLUGIN), operator.daemon()

    family.install(current, plugin=True)
    assert machine.show("ActiveState", PLUGIN) == "active"
    assert machine.show("MainPID", PLUGIN) != pid
    assert operator.daemon() == daemon
    assert current.version in machine.run(PACKAGE, "--version").stdout
    library = "/usr/lib/yunion-mps/yunion_mps"
    compiled = machine.shell(f"find {library}/kubernetes {library}/../vendor/h2 -name '*.pyc' | wc -l")
    assert int(compiled) > 0

    family.remove(PACKAGE)
    assert family.version(PACKAGE) == ""
    assert family.version() == current.version
    machine.wait_until("the unit is gone", lambda: machine.show("LoadState", PLUGIN) == "not-found")
    left = machine.shell(
        f"find / -xdev -name '*kubelet-plugin*' ! -path '/var/*' ! -path '/root/*'; ls {library}"
    )
    assert "kubelet-plugin" not in left
    assert "kubernetes" not in left
    operator.see_it_serves()
    family.remove()
    operator.see_it_rests()
