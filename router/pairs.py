"""A prefill worker and a decode worker, and whether one may send to the other. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.errors import TransferError
from common.pb import serving_pb2 as pb
from router.worker import Worker

MAX_TRANSFER_FAULTS = 3  # in a row; then the pair's check must say whether it still works


class Standing(Enum):
    """unchecked ⇄ good, unchecked ──▶ refused: for as long as both incarnations are members."""

    UNCHECKED = pb.PAIR_UNCHECKED
    GOOD = pb.PAIR_GOOD
    REFUSED = pb.PAIR_REFUSED


@dataclass(eq=False)
class Pair:
    prefill: Worker
    decode: Worker
    standing: Standing
    reason: str = ""  # why it is not chosen
    num_faults: int = 0  # transfers that broke, since one went well

    def __str__(self) -> str:
        return f"{self.prefill.worker_id} → {self.decode.worker_id}"

    @property
    def is_good(self) -> bool:
        return self.standing is Standing.GOOD

    def shares_worker(self, other: Pair) -> bool:
        return self.prefill is other.prefill or self.decode is other.decode

    def accept(self) -> None:
        self.standing, self.reason, self.num_faults = Standing.GOOD, "", 0

    def refuse(self, reason: str) -> None:
        self.standing, self.reason = Standing.REFUSED, reason

    def transfer_failed(self, error: TransferError) -> bool:
        """Whether it was one too many for a pair that was good. Which end is to blame, nobody can tell: the link
        between them may be, and both may serve others well."""
        self.num_faults += 1
        if not self.is_good or self.num_faults < MAX_TRANSFER_FAULTS:
            return False
        self.standing = Standing.UNCHECKED
        self.reason = f"{self} is checked again: {self.num_faults} transfers in a row have failed, {error.message}"
        return True

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
