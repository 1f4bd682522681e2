"""The self-test: before a pair of workers is chosen for the first time, one short prompt goes through it.

It takes the path of every request, Prefill.Run on P and a reservation on D, but D computes the prompt too and compares.
A pair that disagrees is refused for as long as both incarnations live. What merely fails is tried again, ever less
often; what finds no blocks at D, soon: that says only that D is busy. A good pair whose transfers have begun to fail is
checked again before it is given more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

from common.errors import IncompatiblePeer, NoFreeBlocks, ServingError, WorkerLost
from common.identity import new_transfer_id
from common.pb import serving_pb2 as pb
from common.sampling import SamplingParams
from router.legs import Attempt, check_leg, prefill_events
from router.pairs import Pair, Standing
from router.registry import Registry

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CHECKS = 4
# One attempt, with whatever waits in the two workers before it. Its end says nothing about the KV.
CHECK_TIMEOUT_S = 30.0
FIRST_PAUSE_S = 0.25  # about a heartbeat; doubled with every failure
MAX_PAUSE_S = 10.0
# Two blocks and a part of a third, where a block has 16 tokens; on one CPU core some 50 ms of the default model.
NUM_PROMPT_TOKENS = 37
_SAMPLING = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)  # with one token no KV would be sent


class PairChecker:
    """Pairs are due in the order they came. Few checks run at once, and a worker takes part in one at a time, which
    also leaves the measurement of its new link in peace."""

    def __init__(self, registry: Registry, count: Callable[[str], None]) -> None:
        """count: called with the result of each attempt, as `pair_checks_total` names it."""
        self._registry = registry
        self._count = count
        self._due: dict[Pair, float] = {}  # → the pause after a failure; oldest first
        self._running: dict[Pair, asyncio.Task[None]] = {}
        self._pausing: dict[Pair, asyncio.TimerHandle] = {}
        self._is_closed = False
        registry.on_new_pair = self._begin
        registry.on_lost_pair = self._give_up
        registry.on_doubted_pair = self._begin  # also where new pairs go unchecked: requests have shown the need

    @property
    def num_unsettled(self) -> int:
        return len(self._due) + len(self._running) + len(self._pausing)

    async def close(self) -> None:
        self._is_closed = True
        running = list(self._running.values())
        for pair in (*self._due, *self._running, *self._pausing):
            self._give_up(pair)
        await asyncio.gather(*running, return_exceptions=True)

    def _begin(self, pair: Pair) -> None:
        if pair.standing is Standing.UNCHECKED and not self._is_closed:
            self._enqueue(pair, FIRST_PAUSE_S)

    def _give_up(self, pair: Pair) -> None:
        self._due.pop(pair, None)
        if pair in self._pausing:
            self._pausing.pop(pair).cancel()
        if pair in self._running:
            self._running[pair].cancel()

    def _enqueue(self, pair: Pair, pause_s: float) -> None:
        self._pausing.pop(pair, None)
        self._due[pair] = pause_s
        self._start_due()

    def _start_due(self) -> None:
        for pair in list(self._due):
            if len(self._running) >= MAX_CONCURRENT_CHECKS:
                return
            if not any(pair.shares_worker(other) for other in self._running):
                task = asyncio.create_task(self._check(pair, self._due.pop(pair)), name=f"check {pair}")
                self._running[pair] = task
                task.add_done_callback(partial(self._ended, pair))

    def _ended(self, pair: Pair, task: asyncio.Task[None]) -> None:
        del self._running[pair]
        self._start_due()

    async def _check(self, pair: Pair, pause_s: float) -> None:
        result = await self._attempt(pair)
        self._count(result)
        if pair.standing is not Standing.UNCHECKED:
            self._registry.on_change()
        elif result == "busy":
            self._pause(pair, FIRST_PAUSE_S, pause_s)
        else:
            self._pause(pair, pause_s, min(2 * pause_s, MAX_PAUSE_S))

    def _pause(self, pair: Pair, pause_s: float, next_pause_s: float) -> None:
        again = partial(self._enqueue, pair, next_pause_s)
        self._pausing[pair] = asyncio.get_running_loop().call_later(pause_s, again)

    async def _attempt(self, pair: Pair) -> str:
        """Settles the pair, or notes why it cannot be settled yet. Returns the result's name."""
        start_s = time.monotonic()
        try:
            verdict = await _checked(pair)
        except IncompatiblePeer as error:
            pair.refuse(f"{pair} can never exchange KV: {error.message}")
            logger.error("%s", pair.reason)
            return "incompatible"
        except ServingError as error:
            reason = f"the check of {pair} failed and is tried again: {error.message}"
            logger.log(logging.DEBUG if reason == pair.reason else logging.WARNING, "%s", reason)  # once for each cause
            pair.reason = reason
            return "busy" if isinstance(error, NoFreeBlocks) else "failed"
        if not verdict.is_equal:
            pair.refuse(f"{pair} is refused, its KV is not what {pair.decode.worker_id} computes: {verdict.detail}")
            logger.error("%s", pair.reason)
            return "disagreed"
        pair.accept()
        logger.info("%s agree in %.2f s: %s", pair, time.monotonic() - start_s, verdict.detail)
        return "passed"


async def _checked(pair: Pair) -> pb.PairVerdict:
    """One attempt. Raises: a ServingError."""
    token_ids = probe_prompt(pair)
    if not token_ids:
        return pb.PairVerdict(is_equal=True, detail="no request is long enough for them to exchange KV")
    attempt = Attempt(
        request_id=f"check {pair}",
        transfer_id=new_transfer_id(),
        token_ids=token_ids,
        sampling=_SAMPLING,
        deadline_s=time.monotonic() + CHECK_TIMEOUT_S,
        cache_salt=secrets.token_bytes(16),  # computed anew, and never found by anybody
    )
    async with check_leg(pair.decode, attempt, pair.prefill.hello.layout.dtype) as decode:
        reserved = await decode.reserved()
        await _send(pair, attempt, reserved)
        return await decode.verdict()


async def _send(pair: Pair, attempt: Attempt, reserved: pb.Reserved) -> None:
    async with aclosing(prefill_events(pair.prefill, attempt, 1, reserved)) as events:
        async for event in events:
            if event.HasField("done"):
                return
    raise WorkerLost(f"{pair.prefill.worker_id} ended its stream before the hand-over")


def probe_prompt(pair: Pair) -> list[int]:
    """The same tokens each time, scattered over the vocabulary (Knuth's multiplicative hash), so that no two positions
    have much in common. Shorter where the workers' context or the decode worker's memory asks for it; empty where the
    context leaves no room for a prompt and two tokens."""
    hellos = (pair.prefill.hello, pair.decode.hello)
    context = min(hello.max_model_len for hello in hellos) - _SAMPLING.max_tokens
    # D holds the prompt and a next token twice. A third of its tokens, rounded up to blocks, fits twice into any number
    # of blocks from two on.
    memory = max(1, pair.decode.hello.kv_capacity_tokens // 3 - 1)
    vocab_size = min(hello.vocab_size for hello in hellos)
    return [(index + 1) * 2654435761 % 2**32 % vocab_size for index in range(min(NUM_PROMPT_TOKENS, context, memory))]
