"""What a client gets when workers fail at any token: the same text, each token once, and an end."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from common.errors import CorruptPiece, ServingError, WorkerLost
from common.sampling import SamplingParams
from router.admission import Admission
from router.answer import AnswerDelta, answer
from router.breaker import Breaker, Circuit
from router.metrics import RouterMetrics
from router.pairs import MAX_TRANSFER_FAULTS, Pair
from router.pipeline import RequestPipeline
from router.policy import make_policies
from router.prefix_index import PrefixIndex
from router.registry import Registry
from router.request import Request
from router.retries import BudgetLimits, Retries, RetryBudget
from router.tokenizer import Tokenizer
from router.waiting_line import QueueBounds
from router.worker import Worker
from tests.router.reciters import Reciters, reciting

TEXT = "One ship sailed east at dawn, and no STOP sign was in its way for many a mile."
PROMPT = [11, 12, 13]
LOST = WorkerLost("injected")
MAX_ATTEMPTS = 3
AMPLE = BudgetLimits(savings=1000.0)


@dataclass
class Scene:
    pipeline: RequestPipeline
    reciters: Reciters
    registry: Registry
    metrics: RouterMetrics
    workers: list[Worker]
    tokenizer: Tokenizer
    answer_ids: list[int]

    def request(self) -> Request:
        sampling = SamplingParams(max_tokens=len(self.answer_ids), temperature=1.0, seed=11)
        return Request("r", PROMPT, sampling, time.monotonic() + 30)

    async def answer(self, request: Request, *stop: str) -> list[AnswerDelta]:
        return [delta async for delta in answer(self.pipeline, self.tokenizer, request, stop)]


@asynccontextmanager
async def scene(
    tokenizer: Tokenizer, names: tuple[str, ...] = ("prefill-0", "decode-0"), budget: BudgetLimits = AMPLE
) -> AsyncIterator[Scene]:
    answer_ids = tokenizer.encode(TEXT)
    metrics = RouterMetrics()
    registry = Registry("tiny", PrefixIndex(1000), must_check_pairs=False)
    admission = Admission(registry, make_policies("least_loaded", random.Random(0)), QueueBounds(10, 10_000))
    retries = Retries(RetryBudget(limits=budget), metrics, MAX_ATTEMPTS, registry.transfer_ended)
    pipeline = RequestPipeline(admission, metrics, retries)
    reciters = Reciters(len(PROMPT), answer_ids)
    async with reciting(reciters, registry, names) as workers:
        yield Scene(pipeline, reciters, registry, metrics, workers, tokenizer, answer_ids)
        await pipeline.close()


def text_of(deltas: list[AnswerDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_wherever_decode_workers_die_the_text_goes_on_and_each_token_is_counted_once(
    tokenizer: Tokenizer,
) -> None:
    async with scene(tokenizer) as scene_:
        for first in range(0, len(scene_.answer_ids) - 1, 3):
            scene_.reciters.decodes.clear()
            scene_.reciters.decode_faults = [(first, LOST), (2, LOST)]
            request = scene_.request()
            deltas = await scene_.answer(request)
            assert text_of(deltas) == TEXT
            assert [token for delta in deltas for token in delta.token_ids] == scene_.answer_ids
            usage = deltas[-1].usage
            assert usage is not None
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), len(scene_.answer_ids))
            assert request.timeline.num_output_tokens == usage.completion_tokens
            for decode in scene_.reciters.decodes:  # the same draws from the same place, and no token more
                done = list(decode.token_ids)[len(PROMPT) :]
                assert done == scene_.answer_ids[: len(done)]
                assert decode.sampling.seed == 11
                assert decode.sampling.max_tokens == len(scene_.answer_ids) - len(done)
            for worker in scene_.workers:
                worker.breaker.succeeded()


async def test_a_stop_string_is_found_wherever_the_migration_cuts_it(tokenizer: Tokenizer) -> None:
    stop = "no STOP sign"
    expected = TEXT[: TEXT.index(stop)]
    async with scene(tokenizer) as scene_:
        whole = await scene_.answer(scene_.request(), stop)
        assert text_of(whole) == expected
        for cut in range(1, len(whole) + 2):
            scene_.reciters.decode_faults = [(cut, LOST)]
            request = scene_.request()
            deltas = await scene_.answer(request, stop)
            assert deltas == whole
            assert request.attempts == (2 if cut < len(whole) - 1 else request.attempts)
            scene_.reciters.decode_faults.clear()


async def test_a_request_whose_workers_always_die_ends_after_so_many_attempts(tokenizer: Tokenizer) -> None:
    async with scene(tokenizer) as scene_:
        scene_.reciters.decode_faults = [(1, LOST)] * 10
        request = scene_.request()
        deltas = answer(scene_.pipeline, tokenizer, request, ())
        seen = [await anext(deltas) for _ in range(2 * MAX_ATTEMPTS)]
        with pytest.raises(WorkerLost, match="injected"):
            await anext(deltas)
        assert len(scene_.reciters.decodes) == request.attempts == MAX_ATTEMPTS
        assert [token for delta in seen for token in delta.token_ids] == scene_.answer_ids[: len(seen)]


async def test_an_outage_does_not_multiply_the_load(tokenizer: Tokenizer) -> None:
    num_requests, savings = 20, 4.0
    async with scene(tokenizer, budget=BudgetLimits(share=0.2, savings=savings, per_s=0.0)) as scene_:
        scene_.reciters.decode_faults = [(0, LOST)] * 1000
        failures: list[ServingError] = []
        for _ in range(num_requests):
            for worker in scene_.workers:
                worker.breaker = Breaker(time.monotonic)  # here the budget alone is looked at
                worker.is_suspect = False
            with pytest.raises(WorkerLost) as raised:
                await scene_.answer(scene_.request())
            failures.append(raised.value)
        assert len(scene_.reciters.decodes) == num_requests + savings
        assert "send it again later" in failures[-1].message


async def test_cached_tokens_are_those_of_the_attempt_that_gave_the_first_token(tokenizer: Tokenizer) -> None:
    async with scene(tokenizer) as scene_:
        scene_.reciters.cached_tokens[:2] = [0, 3]
        scene_.reciters.decode_faults = [(4, LOST)]
        deltas = await scene_.answer(scene_.request())
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.cached_tokens == 0


async def test_a_worker_that_always_fails_is_out_until_a_probe_goes_well(tokenizer: Tokenizer) -> None:
    async with scene(tokenizer, names=("prefill-0", "decode-0", "decode-1")) as scene_:
        bad, good = scene_.workers[1:]
        for _ in range(3):
            with pytest.raises(WorkerLost), bad.called():
                raise LOST
        assert bad.breaker.circuit is Circuit.OPEN
        bad.heard(scene_.workers[0].load)  # it is alive; that alone does not help it
        assert not bad.is_fit
        assert scene_.registry.not_ready_reason() is None
        for _ in range(5):
            request = scene_.request()
            assert text_of(await scene_.answer(request)) == TEXT
            assert request.decode_worker == good.worker_id
        now_s = time.monotonic() + 60
        bad.breaker._clock = lambda: now_s
        assert bad.breaker.circuit is Circuit.HALF_OPEN
        served = set()
        for _ in range(50):
            request = scene_.request()
            assert text_of(await scene_.answer(request)) == TEXT
            served.add(request.decode_worker)
        assert served == {"decode-0", "decode-1"}
        assert bad.breaker.circuit is Circuit.CLOSED


async def test_a_pair_whose_transfers_keep_failing_is_doubted_and_others_are_chosen(tokenizer: Tokenizer) -> None:
    doubted: list[Pair] = []
    async with scene(tokenizer, names=("prefill-0", "decode-0", "decode-1")) as scene_:
        scene_.registry.on_doubted_pair = doubted.append
        pair = next(pair for pair in scene_.registry.pairs if pair.decode.worker_id == "decode-0")
        for _ in range(MAX_TRANSFER_FAULTS - 1):
            scene_.registry.transfer_ended("prefill-0", "decode-0", CorruptPiece("bits"))
        scene_.registry.transfer_ended("prefill-0", "decode-0", None)
        assert pair.is_good
        for _ in range(MAX_TRANSFER_FAULTS):
            scene_.registry.transfer_ended("prefill-0", "decode-0", CorruptPiece("bits"))
        assert doubted == [pair]
        assert not pair.is_good
        assert "bits" in pair.reason
        for _ in range(10):
            request = scene_.request()
            assert text_of(await scene_.answer(request)) == TEXT
            assert request.decode_worker == "decode-1"


async def test_a_broken_transfer_after_the_first_token_is_tried_again(tokenizer: Tokenizer) -> None:
    async with scene(tokenizer) as scene_:
        scene_.reciters.prefill_faults = [CorruptPiece("bits")]
        request = scene_.request()
        assert text_of(await scene_.answer(request)) == TEXT
        assert request.attempts == 2
        assert scene_.registry.pairs[0].num_faults == 0
