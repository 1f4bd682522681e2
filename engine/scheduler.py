"""Which tokens run in the next step: one token budget over decode tokens and prefill chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from common.errors import NoFreeBlocks
from engine.block_manager import BlockManager
from engine.sequence import ScheduledSequence, Sequence


class Scheduler:
    """Phase-free: it only moves `num_computed_tokens` towards `num_tokens`.

        add ──▶ waiting ──▶ running ──▶ (finished)        blocks for all its tokens and one more on entry
                   ▲           │  ▲
                   └──preempt──┘  │                        newest first; blocks freed, recomputed later
        reserve ─▶ reserved ─▶ activated                   blocks held from the start; KV arrives from elsewhere

    No livelock: whoever holds blocks (running, activated) is served before whoever waits for them (waiting), so the
    oldest holder always moves on and gives its blocks back. Reservations end with the streams that hold them.
    """

    def __init__(self, blocks: BlockManager, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.activated: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.reserved: set[Sequence] = set()
        self.is_held_back: Callable[[Sequence], bool] = lambda sequence: False  # a prompt, in the coming step
        self.prompt_budget: Callable[[int], int] = self._room_beside  # prompt tokens in a step with so many decodes
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of sequences admitted to be computed here
        self.num_cached_tokens = 0  # those among them that the prefix cache had

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.activated or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def reserve(self, sequence: Sequence) -> None:
        """Hold blocks for a sequence whose KV will be written from outside, and for its next token. What the prefix
        cache already has counts as computed.

        Raises: NoFreeBlocks when that would take what running or waiting sequences need next.
        """
        self._reuse_prefix(sequence)
        needed = self.blocks.num_missing(sequence.block_table, sequence.num_tokens + 1)
        if needed > self._num_spare_blocks():
            self._give_back(sequence)
            raise NoFreeBlocks(
                f"the prompt needs {needed} KV blocks; {self.blocks.num_free} of {self.blocks.num_blocks} are free, "
                f"{self.blocks.num_free - max(0, self._num_spare_blocks())} of them kept for sequences already here"
            )
        self.blocks.grow(sequence.block_table, sequence.num_tokens + 1)
        self.reserved.add(sequence)

    def activate(self, sequence: Sequence) -> None:
        """A reserved sequence's KV is complete: let it run at the next step."""
        self.reserved.remove(sequence)
        self.activated.append(sequence)
        self.publish(sequence, 0)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is and free its blocks. An unknown one is ignored."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.reserved:
            self.reserved.remove(sequence)
        elif sequence in self.activated:
            self.activated.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.blocks.free(sequence.block_table)

    def publish(self, sequence: Sequence, start: int) -> None:
        """Let others hit the full blocks that hold tokens from `start` on, as far as they are computed."""
        block_size = self.blocks.block_size
        hashes = sequence.full_block_hashes(sequence.num_computed_tokens, block_size)
        for index in range(start // block_size, len(hashes)):
            self.blocks.publish(sequence.block_table[index], hashes[index])

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step's work; single-token parts come first. May preempt; may admit."""
        self._secure_next_blocks()
        self._admit()
        decodes = [s for s in self.running if s.num_uncomputed_tokens == 1][: self._max_num_batched_tokens]
        prefills = [s for s in self.running if s.num_uncomputed_tokens > 1 and not self.is_held_back(s)]
        shares = dict.fromkeys(decodes, 1) | share_budget(prefills, self.prompt_budget(len(decodes)))
        scheduled = [ScheduledSequence(s, s.num_computed_tokens, share) for s, share in shares.items()]
        scheduled.sort(key=lambda part: part.num_scheduled_tokens > 1)
        return scheduled

    def _room_beside(self, num_decodes: int) -> int:
        return self._max_num_batched_tokens - num_decodes

    def _secure_next_blocks(self) -> None:
        """Give every running sequence the block of its next token, preempting the newest while there is none."""
        for sequence in list(self.running):
            while sequence in self.running:
                try:
                    self.blocks.grow(sequence.block_table, sequence.num_tokens)
                    break
                except NoFreeBlocks:
                    self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self) -> None:
        """First come, first served, while the front fits whole and every running sequence keeps its next block."""
        while self.activated and len(self.running) < self._max_num_seqs:
            self.running.append(self.activated.popleft())
        while self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            self._reuse_prefix(sequence)
            missing = self.blocks.num_missing(sequence.block_table, sequence.num_tokens + 1)
            if missing > self.blocks.num_free - len(self.running):
                self._give_back(sequence)
                break
            self.num_prompt_tokens += sequence.num_tokens
            self.num_cached_tokens += sequence.num_computed_tokens
            self.blocks.grow(sequence.block_table, sequence.num_tokens + 1)
            self.running.append(self.waiting.popleft())

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Start from cached blocks, but not from the whole: the last token is always computed, for its logits."""
        block_size = self.blocks.block_size
        hashes = sequence.full_block_hashes(sequence.num_tokens - 1, block_size)
        sequence.num_computed_tokens = self.blocks.reuse(sequence.block_table, hashes) * block_size

    def _give_back(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.block_table)
        sequence.num_computed_tokens = 0

    def _num_spare_blocks(self) -> int:
        """Free blocks that neither a holder's next token nor a waiting sequence's prompt will need."""
        kept_for_waiting = sum(self.blocks.num_missing(s.block_table, s.num_tokens + 1) for s in self.waiting)
        return self.blocks.num_free - len(self.running) - len(self.activated) - kept_for_waiting


def share_budget(prefills: Seq[Sequence], budget: int) -> dict[Sequence, int]:
    """How many tokens of each prompt (oldest first) the next step computes; nobody with none is in the result.

    Half of the budget is the oldest prompt's, so that it never starves; the other half goes first to those that have
    at most half as much left as it has, so that a short prompt does not wait for a long one. Prompts of about the same
    length come one after the other: shared, the first would be as late as the last.
    """
    if not prefills:
        return {}
    oldest = prefills[0]
    kept_for_oldest = min(oldest.num_uncomputed_tokens, -(-budget // 2))
    short = [s for s in prefills[1:] if s.num_uncomputed_tokens <= oldest.num_uncomputed_tokens // 2]
    short.sort(key=lambda sequence: sequence.num_uncomputed_tokens)
    shares = {oldest: kept_for_oldest}
    left = budget - kept_for_oldest
    for sequence in (*short, *prefills):
        share = min(sequence.num_uncomputed_tokens - shares.get(sequence, 0), left)
        shares[sequence] = shares.get(sequence, 0) + share
        left -= share
    return {sequence: shares[sequence] for sequence in prefills if shares[sequence] > 0}
