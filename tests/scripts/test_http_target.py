from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from fastapi.responses import JSONResponse, PlainTextResponse

from loadgen.http_target import Endpoint, HttpTarget
from loadgen.record import RequestRecord, ServerTimings, Unreachable
from loadgen.runner import measure
from loadgen.workload import PlannedRequest

IDS = PlannedRequest(0.0, [301, 302, 303], input_tokens=3, output_tokens=4)
TEXT = PlannedRequest(0.0, "two words", input_tokens=2, output_tokens=4)


@asynccontextmanager
async def connected(url: str, endpoint: Endpoint = Endpoint.COMPLETIONS) -> AsyncIterator[HttpTarget]:
    target = HttpTarget(url, endpoint)
    try:
        await target.connect()
        yield target
    finally:
        await target.close()


async def send(url: str, request: PlannedRequest = IDS, timeout_s: float = 10.0) -> RequestRecord:
    endpoint = Endpoint.COMPLETIONS if request is IDS else Endpoint.CHAT
    async with connected(url, endpoint) as target:
        return await measure(request, target, time.perf_counter(), timeout_s)


async def test_a_completion_is_sent_with_exact_lengths_and_measured(openai_server) -> None:
    record = await send(openai_server.url)
    assert record.is_completed
    assert (record.input_tokens, record.output_tokens, len(record.token_event_s)) == (3, 4, 4)
    assert openai_server.bodies == [
        {
            "model": "tiny",
            "prompt": [301, 302, 303],
            "max_tokens": 4,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_pdserve_is_asked_for_its_timings_and_nobody_else_is(openai_server) -> None:
    timings = {"stages": {"queue": 0.1, "prefill": 0.2}, "prefill_worker": "p", "decode_worker": "d", "attempts": 2}

    async def with_timings(body: dict) -> AsyncIterator[str]:
        yield openai_server.token(" a", "length")
        account = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}, "timings": timings}
        yield f"data: {json.dumps(account)}\n\n"
        yield openai_server.done

    assert (await send(openai_server.url)).timings is None
    openai_server.owner, openai_server.answer = "pdserve", with_timings
    record = await send(openai_server.url)
    assert record.timings == ServerTimings({"queue": 0.1, "prefill": 0.2}, "p", "d", 2)
    assert record.output_tokens == 1
    asked = [body["stream_options"] for body in openai_server.bodies]
    assert asked == [{"include_usage": True}, {"include_usage": True, "include_timings": True}]


async def test_a_chat_is_sent_as_one_user_message_and_its_role_event_is_not_a_token(openai_server) -> None:
    async def chat(body: dict) -> AsyncIterator[str]:
        for delta, reason in [({"role": "assistant", "content": ""}, None), ({"content": "a"}, None), ({}, "length")]:
            yield f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': reason}]})}\n\n"
        yield openai_server.usage(9, 1)
        yield openai_server.done

    openai_server.answer = chat
    record = await send(openai_server.url, TEXT)
    assert openai_server.bodies[0]["messages"] == [{"role": "user", "content": "two words"}]
    assert record.is_completed
    assert (record.input_tokens, record.output_tokens, len(record.token_event_s)) == (9, 1, 1)


async def test_tokens_are_stamped_when_they_come(openai_server) -> None:
    has_first, may_send_second = asyncio.Event(), asyncio.Event()

    async def gated(body: dict) -> AsyncIterator[str]:
        yield openai_server.token("a")
        has_first.set()
        await may_send_second.wait()
        yield openai_server.token("b", "length")
        yield openai_server.done

    openai_server.answer = gated
    start_s = time.perf_counter()
    sending = asyncio.create_task(send(openai_server.url))
    async with asyncio.timeout(5):
        await has_first.wait()
        released_s = time.perf_counter()
        may_send_second.set()
        record = await sending
    assert start_s < record.scheduled_s <= record.sent_s < record.token_event_s[0]
    assert record.token_event_s[1] > released_s
    assert record.end_s == record.token_event_s[1]


async def test_a_token_that_printed_nothing_is_still_a_token(openai_server) -> None:
    async def halves_of_a_character(body: dict) -> AsyncIterator[str]:
        for text, reason in [("", None), ("你", None), ("", "stop")]:
            yield openai_server.token(text, reason)
        yield openai_server.done

    openai_server.answer = halves_of_a_character
    record = await send(openai_server.url)
    assert (record.output_tokens, len(record.token_event_s)) == (2, 2)


