"""The engine against itself: whatever it is put through, each answer is the one it would give alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from common.engine_config import EngineConfig
from common.errors import ConfigError, InvalidRequest, NoFreeBlocks, PromptTooLong
from common.sampling import FinishReason, SamplingParams
from engine import engine as engine_module
from engine.build import build_engine
from engine.download import Download
from engine.engine import Engine, OnLayerComputed
from engine.sequence import SampledToken, ScheduledSequence, Sequence

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


class Recorder:
    """Collects every sampled token, and the mixes of phases that the steps had."""

    def __init__(self) -> None:
        self.tokens: dict[Sequence, list[int]] = {}
        self.ends: dict[Sequence, FinishReason] = {}
        self.layers: list[int] = []
        self.num_mixed_steps = 0

    def on_scheduled(self, scheduled: Seq[ScheduledSequence]) -> OnLayerComputed:
        lengths = [part.num_scheduled_tokens for part in scheduled]
        assert lengths == sorted(lengths, key=lambda length: length > 1)
        self.num_mixed_steps += 1 in lengths and max(lengths) > 1
        return self.layers.append

    def on_sampled(self, sampled: Seq[SampledToken]) -> None:
        for each in sampled:
            self.tokens.setdefault(each.sequence, []).append(each.token_id)
            if each.finish_reason is not None:
                self.ends[each.sequence] = each.finish_reason


def config(model: Path, **changes: object) -> EngineConfig:
    base = EngineConfig(model, dtype="float32", num_threads=1, block_size=4, kv_cache_bytes=8 << 20)
    return replace(base, **changes)  # type: ignore[arg-type]


def run(engine: Engine, *sequences: Sequence, recorder: Recorder | None = None) -> Recorder:
    recorder = recorder or Recorder()
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(10_000):
        if not engine.has_work:
            return recorder
        engine.step(recorder)
    raise AssertionError("the engine never finished")


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return build_engine(config(tiny_model, max_num_batched_tokens=32))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = Random(5)
    return [[random.randrange(250) for _ in range(n)] for n in (1, 3, 4, 5, 30, 33, 64, 100)]


@pytest.fixture(scope="module")
def alone(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    sequences = [Sequence(list(prompt), GREEDY) for prompt in prompts]
    return [run(engine, sequence).tokens[sequence] for sequence in sequences]


def test_a_mixed_batch_gives_what_each_sequence_gives_alone(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    sequences = [Sequence(list(prompt), GREEDY) for prompt in prompts]
    recorder = run(engine, *sequences)
    assert [recorder.tokens[sequence] for sequence in sequences] == alone
    assert recorder.num_mixed_steps > 0
    assert set(recorder.ends.values()) == {FinishReason.LENGTH}
    assert engine.load().free_blocks == engine.load().total_blocks


def test_preemption_changes_no_token(tiny_model: Path, prompts: list[list[int]], alone: list[list[int]]) -> None:
    block_bytes = 4 * 2 * 4 * 2 * 8 * 4  # layers, K and V, block_size, kv heads, head_dim, float32
    small = build_engine(config(tiny_model, kv_cache_bytes=40 * block_bytes, max_num_batched_tokens=32))
    sequences = [Sequence(list(prompt), GREEDY) for prompt in prompts]
    recorder = run(small, *sequences)
    assert small.counters()["preemptions"] > 0
    assert [recorder.tokens[sequence] for sequence in sequences] == alone
    assert small.load().free_blocks == small.load().total_blocks == 40


def test_a_seeded_draw_survives_preemption_and_other_batches(tiny_model: Path, prompts: list[list[int]]) -> None:
    sampling = [SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=n, ignore_eos=True) for n in range(8)]
    roomy, small = (
        build_engine(config(tiny_model, kv_cache_bytes=size, max_num_batched_tokens=budget))
        for size, budget in ((8 << 20, 512), (40 * 2048, 24))
    )
    pairs = list(zip(prompts, sampling, strict=True))
    one_by_one = [run(roomy, s).tokens[s] for s in (Sequence(list(prompt), wanted) for prompt, wanted in pairs)]
    together = [Sequence(list(prompt), wanted) for prompt, wanted in pairs]
    recorder = run(small, *together)
    assert small.counters()["preemptions"] > 0
    assert [recorder.tokens[sequence] for sequence in together] == one_by_one


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_sequence_goes_on_from_kv_that_another_engine_computed(
    tiny_model: Path, engine: Engine, prompts: list[list[int]], alone: list[list[int]], cut: int
) -> None:
    """Other block size, other block ids, pieces of `cut` layers and of uneven token ranges."""
    other = build_engine(config(tiny_model, block_size=7))
    for prompt, expected in zip(prompts, alone, strict=True):
        source = Sequence(list(prompt), GREEDY)
        engine.add(source)
        recorder = Recorder()
        while source not in recorder.tokens:
            engine.step(recorder)
        target = Sequence(list(prompt), GREEDY)
        other.reserve(target)
        middle = len(prompt) // 3
        for layer in range(0, 4, cut):
            for start, end in ((middle, len(prompt)), (0, middle)):
                data = engine.read_kv(source, (layer, layer + cut), (start, end))
                other.write_kv(target, layer, start, data)
        engine.remove(source)
        assert not other.has_work
        other.activate(target, recorder.tokens[source][0])
        assert recorder.tokens[source] + run(other).tokens[target] == expected
        assert other.load().free_blocks == other.load().total_blocks


def test_kv_for_a_removed_sequence_is_dropped(engine: Engine) -> None:
    held = Sequence([1, 2, 3], GREEDY)
    engine.reserve(held)
    data = engine.read_kv(held, (0, 1), (0, 3))
    engine.remove(held)
    engine.remove(held)
    engine.write_kv(held, 0, 0, data)
    engine.activate(held, 5)
    assert not engine.has_work
    assert engine.load().free_blocks == engine.load().total_blocks


def test_every_layer_is_announced_once_per_step(engine: Engine) -> None:
    sequence = Sequence([1, 2, 3], replace(GREEDY, max_tokens=2))
    assert run(engine, sequence).layers == [0, 1, 2, 3, 0, 1, 2, 3]


def test_what_does_not_depend_on_a_steps_tokens_is_done_before_they_are_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = Sequence([1, 2, 3], replace(GREEDY, max_tokens=2))
    seen: list[tuple[int, int]] = []

    class Watched(Download):
        def tolist(self) -> list[int]:
            seen.append((sequence.num_computed_tokens, sequence.num_tokens))
            return super().tolist()

    monkeypatch.setattr(engine_module, "Download", Watched)
    run(engine, sequence)
    assert seen == [(3, 3), (4, 4)]


def test_a_thousand_sequences_in_any_history_leave_no_block_behind_and_change_no_answer(tiny_model: Path) -> None:
    """Sequences join, abort, are preempted and finish in any order; each survivor answers as it does alone."""
    random = Random(3)
    small = build_engine(config(tiny_model, kv_cache_bytes=24 * 2048, max_num_batched_tokens=16, max_num_seqs=4))
    roomy = build_engine(config(tiny_model))
    known: dict[tuple[int, int], list[int]] = {}
    recorder, live = Recorder(), dict[Sequence, tuple[int, int]]()
    num_added = num_checked = 0
    while num_added < 1000:
        action = random.random()
        if action < 0.25 and len(live) < 8:
            length, seed = random.randrange(1, 40), random.randrange(3)
            sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=seed, ignore_eos=True)
            sequence = Sequence([(seed + i) % 250 for i in range(length)], sampling)
            live[sequence] = (length, seed)
            small.add(sequence)
            num_added += 1
        elif action < 0.3 and live:
            victim = random.choice(list(live))
            small.remove(victim)
            del live[victim]
        else:
            small.step(recorder)
        for sequence in [each for each in live if each in recorder.ends]:
            key = live.pop(sequence)
            if key not in known:
                again = Sequence(sequence.token_ids[: sequence.num_prompt_tokens], sequence.sampling)
                known[key] = run(roomy, again).tokens[again]
            assert recorder.tokens[sequence] == known[key]
            num_checked += 1
    for sequence in live:
        small.remove(sequence)
    assert num_checked > 500
    assert small.counters()["preemptions"] > 0
    assert small.load().free_blocks == small.load().total_blocks


def test_what_could_never_fit_is_refused(tiny_model: Path, engine: Engine) -> None:
    limits = engine.limits
    assert limits.max_model_len == 4096
    with pytest.raises(PromptTooLong, match="4097"):
        limits.require_valid(Sequence([1] * 4097, replace(GREEDY, max_tokens=1)))
    with pytest.raises(InvalidRequest, match="empty"):
        limits.require_valid(Sequence([], GREEDY))
    for token_id in (-1, limits.vocab_size, 999):
        with pytest.raises(InvalidRequest, match=f"go from 0 to {limits.vocab_size - 1}; the prompt has {token_id}"):
            limits.require_valid(Sequence([5, token_id, 7], GREEDY))
    limits.require_valid(Sequence([0, limits.vocab_size - 1], GREEDY))
    with pytest.raises(NoFreeBlocks):
        build_engine(config(tiny_model, kv_cache_bytes=4 * 2048)).reserve(Sequence([1] * 16, GREEDY))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_bytes": 1000}, "kv_cache_gib"),
        ({"kv_cache_bytes": 2**50}, "no memory for a KV cache of 1,048,576.0 GiB on cpu: set a smaller kv_cache_gib"),
        ({"max_model_len": 5000}, "4096 positions"),
        ({"max_model_len": 4000, "kv_cache_bytes": 10 * 2048}, "KV cache holds 40"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_an_engine_that_cannot_be_built_says_what_to_change(
    tiny_model: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(config(tiny_model, **changes))


def test_a_warm_engine_knows_its_pace_and_answers_as_a_cold_one(
    tiny_model: Path, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    warm = build_engine(config(tiny_model, max_num_batched_tokens=32))
    assert warm.load().prefill_s_per_token == 0.0
    warm.warm_up()
    load = warm.load()
    assert load.prefill_s_per_token > 0
    assert load.decode_step_s > 0
    assert load.free_blocks == load.total_blocks
    assert not warm.has_work
    assert set(warm.counters().values()) == {0}
    assert not warm.cached_hashes()
    sequences = [Sequence(list(prompt), GREEDY) for prompt in prompts]
    recorder = run(warm, *sequences)
    assert [recorder.tokens[sequence] for sequence in sequences] == alone


def test_an_engine_with_hardly_any_memory_can_warm_up(tiny_model: Path) -> None:
    small = build_engine(config(tiny_model, max_num_batched_tokens=32))
    block_bytes = (8 << 20) // small.load().total_blocks
    tight = build_engine(config(tiny_model, kv_cache_bytes=2 * block_bytes, max_num_batched_tokens=32))
    tight.warm_up()
    assert tight.load().free_blocks == tight.load().total_blocks
