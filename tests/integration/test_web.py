"""`yunion-mps web` and what it answers: a few paths, to readers, who call this host by a name of its own."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yunion_mps
from yunion_mps.core.paths import Paths
from yunion_mps.gateway.client import OverviewCache
from yunion_mps.gateway.server import WebPage
from yunion_mps.host.sockets import UNKNOWN_UID
from yunion_mps.http.messages import Request, Response

from browser.scene import Jobs, Served
from integration.daemon_host import PATIENCE_S, Daemon
from integration.gateway_host import Gateway, free_port
from simhost import SimHost

PAGE = Path(yunion_mps.__file__).parent / "gateway/page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@pytest.fixture
def served(ready_daemon: Daemon) -> Iterator[Served]:
    with Served(ready_daemon.host) as served:
        yield served


@pytest.fixture(scope="module")
def page() -> Iterator[Served]:
    with SimHost.create() as host, Daemon(host) as daemon:
        daemon.start().wait_ready()
        with Served(host) as served:
            yield served


def ask(served: Served, target: str, method: str = "GET", host: str | None = None) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    with closing(connection):
        connection.request(method, target, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, headers, answer.read())


@pytest.mark.parametrize("name", [file.name for file in PAGE.iterdir()])
def test_each_file_of_the_page_has_its_type_and_needs_no_other_host(page: Served, name: str) -> None:
    answer = ask(page, "/" if name == "index.html" else f"/{name}")
    assert (answer.status, answer.body) == (200, (PAGE / name).read_bytes())
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].partition(";")[0] == kinds[name.rpartition(".")[2]]
    text = answer.body.decode().replace("http://www.w3.org/2000/svg", "")
    assert "://" not in text
    assert not any(
        word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "style=")
    )


@pytest.mark.parametrize(
    "target", ["/", "/page.js", "/overview.json", "/v1/events", "/nothing", "/overview.json?x=1"]
)
def test_every_answer_has_the_strict_policy_and_is_for_its_own_origin(page: Served, target: str) -> None:
    headers = ask(page, target).headers
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"
    assert not [name for name in headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("127.0.0.1:9435", 200), ("10.1.2.3", 200), ("[::1]:9435", 200), ("localhost:9435", 200),
        ("LOCALHOST", 200), (os.uname().nodename, 200), ("", 421), ("evil.example", 421),
        ("evil.example:9435", 421), ("127.0.0.1.evil.example", 421), ("localhost.evil.example", 421),
        ("[::1].evil.example", 421), ("1.2.3.4:5:6", 421),
    ],
)  # fmt: skip
def test_a_name_that_others_can_point_here_is_not_answered(page: Served, name: str, status: int) -> None:
    for target in ("/", "/overview.json", "/v1/events"):
        answer = ask(page, target, host=name)
        assert answer.status == status, answer.body
        if status == 421:
            assert answer.json["detail"] == "this page is not served under that name"
            assert "localhost" in answer.json["hint"]


def test_nothing_can_be_changed_and_only_events_and_usage_are_relayed(page: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        for target in ("/", "/v1/leases", "/v1/reload", "/v1/events"):
            answer = ask(page, target, method)
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    for name in ("v1/leases", "v1/clients", "v1/devices", "v1/plan", "v1/openapi.json", "metrics", "../x"):
        assert ask(page, f"/{name}").status == 404
    assert ask(page, "/v1/usage").json["step_s"] == 60
    for query in ("limit=1", "limit=1&severe_first=true"):
        assert ask(page, f"/v1/events?{query}").json["events"]
    assert ask(page, "/", "HEAD").body == b""


@pytest.mark.parametrize(
    ("target", "detail"),
    [
        ("/v1/events?kind=gpu", "unknown parameter 'kind'"),
        ("/v1/events?wait_s=26", "invalid value for wait_s: '26'"),
        ("/v1/events?limit=1000", "invalid value for limit: '1000'"),
        ("/v1/events?after=1%0d%0aX:y", "invalid value for after: '1\\r\\nX:y'"),
        ("/v1/usage?gpu=%20HTTP", "invalid value for gpu: ' HTTP'"),
        ("/v1/usage?devices=maybe", "invalid value for devices: 'maybe'"),
        ("/overview.json?after=1", "unknown parameter 'after'"),
        ("/overview.json?event=x", "invalid value for event: 'x'"),
        ("/v1/events?after", "the query cannot be parsed"),
    ],
)
def test_a_question_that_is_not_the_pages_is_refused_with_one_line(
    page: Served, target: str, detail: str
) -> None:
    answer = ask(page, target)
    assert (answer.status, answer.json["detail"]) == (400, detail)


@pytest.mark.gpus({"kind": "v100"})
def test_the_picture_shows_holders_and_no_process_environment(ready_daemon: Daemon, served: Served) -> None:
    with Jobs(ready_daemon) as jobs:
        pid = jobs.start("train.py", device="00:06.0-1", mib=6000)
        shown = ask(served, "/overview.json")
    picture = shown.json
    (part,) = (one for one in picture["parts"] if one["state"] != "free")
    assert (part["devices"], part["user"]) == (["00:06.0-1"], "root")
    assert (part["used"], part["budget"]) == (6000, 4096)
    assert part["pids"] == [pid]
    served_devices = {"total": 4, "available": 4, "unavailable": 0, "pending": 0, "reserved": 0}
    assert picture["devices"] == {**served_devices, "used": 1, "free": 3}
    assert picture["problems"][0]["text"].startswith("00:06.0-1 uses 6000 of 4096 MiB")
    assert picture["host"] == os.uname().nodename
    assert b"CUDA_" not in shown.body


def test_an_unchanged_overview_is_answered_with_its_time_only(page: Served) -> None:
    mark = ask(page, "/overview.json").json["mark"]
    assert set(ask(page, f"/overview.json?mark={mark}").json) == {"mark", "taken", "page"}
    assert "gpus" in ask(page, "/overview.json?mark=other").json


@pytest.mark.gpus({"kind": "v100"})
def test_an_event_reaches_a_waiting_page_and_the_next_picture_has_it(
    served: Served, ready_daemon: Daemon
) -> None:
    last = ask(served, "/v1/events?limit=1").json["last"]
    ask(served, "/overview.json")
    with ThreadPoolExecutor() as background:
        waiting = background.submit(ask, served, f"/v1/events?after={last}&wait_s=25")
        assert (
            ready_daemon.ask("POST", "/v1/leases", "holder.kind=name&holder.name=night&holder.ttl_s=60")[0]
            == 201
        )
    (event,) = waiting.result().json["events"]
    assert event["kind"] == "lease"
    assert ask(served, f"/overview.json?event={event['id']}").json["leases"] == 1


def test_readers_that_name_an_event_to_come_share_one_query(ready_daemon: Daemon) -> None:
    async def read() -> list[Any]:
        cache = OverviewCache(Paths(str(ready_daemon.host.root)))
        await cache.overview()
        return await asyncio.gather(*(cache.overview(10**9) for _ in range(20)))

    first, *others = asyncio.run(read())
    assert all(other is first for other in others)


def test_a_reader_of_an_event_does_not_get_what_was_queried_before(ready_daemon: Daemon) -> None:
    async def read() -> tuple[Any, Any]:
        cache = OverviewCache(Paths(str(ready_daemon.host.root)))
        earlier = asyncio.ensure_future(cache.overview())
        for _ in range(5):  # the turns until the query has begun
            await asyncio.sleep(0)
        later = await cache.overview(10**9)
        return await earlier, later

    earlier, later = asyncio.run(read())
    assert later is not earlier


def test_a_fresh_overview_is_answered_at_once(ready_daemon: Daemon) -> None:
    """Its connection then waits for nothing, and makes room for another under a flood of requests."""
    get = Request("GET", "/overview.json", UNKNOWN_UID, headers={"host": "localhost"})

    async def read() -> tuple[Any, Any]:
        web = WebPage(Paths(str(ready_daemon.host.root)))
        first = web.handle(get)
        assert not isinstance(first, Response)
        return await first, web.handle(get)

    first, second = asyncio.run(read())
    assert isinstance(second, Response)
    assert second == first


def test_the_page_reports_a_stopped_daemon_with_a_hint(served: Served, ready_daemon: Daemon) -> None:
    ready_daemon.kill()
    for target in ("/overview.json?event=99999", "/v1/events", "/v1/usage"):
        answer = ask(served, target)
        assert (answer.status, answer.json["detail"]) == (503, "the daemon is not running")
        assert answer.json["hint"] == "see: systemctl status yunion-mps-daemon"
    assert ask(served, "/").status == 200
    ready_daemon.start().wait_ready()
    assert ask(served, "/overview.json").status == 200


def test_web_prints_its_address_and_ends_on_ctrl_c(ready_daemon: Daemon) -> None:
    port = free_port()
    process = ready_daemon.host.popen(["yunion-mps", "web", "--listen", f"localhost:{port}"])
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said == f"Serving at http://127.0.0.1:{port}/ (press Ctrl-C to stop)\n"
    with closing(socket.create_connection(("127.0.0.1", port))):
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_S) == ("", "")
    assert process.returncode == 0


def refused(host: SimHost, *arguments: str) -> tuple[int, list[str]]:
    done = host.run(["yunion-mps", "web", *arguments])
    return done.returncode, done.stderr.splitlines()


def test_an_unusable_listen_address_is_refused_with_a_hint(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        lines = [f"cannot listen on {taken}: Address already in use"]
        lines += ["choose another port: --listen 127.0.0.1:PORT"]
        assert refused(host, "--listen", taken) == (1, [f"yunion-mps: {line}" for line in lines])
    status, lines = refused(host, "--listen", "0.0.0.0:9435")
    assert (status, len(lines)) == (2, 2)
    assert "'--listen': other hosts can reach 0.0.0.0:9435, and the page is not protected" in lines[0]
    assert "add --allow-public" in lines[0]
    status, lines = refused(host, "--listen", "gpu-01:80")
    assert (status, len(lines)) == (2, 2)
    assert "'gpu-01:80' is not an IP address and a port: write an IP address and a port" in lines[0]


def test_without_a_daemon_it_does_not_begin(host: SimHost) -> None:
    status, lines = refused(host)
    assert (status, len(lines)) == (3, 2)
    assert lines[0].startswith("yunion-mps: the daemon is not running: ")


def test_the_gateway_serves_the_page_where_web_listen_says(daemon: Daemon) -> None:
    port = free_port()
    daemon.configure(web_listen=f"127.0.0.1:{port}")
    daemon.start().wait_ready()
    with Gateway(daemon) as gateway:
        gateway.start().wait_listening(port)
        assert gateway.answer(port, "/")[1] == (PAGE / "index.html").read_text()
        assert json.loads(gateway.answer(port, "/overview.json")[1])["devices"]["total"] == 4
