"""The prefix index against a plain table: what each worker holds, by sets."""

from __future__ import annotations

import sys

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from common.block_hash import BlockHash, extend_chain
from router.prefix_index import PrefixIndex

BLOCK_SIZE = 4
WORKERS = [f"worker-{index}" for index in range(5)]


def chain(*token_ids: int) -> list[BlockHash]:
    """One hash per token: each stands for a whole block of it."""
    hashes: list[BlockHash] = []
    extend_chain(hashes, [token for token in token_ids for _ in range(BLOCK_SIZE)], BLOCK_SIZE, b"")
    return hashes


def index_of(max_blocks: int = 1000, **held: list[BlockHash]) -> PrefixIndex:
    index = PrefixIndex(max_blocks)
    for name, hashes in held.items():
        index.join(name)
        index.update(name, hashes, [])
    return index


def test_each_worker_holds_the_prompt_as_far_as_its_blocks_go_without_a_gap() -> None:
    prompt = chain(1, 2, 3, 4)
    index = index_of(
        all_of_it=prompt, a_half=prompt[:2], with_a_gap=[prompt[0], prompt[2]], its_end=prompt[2:], other=chain(9, 2, 3)
    )
    assert index.leading_blocks(prompt) == {"all_of_it": 4, "a_half": 2, "with_a_gap": 1}
    assert index.leading_blocks(chain(7)) == index.leading_blocks([]) == {}
    assert index.leading_blocks(chain(1, 2, 3, 4, 5, 6)) == {"all_of_it": 4, "a_half": 2, "with_a_gap": 1}


def test_evicted_blocks_are_held_no_more() -> None:
    prompt = chain(1, 2, 3)
    index = index_of(a=prompt, b=prompt)
    index.update("a", [], prompt[1:])
    assert index.leading_blocks(prompt) == {"a": 1, "b": 3}
    assert (index.num_held("a"), index.num_held("b"), len(index)) == (1, 3, 3)
    index.update("b", [], [*prompt, *chain(8)])  # the last was never told of
    assert index.leading_blocks(prompt) == {"a": 1}
    assert len(index) == 1


def test_a_worker_that_left_holds_nothing_and_its_successor_starts_from_its_own_first_report() -> None:
    prompt = chain(1, 2, 3)
    index = index_of(a=prompt, b=prompt)
    index.leave("a")
    index.update("a", chain(4), [])  # a report that came too late
    assert index.leading_blocks(prompt) == {"b": 3}
    index.join("a")
    assert index.leading_blocks(prompt) == {"b": 3}
    index.update("a", prompt[:1], [])
    assert index.leading_blocks(prompt) == {"a": 1, "b": 3}
    index.leave("nobody")


def test_what_was_neither_stored_nor_hit_for_longest_is_forgotten_first_and_counted() -> None:
    dropped: list[int] = []
    index = PrefixIndex(4, dropped.append)
    index.join("a")
    old, hit, new = chain(1, 2), chain(3, 4), chain(5, 6)
    index.update("a", hit, [])
    index.update("a", old, [])
    index.leading_blocks(hit)
    index.update("a", new[:1], [])
    assert dropped == [1]
    assert index.leading_blocks(old) == {"a": 1}  # from its end
    index.update("a", new, [])
    assert dropped == [1, 1]
    assert (index.leading_blocks(hit), index.leading_blocks(new)) == ({"a": 1}, {"a": 2})
    assert (len(index), index.num_held("a")) == (4, 4)


def test_a_report_larger_than_the_index_leaves_the_beginning_of_its_prefix() -> None:
    index = index_of(3, a=chain(*range(10)))
    assert index.leading_blocks(chain(*range(10))) == {"a": 3}


def test_a_block_takes_little_more_than_its_hash() -> None:
    index = PrefixIndex(100_000)
    index.join("a")
    index.update("a", [number.to_bytes(16) for number in range(50_000)], [])
    assert sys.getsizeof(index._holders) / 50_000 < 200  # beside 49 bytes of hash and 28 to 36 of int


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class IndexBesideSets(RuleBasedStateMachine):
    """Any sequence of reports, hits and comings and goings, where everything fits."""

    chains = Bundle("chains")

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex(10_000)
        self.held: dict[str, set[BlockHash]] = {}

    @rule(target=chains, token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def make_chain(self, token_ids: list[int]) -> list[BlockHash]:
        return chain(*token_ids)

    @rule(name=st.sampled_from(WORKERS))
    def come_or_go(self, name: str) -> None:
        if name in self.held:
            self.index.leave(name)
            del self.held[name]
        else:
            self.index.join(name)
            self.held[name] = set()

    @rule(name=st.sampled_from(WORKERS), stored=chains, evicted=chains, start=st.integers(0, 5))
    def report(self, name: str, stored: list[BlockHash], evicted: list[BlockHash], start: int) -> None:
        gone = [block_hash for block_hash in evicted[start:] if block_hash not in stored]
        self.index.update(name, stored[start:], gone)
        if name in self.held:
            self.held[name] = self.held[name].difference(gone).union(stored[start:])

    @rule(prompt=chains)
    def ask(self, prompt: list[BlockHash]) -> None:
        expected = {name: _leading(prompt, held) for name, held in self.held.items() if prompt[0] in held}
        assert self.index.leading_blocks(prompt) == expected

    @invariant()
    def counts_agree(self) -> None:
        assert {name: self.index.num_held(name) for name in WORKERS} == {
            name: len(self.held.get(name, ())) for name in WORKERS
        }
        assert len(self.index) == len(set[BlockHash]().union(*self.held.values()))


TestIndexBesideSets = IndexBesideSets.TestCase


def _leading(prompt: list[BlockHash], held: set[BlockHash]) -> int:
    return next((depth for depth, block_hash in enumerate(prompt) if block_hash not in held), len(prompt))
