"""What every worker's prefix cache holds, by block hash: exact, as of the last heartbeats, and of bounded size.

    hash of a block  →  an int, whose bit s is set while the worker in slot s holds that block

One walk over a prompt's chain of hashes answers for all workers at once: those that still hold every block so far are
one int, which each further block can only make smaller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from common.block_hash import BlockHash


class PrefixIndex:
    """Keeps at most `max_blocks` hashes. Beyond that it forgets those that no worker gained and no prompt hit for the
    longest time, a prefix from its end: a forgotten block is a hit that nobody foresees, never a wrong one.
    """

    def __init__(self, max_blocks: int, on_dropped: Callable[[int], None] = lambda num_blocks: None) -> None:
        """on_dropped: told of each number of blocks that were forgotten for want of space."""
        self._max_blocks = max_blocks
        self._on_dropped = on_dropped
        self._holders: OrderedDict[BlockHash, int] = OrderedDict()  # least recently used first
        self._slots: dict[str, int] = {}  # worker id → slot
        self._names: list[str | None] = []  # slot → worker id
        self._num_held: list[int] = []  # slot → blocks
        self._members = 0  # the bits of all slots in use

    def __len__(self) -> int:
        return len(self._holders)

    def num_held(self, worker_id: str) -> int:
        """Blocks that are known of a worker; 0 for one that is no member."""
        slot = self._slots.get(worker_id)
        return 0 if slot is None else self._num_held[slot]

    def join(self, worker_id: str) -> None:
        """A worker of which nothing is known yet: the first report after this one is all that it holds."""
        assert worker_id not in self._slots, f"{worker_id} is indexed already"
        slot = next((slot for slot, name in enumerate(self._names) if name is None), len(self._names))
        if slot == len(self._names):
            self._names.append(None)
            self._num_held.append(0)
        self._names[slot] = worker_id
        self._num_held[slot] = 0
        self._slots[worker_id] = slot
        self._members |= 1 << slot

    def leave(self, worker_id: str) -> None:
        """Forget a worker. Reads the whole index, the price of entries that are one int: 40 ms for a million."""
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            return
        bit = 1 << slot
        entries = dict.items(self._holders)  # in any order: ten times as fast as the OrderedDict's own
        for block_hash in [block_hash for block_hash, holders in entries if holders & bit]:
            self._clear(block_hash, bit)
        self._names[slot] = None
        self._members ^= bit

    def update(self, worker_id: str, stored: Sequence[BlockHash], evicted: Sequence[BlockHash]) -> None:
        """What a worker's cache gained and lost. Of a worker that has left, nothing is kept."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        bit = 1 << slot
        for block_hash in evicted:
            if self._holders.get(block_hash, 0) & bit:
                self._clear(block_hash, bit)
                self._num_held[slot] -= 1
        for block_hash in reversed(stored):  # workers tell a prefix in its order: its end is forgotten first
            holders = self._holders.get(block_hash, 0)
            if not holders & bit:
                self._holders[block_hash] = holders | bit
                self._num_held[slot] += 1
            self._holders.move_to_end(block_hash)
        self._drop_surplus()

    def leading_blocks(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Worker id → how many of a prompt's first blocks it holds, without a gap; only those that hold any."""
        found: dict[str, int] = {}
        holders_of, touch = self._holders.get, self._holders.move_to_end  # this loop is what a choice costs
        holding, depth = self._members, 0  # all who hold the first `depth` blocks
        for block_hash in hashes:
            still = holding & holders_of(block_hash, 0)
            if still != holding:
                if depth:
                    found.update(dict.fromkeys(self._named(holding ^ still), depth))
                holding = still
            if not holding:
                break
            depth += 1
        if depth:
            found.update(dict.fromkeys(self._named(holding), depth))
        for block_hash in reversed(hashes[:depth]):
            touch(block_hash)
        return found

    def _named(self, bits: int) -> Iterator[str]:
        while bits:
            slot = bits.bit_length() - 1
            name = self._names[slot]
            assert name is not None, f"slot {slot} has blocks and no worker"
            yield name
            bits ^= 1 << slot

    def _clear(self, block_hash: BlockHash, bit: int) -> None:
        holders = self._holders[block_hash] & ~bit
        if holders:
            self._holders[block_hash] = holders
        else:
            del self._holders[block_hash]

    def _drop_surplus(self) -> None:
        surplus = len(self._holders) - self._max_blocks
        for _ in range(surplus):
            _, holders = self._holders.popitem(last=False)
            for name in self._named(holders):
                self._num_held[self._slots[name]] -= 1
        if surplus > 0:
            self._on_dropped(surplus)
