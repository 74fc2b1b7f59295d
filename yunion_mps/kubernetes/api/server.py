"""A client of the Kubernetes API server: get, list, watch, create, replace and delete objects.

Every request has a connection of its own, for which the credentials are read again, because they are replaced
regularly.

Source: Kubernetes API Concepts (kubernetes.io/docs/reference/using-api/api-concepts), sections "Resource
URIs", "Efficient detection of changes" and "Retrieving large results sets in chunks".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator, Mapping
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlencode

import h11

from yunion_mps.core.tasks import within
from yunion_mps.kubernetes.api.credentials import Access, ApiCredentials, ApiServerError
from yunion_mps.kubernetes.api.objects import ApiObject, Bookmark, ObjectT, Resource, read_as
from yunion_mps.kubernetes.received import MAX_MESSAGE_BYTES, OF_PROCESS

T = TypeVar("T")

log = logging.getLogger(__name__)

#: How long the API server has for an answer, in s.
TIMEOUT_S = 30.0
#: After how long the API server ends a watch, so that a dead connection is noticed, in s.
_WATCH_S = 300
#: The first and the longest delay after failures, in s.
_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 60.0
#: How many objects a list may have; a node has hundreds.
_MAX_OBJECTS = 10_000
_PIECE_BYTES = 1 << 18
_DONE = (HTTPStatus.OK, HTTPStatus.CREATED, HTTPStatus.ACCEPTED)
#: The types of a watch's events except ADDED and MODIFIED.
_DELETED = "DELETED"
_BOOKMARK = "BOOKMARK"
_ERROR = "ERROR"

NODES = Resource("/api/v1", "nodes", ApiObject)


class MissingObjectError(ApiServerError):
    """The API server says that there is no object of this name."""


class TooLargeError(ApiServerError):
    """An answer is larger than what is received at once."""


def missing_node(node: str) -> str:
    """Return the message if the cluster has no such node."""
    return (
        f"the cluster has no node {node}: correct nodeName, unless the kubelet has yet to register the node"
    )


def node_failure(error: ApiServerError, node: str) -> str:
    """Return the message of a failed request for the node, or for something of it.

    Source: Using Node Authorization (kubernetes.io/docs/reference/access-authn-authz/node): a kubelet's
    credentials are refused for every node but its own.
    """
    if error.status == HTTPStatus.FORBIDDEN:
        return f"{error.message} (if this node is not {node}, correct nodeName)"
    return error.message


class Backoff:
    """Delays after failures: each is twice the one before, varied by up to a half, until `reset`."""

    def __init__(self, first_s: float = _FIRST_DELAY_S, longest_s: float = _LONGEST_DELAY_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.reset()

    def reset(self) -> None:
        self._next_s = self._first_s

    def next_s(self) -> float:
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._longest_s)
        return delay_s * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret: it keeps nodes apart

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s())


class ApiServer:
    """Its methods raise ApiServerError. Every wait has a deadline; only `watch` retries.

    Only `call` and `events` connect: a subclass that replaces them needs no API server.
    """

    def __init__(self, credentials: ApiCredentials, timeout_s: float = TIMEOUT_S) -> None:
        self._credentials = credentials
        self._timeout_s = timeout_s

    async def get(self, resource: Resource[ObjectT], name: str, namespace: str = "") -> ObjectT:
        """Return the object; raises MissingObjectError if there is none."""
        return resource.read(await self.call("GET", resource, resource.path(name, namespace)))

    async def _list_by(
        self, size: int, resource: Resource[ObjectT], fields: str
    ) -> tuple[list[ObjectT], str]:
        """List in pages of this many objects."""
        items: list[ObjectT] = []
        token = ""
        listed = 0
        while True:
            selection = {"fieldSelector": fields, "continue": token, "limit": str(size)}
            page = resource.read_list(await self.call("GET", resource, resource.path(), selection))
            listed += len(page["items"])
            _refuse_too_many(listed, resource)
            for item in page["items"]:
                stored = _readable(resource, item)
                if stored:
                    items.append(stored)
            token = page["metadata"].get("continue", "")
            version = page["metadata"]["resourceVersion"]
            del page  # before the next one is received
            if not token:
                return items, version

    async def list(self, resource: Resource[ObjectT], fields: str = "") -> tuple[list[ObjectT], str]:
        """Return all objects that the field selector matches, and the version from which to watch them.

        An object that cannot be read is logged and left out. If a page is too large, the list begins again
        with smaller ones, because a token is only valid with the size of its page.
        """
        size = resource.page
        while True:
            try:
                return await self._list_by(size, resource, fields)
            except TooLargeError:
                if size == 1:
                    raise
                size //= 2

    async def create(self, resource: Resource[ObjectT], desired: ObjectT) -> ObjectT:
        """Create the object; return it as stored."""
        return resource.read(await self.call("POST", resource, resource.path(), body=desired))

    async def replace(self, resource: Resource[ObjectT], desired: ObjectT) -> ObjectT:
        """Replace the object; return it as stored.

        The status of the error is 409 if its resource version is no longer the newest one.
        """
        metadata = desired["metadata"]
        path = resource.path(metadata["name"], metadata.get("namespace", ""))
        return resource.read(await self.call("PUT", resource, path, body=desired))

    async def delete(self, resource: Resource[Any], name: str) -> None:
        """Delete the object if there is one."""
        with contextlib.suppress(MissingObjectError):
            await self.call("DELETE", resource, resource.path(name))

    async def watch(
        self,
        resource: Resource[ObjectT],
        *,
        fields: str = "",
        confirm: bool = False,
        on_failure: Callable[[ApiServerError], None] = lambda _: None,
        backoff: Backoff | None = None,
    ) -> AsyncGenerator[dict[str, ObjectT], None]:
        """List and watch: yield the objects that the selector matches, by uid, now and after each change.

        It never ends. While the API server is unreachable, nothing is yielded, because what was known stays
        valid, and `on_failure` is called for each failed attempt. With `confirm`, an object that is missing
        from a later list is gone only if the API server also says so when it is asked for that object.
        """
        backoff = backoff or Backoff()
        objects: dict[str, ObjectT] = {}
        while True:
            try:
                items, version = await self.list(resource, fields)
                listed = {item["metadata"]["uid"]: item for item in items}
                if confirm:
                    listed.update(await self._still_there(resource, objects, listed))
                objects = listed
                yield dict(objects)
                backoff.reset()
                while True:
                    events = self.events(resource, {"fieldSelector": fields, "resourceVersion": version})
                    try:
                        async for kind, value in events:
                            if kind == _BOOKMARK:  # it has only a version
                                version = read_as(Bookmark, value, kind)["metadata"]["resourceVersion"]
                                continue
                            stored = _readable(resource, value)
                            if not stored:
                                continue
                            version = stored["metadata"]["resourceVersion"]
                            if kind == _DELETED:
                                objects.pop(stored["metadata"]["uid"], None)
                            else:
                                objects[stored["metadata"]["uid"]] = stored
                            _refuse_too_many(len(objects), resource)
                            yield dict(objects)
                    finally:
                        await events.aclose()
                    await backoff.wait()
                    backoff.reset()
            except ApiServerError as error:
                if error.status != HTTPStatus.GONE:  # which only means that the objects must be listed again
                    on_failure(error)
                await backoff.wait()

    async def _still_there(
        self, resource: Resource[ObjectT], known: Mapping[str, ObjectT], listed: Collection[str]
    ) -> dict[str, ObjectT]:
        """Return those of the known objects that are not listed, but have not been deleted either."""
        missing = {uid: item for uid, item in known.items() if uid not in listed}
        return {uid: item for uid, item in missing.items() if not await self._is_gone(resource, item)}

    async def _is_gone(self, resource: Resource[ObjectT], item: ObjectT) -> bool:
        """Return whether the object has been deleted; if we may not ask, it counts as there."""
        metadata = item["metadata"]
        try:
            stored = await self.get(resource, metadata["name"], metadata.get("namespace", ""))
        except MissingObjectError:
            return True
        except ApiServerError as error:
            if error.status != HTTPStatus.FORBIDDEN:
                raise
            return False
        return stored["metadata"]["uid"] != metadata["uid"]

    async def events(
        self, resource: Resource[Any], query: Mapping[str, str]
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield the kind of each change and the object, until the API server ends the watch.

        Raises ApiServerError.
        """
        watch = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_S)}
        exchange = self._exchange("GET", resource.path(), watch)
        try:
            await _within(self._timeout_s, self._open(exchange, resource))
            pending = bytearray()
            while True:
                piece = await _within(_WATCH_S + self._timeout_s, exchange.read())
                exchange.hold(len(pending) + len(piece))
                lines = (pending + piece).split(b"\n")
                pending = lines.pop()
                for line in lines:
                    if not line:
                        continue
                    event = _decoded(line)
                    if event["type"] == _ERROR:
                        raise _refusal(event["object"].get("code", 0), event["object"], resource)
                    yield event["type"], event["object"]
                exchange.hold(len(pending))
                if not piece:
                    return
        except (KeyError, TypeError, AttributeError):
            raise ApiServerError("the API server's answer to a watch is not valid") from None
        finally:
            exchange.close()

    async def call(
        self,
        method: str,
        resource: Resource[Any],
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
    ) -> Any:
        """Send one request; return the decoded answer."""
        exchange = self._exchange(method, path, query or {}, body)

        async def answer() -> Any:
            await self._open(exchange, resource)
            return _decoded(await exchange.read_all())

        try:
            return await _within(self._timeout_s, answer())
        finally:
            exchange.close()

    def _exchange(self, method: str, path: str, query: Mapping[str, str], body: object = None) -> _Exchange:
        encoded = urlencode({name: value for name, value in query.items() if value})
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        target = f"{path}?{encoded}" if encoded else path
        return _Exchange(self._credentials.access(), method, target, data)

    async def _open(self, exchange: _Exchange, resource: Resource[Any]) -> None:
        """Send the request; raises ApiServerError if it is refused."""
        status = await exchange.open()
        if status in _DONE:
            return
        answer: Mapping[str, Any] = {}
        data = await exchange.read_all()
        with contextlib.suppress(ApiServerError):  # a proxy, or a path that is not served: plain text
            answer = _decoded(data)
        raise _refusal(status, answer, resource)