async def test_a_refusal_is_counted_by_status_and_code(openai_server, queue_full) -> None:
    openai_server.refusal = queue_full
    record = await send(openai_server.url)
    assert not record.is_completed
    assert (record.failure.kind, record.failure.detail) == ("HTTP 429 queue_full", "256 requests wait already")


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (PlainTextResponse("bad gateway", 502), "HTTP 502"),
        (
            JSONResponse({"error": {"message": "m", "type": "BadRequestError", "code": 400}}, 400),
            "HTTP 400 BadRequestError",
        ),
        (JSONResponse({"error": "no"}, 500), "HTTP 500"),
        (JSONResponse(["no"], 500), "HTTP 500"),
    ],
)
async def test_other_refusals_keep_their_status(openai_server, refusal, kind: str) -> None:
    openai_server.refusal = refusal
    assert (await send(openai_server.url)).failure.kind == kind


async def test_an_error_event_inside_the_stream_is_a_failure(openai_server) -> None:
    async def lost(body: dict) -> AsyncIterator[str]:
        yield openai_server.token("a")
        yield f"event: error\ndata: {json.dumps({'error': {'message': 'decode-0 died', 'code': 'worker_lost'}})}\n\n"
        yield openai_server.done

    openai_server.answer = lost
    record = await send(openai_server.url)
    assert (record.failure.kind, record.failure.detail) == ("stream error worker_lost", "decode-0 died")
    assert len(record.token_event_s) == 1


async def test_a_stream_that_breaks_is_a_failure(openai_server) -> None:
    async def breaks(body: dict) -> AsyncIterator[str]:
        yield openai_server.token("a")
        raise OSError("the worker's network is gone")

    openai_server.answer = breaks
    assert (await send(openai_server.url)).failure.kind == "connection broken"


async def test_a_stream_without_its_end_is_a_failure(openai_server) -> None:
    async def silent_end(body: dict) -> AsyncIterator[str]:
        yield openai_server.token("a")

    openai_server.answer = silent_end
    assert (await send(openai_server.url)).failure.kind == "stream ended early"


async def test_an_empty_answer_is_a_failure(openai_server) -> None:
    async def empty(body: dict) -> AsyncIterator[str]:
        yield openai_server.done

    openai_server.answer = empty
    assert (await send(openai_server.url)).failure.kind == "empty answer"


@pytest.mark.parametrize("data", ["{", "[]", "7", '{"choices": [3]}', '{"error": 3}'])
async def test_a_malformed_event_is_a_failure(openai_server, data: str) -> None:
    async def malformed(body: dict) -> AsyncIterator[str]:
        yield f"data: {data}\n\n"
        yield openai_server.done

    openai_server.answer = malformed
    assert (await send(openai_server.url)).failure.kind == "malformed event"


async def test_a_server_that_stops_answering_is_a_timeout_and_is_let_go(openai_server) -> None:
    has_left = asyncio.Event()

    async def stalls(body: dict) -> AsyncIterator[str]:
        yield openai_server.token("a")
        try:
            await asyncio.Event().wait()
        finally:
            has_left.set()

    openai_server.answer = stalls
    record = await send(openai_server.url, timeout_s=0.2)
    assert record.failure.kind == "timeout"
    assert record.end_s - record.sent_s >= 0.2
    async with asyncio.timeout(5):
        await has_left.wait()


async def test_no_server_is_one_clear_line(free_port: int) -> None:
    with pytest.raises(Unreachable, match=f"no server at http://127.0.0.1:{free_port}: "):
        await send(f"http://127.0.0.1:{free_port}")


async def test_a_server_that_goes_away_later_is_a_failed_request(free_port: int) -> None:
    target = HttpTarget(f"http://127.0.0.1:{free_port}", Endpoint.COMPLETIONS, model="tiny")
    async with aclosing_target(target):
        record = await measure(IDS, target, time.perf_counter(), 5.0)
    assert record.failure.kind == "cannot connect"


async def test_a_base_url_may_end_in_v1(openai_server) -> None:
    assert (await send(openai_server.url + "/v1/")).is_completed


async def test_a_caller_that_stops_reading_closes_the_stream(openai_server) -> None:
    async with connected(openai_server.url) as target, aclosing(target.stream(IDS)) as deltas:
        first = await anext(deltas)
    assert first.num_tokens == 1


@asynccontextmanager
async def aclosing_target(target: HttpTarget) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await target.close()
