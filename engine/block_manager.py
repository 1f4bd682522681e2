"""Who owns which KV-cache block, and which blocks hold a prefix that somebody may want again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.block_hash import BlockHash
from common.errors import NoFreeBlocks


@dataclass(frozen=True)
class CacheEvents:
    """What changed in the prefix cache since the last time somebody asked; nothing is in both."""

    stored: list[BlockHash]
    evicted: list[BlockHash]


class BlockManager:
    """Hands out block ids and takes them back, counting owners. A block is in one of three states:

        used      in one or more block tables (more than one: a shared prefix, which nobody writes)
        cached    in none, but its content is known by hash: reused on a hit, evicted (least recently used first)
        free      in none, content unknown

    Cached blocks count as free: they are given up whenever somebody needs a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._unused = list(range(num_blocks - 1, -1, -1))  # popped from the end: low ids first
        self._num_owners = [0] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._changed: dict[BlockHash, bool] = {}  # since the last drain: True stored, False evicted

    @property
    def num_free(self) -> int:
        return len(self._unused) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix could hit, used ones included."""
        return len(self._by_hash)

    def num_missing(self, block_table: list[int], num_tokens: int) -> int:
        """Blocks to add to `block_table` so that it covers `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(block_table))

    def grow(self, block_table: list[int], num_tokens: int) -> None:
        """Extend `block_table` to cover `num_tokens` tokens.

        Raises: NoFreeBlocks, leaving the table as it was.
        """
        missing = self.num_missing(block_table, num_tokens)
        if missing > self.num_free:
            raise NoFreeBlocks(f"{missing} KV blocks are needed and {self.num_free} of {self.num_blocks} are free")
        for _ in range(missing):
            block = self._unused.pop() if self._unused else self._evict()
            self._num_owners[block] = 1
            block_table.append(block)

    def reuse(self, block_table: list[int], hashes: Seq[BlockHash]) -> int:
        """Put the cached blocks of the longest known prefix into an empty table; how many those are."""
        assert not block_table
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            self._evictable.pop(block, None)
            self._num_owners[block] += 1
            block_table.append(block)
        return len(block_table)

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """This used block is full, computed and will not be written again: let others hit it."""
        assert self._num_owners[block] > 0, f"block {block} published without an owner"
        if block_hash not in self._by_hash and block not in self._hash_of:
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash
            self._note(block_hash, is_stored=True)

    def free(self, block_table: list[int]) -> None:
        """Take one owner off every block of a table and empty it. A prefix is evicted from its end."""
        for block in reversed(block_table):
            assert self._num_owners[block] > 0, f"block {block} freed twice"
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                if block in self._hash_of:
                    self._evictable[block] = None
                else:
                    self._unused.append(block)
        block_table.clear()

    def drain_events(self) -> CacheEvents:
        """What changed since the last call."""
        changed, self._changed = self._changed, {}
        return CacheEvents(
            stored=[block_hash for block_hash, is_stored in changed.items() if is_stored],
            evicted=[block_hash for block_hash, is_stored in changed.items() if not is_stored],
        )

    def cached_hashes(self) -> list[BlockHash]:
        """All that a prefix could hit now."""
        return list(self._by_hash)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        block_hash = self._hash_of.pop(block)
        del self._by_hash[block_hash]
        self.num_evictions += 1
        self._note(block_hash, is_stored=False)
        return block

    def _note(self, block_hash: BlockHash, *, is_stored: bool) -> None:
        if self._changed.get(block_hash) is not None and self._changed[block_hash] != is_stored:
            del self._changed[block_hash]  # stored and evicted again, or the other way round: nothing to tell
        else:
            self._changed[block_hash] = is_stored


def slot_mapping(block_table: list[int], start: int, end: int, block_size: int) -> list[int]:
    """KV-cache slots for tokens [start, end) of one sequence.

    slot = block_table[i // block_size] * block_size + i % block_size (PagedAttention, Kwon et al. 2023).
    Raises: IndexError if the block table does not cover `end` tokens; allocate first.
    """
    return [block_table[i // block_size] * block_size + i % block_size for i in range(start, end)]
