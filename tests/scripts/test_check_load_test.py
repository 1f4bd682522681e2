"""check_load_test.py: both clocks time the same answers. How close they come is measured, not tested."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from check_load_test import NUM_WARMUPS, Seen, argument_parser, main, measure_both

SMALL = ["--num-requests", "5", "--concurrency", "2", "--input-tokens", "4", "--output-tokens", "3"]


def test_the_plain_client_counts_tokens_by_usage_and_time_by_lines_with_text() -> None:
    seen = Seen(start_s=10.0)
    seen.note('data: {"choices": [{"text": "a"}]}', 10.2)
    seen.note("", 10.25)
    seen.note('data: {"choices": [{"text": "bc", "finish_reason": "length"}]}', 10.6)
    seen.note('data: {"choices": [], "usage": {"completion_tokens": 5}}', 10.9)
    seen.note("data: [DONE]", 10.9)
    assert seen.ttft_ms == pytest.approx(200)
    assert seen.tpot_ms == pytest.approx(100)


async def test_both_time_the_same_answers_and_warmups_do_not_count(openai_server) -> None:
    async def slow(body: dict) -> AsyncIterator[str]:
        for _ in range(3):
            await asyncio.sleep(0.1)
            yield openai_server.token(" a")
        yield openai_server.usage(4, 3)
        yield openai_server.done

    openai_server.answer = slow
    told, seen = await measure_both(openai_server.url, argument_parser().parse_args(SMALL))
    assert (told["completed"], len(seen), len(openai_server.bodies)) == (5, 5, 5 + NUM_WARMUPS)
    assert all(each.num_tokens == 3 and len(each.text_s) == 3 for each in seen)
    assert all(each.ttft_ms >= 99 and each.tpot_ms >= 50 for each in seen)
    assert told["mean_ttft_ms"] >= sum(each.ttft_ms for each in seen) / 5 - 1  # the load test is further away


async def test_the_script_says_what_both_saw(openai_server, capsys) -> None:
    assert await asyncio.to_thread(main, ["--url", openai_server.url, *SMALL]) in (0, 1)  # instant answers say nothing
    lines = [line for line in capsys.readouterr().out.splitlines() if "plain httpx" in line]
    assert [line.split(":")[0] for line in lines] == ["mean_ttft", "median_ttft", "mean_tpot", "median_tpot"]


async def test_a_load_test_that_fails_is_no_agreement(openai_server, queue_full) -> None:
    openai_server.refusal = queue_full
    with pytest.raises(RuntimeError, match="status 1"):
        await measure_both(openai_server.url, argument_parser().parse_args(SMALL))
