"""The exporter: the metrics as text, written on a thread and kept for a moment."""

from __future__ import annotations

import asyncio

from yunion_mps.host.threads import on_thread
from yunion_mps.metrics.text import OPENMETRICS_TYPE, PLAIN_TYPE, text_of, wants_openmetrics
from yunion_mps.service.metrics import Metrics

#: Scrapes within this time get the same text.
_KEPT_S = 1.0


class Exporter:
    """Writes the metrics for HTTP and for the textfile."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._writing = asyncio.Lock()
        self._kept: dict[bool, bytes] = {}

    async def answer(self, accept: str) -> tuple[str, bytes]:
        """All metrics in the format that an Accept header asks for, after their content type."""
        openmetrics = wants_openmetrics(accept)
        text = await self.text(openmetrics=openmetrics)
        return OPENMETRICS_TYPE if openmetrics else PLAIN_TYPE, text

    async def text(self, *, openmetrics: bool = False) -> bytes:
        """All metrics, at most a second old."""
        async with self._writing:
            if openmetrics not in self._kept:
                facts = await self._metrics.facts()
                self._kept[openmetrics] = await on_thread(lambda: text_of(facts, openmetrics=openmetrics))
                asyncio.get_running_loop().call_later(_KEPT_S, self._kept.pop, openmetrics)
            return self._kept[openmetrics]
