"""Refusals: which settings of GPUs the driver has refused to set or to restore, and when each is tried again.

A refusal may pass, so it is tried again with a pause that grows. No timer does that: each poll asks what is
due. What the driver does not support is tried again by a reload only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from yunion_mps.core.errors import UnsupportedError, YunionError
from yunion_mps.core.reasons import GPU_ABSENT, Reason

#: The first and the longest pause before a refused setting is tried again; the pause doubles.
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0

#: The name of a kind, and the UUID of a GPU.
SettingKey = tuple[str, str]


class Attempt(NamedTuple):
    """The change of a setting that is tried."""

    key: SettingKey
    target: str
    #: Whether the target is what the GPU had before our first change.
    restores: bool


class Refusal(NamedTuple):
    """Why the driver has refused a change, at its last attempt."""

    attempt: Attempt
    error: YunionError
    #: What the status says; empty if the GPU's own reason says it.
    reason: Reason
    pause_s: float
    #: When it is tried again; None if not before a reload.
    again_s: float | None


class Refusals:
    """The refusals of all kinds of settings; changed on the loop only."""

    def __init__(self) -> None:
        self._by_key: dict[SettingKey, Refusal] = {}

    def __iter__(self) -> Iterator[Refusal]:
        return iter(self._by_key.values())

    def note(self, attempt: Attempt, error: YunionError, reason: Reason, now_s: float) -> None:
        """Note that an attempt has failed; a GPU that is not there has refused nothing."""
        if error.code in GPU_ABSENT:
            self.forget(attempt.key)
            return
        before = self._of(attempt)
        pause_s = min(before.pause_s * 2, LAST_PAUSE_S) if before else FIRST_PAUSE_S
        again_s = None if isinstance(error, UnsupportedError) else now_s + pause_s
        self._by_key[attempt.key] = Refusal(attempt, error, reason, pause_s, again_s)

    def is_due(self, attempt: Attempt, now_s: float) -> bool:
        """Whether the change may be tried now: it was not refused, or its pause is over."""
        refusal = self._of(attempt)
        return refusal is None or (refusal.again_s is not None and now_s >= refusal.again_s)

    def last_error(self, attempt: Attempt) -> str:
        """Return the message of its last refusal; empty if it was not refused."""
        refusal = self._of(attempt)
        return refusal.error.message if refusal else ""

    def try_now(self) -> None:
        """Have all of them tried at once, also what is not supported, because of a reload."""
        for key, refusal in self._by_key.items():
            self._by_key[key] = refusal._replace(pause_s=FIRST_PAUSE_S / 2, again_s=0.0)

    def forget(self, key: SettingKey) -> None:
        self._by_key.pop(key, None)

    def keep_only(self, attempts: Collection[Attempt], kinds: Collection[str]) -> None:
        """Forget the refusals of these kinds (names) that are of none of the attempts that are to be made."""
        for key, refusal in list(self._by_key.items()):
            if key[0] in kinds and refusal.attempt not in attempts:
                del self._by_key[key]

    def to_set(self, kind: str) -> dict[str, Refusal]:
        """Return the refusals of desired values of a kind (its name), by GPU UUID."""
        refused = {}
        for (name, uuid), refusal in self._by_key.items():
            if name == kind and not refusal.attempt.restores:
                refused[uuid] = refusal
        return refused

    def of_kind(self, kind: str) -> set[str]:
        """Return the GPUs (UUIDs) that have refused to set or restore a value of a kind (its name)."""
        return {uuid for name, uuid in self._by_key if name == kind}

    def _of(self, attempt: Attempt) -> Refusal | None:
        refusal = self._by_key.get(attempt.key)
        return refusal if refusal and refusal.attempt == attempt else None
