"""What load_test.py is asked to do: its command line, checked and put together."""

from __future__ import annotations

import argparse
import math
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.arguments import (
    DEFAULT_BURST_SIZE,
    DEFAULT_NUM_REQUESTS,
    DEFAULT_URL,
    Arrivals,
    Contestant,
    TargetAddress,
    argument_parser,
    http_address,
)
from loadgen.http_target import Endpoint
from loadgen.metrics import Judgement
from loadgen.slo import Slo
from loadgen.sweep import Search
from loadgen.tls import ClientTls
from loadgen.trace import TraceError, read_trace, spread_in_bins
from loadgen.workload import Burst, ClosedLoop, Constant, Pacing, Poisson, PromptKind, Replay, Workload

DEFAULT_CONFIG = Path("serve.yaml")
COMPARE_CONCURRENCY = 4
COMPARE_NUM_REQUESTS = 16
COMPARE_NUM_WARMUPS = 2


@dataclass(frozen=True)
class Outputs:
    """Files to write besides what is printed."""

    json: Path | None
    csv: Path | None
    html: Path | None
    chrome_trace: Path | None


@dataclass(frozen=True)
class Options:
    targets: tuple[TargetAddress, ...]  # one, or two to compare
    contestants: tuple[Contestant, ...]  # when there are any, they are measured instead of the targets
    config_path: Path  # of the contestants that are started
    workload: Workload
    endpoint: Endpoint
    model: str | None
    num_warmups: int
    timeout_s: float
    judgement: Judgement
    objectives: tuple[Slo, Search] | None  # for a search of the highest rate; None: no search
    outputs: Outputs
    tls: ClientTls


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Exits with status 2 and one line for what cannot be."""
    parser = argument_parser()
    parsed = parser.parse_args(arguments)
    targets = tuple(parsed.targets or [http_address(DEFAULT_URL)])
    if len(targets) > 2:
        parser.error("at most two targets can be compared")
    endpoint = Endpoint(parsed.endpoint)
    prompt_kind = PromptKind(parsed.prompts or ("text" if endpoint is Endpoint.CHAT else "ids"))
    if endpoint is Endpoint.CHAT and prompt_kind is PromptKind.IDS and not all(target.is_grpc for target in targets):
        parser.error("chat takes text, not token ids; use --endpoint completions for exact lengths")
    _check_together(parser, parsed, targets)
    if parsed.compare:
        _check_compare(parser, parsed)
    return Options(
        targets=targets,
        contestants=parsed.compare or (),
        config_path=parsed.config or DEFAULT_CONFIG,
        workload=_workload(parser, parsed, prompt_kind),
        endpoint=endpoint,
        model=parsed.model,
        num_warmups=parsed.warmup if parsed.warmup is not None else COMPARE_NUM_WARMUPS if parsed.compare else 0,
        timeout_s=parsed.timeout,
        judgement=Judgement(parsed.slo, parsed.percentiles),
        objectives=_objectives(parser, parsed),
        outputs=_outputs(parser, parsed),
        tls=_tls(parser, parsed),
    )


def _tls(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> ClientTls:
    try:
        return ClientTls(parsed.tls, parsed.ca)
    except (OSError, ssl.SSLError) as error:
        parser.error(f"--ca: cannot use {parsed.ca}: {error}")


def _outputs(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> Outputs:
    outputs = Outputs(parsed.json, parsed.csv, parsed.html, parsed.chrome_trace)
    paths = [path.resolve() for path in vars(outputs).values() if path is not None]
    if len(set(paths)) < len(paths):
        parser.error("each of --json, --csv, --html and --chrome-trace writes a file of its own")
    return outputs


def _check_together(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, targets: Sequence[TargetAddress]
) -> None:
    """An option that would do nothing is a mistake."""
    if parsed.arrivals is not None and parsed.rate is None and parsed.sweep is None:
        parser.error("--arrivals is of --rate")
    if parsed.burst_size is not None and parsed.arrivals != Arrivals.BURST:
        parser.error("--burst-size is of --arrivals burst")
    for option in ("trace_bin", "trace_speed", "max_model_len"):
        if vars(parsed)[option] is not None and parsed.trace is None:
            parser.error(f"--{option.replace('_', '-')} is of a --trace")
    has_own_arrivals = parsed.rate is not None or parsed.concurrency is not None or parsed.sweep is not None
    if has_own_arrivals and (parsed.trace_bin is not None or parsed.trace_speed is not None):
        parser.error("--trace-bin and --trace-speed are of the trace's own arrivals, which --rate and others replace")
    if parsed.tls and not any(target.is_grpc for target in targets):
        parser.error("--tls is of --grpc; https:// says so for --url")
    if parsed.config is not None and not parsed.compare:
        parser.error("--config is of the systems that --compare starts")


def _check_compare(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    if parsed.targets:
        parser.error("--compare names who is measured: leave out --url and --grpc")
    if parsed.trace or parsed.input_tokens or parsed.output_tokens or parsed.duration:
        parser.error("--compare has workloads of its own: of their size, only --num-requests can be chosen")
    if parsed.endpoint == Endpoint.CHAT or parsed.prompts == PromptKind.TEXT:
        parser.error("--compare sends token ids: its lengths are exact")


def _objectives(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> tuple[Slo, Search] | None:
    if parsed.sweep is None:
        return None
    if parsed.slo is None:
        parser.error("--sweep needs --slo: the objectives that a rate is judged by")
    if parsed.duration is not None:
        parser.error(
            "--sweep gives every rate the same number of requests, or a few seconds' worth: give --num-requests"
        )
    if parsed.sweep > 1:
        parser.error("--sweep is a share of the requests, such as 0.9")
    is_poisson = parsed.arrivals in (None, Arrivals.POISSON)
    if parsed.concurrency is not None or not is_poisson or parsed.rate == math.inf:
        parser.error("--sweep chooses the rate of Poisson arrivals: give at most a finite --rate, where it begins")
    return parsed.slo, Search(goal=parsed.sweep, first_rate=parsed.rate or Search.first_rate)


def _workload(parser: argparse.ArgumentParser, parsed: argparse.Namespace, prompt_kind: PromptKind) -> Workload:
    try:
        trace = () if parsed.trace is None else read_trace(parsed.trace, parsed.max_model_len)
    except TraceError as error:
        parser.error(str(error))
    if parsed.trace_bin is not None:
        trace = spread_in_bins(trace, parsed.trace_bin, parsed.seed)
    if trace and (parsed.input_tokens or parsed.output_tokens):
        parser.error("lengths come from the trace: leave out --input-tokens and --output-tokens")
    num_requests = parsed.num_requests
    if num_requests is None and parsed.duration is None and not trace:
        num_requests = COMPARE_NUM_REQUESTS if parsed.compare else DEFAULT_NUM_REQUESTS
    if parsed.rate == math.inf and parsed.arrivals not in (None, Arrivals.POISSON):
        parser.error(f"--rate inf sends everything at once: it has no --arrivals {parsed.arrivals}")
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
        arrivals = Arrivals(parsed.arrivals or Arrivals.POISSON)
        return _open_loop(arrivals, parsed.rate, parsed.burst_size or DEFAULT_BURST_SIZE)
    if parsed.concurrency is not None:
        return ClosedLoop(parsed.concurrency)
    if has_trace:
        return Replay(parsed.trace_speed or 1.0)
    return ClosedLoop(COMPARE_CONCURRENCY if parsed.compare else 1)


def _open_loop(arrivals: Arrivals, rate: float, burst_size: int) -> Pacing:
    match arrivals:
        case Arrivals.POISSON:
            return Poisson(rate)
        case Arrivals.CONSTANT:
            return Constant(rate)
        case Arrivals.BURST:
            return Burst(rate, burst_size)
