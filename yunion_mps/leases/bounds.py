"""The bounds of requests and names; a module of its own, because a client loads nothing else of leases."""

from __future__ import annotations

#: The most devices that one lease may have.
MOST_DEVICES = 64
#: More memory than any GPU has.
MOST_MIB = 1 << 30
#: How long a request may wait, and how long a lease taken by name may live without renewal, in s.
LONGEST_WAIT_S = 30 * 86_400
LONGEST_TTL_S = 365 * 86_400
#: A holder's command line is cut to so many characters.
COMMAND_LENGTH = 100
#: The names of leases, and idempotency keys (regular expressions).
NAME = "^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,99}$"
REQUEST = "^[A-Za-z0-9-]{16,64}$"
