from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import NoFreeBlocks
from engine.block_manager import BlockManager, slot_mapping


class BlockOwnership(RuleBasedStateMachine):
    """No block is owned twice, and free + used = total, after any sequence of events."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.tables: list[list[int]] = [[] for _ in range(4)]

    @rule(owner=st.integers(0, 3), num_tokens=st.integers(0, 40))
    def grow(self, owner: int, num_tokens: int) -> None:
        table = self.tables[owner]
        before = list(table)
        missing = self.blocks.num_missing(table, num_tokens)
        if missing > self.blocks.num_free:
            with pytest.raises(NoFreeBlocks):
                self.blocks.grow(table, num_tokens)
            assert table == before
        else:
            self.blocks.grow(table, num_tokens)
            assert table[: len(before)] == before
            assert len(table) * self.blocks.block_size >= num_tokens

    @rule(owner=st.integers(0, 3))
    def free(self, owner: int) -> None:
        self.blocks.free(self.tables[owner])
        assert self.tables[owner] == []

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if hasattr(self, "blocks"):
            owned = [block for table in self.tables for block in table]
            assert len(owned) == len(set(owned))
            assert len(owned) + self.blocks.num_free == self.blocks.num_blocks


TestBlockOwnership = BlockOwnership.TestCase


def test_freeing_a_block_twice_is_a_bug_that_shows() -> None:
    blocks = BlockManager(2, 4)
    table: list[int] = []
    blocks.grow(table, 4)
    stale = list(table)
    blocks.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(stale)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True), st.integers(1, 7), st.data())
def test_slots_follow_the_block_table(block_table: list[int], block_size: int, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(block_table) * block_size))
    start = data.draw(st.integers(0, end))
    every_slot = [block * block_size + offset for block in block_table for offset in range(block_size)]
    assert slot_mapping(block_table, start, end, block_size) == every_slot[start:end]


def test_a_token_beyond_the_block_table_has_no_slot() -> None:
    with pytest.raises(IndexError):
        slot_mapping([3], 0, 5, 4)
