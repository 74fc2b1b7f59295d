"""The package of the kubelet plugin, from installation to removal, on a node without a kubelet."""

from __future__ import annotations

import pytest

from packages.family import Family
from packages.operator import Operator
from packages.versions import Packages

PACKAGE = "yunion-mps-kubelet-plugin"
PLUGIN = f"{PACKAGE}.service"
#: Of an API server that is away.
_KUBECONFIG = """\
current-context: here
contexts: [{name: here, context: {cluster: here, user: node}}]
clusters: [{name: here, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: node, user: {token: secret}}]
"""
_PROGRAM = "[Service]\nExecStart=\nExecStart={}\n"
#: One of each format, with the oldest Python (3.9) and the newest one; the rest of an operator's life is the
#: same as with the daemon's package.
on_both = pytest.mark.parametrize("family", ["bullseye-deb", "trixie-rpm"], indirect=True, scope="class")


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
    machine.write("/etc/kubernetes/kubelet.conf", _KUBECONFIG)
    machine.write("/etc/yunion/kubelet-plugin.yml", "kubeconfig: /etc/kubernetes/kubelet.conf\n")
    machine.run("systemctl", "enable", "--now", PLUGIN)
    for awaited in ("device-plugins/kubelet.sock", "cannot be reached: Connect call failed"):
        machine.wait_until(awaited, lambda awaited=awaited: awaited in machine.journal(PLUGIN))  # type: ignore[misc]
    pid, daemon = machine.show("MainPID", PLUGIN), operator.daemon()

    family.install(current, plugin=True)
    assert machine.show("ActiveState", PLUGIN) == "active"
    assert machine.show("MainPID", PLUGIN) != pid
    assert operator.daemon() == daemon
    assert current.version in machine.run(PACKAGE, "--version").stdout
    library = "/usr/lib/yunion-mps/yunion_mps"
    compiled = machine.shell(
        f"find {library}/kubernetes {library}/../vendor-kubelet-plugin -name '*.pyc' | wc -l"
    )
    assert int(compiled) > 0

    family.remove(PACKAGE)
    assert family.version(PACKAGE) == ""
    assert family.version() == current.version
    machine.wait_until("the unit is gone", lambda: machine.show("LoadState", PLUGIN) == "not-found")
    find = "find / -xdev -name '*kubelet-plugin*' ! -path '/var/*' ! -path '/root/*'"
    assert machine.shell(find).split() == ["/etc/yunion/kubelet-plugin.yml"], "only what the operator wrote"
    assert machine.run("test", "-e", f"{library}/kubernetes", check=False).returncode == 1
    operator.see_it_serves()
    family.remove()
    operator.see_it_rests()


@on_both
def test_the_kubelet_starts_if_the_plugin_fails_or_hangs(family: Family, current: Packages) -> None:
    """The plugin is ordered before the kubelet, which waits for its start for some seconds at most."""
    machine = family.machine
    family.install(current, plugin=True)
    machine.write("/etc/systemd/system/kubelet.service", "[Service]\nExecStart=/bin/sleep infinity\n")
    for program in ("/bin/false", "/bin/sleep infinity"):
        machine.write(f"/etc/systemd/system/{PLUGIN}.d/program.conf", _PROGRAM.format(program))
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "start", "--no-block", PLUGIN)
        machine.run("systemctl", "start", "kubelet")
        machine.run("systemctl", "stop", "kubelet", PLUGIN)
    assert "start operation timed out" in machine.journal(PLUGIN)
    limits = [machine.show(f"Timeout{phase}USec", PLUGIN) for phase in ("Start", "Stop")]
    assert limits == ["10s", "5s"]
