"""One request in the fault lab, as the router would serve it: reserve, prefill, retry, and both legs end together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

from common.errors import NoFreeBlocks, ServingError, TransferError, WorkerUnavailable
from common.identity import Ticket, new_transfer_id
from common.pb import serving_pb2 as pb
from tests.kv_transfer.lab_tally import Tally
from tests.kv_transfer.lab_workers import DecodeNode, PrefillNode
from tests.kv_transfer.truth import GREEDY, true_answer

MAX_ATTEMPTS, MAX_RESERVATIONS = 3, 3
PAUSE_S = 0.02  # a dead worker is replaced meanwhile, or a full one has freed something
RETRIED = (WorkerUnavailable, TransferError, NoFreeBlocks)
Node = TypeVar("Node", PrefillNode, DecodeNode)


class Workers(Protocol):
    """Those that serve now; they are replaced as they die."""

    prefills: list[PrefillNode]
    decodes: list[DecodeNode]


@dataclass(frozen=True)
class Wish:
    prompt: list[int]
    leaves_after_s: float | None = None  # the client goes away then
    attempt_aborted: float = 0.0  # share of attempts whose prefill leg alone is cancelled on the way


class Journey:
    def __init__(self, workers: Workers, tally: Tally, random: Random, wish: Wish) -> None:
        self._workers = workers
        self._tally = tally
        self._random = random
        self._wish = wish

    async def run(self) -> None:
        """Raises: a ServingError."""
        for _ in range(MAX_RESERVATIONS - 1):
            try:
                return await self._with_reservation()
            except RETRIED:
                self._tally.retried += 1
                await asyncio.sleep(PAUSE_S)
        return await self._with_reservation()

    async def _with_reservation(self) -> None:
        decode = self._alive(self._workers.decodes)
        stream = _DecodeStream(self._wish.prompt)
        leg = asyncio.create_task(decode.decode(stream.request, stream.on_event))
        try:
            await _first_of(leg, stream.is_reserved)
            await self._prefill(leg, stream)
            await leg
        finally:
            leg.cancel()
            await asyncio.wait([leg])
        answer = true_answer(self._wish.prompt, GREEDY.max_tokens)
        if stream.tokens != answer[1:]:
            self._tally.wrong.append(f"{self._wish.prompt} was answered {stream.tokens}, not {answer[1:]}")

    async def _prefill(self, decode_leg: asyncio.Task[None], stream: _DecodeStream) -> None:
        """Until the decode worker has all of the KV, whatever the prefill worker heard of it."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            self._tally.attempts += 1
            try:
                first = await self._attempt(decode_leg, stream, attempt)
            except ServingError as error:
                if stream.has_begun or decode_leg.done():
                    return  # the answer was faster than the confirmation
                self._tally.failed_attempts[type(error).__name__] += 1
                if attempt == MAX_ATTEMPTS or not isinstance(error, RETRIED):
                    raise
                self._tally.retried += 1
                continue
            if first != true_answer(self._wish.prompt, 1)[0]:
                self._tally.wrong.append(f"first token {first} of {self._wish.prompt}")
            return

    async def _attempt(self, decode_leg: asyncio.Task[None], stream: _DecodeStream, attempt: int) -> int:
        prefill = self._alive(self._workers.prefills)
        reserved = stream.reserved
        ticket = Ticket(
            stream.transfer_id,
            attempt,
            prefill.incarnation,
            reserved.destination.incarnation,
            len(self._wish.prompt),
            reserved.skip_tokens,
        )
        request = pb.PrefillRequest(
            token_ids=self._wish.prompt,
            sampling=GREEDY.to_pb(),
            ticket=ticket.to_pb(),
            destination=reserved.destination,
        )
        leg = asyncio.create_task(prefill.prefill(request))
        try:
            is_aborted = self._random.random() < self._wish.attempt_aborted
            timeout_s = self._random.random() * 0.02 if is_aborted else None
            await asyncio.wait({leg, decode_leg}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leg.cancel()
            await asyncio.wait([leg])
        if leg.cancelled():
            raise TransferError("one leg ended before the other")
        return leg.result()

    def _alive(self, nodes: list[Node]) -> Node:
        """Raises: WorkerUnavailable."""
        alive = [node for node in nodes if not node.process.is_dead]
        if not alive:
            raise WorkerUnavailable("all of them are dead")
        return self._random.choice(alive)


class _DecodeStream:
    """What the decode worker has said so far."""

    def __init__(self, prompt: list[int]) -> None:
        self.transfer_id = new_transfer_id()
        self.request = pb.DecodeRequest(token_ids=prompt, sampling=GREEDY.to_pb(), transfer_id=self.transfer_id)
        self.is_reserved = asyncio.Event()
        self.reserved = pb.Reserved()
        self.has_begun = False
        self.tokens: list[int] = []

    def on_event(self, event: pb.DecodeEvent) -> None:
        match event.WhichOneof("event"):
            case "reserved":
                self.reserved = event.reserved
                self.is_reserved.set()
            case "started":
                self.has_begun = True
            case "token":
                self.tokens.append(event.token.token_id)


async def _first_of(leg: asyncio.Task[None], event: asyncio.Event) -> None:
    """Wait for the event. Raises what the leg raises, if that comes first."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({leg, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if leg.done() and not event.is_set():
        leg.result()
