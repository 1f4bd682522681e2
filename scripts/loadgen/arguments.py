"""The command line of load_test.py as argparse reads it: one option, one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from bench_arguments import explained, writable
from loadgen.http_target import Endpoint
from loadgen.metrics import PERCENTILES
from loadgen.slo import Slo
from loadgen.workload import LengthRange, PromptKind, Workload

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_NUM_REQUESTS = 100
DEFAULT_BURST_SIZE = 8
DISAGGREGATED, COLOCATED = "disaggregated", "colocated"
DEFAULT_GOAL = 0.9

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class TargetAddress:
    address: str
    is_grpc: bool


@dataclass(frozen=True)
class Contestant:
    """Of --compare: one of pdserve's own two systems, started for it, or a server that runs already."""

    name: str
    url: str | None = None

    @property
    def is_disaggregated(self) -> bool:
        return self.url is None and self.name == DISAGGREGATED


class Arrivals(StrEnum):
    """How the requests of an open loop are spread over time."""

    POISSON = "poisson"
    CONSTANT = "constant"
    BURST = "burst"


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="load_test.py",
        description="Load on an OpenAI-compatible server or on pdserve's gRPC endpoint. Two targets are compared.",
        epilog="Exit status: 0 all answered, 1 a request failed or no server, 2 bad usage, 130 interrupted."
        " OPENAI_API_KEY is sent.",
    )
    add = parser.add_argument
    add("--url", dest="targets", action="append", type=http_address, metavar="URL", help=f"default {DEFAULT_URL}")
    add("--grpc", dest="targets", action="append", type=grpc_address, metavar="HOST:PORT")
    add("--tls", action="store_true", help="speak TLS to --grpc too; https:// says so for --url")
    add("--ca", type=Path, metavar="FILE", help="trust this authority instead of the system's, and speak TLS to --grpc")
    add("--endpoint", choices=_names(Endpoint), default=Endpoint.COMPLETIONS, help="of --url; default completions")
    add("--model", help="default: the first one the server lists")
    pacing = parser.add_mutually_exclusive_group()
    pacing.add_argument("--rate", type=_above(float, 0), help="open loop: requests per second, or inf")
    pacing.add_argument("--concurrency", type=_above(int, 0), help="closed loop: clients; default 1")
    add("--arrivals", choices=_names(Arrivals), help="of --rate; default poisson")
    add("--burst-size", type=_above(int, 0), metavar="N", help=f"requests at once; default {DEFAULT_BURST_SIZE}")
    add("--num-requests", type=_above(int, 0), help=f"default {DEFAULT_NUM_REQUESTS}, or the whole trace")
    add("--duration", type=_above(float, 0), metavar="SECONDS", help="send for this long")
    add("--input-tokens", type=explained(LengthRange.parse), metavar="N or LOW:HIGH", help="default 512")
    add("--output-tokens", type=explained(LengthRange.parse), metavar="N or LOW:HIGH", help="default 64")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="lengths and, without --rate or --concurrency, arrivals: an"
        " Azure .csv (TIMESTAMP,ContextTokens,GeneratedTokens) or a Mooncake .jsonl",
    )
    add("--trace-speed", type=_above(float, 0), help="replay the trace's arrivals this much faster")
    add(
        "--trace-bin",
        type=_above(float, 0),
        metavar="SECONDS",
        help="how coarse the trace's clock is (Mooncake's: 3): its requests are spread over each such bin",
    )
    add("--max-model-len", type=_above(int, 1), help="leave out the trace's requests of more tokens, in and out")
    add("--prompts", choices=_names(PromptKind), help="random token ids (exact lengths) or words; chat takes words")
    add("--vocab-size", type=_above(int, 1), default=Workload.vocab_size, help="ids are drawn below this")
    add("--seed", type=_above(int, -1), default=0)
    add(
        "--warmup",
        type=_above(int, -1),
        metavar="N",
        help="requests sent first, one by one, not measured; default 0, with --compare 2 for each workload",
    )
    add("--timeout", type=_above(float, 0), default=600.0, metavar="SECONDS", help="for one request; default 600")
    add(
        "--slo",
        type=explained(Slo.parse),
        metavar="LIMITS",
        help="such as ttft:3,tpot:0.15 in seconds: tells goodput and attainment",
    )
    add("--percentiles", type=explained(_percentiles), default=PERCENTILES, metavar="LIST", help="default 50,90,99")
    add(
        "--sweep",
        type=_above(float, 0),
        nargs="?",
        const=DEFAULT_GOAL,
        metavar="SHARE",
        help="search for the highest Poisson rate at which so many requests meet --slo; default 0.9; begins at --rate",
    )
    add(
        "--compare",
        type=explained(_contestants),
        metavar="A[,B]",
        help="disaggregated, colocated or a URL, each in turn under four workloads and with streams that run while long"
        " prompts arrive; the first two are started here. Over gRPC where no URL is among them. Random ids",
    )
    add("--config", type=Path, help="of the systems that --compare starts; default serve.yaml")
    add("--json", type=writable, metavar="FILE", help="write the results here too")
    add("--csv", type=writable, metavar="FILE", help="write one line per request here")
    add(
        "--html",
        type=writable,
        metavar="FILE",
        help="write a report with plots here, one file on its own",
    )
    add(
        "--chrome-trace",
        type=writable,
        metavar="FILE",
        help="write every request's stages here, for ui.perfetto.dev and chrome://tracing",
    )
    return parser


def _names(kinds: type[StrEnum]) -> list[str]:
    """For argparse, which would show a member as Python does."""
    return [str(kind) for kind in kinds]


def _above(kind: Callable[[str], Number], bound: int) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        number = kind(text)
        if not number > bound:
            limit = f"a number from {bound + 1} up" if kind is int else f"above {bound}"
            raise argparse.ArgumentTypeError(f"{text} is not {limit}")
        return number

    parse.__name__ = kind.__name__  # argparse names it: "invalid int value"
    return parse


def _percentiles(text: str) -> tuple[float, ...]:
    percentiles = tuple(float(part) for part in text.split(","))
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ValueError("percentiles lie between 0 and 100")
    return tuple(sorted(set(percentiles)))


def _contestants(text: str) -> tuple[Contestant, ...]:
    names = text.split(",")
    if len(set(names)) != len(names) or len(names) > 2:
        raise ValueError("at most two can be compared, and not with themselves")
    return tuple(map(_contestant, names))


def _contestant(name: str) -> Contestant:
    if name in (DISAGGREGATED, COLOCATED):
        return Contestant(name)
    if name.startswith(("http://", "https://")):
        return Contestant(name, url=name)
    raise ValueError(f"{name!r} is neither {DISAGGREGATED} nor {COLOCATED} nor a URL")


def http_address(text: str) -> TargetAddress:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} does not begin with http:// or https://")
    return TargetAddress(text, is_grpc=False)


def grpc_address(text: str) -> TargetAddress:
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT")
    return TargetAddress(text, is_grpc=True)
