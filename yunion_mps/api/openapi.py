"""The API's OpenAPI 3.1 document, which the daemon serves at /v1/openapi.json.

Every property carries an example of its own, of the reference case in the documentation; the examples of
whole answers are put together from them, so that the two cannot differ.
"""

from __future__ import annotations

from typing import Any

from yunion_mps import __version__
from yunion_mps.api.routes import LARGEST_LIMIT, LARGEST_OFFSET
from yunion_mps.mps.states import LEGAL_CHANGES
from yunion_mps.service import AVAILABLE, DEFAULT_LIMIT, DISABLED, FAILED, NOT_USED, READY, UNAVAILABLE
from yunion_mps.service import DEGRADED as DEGRADED

Schema = dict[str, Any]
