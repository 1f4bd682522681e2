"""One request through router, P and D is one trace, as a collector receives it."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from common.config import TelemetrySection
from common.errors import ConfigError
from common.pb import serving_pb2 as pb
from common.pb.serving_pb2_grpc import InferenceStub
from common.tracing import make_tracer
from tests.end_to_end.local_cluster import LocalCluster, local_cluster
from tests.end_to_end.otlp_collector import Collector, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
SECRET = "an-unmistakable-secret"
HANDOFF = ["queue", "reserve", "prefill_queue", "prefill", "transfer", "decode_wait", "decode"]
ROUTER, PREFILL, DECODE, COLOCATED = "pdserve-router", "pdserve-prefill", "pdserve-decode", "pdserve-colocated"


def telemetry(collector: Collector, **section: object) -> dict[str, dict[str, object]]:
    return {"telemetry": {"otlp_endpoint": collector.url, **section}}


async def complete(cluster: LocalCluster, traceparent: str | None = None, max_tokens: int = 4) -> None:
    """Warmed up by the self-test of the pair, which is in nobody's trace."""
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {} if traceparent is None else {"traceparent": traceparent, "tracestate": "vendor=its-own"}
    response = await cluster.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def attributes(span: Span) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def assert_within(inner: Span, outer: Span) -> None:
    assert outer.start_time_unix_nano <= inner.start_time_unix_nano
    assert inner.end_time_unix_nano <= outer.end_time_unix_nano


async def test_a_request_is_one_trace_of_the_clients_with_a_span_for_each_stage(tiny_model: Path) -> None:
    with collecting() as collector:
        async with local_cluster(tiny_model, sections=telemetry(collector)) as cluster:
            await complete(cluster, SAMPLED)
        assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE}
        assert {span.trace_state for _, span in collector.spans} == {"vendor=its-own"}
        request = collector.named("request", ROUTER)
        assert request.parent_span_id.hex() == PARENT
        prefill, decode = collector.named("prefill_worker", PREFILL), collector.named("decode_worker", DECODE)
        children = collector.children_of(request)
        workers = [prefill, decode]
        assert names([span for span in children if span not in workers]) == HANDOFF
        assert len(children) == len(HANDOFF) + 2
        assert names(collector.children_of(prefill)) == ["prefill_queue", "prefill", "transfer"]
        assert names(collector.children_of(decode)) == ["reserve", "transfer", "decode_wait", "decode"]
        assert len(collector.spans) == 1 + len(HANDOFF) + 2 + 3 + 4
        for parent in (request, prefill, decode):
            for child in collector.children_of(parent):
                assert_within(child, parent)
        said = attributes(request)
        assert said["gen_ai.usage.input_tokens"] == len(SECRET)
        assert said["gen_ai.usage.output_tokens"] == 4
        assert (said["pdserve.prefill_worker"], said["pdserve.decode_worker"]) == ("prefill-0", "decode-0")
        assert said["pdserve.state"] == "finished"
        assert SECRET.encode() not in collector.received


async def test_a_prompt_that_the_decode_worker_computes_has_the_stages_of_that(tiny_model: Path) -> None:
    with collecting() as collector:
        async with local_cluster(
            tiny_model, prefill=0, decode=0, colocated=1, sections=telemetry(collector)
        ) as cluster:
            await complete(cluster, SAMPLED)
        worker = collector.named("decode_worker", COLOCATED)
        assert names(collector.children_of(worker)) == ["prefill_queue", "prefill", "decode"]
        assert worker.parent_span_id == collector.named("request", ROUTER).span_id


async def test_over_grpc_the_trace_comes_in_the_metadata(tiny_model: Path) -> None:
    with collecting() as collector:
        async with local_cluster(tiny_model, sections=telemetry(collector)) as cluster:
            message = pb.GenerateRequest(prompt=SECRET, sampling=pb.SamplingParams(max_tokens=2, ignore_eos=True))
            async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
                call = InferenceStub(channel).Generate(message, timeout=60, metadata=(("traceparent", SAMPLED),))
                assert [delta async for delta in call]
        assert collector.named("request", ROUTER).parent_span_id.hex() == PARENT


@pytest.mark.parametrize("traceparent", [None, "00-nonsense", f"00-{'0' * 32}-{PARENT}-01", "x" * 5000])
async def test_without_a_trace_of_the_clients_a_request_begins_its_own(
    tiny_model: Path, traceparent: str | None
) -> None:
    with collecting() as collector:
        async with local_cluster(tiny_model, sections=telemetry(collector)) as cluster:
            await complete(cluster, traceparent)
        request = collector.named("request", ROUTER)
        assert request.parent_span_id == b""
        assert request.trace_id.hex() != TRACE
        assert {span.trace_id for _, span in collector.spans} == {request.trace_id}


async def test_what_is_not_sampled_is_not_sent_whoever_decides(tiny_model: Path) -> None:
    with collecting() as collector:
        async with local_cluster(tiny_model, sections=telemetry(collector, sample_share=0.0)) as cluster:
            await complete(cluster)  # our own share
            await complete(cluster, UNSAMPLED)  # the client has decided
            assert collector.spans == []
            await complete(cluster, SAMPLED)
        assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE}


async def test_a_failed_request_says_so_in_its_span(tiny_model: Path) -> None:
    with collecting() as collector:
        async with local_cluster(tiny_model, sections=telemetry(collector)) as cluster:
            body = {"model": "tiny", "prompt": SECRET, "max_tokens": 4000, "ignore_eos": True}
            headers = {"X-Request-Deadline-Ms": "150"}
            response = await cluster.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 504, response.text
        request = collector.named("request", ROUTER)
        assert request.status.code == Status.STATUS_CODE_ERROR
        assert attributes(request)["error.type"] == "DeadlineExceeded"


async def test_a_collector_that_is_not_there_disturbs_no_request(tiny_model: Path) -> None:
    section = {"telemetry": {"otlp_endpoint": "http://127.0.0.1:9"}}
    async with local_cluster(tiny_model, sections=section) as cluster:
        await complete(cluster, SAMPLED)


def test_without_the_extra_the_setting_is_refused_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "common.otlp", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[otel\]'"):
        make_tracer(TelemetrySection(otlp_endpoint="http://127.0.0.1:4318"), "pdserve-router", "router")
