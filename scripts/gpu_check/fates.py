"""What became of clients after something was done, as values and in words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpu_check.asking import Client, Event, describe, pump
from gpu_check.processes import stat_of
from gpu_check.values import Surroundings, seconds

#: A client that has not beaten for so long stands still; its kernels take a millisecond.
_STILL_S = 1.0


def start_beating(clients: Sequence[Client], around: Surroundings, for_s: float = 0.7) -> None:
    """Let ready clients launch small kernels without end, and watch them do it for a while."""
    host = around.host
    for client in clients:
        client.ready(30)
    for client in clients:
        client.tell("beat", blocks=host.small_blocks, iterations=host.gpu["iterations"])
    pump(clients, time.monotonic() + for_s)


def watch(clients: Sequence[Client], for_s: float) -> None:
    """Hear the clients for so long, or until each has got an error or ended, and a little more."""
    end_s = time.monotonic() + for_s
    pump(clients, end_s, lambda: all(_is_over(client) for client in clients))
    pump(clients, min(end_s, time.monotonic() + 0.3))


def _is_over(client: Client) -> bool:
    return client.first("error") is not None or stat_of(client.pid) is None


def fate(client: Client, since_s: float) -> dict[str, Any]:
    """What it did since a moment of the monotonic clock: launches, pauses, its error, its end."""
    client.hear()
    beats = client.beats()
    after = [beat for beat in beats if beat["t"] > since_s]
    before = [beat["launches"] for beat in beats if beat["t"] <= since_s]
    error = client.first("error")
    launches = max(
        [beat["launches"] for beat in after] + [error.get("launches", 0) if error else 0], default=0
    )
    last_s = after[-1]["t"] if after else (beats[-1]["t"] if beats else since_s)
    return {
        "client": client.name,
        "launches_after": max(0, launches - (before[-1] if before else 0)),
        "longest_pause_s": max((beat["gap"] for beat in after), default=0.0),
        "last_beat_after_s": round(last_s - since_s, 3),
        "silent_for_s": round(time.monotonic() - last_s, 3),
        "error": error,
        "error_after_s": round(error["t"] - since_s, 4) if error else None,
        "status": client.process.poll(),
    }


def in_words(found: dict[str, Any]) -> str:
    """One client's fate."""
    name = f"client {found['client']}"
    if found["error"]:
        return f"{name} got {describe(found['error'])} {_after(found['error_after_s'])}"
    if found["status"] is not None:
        return f"{name}'s process ended with status {found['status']} and told no error"
    if found["silent_for_s"] > _STILL_S:
        return (
            f"{name} stood still from {seconds(max(0.0, found['last_beat_after_s']))} after it on, "
            f"with no error in {seconds(found['silent_for_s'])}"
        )
    return (
        f"{name} went on ({found['launches_after']} launches, longest pause "
        f"{seconds(found['longest_pause_s'])})"
    )


def _after(value: float) -> str:
    return f"{seconds(value)} after it" if value >= 0 else f"{seconds(-value)} before it"


def fates(clients: Sequence[Client], since_s: float) -> tuple[list[dict[str, Any]], str]:
    """All clients' fates, and a sentence without its full stop."""
    found = [fate(client, since_s) for client in clients]
    return found, "; ".join(in_words(each) for each in found)


class Attempt(NamedTuple):
    """What a new client met with."""

    event: Event | None
    waited_s: float

    @property
    def works(self) -> bool:
        """Whether it ran a kernel."""
        return self.event is not None and self.event["event"] == "ready"

    @property
    def under_mps(self) -> bool:
        """Whether it ran a kernel, and the driver calls that shared by MPS."""
        return self.works and self.event is not None and self.event.get("mps") is True

    def words(self) -> str:
        """In words that follow `a new client`."""
        if self.event is None:
            return f"waited, neither served nor refused within {seconds(self.waited_s)}"
        if not self.works:
            return f"got {describe(self.event)} after {seconds(self.waited_s)}"
        mps = self.event.get("mps")
        how = "under MPS" if mps else "OUTSIDE MPS, with no limit"
        how = "whether under MPS this driver does not tell" if mps is None else how
        return f"ran a kernel after {seconds(self.waited_s)}, {how}"

    def as_json(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"words": self.words(), "seconds": round(self.waited_s, 4), "event": self.event}


def outcome_of(client: Client, timeout_s: float) -> Attempt:
    """What a client that was started meets with, counted from its start."""
    event = client.outcome(timeout_s)
    return Attempt(event, (event["t"] if event else time.monotonic()) - client.started_s)


def attempt(
    around: Surroundings,
    pipe: str,
    timeout_s: float = 5.0,
    *,
    environment: Mapping[str, str] | None = None,
    uid: int | None = None,
) -> Attempt:
    """Start a new client and end it again."""
    with Client(around, "new", pipe=pipe, environment=environment, uid=uid) as client:
        return outcome_of(client, min(timeout_s, around.left_s()))
