"""An API server in a thread, which keeps objects and serves what the plugin asks for, over plain HTTP.

with Cluster() as cluster:
    cluster.add("/api/v1/pods", {"metadata": {"name": "trainer", "namespace": "default"}})
    program = start(kubeconfig=cluster.write_kubeconfig(path))

It can be away, answer nothing, refuse requests, and forget what has changed (status 410 of a watch).
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from simhost.host import Closes

#: Says what is wrong with an object that is created or replaced; "" if nothing is.
Validate = Callable[[dict[str, Any]], str]

_KUBECONFIG = """\
current-context: test
contexts: [{{name: test, context: {{cluster: here, user: node}}}}]
clusters: [{{name: here, cluster: {{server: "http://127.0.0.1:{port}/"}}}}]
users: [{{name: node, user: {{token: secret}}}}]
"""


class Change(NamedTuple):
    kind: str
    collection: str
    object: dict[str, Any]
    version: int


class RefusalError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cluster(Closes):
    """A context manager. `requests` counts what was asked, by method and by `GET /api/v1/pods/trainer`."""

    def __init__(self, keys: Path | None = None) -> None:
        """With `keys`, a directory with key.pem and certificate.pem, it speaks TLS."""
        self._keys = keys
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: Counter[str] = Counter()
        self.validators: dict[str, Validate] = {}
        #: The statuses with which the next requests are refused, by method.
        self.refusals: dict[str, list[int]] = {}
        self.changed = threading.Condition()
        self._version = 100
        self._changes: list[Change] = []
        self._compacted = 0
        self.is_silent = False
        #: The members that are dropped wherever they are, as those of features that are not enabled.
        self.dropped: set[str] = set()
        #: Keeps the port while the server is stopped: it is bound, but never listens.
        self._port_holder = socket.socket()
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port_holder.bind(("127.0.0.1", 0))
        self.port = self._port_holder.getsockname()[1]
        self.start()

    # -- faults

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), self)
        if self._keys:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(self._keys / "certificate.pem", self._keys / "key.pem")
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def stop(self) -> None:
        """Be away: watches end, and connections are refused."""
        self._server.is_stopping = True
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def close(self) -> None:
        self.stop()
        self._port_holder.close()

    def forget_changes(self) -> None:
        """Answer 410 to watches that start before now, and end those that have started."""
        with self.changed:
            self._compacted = self._version
            self._changes.clear()
            self.changed.notify_all()

    # -- objects

    def write_kubeconfig(self, path: Path) -> Path:
        path.write_text(_KUBECONFIG.format(port=self.port))
        return path

    def add(self, collection: str, made: dict[str, Any]) -> dict[str, Any]:
        """Store an object of `/api/v1/pods`, or of other such paths without a namespace."""
        with self.changed:
            metadata = made["metadata"]
            if "generateName" in metadata:
                metadata.setdefault("name", metadata["generateName"] + uuid.uuid4().hex[:5])
            key = _key(collection, metadata.get("namespace", ""), metadata["name"])
            if key in self.objects:
                raise RefusalError(409, f"{metadata['name']} already exists")
            metadata.setdefault("uid", str(uuid.uuid4()))
            return self._store("ADDED", collection, key, made)

    def replace(self, collection: str, changed: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            metadata = changed["metadata"]
            key = _key(collection, metadata.get("namespace", ""), metadata["name"])
            old = self._find(key)["metadata"]
            if metadata.get("resourceVersion", old["resourceVersion"]) != old["resourceVersion"]:
                raise RefusalError(409, "the object has been modified")
            return self._store("MODIFIED", collection, key, {**changed, "metadata": {**old, **metadata}})

    def remove(self, collection: str, name: str, namespace: str = "") -> dict[str, Any]:
        with self.changed:
            key = _key(collection, namespace, name)
            removed = self._find(key)
            del self.objects[key]
            self._note("DELETED", collection, removed)
            return removed

    def of(self, collection: str) -> list[dict[str, Any]]:
        with self.changed:
            return [one for key, one in self.objects.items() if key.startswith(f"{collection} ")]

    def get(self, collection: str, name: str, namespace: str = "") -> dict[str, Any]:
        with self.changed:
            return self._find(_key(collection, namespace, name))

    def _find(self, key: str) -> dict[str, Any]:
        if key not in self.objects:
            raise RefusalError(404, f"{key} not found")
        return self.objects[key]

    def _store(self, kind: str, collection: str, key: str, one: dict[str, Any]) -> dict[str, Any]:
        validate = self.validators.get(collection)
        wrong = validate(one) if validate else ""
        if wrong:
            raise RefusalError(422, f"{one['metadata'].get('name')} is invalid: {wrong}")
        stored: dict[str, Any] = json.loads(json.dumps(one), object_hook=self._without_dropped)
        self.objects[key] = stored
        self._note(kind, collection, stored)
        return stored

    def _without_dropped(self, members: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in members.items() if name not in self.dropped}

    def _note(self, kind: str, collection: str, one: dict[str, Any]) -> None:
        self._version += 1
        one["metadata"]["resourceVersion"] = str(self._version)
        self._changes.append(Change(kind, collection, json.loads(json.dumps(one)), self._version))
        self.changed.notify_all()

    # -- requests

    def listing(
        self, collection: str, fits: Callable[[dict[str, Any]], bool], limit: int = 500, start: int = 0
    ) -> dict[str, Any]:
        """A page of at most `limit` objects; the token of the next one is where it starts."""
        with self.changed:
            items = [one for one in self.of(collection) if fits(one)]
            end = start + limit
            more = {"continue": str(end)} if end < len(items) else {}
            metadata = {"resourceVersion": str(self._version), **more}
            return {"kind": "List", "metadata": metadata, "items": items[start:end]}

    def changes_after(self, version: int, collection: str) -> list[Change]:
        """Wait for changes; raises RefusalError if some have been forgotten."""
        with self.changed:
            while not self._server.is_stopping:
                if version < self._compacted:
                    raise RefusalError(410, "too old resource version")
                found = [
                    one for one in self._changes if one.version > version and one.collection == collection
                ]
                if found:
                    return found
                self.changed.wait()
        return []


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], cluster: Cluster) -> None:
        self.cluster = cluster
        self.is_stopping = False
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind to a port to which the cluster already is bound."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        cluster = self.server.cluster
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with cluster.changed:
            cluster.requests.update((self.command, f"{self.command} {urlsplit(self.path).path}"))
            refusals = cluster.refusals.get(self.command)
            refusal = refusals.pop(0) if refusals else 0
            cluster.changed.notify_all()
            while cluster.is_silent and not self.server.is_stopping:
                cluster.changed.wait()
        try:
            if self.headers["Authorization"] != "Bearer secret":
                raise RefusalError(401, "Unauthorized")
            if refusal:
                raise RefusalError(refusal, "refused by the test")
            self._answer(json.loads(body or "{}"))
        except RefusalError as error:
            self._send(error.status, {"kind": "Status", "code": error.status, "message": str(error)})
        except (BrokenPipeError, ConnectionResetError):
            pass

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - the names are http.server's

    def _answer(self, body: dict[str, Any]) -> None:
        cluster = self.server.cluster
        url = urlsplit(self.path)
        collection, namespace, name = _parts(url.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}

        def fits(one: dict[str, Any]) -> bool:
            is_inside = namespace in ("", one["metadata"].get("namespace", ""))
            return is_inside and _selects(query.get("fieldSelector", ""), one)

        if self.command == "POST":
            metadata = {**body["metadata"], **({"namespace": namespace} if namespace else {})}
            self._send(201, cluster.add(collection, {**body, "metadata": metadata}))
        elif self.command == "PUT":
            self._send(200, cluster.replace(collection, body))
        elif self.command == "DELETE":
            self._send(200, cluster.remove(collection, name, namespace))
        elif name:
            self._send(200, cluster.get(collection, name, namespace))
        elif query.get("watch") == "true":
            self._watch(collection, int(query["resourceVersion"]), fits)
        else:
            limit, start = int(query["limit"]), int(query.get("continue", 0))
            self._send(200, cluster.listing(collection, fits, limit, start))

    def _watch(self, collection: str, version: int, fits: Callable[[dict[str, Any]], bool]) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            while True:
                changes = self.server.cluster.changes_after(version, collection)
                if not changes:
                    return
                for change in changes:
                    version = change.version
                    if fits(change.object):
                        self._send_event(change.kind, change.object)
        except RefusalError as error:
            self._send_event("ERROR", {"kind": "Status", "code": error.status, "message": str(error)})

    def _send_event(self, kind: str, what: dict[str, Any]) -> None:
        self.wfile.write(json.dumps({"type": kind, "object": what}).encode() + b"\n")

    def _send(self, status: int, what: dict[str, Any]) -> None:
        data = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True


def _key(collection: str, namespace: str, name: str) -> str:
    return f"{collection} {namespace}/{name}"


def _parts(path: str) -> tuple[str, str, str]:
    """The collection, namespace and name of a path such as /api/v1/namespaces/default/pods/trainer."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    size = 2 if parts[0] == "api" else 3
    prefix, rest = parts[:size], parts[size:]
    namespace = ""
    if rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    return "/" + "/".join([*prefix, rest[0]]), namespace, rest[1] if len(rest) > 1 else ""


def _selects(selector: str, one: dict[str, Any]) -> bool:
    for term in filter(None, selector.split(",")):
        path, _, expected = term.partition("=")
        value: Any = one
        for part in path.split("."):
            value = value.get(part, {})
        if value != expected:
            return False
    return True