class _Exchange:
    """One request and its answer, on a connection of their own. Every failure is an ApiServerError."""

    def __init__(self, access: Access, method: str, target: str, body: bytes) -> None:
        self._access = access
        self._http = h11.Connection(h11.CLIENT)
        headers = [("Host", access.authority), ("Accept", "application/json"), ("Connection", "close")]
        if access.token:
            headers.append(("Authorization", f"Bearer {access.token}"))
        if body:
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        events: list[h11.Event] = [h11.Request(method=method, target=access.prefix + target, headers=headers)]
        if body:
            events.append(h11.Data(data=body))
        events.append(h11.EndOfMessage())
        self._request = b"".join(self._http.send(event) or b"" for event in events)
        self._writer: asyncio.StreamWriter | None = None
        self._held_bytes = 0

    async def open(self) -> int:
        """Connect, send the request, and return the status of the answer; raises ApiServerError."""
        access = self._access
        with _failures(access):
            self._reader, self._writer = await asyncio.open_connection(
                access.host, access.port, ssl=access.tls, server_hostname=access.server_name
            )
            self._writer.write(self._request)
            # the answer of a server that has already closed can still be read
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
            event = await self._next()
            assert isinstance(event, h11.Response)
            return event.status_code

    async def read(self) -> bytes:
        """Return some of the answer, empty at its end; raises ApiServerError."""
        with _failures(self._access):
            while True:
                event = await self._next()
                if isinstance(event, h11.EndOfMessage):
                    return b""
                if isinstance(event, h11.Data) and event.data:
                    return bytes(event.data)

    async def read_all(self) -> bytearray:
        """Return the answer; raises ApiServerError, of which TooLargeError if it is too large."""
        answer = bytearray()
        while True:
            piece = await self.read()
            if not piece:
                return answer
            self.hold(len(answer) + len(piece))
            answer += piece

    def hold(self, size_bytes: int) -> None:
        """Count this much of the answer as held, until `close`; raises ApiServerError if it is too much."""
        if size_bytes > MAX_MESSAGE_BYTES:
            most = f"{MAX_MESSAGE_BYTES >> 20} MiB"
            raise TooLargeError(f"{self._access.authority}: the answer is larger than {most}")
        OF_PROCESS.release(self._held_bytes)
        self._held_bytes = 0
        if not OF_PROCESS.hold(size_bytes):
            authority = self._access.authority
            message = f"{authority}: too much is received at the same time: it is asked again later"
            raise ApiServerError(message)
        self._held_bytes = size_bytes

    def close(self) -> None:
        OF_PROCESS.release(self._held_bytes)
        self._held_bytes = 0
        if self._writer:
            self._writer.transport.abort()

    async def _next(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.InformationalResponse):
                continue
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(await self._reader.read(_PIECE_BYTES))


