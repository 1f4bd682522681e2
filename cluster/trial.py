"""Measures a pair of workers with prompts of its own: what `pdserve doctor` bases its advice on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from cluster.registry_client import cluster_status
from cluster.split_advice import Prompt, Speeds, predicted_handoff_s
from common.cluster_access import ClusterAccess
from common.kv_layout import KVLayout
from common.lifecycle import Stage
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc
from common.rpc import new_channel, typed_errors
from kv_transfer.transport import LinkSpeed

TIMEOUT_S = 300.0
PROMPT_TOKENS = (128, 512, 2048)
OUTPUT_TOKENS = 128  # of the requests that the advice is for
NUM_STREAMS = 16
REPEATS = 3
FEW_TOKENS = 8  # enough to see the gap of a handoff beside the usual one
STREAM_PROMPT_TOKENS, STREAM_TOKENS = 32, 128


@dataclass(frozen=True)
class Measured:
    link: pb.LinkStatus  # of the pair, by the prefill side
    speeds: Speeds
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class _Answer:
    token_s: list[float]  # when each token came
    timings: pb.Timings

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_s)]

    def stage_s(self, stage: Stage) -> float:
        return next((each.seconds for each in self.timings.stages if each.name == stage), 0.0)


@dataclass(frozen=True)
class Trial:
    """Of a deployment that serves nobody else."""

    grpc_address: str
    api_key: str
    control_address: str
    access: ClusterAccess
    max_chunk_tokens: int
    tpot_goal_s: float
    say: Callable[[str], None]

    async def measure(self) -> Measured:
        """Raises: ServingError."""
        status = await cluster_status(self.control_address, self.access, TIMEOUT_S)
        hello = status.workers[0].hello
        layout = KVLayout.from_pb(hello.layout)
        longest = hello.max_model_len - FEW_TOKENS
        async with new_channel(self.grpc_address) as channel:
            asking = _Asking(serving_pb2_grpc.InferenceStub(channel), self.api_key, hello.vocab_size)
            prompts: list[Prompt] = []
            for num_tokens in (length for length in PROMPT_TOKENS if length <= longest):
                self.say(f"measuring prompts of {num_tokens} tokens")
                answers = [await asking.ask(num_tokens, FEW_TOKENS) for _ in range(1 + REPEATS)][1:]
                prompts.append(_prompt(num_tokens, num_tokens * layout.token_bytes, answers))
            self.say(f"measuring {NUM_STREAMS} streams")
            streams = [asking.ask(STREAM_PROMPT_TOKENS, STREAM_TOKENS) for _ in range(NUM_STREAMS)]
            step_s = _step_s(await asyncio.gather(*streams))
        status = await cluster_status(self.control_address, self.access, TIMEOUT_S)  # the link is measured by now
        s_per_token = prompts[-1].prefill_s / prompts[-1].num_tokens
        speeds = Speeds(s_per_token, step_s, NUM_STREAMS, self.max_chunk_tokens, self.tpot_goal_s)
        return Measured(status.pairs[0].link, speeds, tuple(prompts))


def measured_by(running: pb.ClusterStatus, max_chunk_tokens: int, tpot_goal_s: float) -> Measured | None:
    """From what a deployment's workers report of themselves: handoffs are predicted from the link. None: they do not
    know yet, or there is no pair."""
    links = [pair.link for pair in running.pairs if pair.link.bytes_per_s]
    loads = [(worker.hello.role, worker.load) for worker in running.workers]
    prefill_speeds = [load.prefill_s_per_token for role, load in loads if role == pb.ROLE_PREFILL]
    s_per_token = max(prefill_speeds, default=0.0)
    decoding = [load for role, load in loads if role == pb.ROLE_DECODE and load.decode_step_s]
    if not links or not s_per_token or not decoding:
        return None
    decode = max(decoding, key=lambda load: load.num_running)
    speeds = Speeds(s_per_token, decode.decode_step_s, max(1, decode.num_running), max_chunk_tokens, tpot_goal_s)
    link, layout = min(links, key=lambda link: link.bytes_per_s), KVLayout.from_pb(running.workers[0].hello.layout)
    prompts = []
    for num_tokens in PROMPT_TOKENS:
        kv_bytes, prefill_s = num_tokens * layout.token_bytes, num_tokens * s_per_token
        handoff_s = predicted_handoff_s(kv_bytes, prefill_s, LinkSpeed(link.bytes_per_s, link.round_trip_s))
        prompts.append(Prompt(num_tokens, OUTPUT_TOKENS, kv_bytes, prefill_s, handoff_s))
    return Measured(link, speeds, tuple(prompts))


class _Asking:
    def __init__(self, inference: Any, api_key: str, vocab_size: int) -> None:
        self._inference = inference
        self._metadata = (("authorization", f"Bearer {api_key}"),)
        self._vocab_size = vocab_size
        self._random = random.Random(1)

    async def ask(self, num_prompt_tokens: int, num_tokens: int) -> _Answer:
        """A prompt that no cache holds, and exactly as many tokens. Raises: ServingError."""
        prompt = [self._random.randrange(self._vocab_size) for _ in range(num_prompt_tokens)]
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True),
        )
        token_s: list[float] = []
        last = pb.GenerateResponse()
        with typed_errors("the router"):
            async for last in self._inference.Generate(request, timeout=TIMEOUT_S, metadata=self._metadata):
                token_s += [time.monotonic()] * len(last.token_ids)
        return _Answer(token_s, last.timings)


def _prompt(num_tokens: int, kv_bytes: int, answers: list[_Answer]) -> Prompt:
    """The handoff is what the second token takes longer than those after it."""
    handoffs_s = [answer.gaps_s[0] - median(answer.gaps_s[1:]) for answer in answers]
    prefill_s = median(answer.stage_s(Stage.PREFILL) for answer in answers)
    return Prompt(num_tokens, OUTPUT_TOKENS, kv_bytes, prefill_s, max(0.0, median(handoffs_s)))


def _step_s(streams: list[_Answer]) -> float:
    """Once all of them run; those that began first end a little before the others."""
    all_run_s = max(stream.token_s[0] for stream in streams)
    times = [[at_s for at_s in stream.token_s if at_s >= all_run_s] for stream in streams]
    return median(later - earlier for at_s in times for earlier, later in pairwise(at_s))
