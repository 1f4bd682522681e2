from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import NoFreeBlocks
from common.sampling import SamplingParams
from engine.block_manager import BlockManager
from engine.scheduler import Scheduler, share_budget
from engine.sequence import Sequence


def sequence(num_tokens: int, max_tokens: int = 8, first_token: int = 0) -> Sequence:
    """Sequences of the same first token share a prefix."""
    return Sequence([first_token, *range(1, num_tokens)], SamplingParams(max_tokens=max_tokens))


def new_scheduler(num_blocks: int = 16, block_size: int = 4, budget: int = 16, max_num_seqs: int = 8) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, block_size), budget, max_num_seqs)


def run_step(scheduler: Scheduler) -> dict[Sequence, int]:
    """What a step does to the sequences, without a model: computed tokens move, complete ones gain a token."""
    parts = scheduler.schedule()
    for part in parts:
        is_sampled = part.is_sampled
        part.sequence.num_computed_tokens = part.end
        scheduler.publish(part.sequence, part.start)
        if is_sampled:
            part.sequence.token_ids.append(0)
            if part.sequence.num_output_tokens >= part.sequence.sampling.max_tokens:
                scheduler.remove(part.sequence)
    return {part.sequence: part.num_scheduled_tokens for part in parts}


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = new_scheduler(budget=16)
    prompt = sequence(40)
    scheduler.add(prompt)
    assert [run_step(scheduler)[prompt] for _ in range(4)] == [16, 16, 8, 1]


def test_decode_tokens_come_before_prefill_chunks_in_one_step() -> None:
    scheduler = new_scheduler(budget=16)
    running, prompt = sequence(4), sequence(40)
    scheduler.add(running)
    run_step(scheduler)
    scheduler.add(prompt)
    parts = scheduler.schedule()
    assert [(part.sequence, part.num_scheduled_tokens) for part in parts] == [(running, 1), (prompt, 15)]


def test_a_short_prompt_does_not_wait_for_a_long_one_and_neither_starves() -> None:
    scheduler = new_scheduler(num_blocks=64, budget=16)
    long, short = sequence(100), sequence(20, first_token=1)
    scheduler.add(long)
    run_step(scheduler)
    scheduler.add(short)
    steps = [run_step(scheduler) for _ in range(3)]
    assert [step.get(short) for step in steps] == [8, 8, 4]
    assert [step.get(long) for step in steps] == [8, 8, 12]


@given(st.lists(st.integers(2, 60), max_size=6), st.integers(0, 40))
def test_the_budget_is_used_up_while_there_is_work_and_the_oldest_gets_half(lengths: list[int], budget: int) -> None:
    prompts = [sequence(length) for length in lengths]
    shares = share_budget(prompts, budget)
    assert sum(shares.values()) == min(budget, sum(lengths))
    assert all(0 < share <= prompt.num_uncomputed_tokens for prompt, share in shares.items())
    if prompts and budget:
        assert shares[prompts[0]] >= min(lengths[0], budget / 2)


def test_prompts_of_like_length_come_one_after_the_other_and_short_ones_in_between() -> None:
    first, second, short = sequence(40), sequence(38), sequence(10)
    assert share_budget([first, second], 16) == {first: 16}
    assert share_budget([first, second, short], 16) == {first: 8, short: 8}
    first.num_computed_tokens = 30
    assert share_budget([first, second, short], 16) == {first: 10, second: 6}


def test_a_known_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    scheduler = new_scheduler(num_blocks=32, budget=64)
    first = sequence(17, max_tokens=1)
    scheduler.add(first)
    assert run_step(scheduler)[first] == 17
    same, longer, other = sequence(16), sequence(30), sequence(16, first_token=5)
    for each in (same, longer, other):
        scheduler.add(each)
    assert run_step(scheduler) == {same: 4, longer: 14, other: 16}
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (17 + 16 + 30 + 16, 12 + 16)


def test_prompts_of_different_salts_share_nothing() -> None:
    scheduler = new_scheduler(num_blocks=32, budget=64)
    for salt, computed in ((b"a", 16), (b"b", 16), (b"a", 4)):
        salted = sequence(16, max_tokens=1)
        salted.cache_salt = salt
        scheduler.add(salted)
        assert run_step(scheduler)[salted] == computed


def test_a_reservation_skips_what_is_cached_and_shares_it() -> None:
    scheduler = new_scheduler(num_blocks=8, budget=64)
    first = sequence(16)
    scheduler.add(first)
    run_step(scheduler)
    held = sequence(20, first_token=0)
    scheduler.reserve(held)
    assert held.num_computed_tokens == 16
    assert held.block_table[:4] == first.block_table[:4]
    assert scheduler.blocks.num_free == 8 - 5 - 2


def test_the_newest_sequence_is_preempted_when_blocks_run_out_and_all_finish() -> None:
    scheduler = new_scheduler(num_blocks=7, block_size=4)
    old, new = sequence(8, max_tokens=12), sequence(8, max_tokens=12)
    for each in (old, new):
        scheduler.add(each)
    for _ in range(100):
        run_step(scheduler)
        if not scheduler.has_work:
            break
    assert scheduler.num_preemptions > 0
    assert old.num_output_tokens == new.num_output_tokens == 12
    assert scheduler.blocks.num_free == 7


