"""The client of the API server against one in a thread."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import shutil
import subprocess
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.kubernetes.api.credentials import ApiServerError, Kubeconfig, ServiceAccount, find_credentials
from yunion_mps.kubernetes.api.objects import ApiObject, Resource
from yunion_mps.kubernetes.api.server import NODES, ApiServer, Backoff, MissingObjectError
from yunion_mps.kubernetes.dra.slices import SLICES
from yunion_mps.kubernetes.received import MAX_HELD_BYTES, MAX_MESSAGE_BYTES, OF_PROCESS

from kubernetes.cluster import Cluster, RefusalError
from kubernetes.grpc_peers import Loop

PODS = Resource("/api/v1", "pods", ApiObject)
COLLECTION = PODS.path()


@pytest.fixture
def server(cluster: Cluster, tmp_path: Path) -> ApiServer:
    return ApiServer(Kubeconfig(str(cluster.write_kubeconfig(tmp_path / "kubeconfig"))))


def pod(name: str, node: str = "node-1") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"nodeName": node}}


def names(objects: dict[str, ApiObject]) -> list[str]:
    return sorted(one["metadata"]["name"] for one in objects.values())


class Watcher:
    """What `watch` has yielded, one step after another."""

    def __init__(self, loop: Loop, server: ApiServer) -> None:
        self._loop = loop
        self.failures: list[int] = []
        self._objects: AsyncGenerator[dict[str, ApiObject], None] = server.watch(
            PODS,
            fields="spec.nodeName=node-1",
            on_failure=lambda error: self.failures.append(error.status),
            backoff=Backoff(0.01, 0.02),
        )

    def next(self) -> list[str]:
        async def step() -> list[str]:
            return names(await self._objects.__anext__())

        return self._loop.run(step())

    def close(self) -> None:
        self._loop.run(self._objects.aclose())


@pytest.fixture
def watcher(loop: Loop, server: ApiServer) -> Iterator[Watcher]:
    watcher = Watcher(loop, server)
    yield watcher
    watcher.close()


def test_objects_are_created_replaced_and_deleted(cluster: Cluster, server: ApiServer, loop: Loop) -> None:
    made = loop.run(server.create(NODES, {"metadata": {"name": "a"}}))
    assert loop.run(server.get(NODES, "a")) == made
    made["metadata"]["labels"] = {"x": "1"}
    changed = loop.run(server.replace(NODES, made))
    assert changed["metadata"]["labels"] == {"x": "1"}
    with pytest.raises(ApiServerError, match="has been modified") as caught:
        loop.run(server.replace(NODES, made))
    assert caught.value.status == 409
    for _ in range(2):
        loop.run(server.delete(NODES, "a"))
    with pytest.raises(ApiServerError, match="not found") as caught:
        loop.run(server.get(NODES, "a"))
    assert caught.value.status == 404


def test_a_list_of_several_pages_is_read_whole(cluster: Cluster, server: ApiServer, loop: Loop) -> None:
    for name in "abcde":
        cluster.add(COLLECTION, pod(name))
    found, version = loop.run(server.list(dataclasses.replace(PODS, page=2)))
    assert [one["metadata"]["name"] for one in found] == list("abcde")
    assert (version, cluster.requests["GET"]) == ("105", 3)


def large(name: str, size: int) -> dict[str, Any]:
    made = pod(name)
    made["metadata"]["annotations"] = {"text": "x" * size}
    return made


def test_a_page_that_is_too_large_is_read_in_smaller_ones(
    cluster: Cluster, server: ApiServer, loop: Loop
) -> None:
    for name in "abcdef":
        cluster.add(COLLECTION, large(name, MAX_MESSAGE_BYTES // 3))
    found, _ = loop.run(server.list(dataclasses.replace(PODS, page=6)))
    assert [one["metadata"]["name"] for one in found] == list("abcdef")
    assert cluster.requests["GET"] > 6, "first six at once, then three, then each"
    assert OF_PROCESS.held_bytes == 0


def test_an_object_that_is_too_large_is_an_error_and_not_held(
    cluster: Cluster, server: ApiServer, loop: Loop
) -> None:
    cluster.add(COLLECTION, large("a", MAX_MESSAGE_BYTES))
    with pytest.raises(ApiServerError, match=r"the answer is larger than 4 MiB"):
        loop.run(server.list(PODS))
    with pytest.raises(ApiServerError, match=r"the answer is larger than 4 MiB"):
        loop.run(server.get(PODS, "a", "default"))
    assert OF_PROCESS.held_bytes == 0


def test_answers_that_together_are_too_large_are_refused(
    cluster: Cluster, server: ApiServer, loop: Loop
) -> None:
    cluster.add(COLLECTION, large("a", MAX_MESSAGE_BYTES // 2))
    assert OF_PROCESS.hold(MAX_HELD_BYTES - 1000), "others hold this"
    try:
        with pytest.raises(ApiServerError, match="too much is received at the same time"):
            loop.run(server.get(PODS, "a", "default"))
    finally:
        OF_PROCESS.release(MAX_HELD_BYTES - 1000)
    assert loop.run(server.get(PODS, "a", "default"))["metadata"]["name"] == "a"


def test_a_list_without_end_is_an_error(loop: Loop, tmp_path: Path) -> None:
    metadata = '{"name": "a", "uid": "1", "resourceVersion": "1"}'
    items = ", ".join([f'{{"metadata": {metadata}}}'] * 1000)
    page = f'{{"kind": "List", "metadata": {{"resourceVersion": "1", "continue": "x"}}, "items": [{items}]}}'
    answers = [answer_of(page)] * 1000
    with contextlib.closing(Answering(loop, tmp_path / "kubeconfig", answers)) as answering:
        assert "lists more than 10000 objects" in answering.refusal().message
    assert len(answers) > 900


def test_a_change_that_is_too_large_ends_the_watch(cluster: Cluster, watcher: Watcher) -> None:
    cluster.add(COLLECTION, pod("a"))
    assert watcher.next() == ["a"]
    cluster.add(COLLECTION, large("b", MAX_MESSAGE_BYTES))
    threading.Timer(0.2, lambda: cluster.remove(COLLECTION, "b", "default")).start()
    assert watcher.next() == ["a"], "listed again"
    assert set(watcher.failures) == {0}


def test_selected_objects_are_watched(cluster: Cluster, watcher: Watcher) -> None:
    cluster.add(COLLECTION, pod("a"))
    cluster.add(COLLECTION, pod("elsewhere", "node-2"))
    assert watcher.next() == ["a"]
    cluster.add(COLLECTION, pod("b"))
    assert watcher.next() == ["a", "b"]
    cluster.add(COLLECTION, pod("c", "node-2"))
    cluster.remove(COLLECTION, "a", "default")
    assert watcher.next() == ["b"]


def test_a_watcher_lists_again_when_its_version_has_expired(cluster: Cluster, watcher: Watcher) -> None:
    cluster.add(COLLECTION, pod("a"))
    assert watcher.next() == ["a"]
    cluster.add(COLLECTION, pod("b"))
    assert watcher.next() == ["a", "b"]
    cluster.remove(COLLECTION, "a", "default")
    cluster.forget_changes()
    while watcher.next() != ["b"]:
        pass
    assert watcher.failures == []


def test_a_watcher_survives_an_unreachable_api_server(cluster: Cluster, watcher: Watcher) -> None:
    cluster.add(COLLECTION, pod("a"))
    assert watcher.next() == ["a"]
    cluster.stop()
    cluster.add(COLLECTION, pod("b"))
    threading.Timer(0.2, cluster.start).start()
    while watcher.next() != ["a", "b"]:
        pass
    assert set(watcher.failures) == {0}


def test_a_request_to_a_silent_api_server_ends_at_the_deadline(
    cluster: Cluster, loop: Loop, tmp_path: Path
) -> None:
    cluster.is_silent = True
    credentials = Kubeconfig(str(cluster.write_kubeconfig(tmp_path / "kubeconfig")))
    with pytest.raises(ApiServerError, match=r"did not answer within 0\.1 s"):
        loop.run(ApiServer(credentials, timeout_s=0.1).get(PODS, "a", "default"))


def test_an_answer_that_no_api_server_gives_is_an_error(loop: Loop, tmp_path: Path) -> None:
    answers = [b"", b"rubbish\r\n\r\n", answer_of("[1]"), answer_of("{")]
    with contextlib.closing(Answering(loop, tmp_path / "kubeconfig", answers)) as answering:
        while answers:
            assert answering.refusal().status == 0


class Answering:
    """A client of a server that answers each request with the next of these."""

    def __init__(self, loop: Loop, path: Path, answers: list[bytes]) -> None:
        self._loop, self._answers = loop, answers
        self._listener = loop.run(asyncio.start_server(self._serve, "127.0.0.1"))
        port = self._listener.sockets[0].getsockname()[1]
        path.write_text(kubeconfig(f"server: 'http://127.0.0.1:{port}'", "token: x"))
        self.server = ApiServer(Kubeconfig(str(path)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self._answers.pop(0))
        writer.close()

    def refusal(self) -> ApiServerError:
        """The error of the next list."""
        with pytest.raises(ApiServerError) as caught:
            self._loop.run(self.server.list(SLICES))
        return caught.value

    def close(self) -> None:
        self._listener.close()


def answer_of(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    "page",
    [
        "{}",
        '{"kind": "PodList", "metadata": {"resourceVersion": "1"}}',
        '{"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": 5}',
        '{"kind": "Pod", "metadata": {"resourceVersion": "1"}, "items": []}',
        '{"kind": "PodList", "metadata": null, "items": []}',
        '{"kind": "PodList", "metadata": {}, "items": []}',
        "[" * 100_000,
    ],
)
def test_an_answer_that_is_no_list_is_not_an_empty_one(loop: Loop, tmp_path: Path, page: str) -> None:
    with contextlib.closing(Answering(loop, tmp_path / "kubeconfig", [answer_of(page)])) as answering:
        assert answering.refusal().code == "api_server_error"


def test_a_version_that_is_not_served_is_said_with_the_first_release(loop: Loop, tmp_path: Path) -> None:
    answers = [answer_of("404 page not found\n", "404 Not Found"), answer_of("busy", "503 Unavailable")]
    with contextlib.closing(Answering(loop, tmp_path / "kubeconfig", answers)) as answering:
        missing = answering.refusal()
        assert (missing.status, isinstance(missing, MissingObjectError)) == (404, False)
        what = "does not serve /apis/resource.k8s.io/v1/resourceslices (Kubernetes 1.34 or later does)"
        assert missing.message.endswith(what)
        assert answering.refusal().status == 503


def test_malformed_objects_are_left_out_of_a_watch(cluster: Cluster, watcher: Watcher) -> None:
    cluster.add(COLLECTION, pod("a"))
    cluster.add(COLLECTION, {**pod("wrong"), "kind": 5})
    assert watcher.next() == ["a"]
    cluster.add(COLLECTION, {**pod("wrong-2"), "kind": 5})
    cluster.add(COLLECTION, pod("b"))
    assert watcher.next() == ["a", "b"]


@pytest.mark.parametrize("status", [403, 500])
def test_an_object_missing_in_a_list_is_gone_only_if_confirmed(
    cluster: Cluster, server: ApiServer, loop: Loop, status: int
) -> None:
    for name in ("a", "b", "c"):
        cluster.add(COLLECTION, pod(name))
    pods = server.watch(PODS, confirm=True, backoff=Backoff(0.01, 0.02))

    def step() -> list[str]:
        async def step() -> dict[str, ApiObject]:
            return await pods.__anext__()

        return names(loop.run(step()))

    try:
        assert step() == ["a", "b", "c"]
        listing, get, refusals = cluster.listing, cluster.get, [status]

        def get_some(collection: str, name: str, namespace: str = "") -> dict[str, Any]:
            if name == "a" and refusals:
                raise RefusalError(refusals.pop(), "refused by the test")
            return get(collection, name, namespace)

        cluster.get = get_some  # type: ignore[method-assign]
        cluster.listing = lambda *asked: {**listing(*asked), "items": []}  # type: ignore[method-assign]
        cluster.stop()
        cluster.remove(COLLECTION, "b", "default")
        cluster.remove(COLLECTION, "c", "default")
        cluster.add(COLLECTION, pod("c"))
        cluster.forget_changes()
        cluster.start()
        assert step() == ["a"]
        assert refusals == []
    finally:
        loop.run(pods.aclose())


def test_delays_double_up_to_the_longest() -> None:
    backoff = Backoff(1, 4)
    for most_s in (1, 2, 4, 4):
        assert most_s / 2 <= backoff.next_s() <= most_s
    backoff.reset()
    assert backoff.next_s() <= 1


SERVER = "server: 'http://a:1'"


def kubeconfig(cluster: str = SERVER, user: str = "", context: str = "c") -> str:
    return f"""\
