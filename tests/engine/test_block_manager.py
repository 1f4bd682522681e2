from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.block_hash import extend_chain
from common.errors import NoFreeBlocks
from engine.block_manager import BlockManager, slot_mapping


def chain(name: int, length: int) -> list[bytes]:
    """The hashes of one of a few prompts; what matters is only which are equal."""
    return [bytes([name, index]) for index in range(length)]


class BlockOwnership(RuleBasedStateMachine):
    """After any sequence of events: used + free = total, only published blocks are shared, a hit is what it says."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.tables: list[list[int]] = [[] for _ in range(4)]
        self.names = [0] * 4  # which prompt each table holds
        self.num_published = [0] * 4
        self.content: dict[int, bytes] = {}  # what a published block holds, until it is handed out afresh
        self.index: set[bytes] = set()  # what a listener to the events believes

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
            for block in table[len(before) :]:
                self.content.pop(block, None)

    @rule(owner=st.integers(0, 3), name=st.integers(0, 2))
    def reuse(self, owner: int, name: int) -> None:
        if self.tables[owner]:
            return
        hashes = chain(name, 8)
        num_hits = self.blocks.reuse(self.tables[owner], hashes)
        assert [self.content[block] for block in self.tables[owner]] == hashes[:num_hits]
        self.names[owner], self.num_published[owner] = name, num_hits

    @rule(owner=st.integers(0, 3))
    def publish(self, owner: int) -> None:
        """The next block of this table's prompt is computed."""
        index = self.num_published[owner]
        if index < min(len(self.tables[owner]), 8):
            block, block_hash = self.tables[owner][index], chain(self.names[owner], 8)[index]
            self.blocks.publish(block, block_hash)
            self.content.setdefault(block, block_hash)
            self.num_published[owner] += 1

    @rule(owner=st.integers(0, 3))
    def free(self, owner: int) -> None:
        self.blocks.free(self.tables[owner])
        assert self.tables[owner] == []
        self.num_published[owner] = 0

    @rule(as_snapshot=st.booleans())
    def listen(self, as_snapshot: bool) -> None:
        events = self.blocks.drain_events()
        assert self.index.isdisjoint(events.stored)
        assert self.index.issuperset(events.evicted)
        self.index = self.index - set(events.evicted) | set(events.stored)
        if as_snapshot:
            self.index = set(self.blocks.cached_hashes())
        assert len(self.index) == self.blocks.num_cached

    @invariant()
    def no_block_is_lost_and_none_is_written_by_two(self) -> None:
        if hasattr(self, "blocks"):
            owned = [block for table in self.tables for block in table]
            assert len(set(owned)) + self.blocks.num_free == self.blocks.num_blocks
            shared = {block for block in owned if owned.count(block) > 1}
            assert shared <= self.content.keys()


BlockOwnership.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestBlockOwnership = BlockOwnership.TestCase


def test_the_least_recently_used_prefix_is_evicted_first_and_from_its_end() -> None:
    blocks = BlockManager(4, 1)
    for name in (1, 2):
        table: list[int] = []
        blocks.grow(table, 2)
        for block, block_hash in zip(table, chain(name, 2), strict=True):
            blocks.publish(block, block_hash)
        blocks.free(table)
    assert blocks.num_free == 4
    blocks.grow([], 1)
    hit: list[int] = []
    assert blocks.reuse(hit, chain(1, 2)) == 1
    blocks.free(hit)
    assert blocks.reuse([], chain(2, 2)) == 2


@given(st.lists(st.integers(0, 2**31), max_size=40), st.integers(1, 7), st.data())
def test_a_chain_grows_as_the_tokens_do_and_tells_prefixes_apart(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    whole: list[bytes] = []
    extend_chain(whole, tokens, block_size, b"")
    assert len(whole) == len(tokens) // block_size
    grown: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_chain(grown, tokens[:end], block_size, b"")
    assert grown == whole
    if whole:
        changed = data.draw(st.integers(0, len(whole) * block_size - 1))
        other: list[bytes] = []
        extend_chain(other, [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]], block_size, b"")
        first = changed // block_size
        assert other[:first] == whole[:first]
        assert set(other[first:]).isdisjoint(whole[first:])
        salted: list[bytes] = []
        extend_chain(salted, tokens, block_size, b"tenant")
        assert set(salted).isdisjoint(whole)


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
