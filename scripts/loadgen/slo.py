"""Service level objectives: which answers were good enough, which share of all, and how many a second (goodput)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.record import RequestRecord


@dataclass(frozen=True)
class Slo:
    """The most that each latency may be, in seconds; inf asks for nothing.

    Latencies count from the planned arrival, so a request that waited for this generator may miss it too.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2el_s: float = math.inf

    @staticmethod
    def parse(text: str) -> Slo:
        """`ttft:3,tpot:0.15`, any of ttft, tpot and e2el, in seconds. Raises: ValueError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, seconds = part.partition(":")
            limit_s = _number(seconds)
            if name not in ("ttft", "tpot", "e2el") or name in limits or not limit_s > 0:
                raise ValueError("limits are ttft, tpot and e2el, each once, in seconds above 0: ttft:3,tpot:0.15")
            limits[name] = limit_s
        return Slo(**{f"{name}_s": seconds for name, seconds in limits.items()})

    def is_met_by(self, record: RequestRecord) -> bool:
        """A refused or failed request meets none. An answer of one token has no TPOT to miss."""
        if not record.is_completed or record.ttft_s is None or record.end_to_end_s is None:
            return False
        return (
            record.ttft_s <= self.ttft_s
            and (record.tpot_s is None or record.tpot_s <= self.tpot_s)
            and record.end_to_end_s <= self.e2el_s
        )

    def __str__(self) -> str:
        limits = {"TTFT": self.ttft_s, "TPOT": self.tpot_s, "end-to-end": self.e2el_s}
        return ", ".join(f"{name} ≤ {limit:g} s" for name, limit in limits.items() if limit < math.inf)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def num_good(records: Sequence[RequestRecord], slo: Slo) -> int:
    return sum(slo.is_met_by(record) for record in records)


def attainment(records: Sequence[RequestRecord], slo: Slo) -> float:
    """The share of all requests, refused and failed ones included, whose answers met `slo`.

    Raises: ValueError for no records, which have no share.
    """
    if not records:
        raise ValueError("no request was sent, so none met or missed its objectives")
    return num_good(records, slo) / len(records)
