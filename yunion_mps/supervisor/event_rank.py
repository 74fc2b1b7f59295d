"""The order of events where there is not room for all: `events`, `top` and the web page use this one.

Recent errors come before recent warnings, both before what users can cause at will, and that before all
other events. Events of one rank are ordered by their ids, the newest first.
"""

from __future__ import annotations

from yunion_mps.core.models import Event
from yunion_mps.core.reasons import CONTROL_DAEMON_BUSY, CONTROL_DAEMON_SILENT, LIMITS_OVERWRITTEN

#: The kinds of events that users can cause at will.
_KINDS_OF_USERS = ("lease", "client")
#: The reason codes of such events of other kinds: any user can connect to a control daemon, and command it.
_CODES_OF_USERS = (CONTROL_DAEMON_BUSY, CONTROL_DAEMON_SILENT, LIMITS_OVERWRITTEN)
#: Whether users can cause an event at will, as an expression of SQL.
OF_USERS = f"(kind IN {_KINDS_OF_USERS} OR code IN {_CODES_OF_USERS})"
#: How recent warnings and errors have to be in a list that does not begin at a given time.
RECENT_S = 86_400.0

_ERROR, _WARNING, _ERROR_OF_USERS, _WARNING_OF_USERS, LAST_RANK = range(5)

#: `rank_of` as an expression of SQL, whose parameter is `recent_since_s`.
RANK = f"""CASE
    WHEN severity = 'info' OR COALESCE(last_s, time_s) < ? THEN {LAST_RANK}
    WHEN {OF_USERS} AND severity = 'error' THEN {_ERROR_OF_USERS}
    WHEN {OF_USERS} THEN {_WARNING_OF_USERS}
    WHEN severity = 'error' THEN {_ERROR}
    ELSE {_WARNING} END"""


def is_of_users(event: Event) -> bool:
    """Whether users can cause such events at will."""
    return event.kind in _KINDS_OF_USERS or event.code in _CODES_OF_USERS


def rank_of(event: Event, last_s: float, recent_since_s: float) -> int:
    """Return the rank of an event, from 0 for what is shown first to `LAST_RANK`.

    last_s: when it happened last, in s since 1970
    recent_since_s: how old a warning or an error may be that comes before others, in s since 1970
    """
    if event.severity == "info" or last_s < recent_since_s:
        return LAST_RANK
    if is_of_users(event):
        return _ERROR_OF_USERS if event.severity == "error" else _WARNING_OF_USERS
    return _ERROR if event.severity == "error" else _WARNING