current-context: {context}
contexts: [{{name: c, context: {{cluster: k, user: u}}}}]
clusters: [{{name: k, cluster: {{{cluster}}}}}]
users: [{{name: u, user: {{{user}}}}}]
"""


INVALID = "certificate-authority-data: " + base64.b64encode("ü".encode()).decode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no current context"),
        ("a: [", "is not YAML"),
        ("[" * 700, "is not YAML"),
        ("- 1\n", "has no current context"),
        ("current-context: 9999-99-99\n", "is not YAML"),
        ("current-context: nothing\ncontexts: []\n", "has no current context"),
        ("current-context: a\ncontexts: [{}]\n", "has no current context"),
        (kubeconfig(context="another"), "has no current context"),
        (kubeconfig(user="exec: {}"), "exec is not supported"),
        (kubeconfig(user="tokenFile: missing"), "missing cannot be read"),
        (kubeconfig(user=r'tokenFile: "a\0b"'), "embedded null byte"),
        (kubeconfig(user=r'token: "a\nb"'), "the token contains invalid"),
        (kubeconfig(user="token: ü"), "the token contains invalid"),
        (kubeconfig().replace("user: {}", "user: text"), "has no current context"),
        (kubeconfig("server: 'https://a'", "client-certificate-data: '*'"), "is not base64"),
        (kubeconfig("server: 'https://a'", "client-certificate-data: YQ=="), "is invalid"),
        (kubeconfig(f"server: 'https://a', {INVALID}"), "certificate authority is invalid"),
        (kubeconfig("server: ''"), "is not a host name"),
        (kubeconfig("server: 'http://127.0.0.1:1/ü'"), "the path contains invalid"),
        (kubeconfig("server: 'https://ü..x:1'"), "the host contains invalid"),
        (kubeconfig(f"server: 'https://{'a' * 64}:1'"), "is not a host name"),
    ],
)
def test_an_invalid_kubeconfig_is_explained(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(ApiServerError, match=reason):
        Kubeconfig(str(path)).access()


def test_a_token_is_read_again_for_each_request(tmp_path: Path) -> None:
    path, token = tmp_path / "kubeconfig", tmp_path / "token"
    path.write_text(kubeconfig("server: 'https://api.example:6443/prefix/'", "tokenFile: token"))
    for text in ("first", "second"):
        token.write_text(f"{text}\n")
        access = Kubeconfig(str(path)).access()
        assert (access.host, access.port, access.prefix) == ("api.example", 6443, "/prefix")
        assert (access.token, access.server_name) == (text, "api.example")


def test_credentials_come_from_a_kubeconfig_or_the_service_account(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert isinstance(find_credentials("/a", paths, pod), Kubeconfig)
    assert isinstance(find_credentials("", paths, pod), ServiceAccount)
    with pytest.raises(ApiServerError, match="kubeconfig is not set"):
        find_credentials("", paths, {"KUBECONFIG": "/a"})
    with pytest.raises(ApiServerError, match="token cannot be read"):
        ServiceAccount("10.0.0.1", 443, paths).access()


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
def test_only_the_service_account_s_authority_is_trusted(loop: Loop, tmp_path: Path) -> None:
    """A pod's token is sent to the API server that its certificate authority vouches for, over TLS."""
    directory = tmp_path / "var/run/secrets/kubernetes.io/serviceaccount"
    directory.mkdir(parents=True)
    (directory / "token").write_text("secret")
    keys = {name: _certificate(tmp_path / name) for name in ("right", "wrong")}
    with Cluster(keys["right"]) as cluster:
        cluster.add(COLLECTION, pod("a"))
        server = ApiServer(ServiceAccount("127.0.0.1", cluster.port, Paths(str(tmp_path))))
        (directory / "ca.crt").write_text((keys["right"] / "certificate.pem").read_text())
        assert loop.run(server.get(PODS, "a", "default"))["metadata"]["name"] == "a"
        (directory / "ca.crt").write_text((keys["wrong"] / "certificate.pem").read_text())
        with pytest.raises(ApiServerError, match="cannot be reached"):
            loop.run(server.get(PODS, "a", "default"))


def _certificate(directory: Path) -> Path:
    """A key and a certificate for 127.0.0.1, signed by itself."""
    directory.mkdir()
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "certificate.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run([*command, *names, *files], check=True, capture_output=True, timeout=60)
    return directory
