"""The routers' own counters, added up over all their lives."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

EVERY_S = 0.5  # what a router counted in the last moments before it was killed is lost
TIMEOUT_S = 2.0


class RouterCounters:
    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._totals: dict[str, float] = defaultdict(float)  # by metric, over all labels and lives
        self._last: dict[str, dict[str, float]] = defaultdict(dict)  # by router: of its present life

    async def run(self) -> None:
        """For ever."""
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
            while True:
                await asyncio.gather(*(self._read(http, url) for url in self._urls))
                await asyncio.sleep(EVERY_S)

    def total(self, metric: str) -> int:
        """0 for one that was never seen."""
        return round(self._totals[metric])

    def note(self, router: str, text: str) -> None:
        """The text of one /metrics page."""
        now: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.type == "counter" and sample.name.endswith("_total"):
                    now[sample.name] += sample.value
        for metric, value in now.items():
            before = self._last[router].get(metric, 0.0)
            self._totals[metric] += value - before if value >= before else value  # less than before: a new life
        self._last[router] = now

    async def _read(self, http: httpx.AsyncClient, url: str) -> None:
        try:
            response = await http.get(f"{url}/metrics")
        except httpx.TransportError:
            return  # a fault's target
        if response.status_code == httpx.codes.OK:
            self.note(url, response.text)