def test_a_reservation_is_refused_when_it_would_take_a_running_sequences_next_block() -> None:
    scheduler = new_scheduler(num_blocks=5, block_size=4)
    scheduler.add(sequence(7))  # two blocks now, and it may need a third
    run_step(scheduler)
    scheduler.reserve(sequence(7, first_token=1))
    with pytest.raises(NoFreeBlocks, match="1 of 5 are free"):
        scheduler.reserve(sequence(3, first_token=2))


def test_a_reservation_is_refused_while_a_preempted_sequence_waits_for_those_blocks() -> None:
    scheduler = new_scheduler(num_blocks=4, block_size=4)
    scheduler.reserve(sequence(7))
    waiting = sequence(11)
    scheduler.add(waiting)
    assert run_step(scheduler) == {}
    with pytest.raises(NoFreeBlocks):
        scheduler.reserve(sequence(3))


def test_an_activated_sequence_runs_at_the_next_step_and_computes_one_token() -> None:
    scheduler = new_scheduler()
    scheduler.add(sequence(40))
    held = sequence(8)
    scheduler.reserve(held)
    assert held not in run_step(scheduler)
    held.num_computed_tokens = 8
    held.token_ids.append(1)
    scheduler.activate(held)
    assert run_step(scheduler)[held] == 1


def test_a_preempted_sequence_and_one_that_holds_its_blocks_do_not_wait_for_each_other() -> None:
    """Each needs what the other holds: the prompt of 7 has no room for a second token in its own two blocks."""
    scheduler = new_scheduler(num_blocks=6, block_size=4, max_num_seqs=1)
    running, held = sequence(3, max_tokens=20), sequence(7, max_tokens=8, first_token=1)
    scheduler.add(running)
    run_step(scheduler)
    scheduler.reserve(held)
    while scheduler.num_preemptions == 0:
        run_step(scheduler)
    held.num_computed_tokens = 7
    held.token_ids.append(0)
    scheduler.activate(held)
    for _ in range(60):
        run_step(scheduler)
    assert not scheduler.has_work
    assert (running.num_output_tokens, held.num_output_tokens) == (20, 8 + 1 - 1)


class AnyHistory(RuleBasedStateMachine):
    """After any sequence of events: free + used = total, nothing is in two places, the budget holds, work moves on."""

    @initialize(num_blocks=st.integers(4, 14), budget=st.integers(1, 24), max_num_seqs=st.integers(1, 5))
    def start(self, num_blocks: int, budget: int, max_num_seqs: int) -> None:
        self.scheduler = new_scheduler(num_blocks, 4, budget, max_num_seqs)
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.capacity = num_blocks * 4
        self.live: list[Sequence] = []

    @rule(num_tokens=st.integers(1, 40), max_tokens=st.integers(1, 20), first_token=st.integers(0, 1))
    def add(self, num_tokens: int, max_tokens: int, first_token: int) -> None:
        if num_tokens + max_tokens <= self.capacity:
            self.live.append(sequence(num_tokens, max_tokens, first_token))
            self.scheduler.add(self.live[-1])

    @rule(num_tokens=st.integers(1, 40))
    def reserve(self, num_tokens: int) -> None:
        held = sequence(num_tokens, 4)
        if num_tokens + 4 > self.capacity:
            return
        try:
            self.scheduler.reserve(held)
        except NoFreeBlocks:
            assert held.block_table == []
            return
        self.live.append(held)

    @rule(pick=st.randoms(use_true_random=False))
    def activate(self, pick: object) -> None:
        for held in [s for s in self.live if s in self.scheduler.reserved][:1]:
            held.num_computed_tokens = held.num_tokens
            held.token_ids.append(0)
            self.scheduler.activate(held)

    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        if self.live:
            self.scheduler.remove(self.live.pop(index % len(self.live)))

    @rule()
    def step(self) -> None:
        parts = run_step(self.scheduler)
        assert sum(parts.values()) <= self.budget
        assert len(parts) <= self.max_num_seqs

    @invariant()
    def no_block_is_lost_and_none_is_written_by_two(self) -> None:
        if hasattr(self, "scheduler"):
            owned = {block for each in self.live for block in each.block_table}
            assert len(owned) + self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks
            for each in self.live:  # a block that somebody may still write belongs to nobody else
                own = each.block_table[each.num_computed_tokens // 4 :]
                others = {block for other in self.live if other is not each for block in other.block_table}
                assert others.isdisjoint(own)

    def teardown(self) -> None:
        """Whatever happened, with the reservations gone all the rest finishes."""
        if not hasattr(self, "scheduler"):
            return
        for held in list(self.scheduler.reserved):
            self.scheduler.remove(held)
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            run_step(self.scheduler)
        assert not self.scheduler.has_work
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks


AnyHistory.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
