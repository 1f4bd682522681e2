from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from common.errors import InvalidRequest, InvalidSampling, PromptTooLong, ServingError, UnknownModel, WorkerUnavailable
from router.chat_template import ChatMessage
from router.frontend import Frontend
from router.tenant import ANONYMOUS
from router.validation import INLINE_CHARACTERS, Wish

WISH = Wish("Hello world")


@pytest.mark.parametrize(
    ("change", "error", "param", "message"),
    [
        ({"model": "gpt-5"}, UnknownModel, "model", "'gpt-5' is not served here; 'tiny' is"),
        ({"prompt": ""}, InvalidRequest, "prompt", "prompt is empty"),
        ({"prompt": []}, InvalidRequest, "prompt", "prompt is empty"),
        ({"prompt": [1, 49152]}, InvalidRequest, "prompt", "49152 at index 1 of prompt .* vocabulary of 49152"),
        ({"prompt": [-1]}, InvalidRequest, "prompt", "-1 at index 0"),
        ({"stop_token_ids": [99999]}, InvalidRequest, "stop_token_ids", "99999 at index 0 of stop_token_ids"),
        ({"stop": ["a", ""]}, InvalidRequest, "stop", "empty string"),
        ({"stop": list("abcde")}, InvalidRequest, "stop", "5 strings; at most 4"),
        ({"max_tokens": 0}, InvalidSampling, "max_tokens", "at least 1"),
        ({"max_tokens": -5}, InvalidSampling, "max_tokens", "is -5"),
        ({"max_tokens": 511}, PromptTooLong, "max_tokens", "2 tokens and max_tokens is 511, together 513.* 512 tokens"),
        ({"prompt": [1] * 512}, PromptTooLong, "prompt", "512 tokens; the model's context is 512"),
        ({"temperature": 2.5}, InvalidSampling, "temperature", "from 0 to 2"),
        ({"temperature": float("nan")}, InvalidSampling, "temperature", "nan"),
        ({"top_p": 0.0}, InvalidSampling, "top_p", "above 0"),
        ({"top_k": -1}, InvalidSampling, "top_k", "0 .off. or more"),
        ({"seed": -1}, InvalidSampling, "seed", "from 0"),
    ],
)
async def test_a_mistake_is_named_with_its_field(
    frontend: Frontend, change: dict[str, Any], error: type[ServingError], param: str, message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        await frontend.accept(replace(WISH, **change), "r", ANONYMOUS)
    assert type(caught.value) is error
    assert caught.value.param == param


async def test_prompt_and_answer_may_fill_the_context_exactly(frontend: Frontend) -> None:
    request = await frontend.accept(replace(WISH, max_tokens=510), "r", ANONYMOUS)
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == 512


async def test_without_max_tokens_the_answer_may_fill_what_is_left(frontend: Frontend) -> None:
    assert (await frontend.accept(WISH, "r", ANONYMOUS)).sampling.max_tokens == 510


async def test_each_request_without_a_seed_draws_its_own(frontend: Frontend) -> None:
    seeds = {(await frontend.accept(WISH, "r", ANONYMOUS)).sampling.seed for _ in range(8)}
    assert len(seeds) == 8


async def test_what_the_client_chose_reaches_the_request(frontend: Frontend) -> None:
    wish = Wish([5, 6], "tiny", 7, 0.5, 0.9, 40, 11, True, [3], timeout_s=2)
    request = await frontend.accept(wish, "my-id", ANONYMOUS)
    sampling = request.sampling
    assert request.prompt_token_ids == [5, 6]
    assert request.request_id == "my-id"
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 40)
    assert (sampling.seed, sampling.ignore_eos, sampling.stop_token_ids) == (11, True, (3,))


async def test_the_deadline_is_the_clients_but_never_later_than_the_routers(frontend: Frontend) -> None:
    for asked, allowed in [(None, 60), (2.0, 2), (1e9, 60)]:
        request = await frontend.accept(replace(WISH, timeout_s=asked), "r", ANONYMOUS)
        assert request.deadline_s == pytest.approx(time.monotonic() + allowed, abs=1)


async def test_a_top_k_beyond_the_vocabulary_keeps_every_token(frontend: Frontend) -> None:
    assert (await frontend.accept(replace(WISH, top_k=10**12), "r", ANONYMOUS)).sampling.top_k == 49152


async def test_before_any_worker_has_registered_the_answer_is_come_back_later(frontend: Frontend, limits: Any) -> None:
    limits.context, limits.reason = None, "no prefill worker is registered"
    with pytest.raises(WorkerUnavailable, match="no prefill worker is registered"):
        await frontend.accept(WISH, "r", ANONYMOUS)


async def test_text_that_needs_ids_the_model_does_not_have_is_refused(frontend: Frontend, limits: Any) -> None:
    limits.vocabulary = 100
    with pytest.raises(InvalidRequest, match="outside the vocabulary of 100"):
        await frontend.accept(WISH, "r", ANONYMOUS)


async def test_a_long_text_is_tokenized_like_a_short_one(frontend: Frontend, limits: Any) -> None:
    limits.context = 100_000
    text = "word " * INLINE_CHARACTERS
    assert (await frontend.accept(Wish(text), "r", ANONYMOUS)).prompt_token_ids == frontend.tokenizer.encode(text)
    chat = [ChatMessage("user", text)]
    assert (await frontend.accept(Wish(chat), "r", ANONYMOUS)).prompt_token_ids == frontend.tokenizer.encode_chat(chat)