@contextlib.contextmanager
def _failures(access: Access) -> Iterator[None]:
    try:
        yield
    except (OSError, h11.ProtocolError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ApiServerError(f"the API server {access.authority} cannot be reached: {cause}") from None


async def _within(timeout_s: float, coroutine: Coroutine[Any, Any, T]) -> T:
    error = ApiServerError(f"the API server did not answer within {timeout_s:g} s")
    return await within(timeout_s, coroutine, error)


def _readable(resource: Resource[ObjectT], value: object) -> ObjectT | None:
    """Return the object, None if it cannot be read, which is logged."""
    try:
        return resource.read(value)
    except ApiServerError as error:
        log.warning("ignored an object: %s", error.message)
        return None


def _refuse_too_many(number: int, resource: Resource[Any]) -> None:
    """Raise ApiServerError if there are more objects than are kept."""
    if number > _MAX_OBJECTS:
        raise ApiServerError(f"the API server lists more than {_MAX_OBJECTS} objects of {resource.plural}")


def _decoded(data: bytes | bytearray) -> Any:
    """Return the object in an answer; raises ApiServerError."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict):
            return value
    raise ApiServerError("the API server's answer is not a JSON object")


def _refusal(status: int, answer: Mapping[str, Any], resource: Resource[Any]) -> ApiServerError:
    """Return the error for an answer of kind Status, or for one of a server that does not know the path."""
    text = f"the API server refused the request: {answer.get('message') or f'HTTP status {status}'}"
    if status != HTTPStatus.NOT_FOUND:
        return ApiServerError(text, status)
    if answer.get("kind") == "Status":
        return MissingObjectError(text, status)
    first = f" (Kubernetes {resource.since} or later does)" if resource.since else ""
    return ApiServerError(f"the API server does not serve {resource.path()}{first}", status)
