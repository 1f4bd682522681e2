"""A prefill worker and a decode worker, and whether one may send to the other. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.pb import serving_pb2 as pb
from router.worker import Worker


class Standing(Enum):
    """unchecked ──▶ good | refused: for as long as both incarnations are members."""

    UNCHECKED = pb.PAIR_UNCHECKED
    GOOD = pb.PAIR_GOOD
    REFUSED = pb.PAIR_REFUSED


@dataclass(eq=False)
class Pair:
    prefill: Worker
    decode: Worker
    standing: Standing
    reason: str = ""  # why it is not chosen

    def __str__(self) -> str:
        return f"{self.prefill.worker_id} → {self.decode.worker_id}"

    @property
    def is_good(self) -> bool:
        return self.standing is Standing.GOOD

    def shares_worker(self, other: Pair) -> bool:
        return self.prefill is other.prefill or self.decode is other.decode

    def accept(self) -> None:
        self.standing, self.reason = Standing.GOOD, ""

    def refuse(self, reason: str) -> None:
        self.standing, self.reason = Standing.REFUSED, reason

    def summary(self) -> pb.PairSummary:
        summary = pb.PairSummary(
            prefill_worker=self.prefill.worker_id,
            decode_worker=self.decode.worker_id,
            standing=self.standing.value,
            reason=self.reason,
        )
        for link in self.prefill.load.links:
            if link.peer_incarnation == self.decode.hello.incarnation:
                summary.link.CopyFrom(link)
        return summary


def new_pair(prefill: Worker, decode: Worker, *, must_check: bool) -> Pair:
    mismatch = prefill.mismatch(decode)
    if mismatch is not None:
        return Pair(prefill, decode, Standing.REFUSED, mismatch)
    if must_check:
        pair = Pair(prefill, decode, Standing.UNCHECKED)
        pair.reason = f"{pair} has not passed its check yet"
        return pair
    return Pair(prefill, decode, Standing.GOOD)
