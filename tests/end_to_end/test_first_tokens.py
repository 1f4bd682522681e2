"""Where an answer may end at once: max_tokens=1 and an end-of-sequence as the first token (LESSONS 15)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.local_cluster import local_cluster
from tests.end_to_end.tiny_model import save_tiny_model

HELLO = list(b"hello")
UNCHECKED = {"transfer": {"self_test": False}}  # where every step of the decode worker counts


async def test_max_tokens_one_never_starts_decode(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, sections=UNCHECKED) as cluster:
        answer = await cluster.generate(HELLO, max_tokens=1)
        assert len(answer.token_ids) == answer.usage.completion_tokens == 1
        assert answer.finish_reason == "length"
        assert (await cluster.decode_status()).counters["engine_steps"] == 0
        assert (await cluster.prefill_status()).counters["kv_transfer_bytes_total"] == 0
        await cluster.wait_all_free()


async def test_a_stop_token_as_first_token_never_starts_decode(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, sections=UNCHECKED) as cluster:
        first = (await cluster.generate(HELLO, max_tokens=1)).token_ids[0]
        answer = await cluster.generate(HELLO, max_tokens=8, stop_token_ids=[first])
        assert list(answer.token_ids) == [first]
        assert answer.usage.completion_tokens == 1
        assert answer.finish_reason == "stop"
        assert (await cluster.decode_status()).counters["engine_steps"] == 0
        await cluster.wait_all_free()


async def test_an_end_of_sequence_as_first_token_never_starts_decode(tiny_model: Path, tmp_path: Path) -> None:
    """The same weights, told that the token they begin with ends the answer."""
    async with local_cluster(tiny_model) as cluster:
        first = (await cluster.generate(HELLO, max_tokens=1)).token_ids[0]
    async with local_cluster(save_tiny_model(tmp_path, eos_token_id=first), sections=UNCHECKED) as cluster:
        answer = await cluster.generate(HELLO, max_tokens=8)
        assert (list(answer.token_ids), answer.finish_reason) == ([first], "stop")
        assert answer.usage.completion_tokens == 1
        assert (await cluster.decode_status()).counters["engine_steps"] == 0
        assert len((await cluster.generate(HELLO, max_tokens=8, ignore_eos=True)).token_ids) == 8
        await cluster.wait_all_free()


@pytest.mark.parametrize("transport", ["grpc", "torch_dist"])
async def test_prompts_around_block_and_chunk_edges_answer_like_the_colocated_engine(
    tiny_model: Path, transport: str
) -> None:
    prompts = [[(7 * n + i) % 250 for i in range(n)] for n in (1, 2, 15, 16, 17, 31, 32, 33, 511, 512, 513, 1100)]
    async with (
        local_cluster(tiny_model, sections={"transfer": {"transport": transport}}) as pair,
        local_cluster(tiny_model, prefill=0, decode=0, colocated=1) as alone,
    ):
        for prompt in prompts:
            split, whole = [await c.generate(prompt, max_tokens=40, ignore_eos=True) for c in (pair, alone)]
            assert list(split.token_ids) == list(whole.token_ids)
            assert len(split.token_ids) == split.usage.completion_tokens == 40
            assert split.timings.prefill_worker == "prefill-0"
            assert not whole.timings.prefill_worker
        assert (await pair.decode_status()).counters["received_prefills"] == len(prompts)
        await pair.wait_all_free()
        await alone.wait_all_free()


async def test_the_stages_of_a_request_add_up_to_its_end_to_end_time(tiny_model: Path) -> None:
    async with local_cluster(tiny_model) as cluster:
        timings = (await cluster.generate(HELLO, max_tokens=20, ignore_eos=True)).timings
    assert sum(stage.seconds for stage in timings.stages) == pytest.approx(timings.end_to_end_s, abs=1e-6)
    assert {stage.name for stage in timings.stages} == {
        "queue", "reserve", "prefill_queue", "prefill", "transfer", "decode_wait", "decode"
    }  # fmt: skip
    assert 0 < timings.ttft_s < timings.end_to_end_s
    assert timings.tpot_s == pytest.approx((timings.end_to_end_s - timings.ttft_s) / 19)
