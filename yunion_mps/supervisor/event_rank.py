"""The order of events where there is not room for all: `events`, `top` and the web page use this one.

Recent errors come before recent warnings, both before what users can cause at will, and that before all
other events. Events of one rank are ordered by their ids, the newest first.
"""

from __future__ import annotations

#: The kinds of events that users can cause at will.
OF_USERS = ("lease", "client")
#: How recent warnings and errors have to be in a list that does not begin at a given time.
RECENT_S = 86_400.0

_ERROR, _WARNING, _ERROR_OF_USERS, _WARNING_OF_USERS, LAST_RANK = range(5)

#: `rank_of` as an expression of SQL, whose parameter is `recent_since_s`.
RANK = f"""CASE
    WHEN severity = 'info' OR COALESCE(last_s, time_s) < ? THEN {LAST_RANK}
    WHEN kind IN {OF_USERS} AND severity = 'error' THEN {_ERROR_OF_USERS}
    WHEN kind IN {OF_USERS} THEN {_WARNING_OF_USERS}
    WHEN severity = 'error' THEN {_ERROR}
    ELSE {_WARNING} END"""


def rank_of(severity: str, kind: str, last_s: float, recent_since_s: float) -> int:
    """Return the rank of an event, from 0 for what is shown first to `LAST_RANK`.

    last_s: when it happened last, in s since 1970
    recent_since_s: how old a warning or an error may be that comes before others, in s since 1970
    """
    if severity == "info" or last_s < recent_since_s:
        return LAST_RANK
    if kind in OF_USERS:
        return _ERROR_OF_USERS if severity == "error" else _WARNING_OF_USERS
    return _ERROR if severity == "error" else _WARNING
