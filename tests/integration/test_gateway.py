"""The metrics over TCP, by the gateway: as the configuration changes, and as the daemon comes and goes."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.daemon_host import Daemon
from integration.gateway_host import Gateway, free_port

_DOWN = """\
# HELP yunion_mps_up Whether the daemon answers (1) or not (0).
# TYPE yunion_mps_up gauge
yunion_mps_up 0
"""
MakeGateway = Callable[[Daemon], Gateway]


@pytest.fixture
def make_gateway() -> Iterator[MakeGateway]:
    with ExitStack() as stack:
        yield lambda daemon: stack.enter_context(Gateway(daemon))


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def open_daemon(daemon: Daemon, port: int) -> Daemon:
    """A daemon that serves, and whose metrics are to be had at the port."""
    daemon.configure(metrics_listen=f"127.0.0.1:{port}")
    return daemon.start().wait_ready()


@pytest.fixture
def gateway(make_gateway: MakeGateway, open_daemon: Daemon, port: int) -> Gateway:
    found = make_gateway(open_daemon).start()
    found.serves(port)
    return found


def reload(daemon: Daemon, **keys: object) -> None:
    daemon.configure(**keys)
    status, answer = daemon.ask("POST", "/v1/reload")
    assert status == 200, answer


def test_prometheus_format_is_served_as_it_asks_for_it(gateway: Gateway, port: int) -> None:
    plain = gateway.answer(port)
    assert plain[0] == 200
    assert "# TYPE yunion_mps_build_info gauge\n" in plain[1]
    modern = gateway.answer(port, accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert "# TYPE yunion_mps_build info\n" in modern[1]
    assert modern[1].endswith("\n# EOF\n")


def test_the_metrics_address_serves_get_of_metrics_only(gateway: Gateway, port: int) -> None:
    head = gateway.get(port, method="HEAD")
    assert head == (200, "")
    for target in ("/", "/v1/status", "/v1/devices", "/metrics/", "/v1/reload"):
        found = gateway.answer(port, target)
        assert found[0] == 404
        assert json.loads(found[1])["hint"] == "the metrics are at /metrics"
    for method in ("POST", "PUT", "DELETE", "BREW"):
        refused = gateway.answer(port, "/v1/reload", method)
        assert refused[0] == 405


@pytest.mark.parametrize("target", ["/metrics", "/"])
def test_a_name_that_another_party_may_hold_is_not_answered(gateway: Gateway, port: int, target: str) -> None:
    found = gateway.answer(port, target, host="evil.example")
    assert (found[0], json.loads(found[1])["detail"]) == (421, "the metrics are not served under that name")


def test_every_accept_header_and_target_is_answered(gateway: Gateway, port: int) -> None:
    """A connection that is not answered is kept, and they are counted: 128 would shut Prometheus out."""
    found = gateway.answer(port, accept="\xe9t\xe9")
    assert (found[0], "# TYPE yunion_mps_build_info gauge\n" in found[1]) == (200, True)
    for target, status in ((b"http://[", b"400"), (b"//[::1", b"400"), (b"*", b"404")):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 " + status
    assert "Traceback" not in gateway.log


def test_a_reload_moves_it_to_another_port(gateway: Gateway, open_daemon: Daemon, port: int) -> None:
    other = free_port()
    reload(open_daemon, metrics_listen=f"127.0.0.1:{other}")
    gateway.serves(other)
    assert gateway.get(port) is None
    assert f"metrics_listen: stopped serving at http://127.0.0.1:{port}/" in gateway.log


def test_it_ends_when_nothing_is_to_be_served(gateway: Gateway, open_daemon: Daemon, port: int) -> None:
    reload(open_daemon)
    assert gateway.wait() == 0
    assert not gateway.addresses.exists()
    assert gateway.get(port) is None


def test_it_ends_with_the_daemon(gateway: Gateway, open_daemon: Daemon) -> None:
    assert open_daemon.stop() == 0
    assert gateway.wait() == 0


def test_it_says_that_the_daemon_is_gone_and_when_it_is_back(
    gateway: Gateway, open_daemon: Daemon, port: int
) -> None:
    open_daemon.kill()
    gateway.serves(port, "yunion_mps_up 0")
    assert gateway.get(port) == (200, _DOWN)
    open_daemon.start().wait_ready()
    gateway.serves(port)
    why = "yunion_mps_up is 0: the daemon is not running; see: systemctl status yunion-mps-daemon"
    assert gateway.log.splitlines()[-2:] == [why, "yunion_mps_up is 1 again: the daemon answers"]


def test_a_gateway_that_may_not_ask_does_not_say_the_daemon_is_gone(
    make_gateway: MakeGateway, open_daemon: Daemon, port: int
) -> None:
    web = free_port()
    reload(open_daemon, metrics_listen=f"127.0.0.1:{port}", web_listen=f"127.0.0.1:{web}")
    gateway = make_gateway(open_daemon).start(user=65534)
    gateway.serves(port, "yunion_mps_up 0")
    why = "the gateway's user has no access to the daemon's socket"
    hint = "run it as root or as a member of the group yunion-mps"
    assert gateway.log.count(f"yunion_mps_up is 0: {why}; {hint}") == 1
    found = gateway.answer(web, "/overview.json")
    assert (found[0], json.loads(found[1])["detail"], json.loads(found[1])["hint"]) == (503, why, hint)


def test_a_hung_daemon_is_reported_within_the_scrape_timeout(
    gateway: Gateway, open_daemon: Daemon, port: int
) -> None:
    """Its scrape_timeout is 10 s: beyond it, the alert would be that of a gateway that is gone."""
    open_daemon.signal(signal.SIGSTOP)
    try:
        assert gateway.get(port) == (200, _DOWN)
        assert "yunion_mps_up is 0: the daemon did not answer within 7 s" in gateway.log
    finally:
        open_daemon.signal(signal.SIGCONT)
    gateway.serves(port)


def test_a_start_with_a_public_address_serves_all_else_and_warns(
    daemon: Daemon, make_gateway: MakeGateway, port: int
) -> None:
    """No job waits for the metrics; a reload and `config check` refuse what they find in the files."""
    daemon.configure(metrics_listen="0.0.0.0:9434", web_listen="somewhere", metrics_textfile="/srv/m.txt")
    daemon.start().wait_ready()
    wrong = (
        "host.conf:2: metrics_listen is 0.0.0.0:9434, which is reachable from other hosts: write 127.0.0.1"
    )
    daemon.wait_log(wrong)
    shown = daemon.status()
    assert shown["devices"]["available"] == 4
    warnings = daemon.warnings()
    assert set(warnings.values()) == {"configuration_ignored", "budget_not_enforced"}
    for part in (wrong, "not an address with a port", "node_exporter does not read"):
        assert [one for one in warnings if part in one and one.endswith("ignores this setting")]
    told = daemon.host.run(["yunion-mps", "status"]).stdout
    assert "Hint:     correct that line, then: yunion-mps reload" in told
    gateway = Gateway(daemon)
    assert not gateway.addresses.exists()
    assert daemon.host.run(["yunion-mps", "config", "check"]).returncode == 6
    status, answer = daemon.ask("POST", "/v1/reload")
    assert (status, wrong in answer["detail"]) == (422, True)
    reload(daemon, metrics_listen=f"127.0.0.1:{port}")
    make_gateway(daemon).start().serves(port)
    assert not [one for one in daemon.warnings() if wrong in one]


def test_the_daemon_itself_never_listens_on_tcp(gateway: Gateway, open_daemon: Daemon) -> None:
    tcp = {
        line.split()[9] for name in ("tcp", "tcp6") for line in _lines(f"/proc/{open_daemon.pid}/net/{name}")
    }
    links = [entry.readlink() for entry in Path(f"/proc/{open_daemon.pid}/fd").iterdir()]
    assert not [link for link in links if str(link).removeprefix("socket:[").rstrip("]") in tcp]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()[1:]
