"""The command line of load_test.py."""

from __future__ import annotations

import argparse
import math
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loadgen.http_target import Endpoint
from loadgen.tls import ClientTls
from loadgen.trace import TraceError, read_trace
from loadgen.workload import ClosedLoop, LengthRange, Pacing, Poisson, PromptKind, Replay, Workload

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_NUM_REQUESTS = 100

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class TargetAddress:
    address: str
    is_grpc: bool


@dataclass(frozen=True)
class Options:
    targets: tuple[TargetAddress, ...]  # one, or two to compare
    workload: Workload
    endpoint: Endpoint
    model: str | None
    num_warmups: int
    timeout_s: float
    json_path: Path | None
    tls: ClientTls


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Exits with status 2 and one line for what cannot be."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    targets = tuple(parsed.targets or [_http_address(DEFAULT_URL)])
    if len(targets) > 2:
        parser.error("at most two targets can be compared")
    endpoint = Endpoint(parsed.endpoint)
    prompt_kind = PromptKind(parsed.prompts or ("text" if endpoint is Endpoint.CHAT else "ids"))
    if endpoint is Endpoint.CHAT and prompt_kind is PromptKind.IDS and not all(target.is_grpc for target in targets):
        parser.error("chat takes text, not token ids; use --endpoint completions for exact lengths")
    if parsed.json is not None and not parsed.json.parent.is_dir():
        parser.error(f"--json: {parsed.json.parent} is not a folder")
    return Options(
        targets=targets,
        workload=_workload(parser, parsed, prompt_kind),
        endpoint=endpoint,
        model=parsed.model,
        num_warmups=parsed.warmup,
        timeout_s=parsed.timeout,
        json_path=parsed.json,
        tls=_tls(parser, parsed),
    )


def _tls(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> ClientTls:
    try:
        return ClientTls(parsed.tls, parsed.ca)
    except (OSError, ssl.SSLError) as error:
        parser.error(f"--ca: cannot use {parsed.ca}: {error}")


def _workload(parser: argparse.ArgumentParser, parsed: argparse.Namespace, prompt_kind: PromptKind) -> Workload:
    try:
        trace = () if parsed.trace is None else read_trace(parsed.trace, parsed.max_model_len)
    except TraceError as error:
        parser.error(str(error))
    if trace and (parsed.input_tokens or parsed.output_tokens):
        parser.error("lengths come from the trace: leave out --input-tokens and --output-tokens")
    num_requests = parsed.num_requests
    if num_requests is None and parsed.duration is None and not trace:
        num_requests = DEFAULT_NUM_REQUESTS
    if parsed.rate == math.inf and num_requests is None and not trace:
        parser.error("--rate inf needs --num-requests")
    return Workload(
        pacing=_pacing(parsed, has_trace=bool(trace)),
        input_tokens=parsed.input_tokens or Workload.input_tokens,
        output_tokens=parsed.output_tokens or Workload.output_tokens,
        trace=trace,
        prompt_kind=prompt_kind,
        vocab_size=parsed.vocab_size,
        num_requests=num_requests,
        duration_s=parsed.duration,
        seed=parsed.seed,
    )


def _pacing(parsed: argparse.Namespace, has_trace: bool) -> Pacing:
    if parsed.rate is not None:
        return Poisson(parsed.rate)
    if parsed.concurrency is not None:
        return ClosedLoop(parsed.concurrency)
    return Replay(parsed.trace_speed) if has_trace else ClosedLoop(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="load_test.py",
        description="Load on an OpenAI-compatible server or on pdserve's gRPC endpoint. Two targets are compared.",
        epilog="Exit status: 0 all answered, 1 a request failed or no server, 2 bad usage. OPENAI_API_KEY is sent.",
    )
    add = parser.add_argument
    add("--url", dest="targets", action="append", type=_http_address, metavar="URL", help=f"default {DEFAULT_URL}")
    add("--grpc", dest="targets", action="append", type=_grpc_address, metavar="HOST:PORT")
    add("--tls", action="store_true", help="speak TLS to --grpc too; https:// says so for --url")
    add("--ca", type=Path, metavar="FILE", help="trust this authority instead of the system's, and speak TLS to --grpc")
    add("--endpoint", choices=list(Endpoint), default=Endpoint.COMPLETIONS, help="of --url; default completions")
    add("--model", help="default: the first one the server lists")
    pacing = parser.add_mutually_exclusive_group()
    pacing.add_argument("--rate", type=_above(float, 0), help="open loop: Poisson arrivals per second, or inf")
    pacing.add_argument("--concurrency", type=_above(int, 0), help="closed loop: clients; default 1")
    add("--num-requests", type=_above(int, 0), help=f"default {DEFAULT_NUM_REQUESTS}, or the whole trace")
    add("--duration", type=_above(float, 0), metavar="SECONDS", help="send for this long")
    add("--input-tokens", type=_length, metavar="N or LOW:HIGH", help="default 512")
    add("--output-tokens", type=_length, metavar="N or LOW:HIGH", help="default 64")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="lengths and, without --rate or --concurrency, arrivals: an"
        " Azure .csv (TIMESTAMP,ContextTokens,GeneratedTokens) or a Mooncake .jsonl",
    )
    add("--trace-speed", type=_above(float, 0), default=1.0, help="replay the trace's arrivals this much faster")
    add("--max-model-len", type=_above(int, 1), help="leave out the trace's requests of more tokens, in and out")
    add("--prompts", choices=list(PromptKind), help="random token ids (exact lengths) or words; chat takes words")
    add("--vocab-size", type=_above(int, 1), default=Workload.vocab_size, help="ids are drawn below this")
    add("--seed", type=_above(int, -1), default=0)
    add("--warmup", type=_above(int, -1), default=0, metavar="N", help="requests sent first, one by one, not measured")
    add("--timeout", type=_above(float, 0), default=600.0, metavar="SECONDS", help="for one request; default 600")
    add("--json", type=Path, metavar="FILE", help="write the results here too")
    return parser


def _above(kind: Callable[[str], Number], bound: int) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        number = kind(text)
        if not number > bound:
            raise argparse.ArgumentTypeError(f"{text} is not above {bound}")
        return number

    parse.__name__ = kind.__name__  # argparse names it: "invalid int value"
    return parse


def _length(text: str) -> LengthRange:
    try:
        return LengthRange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a length such as 512 nor a range such as 128:1024"
        ) from error


def _http_address(text: str) -> TargetAddress:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} does not begin with http:// or https://")
    return TargetAddress(text, is_grpc=False)


def _grpc_address(text: str) -> TargetAddress:
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT")
    return TargetAddress(text, is_grpc=True)
