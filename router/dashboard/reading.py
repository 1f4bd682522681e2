"""All metrics at one moment, as a scrape of /metrics would find them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Distribution:
    """A histogram's observations, or those between two readings of it."""

    bounds: tuple[float, ...]  # upper ends of the buckets, rising; the last is infinite
    counts: tuple[float, ...]  # in each bucket and all before it
    sum: float

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    def since(self, earlier: Distribution) -> Distribution:
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Distribution(self.bounds, counts, self.sum - earlier.sum)

    def quantile(self, share: float) -> float | None:
        """As PromQL's histogram_quantile: linear within a bucket, the last finite bound where it lies beyond that.
        None: nothing was observed."""
        if not self.count:
            return None
        rank = share * self.count
        index = next(index for index, count in enumerate(self.counts) if count >= rank)
        if math.isinf(self.bounds[index]):
            return self.bounds[index - 1]
        start, before = (self.bounds[index - 1], self.counts[index - 1]) if index else (0.0, 0.0)
        inside = self.counts[index] - before
        return start + (self.bounds[index] - start) * ((rank - before) / inside if inside else 1.0)


class Reading:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for family in registry.collect():
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append(sample)

    def rows(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Every series of a metric: labels and value."""
        for sample in self._samples.get(name, ()):
            yield sample.labels, sample.value

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels."""
        return sum(value for found, value in self.rows(name) if labels.items() <= found.items())

    def indexed(self, names: Sequence[str], *labels: str) -> dict[tuple[str, ...], dict[str, float]]:
        """The values of several metrics, by these labels' values."""
        found: dict[tuple[str, ...], dict[str, float]] = {}
        for name in names:
            for of, value in self.rows(name):
                found.setdefault(tuple(of[label] for label in labels), {})[name] = value
        return found

    def distribution(self, name: str) -> Distribution:
        """Of a histogram without labels."""
        buckets = [(float(labels["le"]), value) for labels, value in self.rows(f"{name}_bucket")]
        bounds, counts = zip(*buckets, strict=True)
        return Distribution(bounds, counts, self.total(f"{name}_sum"))
