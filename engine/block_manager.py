"""Who owns which KV-cache block."""

from __future__ import annotations

from common.errors import NoFreeBlocks


class BlockManager:
    """Hands out block ids and takes them back. Every block is either free or in exactly one block table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: low ids first
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_missing(self, block_table: list[int], num_tokens: int) -> int:
        """Blocks to add to `block_table` so that it covers `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(block_table))

    def grow(self, block_table: list[int], num_tokens: int) -> None:
        """Extend `block_table` to cover `num_tokens` tokens.

        Raises: NoFreeBlocks, leaving the table as it was.
        """
        missing = self.num_missing(block_table, num_tokens)
        if missing > len(self._free):
            raise NoFreeBlocks(f"{missing} KV blocks are needed and {len(self._free)} of {self.num_blocks} are free")
        for _ in range(missing):
            block = self._free.pop()
            self._is_free[block] = False
            block_table.append(block)

    def free(self, block_table: list[int]) -> None:
        """Take back every block of a table and empty it."""
        for block in reversed(block_table):
            assert not self._is_free[block], f"block {block} freed twice"
            self._is_free[block] = True
            self._free.append(block)
        block_table.clear()


def slot_mapping(block_table: list[int], start: int, end: int, block_size: int) -> list[int]:
    """KV-cache slots for tokens [start, end) of one sequence.

    slot = block_table[i // block_size] * block_size + i % block_size (PagedAttention, Kwon et al. 2023).
    Raises: IndexError if the block table does not cover `end` tokens; allocate first.
    """
    return [block_table[i // block_size] * block_size + i % block_size for i in range(start, end)]
