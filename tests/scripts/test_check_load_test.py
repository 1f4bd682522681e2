"""check_load_test.py: what the plain client sees, and how the two are compared. Whether they agree is measured, not
tested."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from check_load_test import NUM_WARMUPS, by_plain_client, disagreement, main, take_turns
from loadgen.workload import ClosedLoop, LengthRange, PlannedRequest, Workload, plan

REQUEST = PlannedRequest(0.0, [5, 6, 7], input_tokens=3, output_tokens=5)


async def test_the_plain_client_counts_tokens_by_usage_and_time_by_its_own_clock(openai_server) -> None:
    """Five tokens in three events: 0.2 s to the first, 0.4 s from there to the last."""

    async def slow(body: dict) -> AsyncIterator[str]:
        for text in ("a", "bc", "de"):
            await asyncio.sleep(0.2)
            yield openai_server.token(text)
        yield openai_server.usage(3, 5)
        yield openai_server.done

    openai_server.answer = slow
    async with httpx.AsyncClient(base_url=openai_server.url) as client:
        seen = await by_plain_client(client, "tiny", REQUEST)
    assert seen.ttft_s >= 0.19
    assert seen.tpot_s >= 0.39 / 4
    assert seen.ttft_s < 2
    assert seen.tpot_s < 1


async def test_both_take_turns_and_warmups_do_not_count(openai_server) -> None:
    workload = Workload(ClosedLoop(1), LengthRange(4, 4), LengthRange(3, 3), num_requests=2 * (6 + NUM_WARMUPS))
    pairs = await take_turns(openai_server.url, plan(workload))
    assert len(pairs.load_test) == len(pairs.plain) == 6
    prompts = [tuple(body["prompt"]) for body in openai_server.bodies]
    assert len(prompts) == len(set(prompts)) == 2 * (6 + NUM_WARMUPS)
    assert all(latencies.ttft_s > 0 for latencies in (*pairs.load_test, *pairs.plain))


async def test_the_script_says_what_both_saw(openai_server, capsys) -> None:
    arguments = ["--url", openai_server.url, "--pairs", "2", "--input-tokens", "4", "--output-tokens", "3"]
    assert await asyncio.to_thread(main, arguments) in (0, 1)  # a machine under test is too noisy to judge
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["TTFT", "TPOT"]
    assert all("plain httpx" in line for line in lines)


@pytest.mark.parametrize(("loaded", "plain", "share"), [(103.0, 100.0, 0.03), (97.0, 100.0, 0.03), (5.0, 5.0, 0.0)])
def test_disagreement_is_a_share_of_what_the_plain_client_saw(loaded: float, plain: float, share: float) -> None:
    assert disagreement(loaded, plain) == pytest.approx(share)
