"""What became of the requests in a fault lab, as numbers and as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kv_transfer.transport import TransferStats


@dataclass
class Tally:
    requests: int = 0
    committed: int = 0  # the decode worker gave the right answer to its end
    left: int = 0  # the client went away first
    refused: Counter[str] = field(default_factory=Counter)  # requests, by their one typed error
    attempts: int = 0
    failed_attempts: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    deaths: int = 0
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    sources: TransferStats = field(default_factory=TransferStats)  # of all that ever lived
    destinations: TransferStats = field(default_factory=TransferStats)

    @property
    def faults_found(self) -> list[str]:
        """Of the product; empty if it is right."""
        ended = self.committed + self.left + sum(self.refused.values()) + len(self.stuck)
        lost = [] if ended == self.requests else [f"{self.requests} requests, {ended} ends"]
        return [*self.wrong, *self.leaked, *self.stuck, *lost]

    def table(self) -> str:
        rows = [
            ("transfers", self.requests),
            ("committed", self.committed),
            ("aborted by the client", self.left),
            *((f"refused: {reason}", count) for reason, count in sorted(self.refused.items())),
            ("attempts", self.attempts),
            *((f"failed: {reason}", count) for reason, count in sorted(self.failed_attempts.items())),
            ("retried", self.retried),
            ("workers killed", self.deaths),
            *((f"pieces rejected: {why}", count) for why, count in sorted(self.destinations.pieces_rejected.items())),
            ("stale pieces", self.destinations.stale_pieces),
            ("quarantined blocks", len(self.destinations.quarantined)),
            ("wrong", len(self.wrong)),
            ("leaked", len(self.leaked)),
            ("stuck", len(self.stuck)),
        ]
        return "\n".join(f"{name:<32}{count:>8}" for name, count in rows)


def add_up(total: TransferStats, more: TransferStats) -> None:
    total.transfers_committed += more.transfers_committed
    total.transfers_failed += more.transfers_failed
    total.pieces += more.pieces
    total.bytes += more.bytes
    total.stale_pieces += more.stale_pieces
    total.quarantined += more.quarantined
    for reason, count in more.pieces_rejected.items():
        total.pieces_rejected[reason] = total.pieces_rejected.get(reason, 0) + count
