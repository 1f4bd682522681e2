from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from common.errors import ServingError, WorkerLost
from common.lifecycle import State
from common.sampling import FinishReason, SamplingParams
from router.answer import AnswerDelta, Usage, answer
from router.request import Request
from router.tokenizer import Tokenizer


def new_request(max_tokens: int = 100) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(max_tokens), deadline_s=1e9, cached_tokens=2)


async def collected(
    pipeline: Any, tokenizer: Tokenizer, request: Request, stop: Sequence[str] = ()
) -> list[AnswerDelta]:
    return [delta async for delta in answer(pipeline, tokenizer, request, stop)]


def text_of(deltas: list[AnswerDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_every_token_is_a_delta_and_only_the_last_has_reason_and_usage(
    pipeline: Any, tokenizer: Tokenizer
) -> None:
    pipeline.token_ids = [*tokenizer.encode("one two three"), 2]
    deltas = await collected(pipeline, tokenizer, new_request())
    assert text_of(deltas) == "one two three"
    assert [delta.token_ids for delta in deltas] == [(token_id,) for token_id in pipeline.token_ids]
    assert [delta.finish_reason for delta in deltas] == [None] * 3 + [FinishReason.STOP]
    assert [delta.usage for delta in deltas] == [None] * 3 + [Usage(3, 4, cached_tokens=2)]


async def test_a_stop_token_with_text_adds_none_and_is_counted(pipeline: Any, tokenizer: Tokenizer) -> None:
    pipeline.token_ids = tokenizer.encode("one two")
    deltas = await collected(pipeline, tokenizer, new_request())
    assert text_of(deltas) == "one"
    assert deltas[-1].usage == Usage(3, 2, cached_tokens=2)


async def test_a_stop_string_ends_the_answer_and_closes_the_pipeline(pipeline: Any, tokenizer: Tokenizer) -> None:
    pipeline.token_ids = tokenizer.encode("one two three four five")
    request = new_request()
    deltas = await collected(pipeline, tokenizer, request, stop=["thr"])
    assert text_of(deltas) == "one two "
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].usage == Usage(3, 3, cached_tokens=2)
    assert pipeline.num_sent == 3
    assert pipeline.closed.is_set()
    assert request.ended_by_stop_string


async def test_a_stop_string_in_the_last_token_is_still_cut_out(pipeline: Any, tokenizer: Tokenizer) -> None:
    pipeline.token_ids = tokenizer.encode("one two")
    request = new_request(max_tokens=2)
    deltas = await collected(pipeline, tokenizer, request, stop=["wo"])
    assert text_of(deltas) == "one t"
    assert deltas[-1].finish_reason is FinishReason.STOP


async def test_held_back_text_is_shown_when_the_answer_ends_by_length(pipeline: Any, tokenizer: Tokenizer) -> None:
    pipeline.token_ids = tokenizer.encode("one two three")
    deltas = await collected(pipeline, tokenizer, new_request(max_tokens=2), stop=["two four"])
    assert text_of(deltas) == "one two"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_half_a_character_at_the_end_is_replaced_as_decoding_does(pipeline: Any, tokenizer: Tokenizer) -> None:
    pipeline.token_ids = tokenizer.encode("好你")[:-1]
    pipeline.finish_reason = FinishReason.LENGTH
    deltas = await collected(pipeline, tokenizer, new_request())
    assert text_of(deltas) == tokenizer.decode(pipeline.token_ids) == "好\ufffd"


@pytest.mark.parametrize("token_ids", [[], [19556]])
async def test_an_answer_without_a_finish_reason_is_an_error(
    pipeline: Any, tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    pipeline.token_ids, pipeline.finish_reason = token_ids, None
    with pytest.raises(ServingError, match=f"broke off after {len(token_ids)} tokens"):
        await collected(pipeline, tokenizer, new_request())


async def test_the_pipelines_error_comes_through(pipeline: Any, tokenizer: Tokenizer) -> None:
    pipeline.break_at, pipeline.error = 1, WorkerLost("decode-0 is gone")
    with pytest.raises(WorkerLost, match="decode-0 is gone"):
        await collected(pipeline, tokenizer, new_request())
    assert pipeline.closed.is_set()


async def test_closing_the_answer_closes_the_pipeline(pipeline: Any, tokenizer: Tokenizer) -> None:
    pipeline.token_ids = tokenizer.encode("one two three")
    async with aclosing(answer(pipeline, tokenizer, new_request(), ())) as deltas:
        await anext(deltas)
    assert pipeline.closed.is_set()


async def test_the_timeline_is_complete_when_the_last_delta_comes(pipeline: Any, tokenizer: Tokenizer) -> None:
    request = new_request()
    async for delta in answer(pipeline, tokenizer, request, ()):
        if delta.usage is not None:
            assert request.timeline.state is State.FINISHED
            return
    raise AssertionError("no last delta")
