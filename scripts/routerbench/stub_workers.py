"""Workers without an engine: they register, reserve, hand over and stream as real ones do, at a set pace.

Every sequence of a decode worker gets its token at the same tick, as from an engine's step. Tokens are the same few,
over and over, so that whoever receives an answer knows what it must be.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import grpc

from common.cluster_access import NO_SECRET
from common.config import Role
from common.drain import Drain
from common.identity import new_incarnation
from common.kv_layout import KVLayout
from common.pb import kv_transfer_pb2 as kv_pb
from common.pb import serving_pb2 as pb
from common.pb import serving_pb2_grpc as pb_grpc
from common.sampling import FinishReason
from common.worker_server import ROLES, WorkerServer

Context = grpc.aio.ServicerContext[Any, Any]

HOST = "127.0.0.1"
LAYOUT = KVLayout("stub", num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", rope="none")
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 4096


@dataclass(frozen=True)
class Pace:
    step_s: float  # between a sequence's tokens; 0: as fast as they are taken, inf: the first one only
    keeps_times: bool = False  # of every token, until they are asked for


@dataclass
class Stage:
    """What the workers of one process share. Its pace may change while they run."""

    model: str
    vocab_size: int
    answer_ids: tuple[int, ...]  # an answer is made of these, in turns
    pace: Pace = Pace(0.0)
    sent_s: dict[str, list[float]] = field(default_factory=dict)  # by request id: when each token left, monotonic
    arrivals: dict[bytes, asyncio.Event] = field(default_factory=dict)  # by transfer id: the KV is there
    _ticks: dict[float, Tick] = field(default_factory=dict)

    async def step(self) -> None:
        """Wait for the next tick of the pace."""
        step_s = self.pace.step_s
        if math.isinf(step_s):
            await asyncio.Event().wait()
        elif step_s:
            await self._ticks.setdefault(step_s, Tick(step_s)).next()

    def note_sent(self, request_id: str) -> None:
        if self.pace.keeps_times:
            self.sent_s.setdefault(request_id, []).append(time.monotonic())

    @property
    def first_id(self) -> int:
        return self.answer_ids[0]


class Tick:
    """A clock for many: everybody who waits goes on at the same moment, at whole multiples of its period.

    A thread sleeps: the event loop's own timers are late by up to a millisecond, more than what is to be measured.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            left_s = self._period_s - time.monotonic() % self._period_s
            loop.run_in_executor(None, time.sleep, left_s).add_done_callback(self._strike)
        return asyncio.shield(self._next)  # one sequence that is cancelled must not stop the clock

    def _strike(self, _slept: asyncio.Future[None]) -> None:
        struck, self._next = self._next, None
        assert struck is not None
        struck.set_result(None)


class StubDecode(pb_grpc.DecodeServicer):
    """Serves decode and colocated alike."""

    def __init__(self, stage: Stage, destination: kv_pb.Destination) -> None:
        self._stage = stage
        self._destination = destination

    async def Generate(self, request: pb.DecodeRequest, context: Context) -> AsyncIterator[pb.DecodeEvent]:
        num_given = 0
        if not request.compute_prompt:
            with closing(Arrival(self._stage, request.transfer_id)) as arrival:
                yield pb.DecodeEvent(reserved=pb.Reserved(destination=self._destination))
                await arrival.wait()
            num_given = 1  # by the prefill worker
        yield pb.DecodeEvent(started=pb.DecodeStarted())
        last = request.sampling.max_tokens - 1
        for index, token_id in enumerate(islice(cycle(self._stage.answer_ids), num_given, last + 1), num_given):
            if index:
                await self._stage.step()
            self._stage.note_sent(request.request_id)
            yield pb.DecodeEvent(token=_token(token_id, is_last=index == last))

    async def CheckPair(self, request: pb.PairCheckRequest, context: Context) -> AsyncIterator[pb.PairCheckEvent]:
        with closing(Arrival(self._stage, request.transfer_id)) as arrival:
            yield pb.PairCheckEvent(reserved=pb.Reserved(destination=self._destination))
            await arrival.wait()
        yield pb.PairCheckEvent(verdict=pb.PairVerdict(is_equal=True, detail="nothing was computed"))


class StubPrefill(pb_grpc.PrefillServicer):
    """The first token at once; what it hands over arrives in the same process."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def Run(self, request: pb.PrefillRequest, context: Context) -> AsyncIterator[pb.PrefillEvent]:
        yield pb.PrefillEvent(started=pb.PrefillStarted())
        is_last = request.sampling.max_tokens == 1
        self._stage.note_sent(request.request_id)
        yield pb.PrefillEvent(first_token=_token(self._stage.first_id, is_last=is_last))
        if not is_last:
            self._stage.arrivals[request.ticket.transfer_id].set()
        yield pb.PrefillEvent(done=pb.PrefillDone())


class Arrival:
    """One expected transfer."""

    def __init__(self, stage: Stage, transfer_id: bytes) -> None:
        self._arrivals = stage.arrivals
        self._transfer_id = transfer_id
        self._event = stage.arrivals[transfer_id] = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def close(self) -> None:
        del self._arrivals[self._transfer_id]


class StubWorker:
    """A running stub that is a member at a router. Make one with `start`."""

    def __init__(self, address: str, server: WorkerServer) -> None:
        self.address = address
        self._server = server

    @staticmethod
    async def start(role: Role, name: str, stage: Stage, router_address: str) -> StubWorker:
        incarnation = new_incarnation()
        server = WorkerServer(_services(role, stage, incarnation), Drain(name, timeout_s=0.0), NO_SECRET)
        address = server.bind(HOST)
        hello = pb.WorkerHello(
            worker_id=name,
            role=ROLES[role],
            incarnation=incarnation,
            address=address,
            model=stage.model,
            layout=LAYOUT.to_pb(),
            vocab_size=stage.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            kv_capacity_tokens=MAX_NUM_SEQS * MAX_MODEL_LEN,
            transport="stub",
            block_size=16,
        )
        await server.start(hello, [router_address], AlwaysRoom())
        return StubWorker(address, server)

    async def stop(self) -> None:
        await self._server.stop()


class AlwaysRoom:
    """A ReportSource: without blocks to count, the router goes by max_num_seqs."""

    @contextmanager
    def listening(self) -> Iterator[Callable[[], Awaitable[pb.WorkerLoad]]]:
        async def report() -> pb.WorkerLoad:
            return pb.WorkerLoad()

        yield report


def _services(role: Role, stage: Stage, incarnation: str) -> dict[str, Callable[[grpc.aio.Server], None]]:
    if role is Role.PREFILL:
        return {"pdserve.v1.Prefill": lambda server: pb_grpc.add_PrefillServicer_to_server(StubPrefill(stage), server)}
    destination = kv_pb.Destination(incarnation=incarnation, transport="stub")
    decode = StubDecode(stage, destination)
    return {"pdserve.v1.Decode": lambda server: pb_grpc.add_DecodeServicer_to_server(decode, server)}


def _token(token_id: int, *, is_last: bool) -> pb.SampledToken:
    return pb.SampledToken(token_id=token_id, finish_reason=FinishReason.LENGTH if is_last else "")
